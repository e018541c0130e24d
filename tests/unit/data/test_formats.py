"""Rows of published data sets, as their cards show them, and the items that they become."""

import base64
import json
import os
import pickle
import zlib

import pytest

from areal_megatron.config import ConfigError
from areal_megatron.data import formats
from areal_megatron.data.formats import read_item, text_of
from areal_megatron.reward.answers import problem_with_answers
from areal_megatron.reward.choice import score
from areal_megatron.reward.math import score as math_score

AIME24 = {"id": 60, "problem": "Every morning Aya goes…", "solution": r"… \boxed{204}", "answer": "204", "year": "2024"}
AIME24_CAPITAL = {"ID": "2024-II-4", "Problem": "Let $x,y$ and $z$…", "Solution": "…", "Answer": 33}
AIME25 = {"question": "Find the sum of all integer bases…", "answer": "70"}
AMC23 = {"id": 0, "problem": "Cities $A$ and $B$…", "answer": 27.0, "url": "…"}
MATH500 = {
    "problem": "Convert the point…",
    "answer": r"\left( 3, \frac{\pi}{2} \right)",
    "subject": "Precalculus",
    "level": 2,
}


AMC23_QUESTION = {"id": 1, "question": "Cities $C$ and $D$…", "answer": "27.0", "url": "…"}
GSM8K = {
    "question": "Ada packs 3 boxes of 500 nails. How many?",
    "answer": "She packs 3*500 = <<3*500=1500>>1500 nails.\nThat is many.\n#### 1,500",
}


@pytest.mark.parametrize(
    ("row", "question", "answer"),
    [
        (AMC23_QUESTION, "Cities $C$ and $D$…", "27.0"),
        (GSM8K, "Ada packs 3 boxes", "1500"),
        (GSM8K | {"answer": "None is left.\n#### -7"}, "Ada packs 3 boxes", "-7"),
        (AIME24, "Every morning Aya goes…", "204"),
        (AIME24_CAPITAL, "Let $x,y$ and $z$…", "33"),
        (AIME25, "Find the sum of all integer bases…", "70"),
        (AMC23, "Cities $A$ and $B$…", "27.0"),
        (MATH500, "Convert the point…", MATH500["answer"]),
    ],
)
def test_mathematical_problems_ask_for_a_box(row, question, answer):
    item = read_item(row, "x:1", [0])
    assert item.prompt.startswith(question) and "\\boxed{}" in item.prompt
    assert (item.answer, item.reward) == (answer, "math")
    assert math_score(item.prompt, f"so \\boxed{{{answer}}}", item.answer) == 1


def test_the_whole_number_of_amc_is_right():
    assert math_score("", r"\boxed{27}", read_item(AMC23, "x:1", [0]).answer) == 1


CHOICES = ["iron", "gold", "lead", "zinc"]
GPQA = {
    "Question": "Which?",
    "Correct Answer": "gold\n",
    "Incorrect Answer 1": "iron",
    "Incorrect Answer 2": "lead",
    "Incorrect Answer 3": "zinc",
    "Explanation": "…",
}
MULTIPLE = [GPQA, *({"question": "Which?", "choices": CHOICES, "answer": answer} for answer in (1, "B", "gold"))]


@pytest.mark.parametrize("row", MULTIPLE)
def test_the_letter_of_a_shuffled_question_stands_before_the_right_choice(row):
    letters = set()
    for seed in range(40):
        item = read_item(row, "x:1", [1, seed])
        assert item == read_item(row, "y:9", [1, seed]) and item.reward == "choice"
        shown = dict(line.split(") ") for line in item.prompt.split("\n")[2:6])
        assert list(shown) == list("ABCD") and sorted(shown.values()) == sorted(CHOICES)
        assert shown[item.answer] == "gold"
        assert score(item.prompt, f"I think \\boxed{{{item.answer}}}", item.answer) == 1
        letters.add(item.answer)
    assert letters == set("ABCD")


