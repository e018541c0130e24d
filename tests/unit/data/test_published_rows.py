"""Files of published data sets, as they are published: names, types and container are theirs, the contents are ours.

Each is read as a run reads it and graded by the real reward: 1 for its right answer, 0 for another.
"""

import base64
import json
import pickle
import shutil
import zlib

import pytest

from areal_megatron.config import Config, ConfigError, DataConfig, ModelConfig, RewardConfig
from areal_megatron.data.formats import text_of
from areal_megatron.data.prompts import LeftOut, read_prompts
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.reward.answers import problem_with_answers
from areal_megatron.reward.function import load_function

ADD = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
SUBTRACT = ADD.replace("a + b", "a - b")
SORT = "```python\nclass Solution:\n    def order(self, values):\n        return sorted(values)\n```"
DOUBLE = "```python\ndef double(n):\n    return 2 * n\n```"
COLUMNS = {"inputs": ["1 2\n", "4 5\n"], "outputs": ["3\n", "9\n"]}
PAIRS = [{"input": "1 2\n", "output": "3\n"}, {"input": "4 5\n", "output": "9\n"}]
CALLS = [{"input": "[3, 1, 2]", "output": "[1, 2, 3]", "testtype": "functional", "metadata": {"func_name": "order"}}]
USER = [{"role": "user", "content": "What is 6 times 7? Put it into \\boxed{}."}]
LAST_LINE = [{"content": "Solve it. The last line is of the form Answer: $Answer.\n\nWhat is 6 · 7?", "role": "user"}]


def packed(cases):
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


