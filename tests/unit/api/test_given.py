"""What a program gives to areal.Policy: what is taken, as what, and what is refused in one line."""

from types import MappingProxyType

import numpy as np
import pytest

from areal_megatron.api import given
from areal_megatron.api.policy import Policy, Response
from areal_megatron.config import ConfigError

SETTINGS = {
    "n": 2,
    "max_tokens": 5,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "stop_tokens": [3],
    "seed": 1,
}


def refused(problem, call):
    with pytest.raises(ConfigError, match=problem) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "taken"),
    [
        ([3, 4], [3, 4]),
        ((3,), [3]),
        ([], []),
        (np.array([3, 2**31 - 1]), [3, 2**31 - 1]),
        (np.array([7], np.uint8), [7]),
    ],
)
def test_tokens(value, taken):
    found = given.tokens(value, "tokens")
    assert found.tolist() == taken and found.dtype == np.int32


@pytest.mark.parametrize(
    "value", [[4.9, 5.9], [3.0], ["4"], "46", [[3], [4]], [[3], [4, 5]], 3, None, [True], [None], [2**70]]
)
def test_what_is_no_sequence_of_whole_numbers_is_refused_as_tokens(value):
    refused("^tokens: must be token ids, a sequence of whole numbers$", lambda: given.tokens(value, "tokens"))


@pytest.mark.parametrize("value", [[-1], np.array([2**32 + 5])])
def test_tokens_are_not_wrapped(value):
    refused("which is no token id", lambda: given.tokens(value, "tokens"))


CHAT = [{"role": "system", "content": "é"}, {"role": "user", "content": "1+1="}]


@pytest.mark.parametrize(
    ("value", "taken"),
    [
        ("1+1=", "1+1="),
        (CHAT, CHAT),
        (tuple(map(MappingProxyType, CHAT)), CHAT),
        ([{"role": "user", "content": "", "tool_calls": []}], [{"role": "user", "content": "", "tool_calls": []}]),
    ],
)
def test_a_prompt_is_a_text_or_messages(value, taken):
    assert given.prompt(value, "prompt 0") == taken


def test_a_prompt_may_be_tokens():
    assert given.prompt(np.array([3, 4]), "prompt 0").tolist() == given.prompt((3, 4), "prompt 0").tolist() == [3, 4]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (CHAT[0], "is one message: a conversation is a list of them$"),
        ([[1, 2, 3], [4]], "must be token ids"),
        (["a", ["b"]], "must be token ids"),
        ([3, CHAT[0]], "must be token ids"),
        ([CHAT[0], "1+1="], "message 2 of 'messages' needs a text `role` and a text `content`$"),
        ([{"role": "user"}], "message 1 of 'messages' needs"),
        ([{"content": "1+1="}], "message 1 of 'messages' needs"),
        ([{"role": "user", "content": None}], "message 1 of 'messages' needs"),
        ([{"role": "user", "content": [{"type": "text", "text": "1"}]}], "message 1 of 'messages' needs"),
        ([CHAT[0], {"role": "user", "content": "1\ud800"}], r"\\ud800 is half of a character$"),
        ("1\ud800", r"\\ud800 is half of a character$"),
    ],
)
def test_what_is_no_prompt_is_refused_before_it_is_rendered(value, problem):
    policy = object.__new__(Policy)  # it refuses before it needs a run
    refused(f"^prompt 1: {problem}", lambda: policy._all_tokens([[1], value], "prompt"))


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"n": 0}, "n: must be a whole number from 1"),
        ({"n": 10**7}, "n: must be a whole number from 1 to 16384"),
        ({"n": 2.0}, "n: must be a whole number"),
        ({"n": True}, "n: must be a whole number"),
        ({"max_tokens": 0}, "max_tokens: must be"),
        ({"temperature": 2.5}, "temperature: must be a finite number from 0 to 2, is 2.5"),
        ({"temperature": float("nan")}, "temperature: must be a finite number"),
        ({"temperature": "1"}, "temperature: must be a finite number"),
        ({"top_p": 0}, "top_p: must be a finite number from"),
        ({"top_p": 2}, "top_p: must be a finite number from"),
        ({"top_k": -5}, "top_k: must be a whole number from 0"),
        ({"stop_tokens": "}"}, "stop_tokens: must be token ids"),
        ({"stop_tokens": [-1]}, "stop_tokens: has -1"),
        ({"seed": 1.5}, "seed: must be a whole number"),
    ],
)
def test_settings_that_engines_refuse_are_refused_before_them(changed, problem):
    refused(problem, lambda: given.answer_settings(**SETTINGS | changed))


