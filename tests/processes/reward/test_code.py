"""Programs scored against tests, by real workers in the real sandbox."""

import asyncio
import json
import time

import pytest

from areal_megatron.config import RewardConfig
from areal_megatron.reward.code import last_program, parse_tests, same_output, score
from areal_megatron.reward.worker import Answer
from areal_megatron.reward.workers import RewardWorkers
from tests.support.judging import scores_of

pytestmark = pytest.mark.usefixtures("isolation")
SQUARE = json.dumps({"inputs": ["3\n", "-4\n"], "outputs": ["9\n", "16\n"]})
CALLS = json.dumps({"fn_name": "longest", "inputs": [[["a", "bcd", "ef"]], [[]]], "outputs": [["bcd", 3], [None, 0]]})


def fenced(program: str, language: str = "python") -> str:
    return f"I think:\n```{language}\n{program}\n```\nThat is it."


def scored(answers: list[tuple[str, str]], timeout_s: float = 60) -> tuple[list[float], int, float]:
    """Returns scores, counted failures and seconds."""

    async def scores():
        pool = RewardWorkers(RewardConfig(function="code", timeout_s=timeout_s, retry_s=0))
        await pool.start()
        began = time.monotonic()
        try:
            found = await scores_of(pool, [Answer("", response, answer) for response, answer in answers])
            return found, pool.failures, time.monotonic() - began
        finally:
            await pool.close()

    return asyncio.run(asyncio.wait_for(scores(), 300))


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```python\na\n```\n```py\nb\n```", "b\n"),
        ("```python\na\n```\nrun it:\n```\n$ python a\n```", "a\n"),
        ("```\na\n```\ntext\n```\nb\n```", "b\n"),
        ("```\r\na\r\n```\r\n", "a\n"),
        ("```Python title=x\na\n```", "a\n"),
        ("1. so\n   ```python\n   a\n   ```\n", "   a\n"),
        ("```cpp\nint a;\n```", None),
        ("```python\na\n```\nand better\n```python\nb", "a\n"),
        ("print(1)", None),
        ("", None),
        ("`" * 100_000, None),
    ],
)
def test_the_last_python_block_is_the_program(response, program):
    assert last_program(response) == program


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1 2  \n3\n\n\n", "1 2\n3", True),
        ("1  2", "1 2", True),
        ("0.50 a", "0.5 a", True),
        ("0.5 a", "0.50 a", True),
        (".5", "0.5", True),
        ("1e-05", "0.00001", True),
        ("1000", "1e3", True),
        ("-2.5", "-2.50", True),
        ("1 2 3.0", "1 2 3.00", True),
        ("1e3", "1000", False),
        ("1000.0", "1000", False),
        ("10", "0010", False),
        ("0010", "10", False),
        ("7", "007", False),
        ("007", "7", False),
        ("00.5", "0.5", False),
        ("0.5", "00.5", False),
        ("00", "0.0", False),
        ("+5", "5", False),
        ("5.0", "+5.0", False),
        ("-0", "0", False),
        ("-0.0", "0.0", False),
        ("-5.0", "5.0", False),
        ("0x10", "16", False),
        ("0x1p3", "8.0", False),
        ("5", "5.", False),
        ("1_0.0", "10.0", False),
        ("٣.5", "3.5", False),
        ("３", "3", False),
        ("３.0", "3.0", False),
        ("1,5", "1.5", False),
        ("NaN", "nan", False),
        ("-nan", "nan", False),
        ("1e400", "inf", False),
        ("True", "true", False),
        ("True", "1", False),
        ("1/2", "0.5", False),
        ("50%", "0.5", False),
        ("0.30000000000000004", "0.3", False),
        ("9007199254740993.0", "9007199254740992.0", False),
        ("0.1", "0.10000000000000000001", False),
        ("1\n2", "1 2", False),
        ("1", "1\n1", False),
        ("a", "A", False),
        ("1_0", "10", False),
        ("nan", "nan", True),
        ("inf", "Infinity", False),
        ("", "\n", True),
        ("1e999999999", "2", False),
        ("1e999999999", "2.0", False),
        (" 1 2", "1 2", True),
        ("1 2", "1  2", True),
        ("1\t2", "1 2", True),
        ("a  b", "a b", True),
        ("1\r\n2\r\n", "1\n2", True),
        ("1\n\n2", "1\n \n2", True),
        ("1\n\n2", "1\n2", False),
        ("\n1", "1", False),
        ("1\r2", "1 2", False),
        ("1\u20282", "1 2", False),
        ("1\u30002", "1 2", False),
        ("1\f", "1", False),
        ("*\n***", "  *\n ***", False),
        ("  *\n***", " *\n***", False),
        ("  *\n ***", "  *\n ***\n", True),
        ("  *  \n ***", "  *\n *** ", True),
        ("  *\n ***\n  *****", "  *\n ***\n*****", False),
        ("  *\n ***", "*\n***", False),
        ("***\n* *\n***", "***\n*  *\n***", False),
        ("***\n*  *\n***", "***\n* *\n***", False),
        ("\t*", "    *", False),
        ("A\nABA", " A\nABA", False),
        ("  A\n ABA", "  A\nABA", False),
        ("a b", "a  b", False),
        ("1\n1 1", " 1\n1 1", False),
        ("  1.0", "  1.00", True),
    ],
)
def test_outputs_are_compared_by_line_and_what_has_a_point_by_value(found, expected, same):
    assert same_output(found, expected) is same