@pytest.mark.parametrize(
    ("response", "found"),
    [
        (r"\boxed{B}", "B"),
        (r"\boxed{A} no, \boxed{B}", "B"),
        (r"answer is A, boxed \boxed{(B)}, answer is C", "B"),
        (r"\boxed{\text{B}}", "B"),
        (r"\boxed{\textbf{(B)}}", "B"),
        (r"\boxed{b}", "B"),
        (r"\boxed{B.}", "B"),
        (r"\boxed{B) 42 cm}", "B"),
        (r"\boxed{**B**}", "B"),
        (r"\boxed{42} answer is B", None),
        (r"\boxed{B and C}", None),
        (r"\boxed{Both}", None),
        ("The answer is B.", "B"),
        ("The correct answer is **B** since", "B"),
        ("Answer: (B)", "B"),
        ("Answer: $B$", "B"),
        ("the answer is A. No: the answer is B", "B"),
        ("the answer is both", None),
        ("the answer is Boron", None),
        ("B", "B"),
        ("", None),
    ],
)
def test_letters_are_found_where_models_put_them(response, found):
    assert [letter for letter in "ABCD" if score("", response, letter)] == ([found] if found else [])


STDIN = [
    {"input": "1 2\n", "output": "3\n", "testtype": "stdin"},
    {"input": "4 5\n", "output": "9\n", "testtype": "stdin"},
]
CALLS = [
    {"input": '[3, 1]\n"up"', "output": "[1, 3]", "testtype": "functional"},
    {"input": '[3, 1]\n"down"', "output": "[3, 1]", "testtype": "functional"},
]
STDIN_ROW = {
    "question_title": "Sum",
    "question_content": "Add.",
    "platform": "atcoder",
    "starter_code": "",
    "metadata": "{}",
    "public_test_cases": json.dumps(STDIN[:1]),
}
CALLS_ROW = {
    "question_content": "Sort.",
    "starter_code": "class Solution:\n    def order(self, a, way):\n        ",
    "metadata": '{"func_name": "order"}',
    "public_test_cases": json.dumps(CALLS[:1]),
}


CODEFORCES = {
    "id": "1/A",
    "title": "Sum",
    "time_limit": 1.0,
    "description": "Add the numbers.",
    "input_format": "Two numbers.",
    "output_format": "Their sum.",
    "interaction_format": None,
    "note": "They are small.",
    "examples": [{"input": "1 2", "output": "3"}],
    "official_tests": [{"input": "1 2\n", "output": "3\n"}, {"input": "4 5\n", "output": "9\n"}],
    "official_tests_complete": True,
    "input_mode": "stdio",
    "generated_checker": None,
    "executable": True,
}
CODE_CONTESTS = {
    "name": "1_A. Sum",
    "description": "Add the numbers.\n\nInput\n\nTwo numbers.",
    "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
    "private_tests": {"input": [], "output": []},
    "generated_tests": {"input": ["4 5\n"], "output": ["9\n"]},
    "solutions": {"language": [3], "solution": ["…"]},
    "input_file": "",
    "output_file": "",
}


@pytest.mark.parametrize("row", [CODEFORCES, CODE_CONTESTS])
def test_problems_of_contests_become_inputs_and_outputs(row):
    item = read_item(row, "x:1", [0])
    assert item.prompt.startswith("Add the numbers.") and "Two numbers." in item.prompt and "stdin" in item.prompt
    assert item.reward == "code" and problem_with_answers("code")(item.answer) == ""
    assert json.loads(item.answer) == {"inputs": ["1 2\n", "4 5\n"], "outputs": ["3\n", "9\n"]}


def test_a_problem_of_codeforces_shows_all_its_parts_in_order():
    prompt = read_item(CODEFORCES, "x:1", [0]).prompt
    parts = ["Add the", "Input\nTwo", "Output\nTheir", "Example 1\nInput:\n1 2\nOutput:\n3", "Note\nThey", "python"]
    places = [prompt.index(part) for part in parts]
    assert places == sorted(places)