# name: (file, rows, reward, right, wrong)
FILES = {
    "AReaL boba, math": (
        "AReaL-boba-106k.jsonl",
        [
            {
                "prompt": "<｜User｜>What is $6 \\cdot 7$?\nPlease reason step by step.<｜Assistant｜><think>\n",
                "task": "math",
                "query_id": "8f2c",
                "solutions": ["\\boxed{42}"],
            }
        ],
        "math",
        r"so \boxed{42}",
        r"so \boxed{41}",
    ),
    "AReaL boba, several solutions": (
        "boba.jsonl",
        [
            {
                "prompt": "<｜User｜>x<｜Assistant｜>",
                "task": "math",
                "query_id": "1",
                "solutions": ["\\boxed{1}", "\\boxed{\\frac{1}{2}}"],
            }
        ],
        "math",
        r"\boxed{\frac{1}{2}}",
        r"\boxed{2}",
    ),
    "AReaL, code": (
        "code.jsonl",
        [
            {
                "prompt": "<｜User｜>Add.<｜Assistant｜><think>\n",
                "task": "code",
                "query_id": "2",
                "input_output": json.dumps(COLUMNS),
            }
        ],
        "code",
        ADD,
        SUBTRACT,
    ),
    "GSM8K": (
        "train-00000-of-00001.parquet",
        [{"question": "Six boxes hold 7 apples each. How many?", "answer": "6*7=<<6*7=42>>42 apples.\n#### 42"}],
        "math",
        r"\boxed{42}",
        r"\boxed{6}",
    ),
    "DAPO": (
        "dapo-math-17k.parquet",
        [
            {
                "data_source": "math_dapo",
                "prompt": LAST_LINE,
                "ability": "MATH",
                "reward_model": {"ground_truth": "42", "style": "rule-lighteval/MATH_v2"},
                "extra_info": {"index": "9a9b6eb4"},
            }
        ],
        "math",
        "6 · 7 is 42.\nAnswer: 42",
        "Answer: 36",
    ),
    "verl, GSM8K": (
        "train.parquet",
        [
            {
                "data_source": "openai/gsm8k",
                "prompt": USER,
                "ability": "math",
                "reward_model": {"ground_truth": "42", "style": "rule"},
                "extra_info": {"answer": "… #### 42", "index": 0, "question": "…", "split": "train"},
            }
        ],
        "math",
        "So it is\n#### 42",
        "#### 24",
    ),
    "verl, several right answers": (
        "list.parquet",
        [{"prompt": USER, "reward_model": {"style": "rule", "ground_truth": ["42", "forty-two"]}}],
        "math",
        r"\boxed{42}",
        r"\boxed{43}",
    ),
    "verl, code": (
        "code.parquet",
        [{"prompt": USER, "ability": "code", "reward_model": {"style": "rule", "ground_truth": json.dumps(COLUMNS)}}],
        "code",
        ADD,
        SUBTRACT,
    ),
    "slime": ("dapo-math-17k.jsonl", [{"prompt": LAST_LINE, "label": "42"}], "math", "Answer: 42", "Answer: 41"),
    "DeepScaleR": (
        "deepscaler.json",
        [
            {"problem": "What is $6\\cdot7$?", "answer": "42", "solution": "It is $42$, so \\boxed{42}."},
            {"problem": "Halve 1.", "answer": "\\frac{1}{2}", "solution": ""},
        ],
        "math",
        r"\boxed{42}",
        r"\boxed{7}",
    ),
    "MATH, a solution alone": (
        "train-00000-of-00001.parquet",
        [{"problem": "Halve 1.", "level": "Level 1", "type": "Algebra", "solution": "It is $\\boxed{\\frac{1}{2}}$."}],
        "math",
        r"\boxed{\frac{1}{2}}",
        r"\boxed{2}",
    ),
    "DeepCoder, TACO": (
        "train-00000-of-00001.parquet",
        [{"problem": "Add.", "solutions": ["…"], "tests": json.dumps(COLUMNS)}],
        "code",
        ADD,
        SUBTRACT,
    ),
    "DeepCoder, TACO, a function": (
        "taco.parquet",
        [
            {
                "problem": "Double.",
                "solutions": [],
                "tests": json.dumps({"fn_name": "double", "inputs": [[2]], "outputs": [[4]]}),
            }
        ],
        "code",
        DOUBLE,
        DOUBLE.replace("2 * n", "n"),
    ),
    "DeepCoder, PrimeIntellect": (
        "primeintellect.parquet",
        [
            {
                "problem": "Add.",
                "solutions": ["…"],
                "tests": json.dumps([case | {"type": "stdin_stdout"} for case in PAIRS]),
            }
        ],
        "code",
        ADD,
        SUBTRACT,
    ),
    "DeepCoder, PrimeIntellect, a function": (
        "primeintellect.parquet",
        [
            {
                "problem": "Double.",
                "solutions": ["…"],
                "tests": json.dumps([{"type": "function_call", "fn_name": "double", "input": [2], "output": [4]}]),
            }
        ],
        "code",
        DOUBLE,
        DOUBLE.replace("2 * n", "n"),
    ),
    "DeepCoder, LiveCodeBench": (
        "lcbv5.parquet",
        [
            {
                "problem": "Sort.",
                "starter_code": "class Solution:\n    def order(self, values):\n        ",
                "tests": json.dumps(CALLS),
                "metadata": {"func_name": "order"},
            }
        ],
        "code",
        SORT,
        SORT.replace("sorted(values)", "values"),
    ),
    "DeepCoder, Codeforces": (
        "codeforces.parquet",
        [{"problem": "Add.", "tests": json.dumps([case | {"testtype": "stdin"} for case in PAIRS])}],
        "code",
        ADD,
        SUBTRACT,
    ),
    "CodeContests": (
        "train-00000-of-00039-e991a271dbfa9925.parquet",
        [
            {
                "name": "1_A. Sum",
                "description": "Add.",
                "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
                "private_tests": {"input": [], "output": []},
                "generated_tests": {"input": ["4 5\n"], "output": ["9\n"]},
                "source": 2,
                "difficulty": 7,
                "solutions": {"language": [3], "solution": ["…"]},
                "input_file": "",
                "output_file": "",
            }
        ],
        "code",
        ADD,
        SUBTRACT,
    ),
    "Codeforces": (
        "train-00000-of-00011.parquet",
        [
            {
                "id": "1/A",
                "title": "Sum",
                "description": "Add.",
                "input_format": "Two numbers.",
                "output_format": "Their sum.",
                "interaction_format": None,
                "note": None,
                "examples": PAIRS[:1],
                "official_tests": PAIRS,
                "official_tests_complete": True,
                "input_mode": "stdio",
                "generated_checker": None,
                "executable": True,
            }
        ],
        "code",
        ADD,
        SUBTRACT,
    ),
    "LiveCodeBench": (
        "test5.jsonl",
        [
            {
                "question_title": "Sum",
                "question_content": "Add.",
                "platform": "atcoder",
                "question_id": "abc",
                "contest_date": "2024-01-01T00:00:00",
                "starter_code": "",
                "difficulty": "easy",
                "public_test_cases": json.dumps([PAIRS[0] | {"testtype": "stdin"}]),
                "private_test_cases": packed([PAIRS[1] | {"testtype": "stdin"}]),
                "metadata": "{}",
            }
        ],
        "code",
        ADD,
        SUBTRACT,
    ),
}


def write(folder, name, rows):
    path = folder / name
    if path.suffix == ".parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows) if path.suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_of(path, reward="math", **data):
    return Config(
        name="x",
        updates=1,
        model=ModelConfig("m"),
        data=DataConfig(str(path), **data),
        reward=RewardConfig(function=reward),
    )


