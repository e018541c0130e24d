"""Templates that would hold the launcher, or its terminal."""

import time

import pytest

from areal_megatron.config import ConfigError
from areal_megatron.data import chat_template
from areal_megatron.data.tokenizer import Tokenizer
from tests.support.chat_folders import CHATML, make

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}{% endfor %}"
ENDLESS = {
    "a loop over a conversation": "{% if messages | length > 2 %}" + LOOP + "{% endif %}",
    "a loop with a system message": "{% if messages[0].role == 'system' %}" + LOOP + "{% endif %}",
    "a number": "{{ 9 ** (9 ** 9) }}",
}
LARGE = {
    "letters at work": "{% set n = messages | length * 1000000000 %}{{ 'x' * n }}",
    "fewer letters": "{{ 'x' * 2000000 }}",
    "a text that doubles": "{% set n = namespace(t='x') %}{% for k in 'x' * 40 %}{% set n.t = n.t * 2 %}{% endfor %}",
}


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(chat_template, "RENDER_S", 1)


@pytest.mark.parametrize("what", ENDLESS)
def test_an_endless_template_is_refused(tmp_path, what):
    folder, begun = make(tmp_path / "model", template=CHATML + ENDLESS[what]), time.monotonic()
    with pytest.raises(ConfigError, match=r"^model.path: .*: the chat template cannot be used: it takes more than 1 s"):
        Tokenizer(folder, untried=True)
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize("what", LARGE)
def test_an_enormous_text_is_refused(tmp_path, what):
    folder = make(tmp_path / "model", template=CHATML + LARGE[what])
    with pytest.raises(ConfigError, match=r"cannot be used: it (takes more than 1|writes 2,0\d\d,\d+)"):
        Tokenizer(folder, untried=True)


@pytest.mark.parametrize("text", ["\x1b]0;title\x07\x1b[2J", "\u202e", "\x9b2J", "a\nb"])
def test_what_a_template_says_is_printable(tmp_path, text):
    folder = make(tmp_path / "model", template="{{ raise_exception(messages[0].content + '" + text + "') }}")
    with pytest.raises(ConfigError, match="refuses the prompt") as error:
        Tokenizer(folder).prompts([text], ["d.jsonl:1"])
    assert str(error.value).isprintable()
    folder = make(tmp_path / "model", template="{% " + text + " %}")
    with pytest.raises(ConfigError, match="cannot be read") as error:
        Tokenizer(folder)
    assert str(error.value).isprintable()


def test_a_good_template_is_tried_once(tmp_path, monkeypatch):
    folder = make(tmp_path / "model", template=CHATML + "{# another #}")
    Tokenizer(folder, untried=True)
    monkeypatch.setattr(chat_template.subprocess, "Popen", None)
    Tokenizer(folder, untried=True)