def packed(cases, protocol=None):
    """Packs text as the private tests of the published files are, with the real pickle."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases), protocol))).decode()


@pytest.mark.parametrize("private", [json.dumps(STDIN[1:]), STDIN[1:], *(packed(STDIN[1:], p) for p in range(6))])
def test_programs_of_live_code_bench_become_inputs_and_outputs(private):
    item = read_item(STDIN_ROW | {"private_test_cases": private}, "x:1", [0])
    assert item.prompt.startswith("Add.") and "stdin" in item.prompt and item.reward == "code"
    assert json.loads(item.answer) == {"inputs": ["1 2\n", "4 5\n"], "outputs": ["3\n", "9\n"]}


def test_functions_of_live_code_bench_can_be_called_with_their_inputs():
    class Solution:
        def order(self, a, way):
            return sorted(a, reverse=way == "down")

    item = read_item(CALLS_ROW | {"private_test_cases": packed(CALLS[1:])}, "x:1", [0])
    assert CALLS_ROW["starter_code"] in item.prompt and item.reward == "code"
    tests = json.loads(item.answer)
    assert len(tests["inputs"]) == 2
    assert [getattr(Solution(), tests["fn_name"])(*given) for given in tests["inputs"]] == tests["outputs"]


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_is_more_than_a_text_is_refused_and_never_executed(tmp_path):
    private = base64.b64encode(zlib.compress(pickle.dumps(Hostile(tmp_path / "owned")))).decode()
    with pytest.raises(ConfigError, match=r"^x:3: field 'private_test_cases' is no list of tests"):
        read_item(STDIN_ROW | {"private_test_cases": private}, "x:3", [0])
    assert not (tmp_path / "owned").exists()
    pickle.loads(zlib.decompress(base64.b64decode(private)))
    assert (tmp_path / "owned").exists(), "the pickle was harmless: this test proves nothing"


def test_a_text_that_inflates_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(formats, "_UNPACKED_BYTES", 10_000)
    read_item(STDIN_ROW | {"private_test_cases": packed(STDIN)}, "x:1", [0])
    with pytest.raises(ConfigError, match="private_test_cases"):
        read_item(
            STDIN_ROW | {"private_test_cases": packed([*STDIN, {"input": "0" * 20_000, "output": ""}])}, "x:1", [0]
        )


def test_prompts_as_they_stand_may_be_messages_and_answers_json():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}]
    item = read_item({"prompt": messages, "answer": {"inputs": ["1"]}}, "x:1", [0])
    assert (item.prompt, item.reward) == (messages, "")
    assert json.loads(item.answer) == {"inputs": ["1"]}
    assert text_of(item.prompt) == "Be brief.\n\n1+1"
    assert read_item({"prompt": "1+1", "system": "Be brief.", "answer": "2"}, "x:1", [0]).prompt == messages
    assert read_item({"prompt": messages, "system": "Be brief.", "answer": "2"}, "x:1", [0]).prompt == messages
    assert read_item({"prompt": "a", "answer": 2.5}, "x:1", [0]).answer == "2.5"


CALLED = {"type": "function_call", "fn_name": "f", "input": [2], "output": [4]}
NO_TEXT = "a test of field 'tests' has a type or fn_name that is no text"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"said": "a"}, "field 'prompt' is missing, found 'said'; other formats have one of 'question_content'"),
        (
            {"instruction": "a", "output": "b"},
            "'prompt' is missing, found 'instruction', 'output'; rename 'instruction' to 'prompt'?",
        ),
        ({"question_text": "a"}, "found 'question_text'; rename 'question_text' to 'prompt'?"),
        ({"messages": [{"role": "user", "content": "a"}]}, "found 'messages'; 'messages' are for mode=sft"),
        ({}, "found no field"),
        ({"problem": "a"}, "field 'answer' is missing, found 'problem'"),
        ({"Problem": "a", "answer": "1"}, "field 'Answer' is missing"),
        ({"question": ["a"], "answer": "1"}, "field 'question' is a list, expected a text"),
        ({"question": "a", "answer": [1]}, "field 'answer' is a list, expected a text or a number"),
        ({"prompt": [], "answer": "1"}, "field 'prompt' is empty"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, "message 1 of 'prompt' needs a text `role`"),
        ({"prompt": ["hi"], "answer": "1"}, "message 1 of 'prompt'"),
        ({"prompt": [{"role": "system", "content": "a"}], "system": "b", "answer": "1"}, "field 'system' and the"),
        ({"prompt": "a", "system": ["b"], "answer": "1"}, "field 'system' is a list, expected a text"),
        ({"question": "a", "choices": ["x"], "answer": 0}, "field 'choices' must be 2 to 26 texts"),
        ({"question": "a", "choices": ["x", 2], "answer": 0}, "field 'choices' must be"),
        ({"question": "a", "choices": "xy", "answer": 0}, "field 'choices' is a text, expected a list"),
        ({"question": "a", "choices": ["x", "y"], "answer": 2}, "field 'answer' is 2, expected a choice"),
        ({"question": "a", "choices": ["x", "y"], "answer": -1}, "field 'answer' is -1"),
        ({"question": "a", "choices": ["x", "y"], "answer": "C"}, "field 'answer' is 'C'"),
        ({"question": "a", "choices": ["x", "y"], "answer": "AB"}, "field 'answer' is 'AB'"),
        ({key: value for key, value in GPQA.items() if key != "Incorrect Answer 2"}, "'Incorrect Answer 2' is missing"),
        (STDIN_ROW | {"public_test_cases": ""}, "no test in public_test_cases"),
        (STDIN_ROW | {"public_test_cases": "[" * 100_000}, "field 'public_test_cases' is no list of tests"),
        (STDIN_ROW | {"public_test_cases": '[{"input": "\\ud800", "output": ""}]'}, "field 'public_test_cases'"),
        (CALLS_ROW | {"metadata": "[" * 100_000}, "func_name"),
        (CALLS_ROW | {"public_test_cases": json.dumps([CALLS[0] | {"output": "[" * 100_000}])}, "need JSON values"),
        (STDIN_ROW | {"public_test_cases": "[oops"}, "field 'public_test_cases' is no list of tests"),
        (STDIN_ROW | {"public_test_cases": '[{"input": 1, "output": "2"}]'}, "field 'public_test_cases'"),
        (STDIN_ROW | {"public_test_cases": 7}, "field 'public_test_cases'"),
        (STDIN_ROW | {"private_test_cases": "no base64!"}, "field 'private_test_cases'"),
        (STDIN_ROW | {"private_test_cases": base64.b64encode(b"no zlib").decode()}, "field 'private_test_cases'"),
        (STDIN_ROW | {"private_test_cases": packed([{"input": "\ud800", "output": ""}])}, "field 'private_test_cases'"),
        (STDIN_ROW | {"private_test_cases": packed(CALLS)}, "expected all stdin or all functional"),
        (
            STDIN_ROW | {"public_test_cases": '[{"input": "", "output": "", "testtype": ["x"]}]'},
            "field 'public_test_cases'",
        ),
        (GSM8K | {"answer": "so\n#### "}, "field 'answer' has nothing after its last ####"),
        (CODEFORCES | {"generated_checker": "import sys"}, "cannot be tested: several outputs are right"),
        (CODEFORCES | {"interaction_format": "Ask."}, "cannot be tested: it is interactive"),
        (CODEFORCES | {"input_mode": "file"}, "cannot be tested: it reads a file; leave the row out"),
        (CODEFORCES | {"official_tests": []}, "field 'official_tests' is empty"),
        (CODEFORCES | {"official_tests": None}, "field 'official_tests' is null, expected a list"),
        (CODEFORCES | {"official_tests": [{"input": "1"}]}, "field 'official_tests' is no list of tests"),
        (CODEFORCES | {"examples": ["1"]}, "field 'examples' is no list of tests"),
        (CODEFORCES | {"examples": 7}, "field 'examples' is no list of tests"),
        (CODE_CONTESTS | {"input_file": "in.txt"}, "reads or writes a file; leave the row out"),
        (CODE_CONTESTS | {"public_tests": {"input": ["1"], "output": []}}, "field 'public_tests' needs an `input`"),
        (CODE_CONTESTS | {"private_tests": ["1"]}, "field 'private_tests' needs an `input`"),
        (CODE_CONTESTS | {"generated_tests": {"input": [1], "output": ["2"]}}, "field 'generated_tests' is no list"),
        (CODE_CONTESTS | {"public_tests": None, "generated_tests": None}, "no test in public_tests"),
        (CALLS_ROW | {"metadata": "{}"}, "func_name"),
        (CALLS_ROW | {"metadata": "[]"}, "func_name"),
        (CALLS_ROW | {"starter_code": ""}, "field 'starter_code' is empty"),
        (CALLS_ROW | {"public_test_cases": json.dumps([CALLS[0] | {"output": "no json"}])}, "need JSON values"),
        *(({"problem": "p", "tests": [CALLED | {name: ["f"]}]}, NO_TEXT) for name in ("type", "testtype", "fn_name")),
        ({"problem": "p", "tests": [CALLED | {"type": 7}]}, NO_TEXT),
    ],
)
def test_rows_without_sense_are_named(row, problem):
    with pytest.raises(ConfigError) as error:
        read_item(row, "data.jsonl:7", [0])
    assert str(error.value).startswith("data.jsonl:7: ") and problem in str(error.value)
    assert "\n" not in str(error.value)
