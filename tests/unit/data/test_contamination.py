"""What training and evaluation prompts have in common, beside the sets of tuples that a plain loop would compare."""

import random
import re
import unicodedata
from dataclasses import replace

import pytest

from areal_megatron.data import contamination
from areal_megatron.data.contamination import compare
from areal_megatron.data.prompts import Prompt


def prompts(*texts, source=0):
    return [
        Prompt(id=number, text=text, answer="1", tokens=[1], response_tokens=None, source=source, where=f"x:{number}")
        for number, text in enumerate(texts)
    ]


def pairs(found):
    return [(asked.id, trained.id) for asked, trained in found]


def never(line):
    raise AssertionError(line)


def plainly(train, held_out):
    """Returns the numbers of the evaluation prompts with a phrase that 1 to 10 different training prompts have."""

    def words_of(text):
        return re.findall(r"[a-z0-9\x80-\U0010ffff]+", unicodedata.normalize("NFKC", text).casefold())

    def phrases(text):
        words = words_of(text)
        return {tuple(words[k : k + 13]) for k in range(len(words) - 12)}

    different = {tuple(words_of(prompt.text)): prompt for prompt in train}.values()
    of_training = [phrases(prompt.text) for prompt in different]
    texts = {prompt.text.casefold() for prompt in train}
    return [
        prompt.id
        for prompt in held_out
        if prompt.text.casefold() not in texts
        and any(1 <= sum(phrase in own for own in of_training) <= 10 for phrase in phrases(prompt.text))
    ]


@pytest.mark.parametrize("batch", [contamination._BATCH, 500])
def test_phrases_are_those_that_a_plain_loop_finds(monkeypatch, batch):
    """Texts put together from pieces, some of which many have; the first are repeated, and some are empty."""
    monkeypatch.setattr(contamination, "_BATCH", batch)
    draw = random.Random(5)
    words = ["Über", "x2", "n", "the", "sum", "of", "Σ", "42", "prime", "İs", "ﬁnd", "odd"]
    rare = [" ".join(draw.choices(words, k=11)) for _ in range(60)]
    common = [" - ".join(draw.choices(words, k=14)) for _ in range(2)]

    def text():
        pieces = draw.choices(rare, k=draw.randint(0, 2)) + draw.choices([*common, "", "a+b"], k=1)
        return f"{draw.randint(0, 9)}\0 {draw.choice(words)} " + "\n".join(draw.sample(pieces, len(pieces)))

    train = prompts(*(text() for _ in range(150)), "", "n")
    train = prompts(*(prompt.text for prompt in [*train, *train[:30]]))
    held_out = prompts(*(text() for _ in range(60)), "", "n", "sum of")
    expected = plainly(train, held_out)
    assert 10 < len(expected) < 50
    found = compare(train, held_out, never)
    assert [asked for asked, _ in pairs(found.similar)] == expected
    for asked, trained in found.similar:
        assert plainly([trained], [replace(asked, id=0)]) == [0]
    texts = [prompt.text for prompt in train]
    equal = [(asked.id, texts.index(asked.text)) for asked in held_out if asked.text in texts]
    assert pairs(found.equal) == equal and (60, 150) in equal


def test_prompts_are_equal_but_for_case_blanks_and_compatible_characters():
    train = prompts("What is 3-2?", "12+3=", "x² ﬁnd", "  a\n b", "once", "once")
    held_out = prompts("what is 3 - 2?", "what is 3+2?", "1 2+3=", "12+3=", "X2 Find", "A B", "ONCE")
    assert pairs(compare(train, held_out, never).equal) == [(3, 1), (4, 2), (5, 3), (6, 4)]


QUESTION = "a farmer sells {} eggs and {} hens on each of the seven days of a week of rain; how much is {}"


def test_instructions_that_prompts_share_are_no_phrase():
    """Questions of a few words in a long frame, and one of many words that stands in another frame in each set."""

    def framed(*questions, before="Answer the following question as well as you possibly can, my dear friend:"):
        return [
            f"{before} {question}? Reason step by step and put the final answer into \\boxed{{}}."
            for question in questions
        ]

    short = [f"what is {number} times seven" for number in range(40)]
    contaminated = QUESTION.format("nine", "four", "that")
    train = prompts(*framed(*short, contaminated))
    held_out = prompts(
        *framed(*(f"what is {number} times eight" for number in range(40)), contaminated, before="Solve:")
    )
    assert pairs(compare(train, held_out, never).similar) == [(40, 40)]
    assert plainly(train, held_out), "the frame has no phrase: this test proves nothing"


def test_every_file_has_a_frame_of_its_own():
    before = "You are a careful assistant that always thinks twice before it says what it believes:"
    first = prompts(*(f"{before} is {n} odd?" for n in range(9)))
    second = prompts(*(f"is {n} even? {before}" for n in range(9)), source=1)
    held_out = prompts(*(f"{before} is {n} prime?" for n in range(9)))
    assert pairs(compare([*first, *second], held_out, never).similar) == []


def test_progress_is_told(monkeypatch):
    monkeypatch.setattr(contamination, "_BATCH", 1)
    monkeypatch.setattr(contamination, "_PROGRESS_S", 0.0)
    told = []
    compare(prompts("a", "b"), prompts("c"), told.append)
    assert told == [f"comparing data.eval with data.train: {n} of 2 rows, 0 s" for n in (1, 2)]
