"""docs/recipes.md: every line that trains has a config that loads with its keys; and what its search program does.
Options of all lines are checked in test_shell_lines.py."""

import asyncio
import json
import math
import re
import shlex
from types import SimpleNamespace

import pytest

from areal_megatron.config import config_file
from examples.search import search
from tests.conftest import ROOT

PAGE = (ROOT / "docs/recipes.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
SMALL = ("configs/tiny_sft.yaml", "configs/tiny_cpu.yaml", "configs/smollm2_cpu.yaml")


def lines(name):
    """The words of the commands of a recipe."""
    block = "".join(re.findall(r"^```\n(.*?)^```", SECTIONS[name], re.MULTILINE | re.DOTALL)).replace("\\\n", " ")
    return [shlex.split(line) for line in block.splitlines() if line.startswith(("areal train", "sbatch", "make "))]


def test_there_are_eight_and_the_table_has_each():
    assert len(SECTIONS) == 8
    assert [name.lower() for name in SECTIONS] == [
        name.lower() for name in re.findall(r"^\| \[(.+?)\]\(#", PAGE, re.MULTILINE)
    ]


@pytest.mark.parametrize("name", SECTIONS)
def test_a_recipe_has_a_small_line_and_one_for_real_sizes_that_load(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    small, large = 0, 0
    for program, *rest in lines(name):
        if program == "areal":
            _, config, *keys = rest
            assert config_file.load(config, keys)
            small, large = (small + 1, large) if config in SMALL else (small, large + 1)
        elif program == "sbatch":
            assert (ROOT / rest[0]).is_file()
            large += 1
        else:
            small += 1
    assert small and large


def test_search_has_the_scores_of_the_published_formula():
    passages = ["The tower of Ashby measures 12 metres.", "The lake of Ashby.", "A tower, a tower and a lake."]
    index, split = search.Index(passages), [search.words(passage) for passage in passages]
    mean = sum(map(len, split)) / 3

    def score(query, passage):
        total = 0.0
        for word in set(query.split()):
            having, count = sum(word in other for other in split), passage.count(word)
            rare = math.log(1 + (3 - having + 0.5) / (having + 0.5))
            total += rare * count * 2.2 / (count + 1.2 * (0.25 + 0.75 * len(passage) / mean))
        return total

    for query in ("tower ashby", "lake", "a tower", "metres"):
        expected = [(passage, score(query, words)) for passage, words in zip(passages, split, strict=True)]
        best = sorted((each for each in expected if each[1]), key=lambda each: -each[1])
        assert index.search(query) == [passage for passage, _ in best], query
    assert index.search("nothing here") == [] and len(index.search("the a of", most=1)) == 1


def test_a_search_is_answered_and_its_questions_can_be(monkeypatch, tmp_path):
    monkeypatch.setattr(search, "FOLDER", tmp_path)
    search.index.cache_clear()
    search.main()
    rows = [json.loads(line) for name in ("train", "heldout") for line in (tmp_path / f"{name}.jsonl").open()]
    assert len(rows) == 80 and len({row["prompt"] for row in rows}) == 80
    for row in rows:
        thing, place = re.search(r"the (\w+) of (\w+) ", row["prompt"]).groups()
        assert f" {row['answer']} metres" in search.index().search(f"{thing} {place}")[0]
    said, left = [], ["<search>tower Ashby</search>", "<search>xyz</search>", "\\boxed{1}", "never"]

    async def sample():
        return left.pop(0)

    asyncio.run(search.run(SimpleNamespace(turns=4, sample=sample, say=said.append)))
    assert "The tower of Ashby measures" in said[0] and said[1] == "Nothing was found." and left == ["never"]
    search.index.cache_clear()
