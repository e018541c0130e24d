"""The chat template of a model folder. Imports no torch.

A template is a program of whoever published the model. It is tried in a process of its own first (`tried`), which has
little time and memory.
"""

from __future__ import annotations

import json
import math
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jinja2

from areal_megatron.config import ConfigError
from areal_megatron.process.errors import first_line, printable

Span = tuple[int, int]
"""The first character of a part of a text, and the one after its last."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""How templates begin to mark what the assistant says, in transformers' way."""
_FILE, _MORE = "chat_template.jinja", "additional_chat_templates"
_FOR_TOOLS = "tool_use"
"""The name of the template that is taken where there are tools, as transformers does."""
RENDER_S = 5
"""CPU time: other processes may use the cores meanwhile."""
_MOST_S = 120.0
MEMORY_MB = 1024
"""Beyond what the process has loaded."""
MOST_CHARACTERS = 1_000_000
"""What a template may write around a short conversation."""
_SHORT = [
    [{"role": role, "content": "1"} for role in roles.split()]
    for roles in ("user", "system user", "user assistant user", "system user assistant user")
]
_tried: set[str] = set()
_WRONG = (ValueError, TypeError, KeyError, AttributeError)


class TemplateRefused(ValueError):
    """The template does not take these messages."""


class ChatTemplate:
    """A chat template, and the one for tools where there are two. Raises ConfigError if it does not parse."""

    def __init__(self, sources: Mapping[str, str], special: Mapping[str, str], folder: Path):
        """`special`: the texts of bos_token and the like, which templates may write."""
        self._sources, self._special = sources, special
        try:
            for source in sources.values():
                _render([], source)
        except (jinja2.TemplateError, ArithmeticError, MemoryError, RecursionError, *_WRONG) as e:
            raise ConfigError(f"model.path: {folder}: {_unreadable(e)}") from None

    @property
    def written(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """The templates by name, and the special tokens that they may write."""
        return self._sources, self._special

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        asks: bool = True,
        marks: list[Span] | None = None,
    ) -> str:
        """Returns the text of a conversation; if it `asks`, up to where the model starts its answer. `marks` gets what
        the template marks as the assistant's. Raises TemplateRefused."""
        source, marked = self._source(tools), marks is not None and self.marks(tools)
        try:
            [text], found = _render(
                [messages],
                source,
                add_generation_prompt=asks,
                tools=tools,
                return_assistant_tokens_mask=marked,
                **self._special,
            )
        except Exception as e:  # the template is the model's: it may fail in any way
            raise TemplateRefused(printable(" ".join(str(e).split())) or type(e).__name__) from None
        if marks is not None and marked:
            marks += found[0]
        return text

    def marks(self, tools: Sequence[Any] | None = None) -> bool:
        """Whether the template marks what is the assistant's."""
        return _GENERATION.search(self._source(tools)) is not None

    def says(self, word: str, tools: Sequence[Any] | None = None) -> bool:
        """Whether the template's own text has a word."""
        return word in self._source(tools)

    def _source(self, tools: Sequence[Any] | None) -> str:
        source = self._sources["default"]
        return source if tools is None else self._sources.get(_FOR_TOOLS, source)


def sources(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the templates of a model folder by name, among them `default`; nothing if it has none. `settings`:
    tokenizer_config.json. Raises ConfigError."""
    try:
        found = settings.get("chat_template") or {}
        if isinstance(found, list):
            found = {entry["name"]: entry["template"] for entry in found}
        found = {"default": found} if isinstance(found, str) else dict(found)
        files = {path.stem: path for path in sorted((folder / _MORE).glob("*.jinja"))}
        files |= {"default": folder / _FILE} if (folder / _FILE).is_file() else {}
        if files:
            found = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
        if not all(isinstance(source, str) for source in found.values()):
            raise TypeError("it is no text")
        if any(found.values()) and not found.get("default"):
            raise ValueError(f"there is none by the name of default, only {', '.join(map(str, found))}")
    except (OSError, *_WRONG) as e:
        raise ConfigError(f"model.path: {folder}: {_unreadable(e)}") from None
    return {name: source for name, source in found.items() if source}


def tried(found: Mapping[str, str], special: Mapping[str, str]) -> str:
    """Renders short conversations by the templates in a process of its own, the first time. Returns what is wrong with
    the templates: that they take more than RENDER_S seconds or MEMORY_MB megabytes, or write more than MOST_CHARACTERS.
    """
    if not found or (key := json.dumps([found, special], sort_keys=True)) in _tried:
        return ""
    request = json.dumps({"sources": dict(found), "special": dict(special), "render_s": RENDER_S})
    command, pipe = [sys.executable, "-m", "areal_megatron.data.chat_template"], subprocess.PIPE
    try:
        done = subprocess.run(
            command,
            input=request,
            stdout=pipe,
            stderr=pipe,
            text=True,
            timeout=_MOST_S,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return f"it renders no short conversation within {_MOST_S:g} s"
    except OSError as e:
        return f"no process can be started to try it: {e.strerror}"
    if done.returncode == -signal.SIGXCPU:
        return f"it takes more than {RENDER_S} s to render short conversations"
    if done.returncode:
        return f"it cannot be tried: {printable(done.stderr.strip().rpartition(chr(10))[2] or str(done.returncode))}"
    if not done.stdout:
        _tried.add(key)
    return printable(done.stdout.strip())


def main() -> None:
    asked = json.load(sys.stdin)
    _render([], "")  # imports what it takes
    _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + asked["render_s"])
    held = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_AS, held + (MEMORY_MB << 20))
    for source in asked["sources"].values():
        for messages in _SHORT:
            try:
                [text], _ = _render([messages], source, add_generation_prompt=True, tools=None, **asked["special"])
            except MemoryError:
                print(f"it takes more than {MEMORY_MB} MB to render a short conversation")
                return
            except Exception:  # it may not take these messages; what it says of the data's is told elsewhere
                continue
            if len(text) > MOST_CHARACTERS:
                print(f"it writes {len(text):,} characters around a short conversation")
                return


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _unreadable(error: BaseException) -> str:
    return f"the chat template cannot be read: {printable(first_line(error))}"


def _render(chats: list[Any], template: str, **variables: Any) -> tuple[list[str], list[list[Span]]]:
    """Returns the texts, and what the template marks as the assistant's of each, if asked for."""
    # costs half a second and 25 MB, for models with a chat template only
    from transformers.utils.chat_template_utils import render_jinja_template

    return cast(tuple[list[str], list[list[Span]]], render_jinja_template(chats, chat_template=template, **variables))


if __name__ == "__main__":
    main()
