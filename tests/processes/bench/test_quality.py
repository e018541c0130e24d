"""Time to quality: the tasks, and the figures of curves."""

import math
import random
import re

import pytest

from tools.bench import quality
from tools.bench.quality_trl import right
from tools.make_arithmetic import make_tokenizer


@pytest.mark.parametrize("name", quality.TASKS)
def test_questions_have_right_answers_of_known_words_that_fit(name):
    task, tokenizer, rng = quality.TASKS[name], make_tokenizer(quality.LABELS), random.Random(0)
    for _ in range(500):
        question = task.ask(rng)
        careful = f"{question.working} \\boxed{{{question.answer}}}".strip()
        numbers = [int(number) for number in re.findall(r"\d+", question.prompt)]
        assert question.answer == (max if name == "long-prompts" else sum)(numbers)
        assert right(question.prompt, careful, str(question.answer)) == 1
        assert right(question.prompt, f"\\boxed{{{question.answer}}} \\boxed{{0}}", str(question.answer)) == 0
        prompt, answer = tokenizer(question.prompt).input_ids, tokenizer(careful).input_ids
        assert tokenizer.unk_token_id not in prompt + answer
        assert len(prompt) <= task.max_prompt_tokens and len(answer) < task.max_new_tokens


def test_the_corpus_has_hasty_answers_and_slips():
    rng, said = random.Random(0), []
    for _ in range(2000):
        question = quality.two_numbers(rng)
        answer = quality.corpus_answer(question, rng)
        said.append((answer.startswith("\\boxed"), right("", answer, str(question.answer))))
    assert 0.45 < sum(hasty for hasty, _ in said) / 2000 < 0.55
    careful = [is_right for hasty, is_right in said if not hasty]
    assert 0.88 < sum(careful) / len(careful) < 0.96


def curve(*accuracies, step=2.0):
    return [(step * number, accuracy) for number, accuracy in enumerate(accuracies, 1)]


def test_times_and_areas_are_those_of_moving_means(monkeypatch):
    monkeypatch.setattr(quality, "MEAN_OF", 2)
    found = curve(0.0, 0.2, 0.6, 1.0, 0.6, 0.6)  # means 0.1, 0.4, 0.8, 0.8, 0.6 at 4, 6, 8, 10, 12 s
    assert [quality.seconds_to(found, at) for at in (0.1, 0.4, 0.7, 0.9)] == [4, 6, 8, math.inf]
    assert quality.largest_fall(found) == pytest.approx(0.2)
    # 0 until the first mean, and each mean until the next one
    assert quality.area(found, 12) == pytest.approx((4 * 0 + 2 * 0.1 + 2 * 0.4 + 4 * 0.8) / 12)
    assert quality.area(found, 7) == pytest.approx((4 * 0 + 2 * 0.1 + 1 * 0.4) / 7)
    assert quality.area(found, 20) == pytest.approx((4 * 0 + 2 * 0.1 + 2 * 0.4 + 4 * 0.8 + 8 * 0.6) / 20)


def test_each_system_counts_with_its_best_rate():
    slow, fast, never = (
        [(step * n, min(1.0, n / top)) for n in range(1, 41)] for step, top in ((2, 20), (1, 20), (1, 99))
    )
    found = quality.report({quality.OURS: {"a": [slow], "b": [fast]}, quality.TRL: {"a": [slow], "b": [never]}}, 0.8)
    assert found["rates"] == {quality.OURS: "b", quality.TRL: "a"}
    assert found["ours over TRL's"]["seconds to 0.8"] == pytest.approx(0.5)
    assert "this system's over TRL's" in quality.table(found, 0.8)