def test_numbers_of_numpy_are_numbers():
    found = given.answer_settings(
        np.int64(2), np.int32(5), np.float32(0.5), np.float64(1), np.int8(4), np.array([3]), np.int64(9)
    )
    assert (found.n, found.max_tokens, found.temperature, found.top_k) == (2, 5, 0.5, 4)
    values = found.n, found.max_tokens, found.temperature, found.top_p, found.top_k, found.seed
    assert [type(value) for value in values] == [int, int, float, float, int, int] and found.stop_tokens == [3]
    assert given.number(np.linspace(0, 1, 3)[1], "lr", 0) == 0.5


def test_equal_answers_are_asked_for_once():
    assert given.answer_settings(**SETTINGS | {"temperature": 0}).n == 1
    assert given.answer_settings(**SETTINGS).n == 2


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"objective": "navie"}, "^objective: must be .*, is 'navie', did you mean 'naive'"),
        ({"clip_high": float("nan")}, "^clip_high: must be a finite number"),
        ({"clip_high": -3}, "^clip_high: must be "),
        ({"clip_low": 2}, "^clip_low: must be "),
        ({"clip_low": "0.2"}, "^clip_low: must be a finite number"),
        ({"dual_clip": -1}, "^dual_clip: must be "),
        ({"clip": 1}, "^clip: is no setting of a loss"),
    ],
)
def test_settings_of_a_loss_are_held_to_the_rules_of_their_keys(settings, problem):
    refused(problem, lambda: given.loss_settings(settings))


def test_settings_of_a_loss():
    taken = given.loss_settings({"objective": "naive", "clip_low": np.float64(0.5), "clip_high": 1e9, "dual_clip": 0})
    assert taken == {"objective": "naive", "clip_low": 0.5, "clip_high": 1e9, "dual_clip": 0}


def test_values_of_tokens():
    assert given.of_tokens(2, 3, "weight").tolist() == [2, 2, 2]
    assert given.of_tokens([True, False], 2, "mask", "b", np.bool_).tolist() == [True, False]
    assert given.of_tokens([1, 0], 2, "mask", "b", np.bool_).tolist() == [True, False]


@pytest.mark.parametrize(
    ("value", "kinds", "problem"),
    [
        (["False", "True"], "b", "mask: must be True or False"),
        ([0.5, 1], "b", "mask: must be True or False"),
        ([2, 0], "b", "mask: must be True or False"),
        ([1.5, 1], "iu", "mask: must be a whole number"),
        (None, "fiu", "mask: must be a number"),
        ([1, 2, 3], "fiu", r"mask: has the shape \[3\]"),
        ([1, 1e300], "fiu", "mask: must be finite"),
    ],
)
def test_what_is_no_value_of_tokens_is_refused(value, kinds, problem):
    refused(problem, lambda: given.of_tokens(value, 2, "mask", kinds))


@pytest.mark.parametrize(
    ("check", "value", "problem"),
    [
        (given.path, None, "^x: must be a path, is None$"),
        (given.path, 3, "^x: must be a path, is 3$"),
        (given.path, "a\0", "^x: must be a path, is "),
        (given.check_text, "1\ud800", r"^x: \\ud800 is half of a character$"),
        (given.routes, None, "^x: must be those of an answer"),
        (given.routes, np.zeros(2), "^x: must be those of an answer"),
        (given.routes, np.zeros((2, 2), np.uint8), "^x: must be those of an answer"),
    ],
)
def test_what_is_no_path_text_or_route_is_refused(check, value, problem):
    refused(problem, lambda: check(value, "x"))


def test_paths_texts_and_routes(tmp_path):
    own = np.ones(3, np.uint16)
    assert given.path(tmp_path, "x") == given.path(str(tmp_path), "x") == tmp_path
    given.check_text("é", "x")
    assert given.routes(own, "x") is own


@pytest.mark.parametrize("value", ["12+34=", Response([1], [2]), {"role": "user"}, 3])
def test_one_of_them_is_not_taken_for_several(value):
    refused("^samples: must be a list of them", lambda: given.several(value, "samples", Response))