@pytest.fixture(scope="module")
def tokenizer(world, tmp_path_factory):
    """That of a model with a chat template."""
    folder = shutil.copytree(world / "model", tmp_path_factory.mktemp("model") / "model")
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer(folder)


@pytest.mark.parametrize("name", FILES)
def test_a_file_as_it_is_published(name, tmp_path, tokenizer, request):
    file, rows, reward, right, wrong = FILES[name]
    if reward == "code":
        request.getfixturevalue("isolation")
    path = write(tmp_path, file, rows)
    prompts = read_prompts(config_of(path, reward), "train", tokenizer, problem_with_answers)
    assert len(prompts) == len(rows) and {prompt.reward for prompt in prompts} <= {"", reward}
    first = prompts[0]
    assert "<｜" not in first.text and "<think>" not in first.text
    asked = rows[0].get("prompt")
    assert not isinstance(asked, list) or first.text == text_of(asked)
    score = load_function(reward)
    assert float(score(first.text, right, first.answer)) == 1.0
    assert float(score(first.text, wrong, first.answer)) == 0.0


def test_every_solution_of_several_is_right_and_a_list_is_none():
    score = load_function("math")
    several = json.dumps(["1", "\\frac{1}{2}"])
    assert [score("", rf"\boxed{{{given}}}", several) for given in ("1", r"\frac{1}{2}", "0.5", "3")] == [1, 1, 1, 0]
    assert score("", r"\boxed{[1, 2]}", "[1, 2]") == 1, "an interval is no list of answers"


MIXED = [
    FILES["Codeforces"][1][0],
    FILES["Codeforces"][1][0] | {"id": "1/B", "generated_checker": "…"},
    FILES["Codeforces"][1][0] | {"id": "1/C", "official_tests": []},
    FILES["Codeforces"][1][0] | {"id": "1/D", "interaction_format": "…"},
    FILES["Codeforces"][1][0] | {"id": "1/E", "interaction_format": "…"},
]


def test_rows_that_cannot_be_used_are_refused_or_left_out_and_counted(tmp_path, tokenizer):
    path = write(tmp_path, "codeforces.jsonl", MIXED)
    with pytest.raises(ConfigError, match=r"codeforces.jsonl:2: programs for this problem cannot be tested"):
        read_prompts(config_of(path, "code"), "train", tokenizer)
    left_out = LeftOut.none()
    skipping = config_of(path, "code", unusable_rows="skip")
    prompts = read_prompts(skipping, "train", tokenizer, problem_with_answers, left_out)
    assert [prompt.id for prompt in prompts] == [0] and left_out.counts.total() == 4
    assert left_out.lines()[0] == (
        f"2 × programs for this problem cannot be tested: it is interactive; leave the row out, such as {path}:4"
    )
    path.write_text(json.dumps(MIXED[1]) + "\n")
    with pytest.raises(ConfigError, match=r"data.train: no row can be used: \S+:1: programs for this problem"):
        read_prompts(skipping, "train", tokenizer)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "x", "solutions": []}, "field 'solutions' is empty"),
        ({"prompt": "x", "solutions": [1]}, "field 'solutions' must be texts"),
        ({"prompt": USER, "reward_model": {"style": "rule"}}, "field 'reward_model' has no 'ground_truth'"),
        ({"prompt": USER, "reward_model": {"ground_truth": ""}}, "field 'ground_truth' of 'reward_model' is no text"),
        ({"prompt": USER, "label": ""}, "field 'label' is empty"),
        ({"prompt": "x"}, "field 'answer' is missing, found 'prompt'"),
        (
            {"problem": "x", "solution": "It is 4."},
            "there is no field 'answer', and nothing is boxed in field 'solution'",
        ),
        ({"problem": "x", "tests": "[oops"}, "field 'tests' is not JSON"),
        ({"problem": "x", "tests": "[]"}, "field 'tests' is no list of tests"),
        ({"problem": "x", "tests": '[{"input": "1"}]'}, "a test of field 'tests' lacks its input or its output"),
        ({"problem": "x", "tests": '[{"input": 1, "output": "2"}]'}, "tests for standard input must be texts"),
        ({"problem": "x", "tests": '[{"input": "", "output": "", "type": "y"}]'}, "tests of type 'y', expected all"),
        ({"problem": "x", "starter_code": "def f", "tests": json.dumps(CALLS), "metadata": 7}, "func_name"),
    ],
)
def test_a_row_that_is_broken_is_named(row, problem, tmp_path, tokenizer):
    path = write(tmp_path, "a.jsonl", [row])
    with pytest.raises(ConfigError) as error:
        read_prompts(config_of(path), "train", tokenizer)
    assert str(error.value).startswith(f"{path}:1: ") and problem in str(error.value) and "\n" not in str(error.value)