def test_answers_for_standard_input():
    right = fenced("print(int(input()) ** 2)")
    answers = {
        right: 1.0,
        fenced("print(int(input()) * 3)"): 0.0,  # right for the first test only
        fenced("print(int(input()) ** 2); exit()"): 1.0,
        fenced("import sys\nprint(int(sys.stdin.readline()) ** 2)\nsys.exit(1)"): 0.0,
        fenced("print(int(input()) ** 2); print('done')"): 0.0,
        fenced("this is no program"): 0.0,
        fenced("print(open('/etc/hostname').read())"): 0.0,
        fenced("import os\nos.write(1, b'\\xff')"): 0.0,
        "print(int(input()) ** 2)": 0.0,
    }
    assert scored([(response, SQUARE) for response in answers])[:2] == (list(answers.values()), 0)


def test_inputs_may_be_lists_of_lines():
    tests = json.dumps({"inputs": [["2", "1 5"]], "outputs": [["6"]]})
    assert score("", fenced("input()\nprint(sum(map(int, input().split())))"), tests) == 1.0


METHOD = """
class Solution:
    def __init__(self):
        self.calls = 0
    def longest(self, words: List[str]) -> Optional[str]:
        self.calls += 1
        print("noise", self.calls)
        best = max(words, key=len, default=None)
        return best, len(best or "") * pow(self.calls, 1, 7)
"""
FUNCTION = "def longest(words):\n    best = max(words, key=len, default=None)\n    return [best, len(best or '')]"


def test_answers_that_are_functions():
    answers = {
        fenced(METHOD): 1.0,
        fenced(FUNCTION): 1.0,
        fenced(FUNCTION + "\nif __name__ == '__main__': print(longest(input()))"): 1.0,
        fenced(FUNCTION.replace("longest", "shortest")): 0.0,
        fenced(FUNCTION.replace("key=len, ", "")): 0.0,
        fenced("def longest(words): return {1, 2}"): 0.0,
        fenced("def longest(words): print('[\"bcd\", 3]\\n[null, 0]'); exit()"): 0.0,
        # results are compared outside: writing to where they go needs the right ones
        fenced(
            "import os\nfor d in range(3, 9):\n    "
            "try: os.write(d, b'[' * 99999 + b'\\n' * 2)\n    except OSError: pass\nos._exit(0)"
        ): 0.0,
    }
    assert scored([(response, CALLS) for response in answers])[:2] == (list(answers.values()), 0)


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ([[1, 2]], [3]),
        ([[1, 2]], [[3]]),  # as APPS writes most of them
        (["1\n2\n"], ["3"]),  # as LiveCodeBench does
    ],
)
def test_published_ways_to_write_a_call(inputs, outputs):
    tests = {"fn_name": "add", "inputs": inputs, "outputs": outputs}
    assert score("", fenced("def add(a, b): return a + b"), json.dumps(tests)) == 1.0
    assert score("", fenced("def add(a, b): return a - b"), json.dumps(tests)) == 0.0


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("42", "expected an object, is a number"),
        ("print", "not JSON"),
        ("{}", "lists of one length, not empty"),
        ('{"inputs": [], "outputs": []}', "lists of one length, not empty"),
        ('{"inputs": ["1"], "outputs": []}', "lists of one length, not empty"),
        ('{"inputs": "1", "outputs": "2"}', "lists of one length, not empty"),
        ('{"inputs": [1], "outputs": ["2"]}', "standard input must be text, is 1"),
        ('{"inputs": [1], "outputs": ["2"], "fn_name": "f"}', "needs a list of arguments, has 1"),
        ('{"inputs": ["x"], "outputs": ["2"], "fn_name": "f"}', "no JSON: 'x', '2'"),
        ('{"inputs": [[1]], "outputs": [2], "fn_name": "os.f"}', "fn_name must be a name, is 'os.f'"),
    ],
)
def test_malformed_tests_are_named(answer, problem):
    with pytest.raises(ValueError, match=r"^(the answer|a test)") as error:
        parse_tests(answer)
    assert problem in str(error.value)


@pytest.mark.parametrize(("result", "passes"), [("3", 1.0), ("3.0", 1.0), ("'3'", 0.0), ("[[3]]", 0.0), ("3.1", 0.0)])
def test_results_of_functions_are_compared_as_json(result, passes):
    """As APPS compares them: 3.0 and 3 are one number, text is none."""
    tests = json.dumps({"fn_name": "f", "inputs": [[]], "outputs": [3]})
    assert score("", fenced(f"def f(): return {result}"), tests) == passes


def test_malformed_tests_are_counted_as_failures():
    answers = [(fenced("print(1)"), "42"), (fenced("print(int(input()) ** 2)"), SQUARE), ("no program", "{}")]
    assert scored(answers)[:2] == ([None, 1.0, None], 2)


def test_a_problem_ends_before_the_worker_would_be_killed():
    """A slow program is a wrong answer and no failure, even if each of many tests is quick enough."""
    many = json.dumps({"inputs": ["1\n"] * 1000, "outputs": ["1\n"] * 1000})
    slow = [fenced("import time\ntime.sleep(100)"), fenced("while True: pass"), fenced("print(input())")]
    scores, failures, took_s = scored([(program, many) for program in slow], timeout_s=4)
    assert (scores, failures) == ([0.0] * 3, 0)
    assert 3 * 3.2 <= took_s < 3 * 4
