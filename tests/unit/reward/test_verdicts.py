"""The verdicts of the graders on responses whose verdict is known (tests/support/verdicts.py)."""

import pytest

from areal_megatron.reward import choice, math
from areal_megatron.reward.code import last_program
from areal_megatron.reward.no_score import AnswerRefused
from tests.support.verdicts import CHOICE_RIGHT, CHOICE_WRONG, MATH_RIGHT, MATH_WRONG


def by_math(response, answer):
    try:
        return math.score("", response, answer)
    except AnswerRefused:
        return 0.0


def by_choice(response, answer):
    return choice.score("", response, answer)


@pytest.mark.parametrize(
    ("grade", "pairs", "verdict"),
    [
        (by_math, MATH_RIGHT, 1.0),
        (by_math, MATH_WRONG, 0.0),
        (by_choice, CHOICE_RIGHT, 1.0),
        (by_choice, CHOICE_WRONG, 0.0),
    ],
    ids=["math right", "math wrong", "choice right", "choice wrong"],
)
def test_known_verdicts(grade, pairs, verdict):
    assert [(response, answer) for response, answer in pairs if grade(response, answer) != verdict] == []


def test_there_are_two_hundred_pairs_and_sixty_hedges():
    pairs = MATH_RIGHT + MATH_WRONG + CHOICE_RIGHT + CHOICE_WRONG
    assert len(set(pairs)) == len(pairs) >= 200
    assert len(MATH_WRONG) + len(CHOICE_WRONG) >= 60


@pytest.mark.parametrize("answer", "ABCD")
def test_no_response_chooses_two_letters(answer):
    for response, right in CHOICE_RIGHT:
        assert by_choice(response, answer) == (answer == right)


PROGRAM = "print(1)\n"


@pytest.mark.parametrize(
    ("response", "program"),
    [
        (f"```python\n{PROGRAM}```", PROGRAM),
        (f"Here it is:\n\n```python\n{PROGRAM}```\nIt prints 1.", PROGRAM),
        (f"```Python\n{PROGRAM}```", PROGRAM),
        (f"```py\n{PROGRAM}```", PROGRAM),
        (f"```python3\n{PROGRAM}```", PROGRAM),
        (f"``` python\n{PROGRAM}```", PROGRAM),
        (f"```python title=a.py\n{PROGRAM}```", PROGRAM),
        (f"```\n{PROGRAM}```", PROGRAM),
        (f"1. A list:\n   ```python\n{PROGRAM}   ```", PROGRAM),
        (f"```python\nprint(2)\n```\nNo:\n```python\n{PROGRAM}```", PROGRAM),
        (f"```python\n{PROGRAM}```\nIts output:\n```\n1\n```", PROGRAM),
        (f"```python\n{PROGRAM}```\n```bash\npython a.py\n```", PROGRAM),
        (f"```python\n{PROGRAM}```\nThen\n```python\nprint(", PROGRAM),
        ("```python\r\nprint(1)\r\n```", PROGRAM),
        ("```cpp\nint main() {}\n```", None),
        (f"```python\n{PROGRAM}", None),
        (PROGRAM, None),
        ("", None),
        ("`print(1)`", None),
        ("```python print(1)```", None),
        ("```\n1\n```\n```javascript\nlet a\n```", "1\n"),
        (f"```python\n{PROGRAM}``` and text", None),
    ],
)
def test_the_program_of_a_response(response, program):
    assert last_program(response) == program
