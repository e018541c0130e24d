"""README.md, docs/ and examples/: every file, folder and heading that they name exists."""

import re
from dataclasses import astuple, is_dataclass
from pathlib import Path

import pytest

from areal_megatron.command import COMMANDS, parser_of
from areal_megatron.config import Config, EnvironmentConfig, PPOConfig, config_fields
from areal_megatron.config.algorithms import PUBLISHED
from areal_megatron.config.other_names import OTHER_NAMES, find
from areal_megatron.data.formats import FORMATS
from areal_megatron.ppo import loss
from areal_megatron.ppo.algorithm import ALGORITHMS
from tools import reference
from tools.docs_site.conf import CONTENTS

ROOT = Path(__file__).parents[2]
DOCS = [
    *sorted(ROOT.glob("*.md")),
    *(doc for top in ("docs", "examples") for doc in sorted((ROOT / top).rglob("*.md"))),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
FOLDERS = ("areal_megatron", "configs", "docs", "launch", "slurm", "tests", "tools")
PATH = re.compile(rf"(?<![\w./-])(?:(?:{'|'.join(FOLDERS)})/[\w./-]*|[\w/-]+\.py\b)")
USERS = {
    "areal_megatron/models/mistral.py",
    "configs/mine.yaml",
    "guessing.py",
    "lengths.py",
    "my_agent.py",
    "my_rewards.py",
}
"""Files of the reader, beside those that a block begins with: `# mine.py`."""
PLACES = (ROOT, ROOT / "areal_megatron")
NAMES = {path.name for folder in (*FOLDERS, "examples") for path in (ROOT / folder).rglob("*.py")}
MODULE = re.compile(r"(?:\bpython -m |`)((?:areal_megatron|launch)(?:\.\w+)+)")


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.name)
def test_links_lead_somewhere(doc):
    for link in LINK.findall(doc.read_text()):
        if re.match(r"https?://", link):
            continue
        name, _, heading = link.partition("#")
        target = doc.parent / name if name else doc
        assert target.exists(), link
        assert not heading or heading in headings(target), link


def headings(doc: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a Markdown file."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", doc.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def words(page: Path) -> int:
    return len(page.read_text().split())


def test_the_docs_are_short_enough_to_be_kept_true():
    """The README, every page of docs/ and the tutorials, tables and commands included."""
    assert sum(map(words, [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])) <= 40_000


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_a_guide_is_read_in_one_sitting(page):
    """All pages but those that one looks something up in, and those of how it works."""
    name = page.relative_to(ROOT / "docs").with_suffix("").as_posix()
    assert name in (*CONTENTS["Reference"], *CONTENTS["How it works"]) or words(page) <= 1500


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").rglob("*.svg")), ids=lambda picture: picture.name)
def test_a_picture_is_drawn_for_light_and_dark(picture):
    assert picture.parent.name == "pictures" and "@media (prefers-color-scheme: dark)" in picture.read_text()


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.name)
def test_paths_exist(doc):
    """From the root; `room/file.py` also from areal_megatron/, and `file.py` alone from anywhere."""
    text = doc.read_text()
    own = set(re.findall(r"^```python\n# (\w+\.py)$", text, re.MULTILINE))
    named = {path for code in CODE.findall(text) for path in PATH.findall(code)} - USERS - own
    assert sorted(path for path in named - NAMES if not any((place / path).exists() for place in PLACES)) == []


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.name)
def test_modules_exist(doc):
    for module in MODULE.findall(doc.read_text()):
        path = ROOT / module.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").exists(), module


def test_the_command_for_gpu_tests_names_all_their_files():
    """Without names pytest imports every test, and fails on a machine that has only what these need."""
    mark = re.compile(r'^[^"\n]*pytest\.mark\.gpu', re.MULTILINE)  # and not in a text that a test writes
    files = (ROOT / "tests").rglob("test_*.py")
    marked = {str(path.relative_to(ROOT)) for path in files if mark.search(path.read_text())}
    (named,) = re.findall(r"python -m pytest -m gpu ([^`\n]*)", (ROOT / "docs" / "measurements.md").read_text())
    assert set(named.split()) == marked


@pytest.mark.parametrize("page", reference.PAGES)
def test_pages_made_from_the_code_are_what_it_says_now(page):
    made = reference.PAGES[page]()
    assert (ROOT / page).read_text() == made, "`python tools/reference.py` makes them again"
    unsaid = [line for line in made.splitlines() if line.startswith("| `") and line.endswith("|  |")]
    assert unsaid == [], "a key without a docstring, or an option without a help text"


def test_the_page_of_keys_has_every_key():
    page = (ROOT / "docs" / "keys.md").read_text()
    every = Config(environments=[EnvironmentConfig()])
    keys = [name for name, _, value in config_fields(every) if not is_dataclass(value) and not isinstance(value, list)]
    shown = {key: re.sub(r"^served\.\w+\.", "served.NAME.", re.sub(r"\.0\.", "[].", key)) for key in keys}
    assert [key for key, name in shown.items() if page.count(f"| `{name}` |") != 1] == []


def test_the_table_of_algorithms_says_what_the_code_takes():
    page = (ROOT / "docs" / "algorithms.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if "| w · " in line]
    rows += [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if "| −w · " in line]
    losses = {"w · clipped": loss.clipped, "−w · clip(u) ": loss.weighted, "−w · 4/τ": loss.gated}
    means = {"tokens": "tokens", "episodes": "episodes", "episodes, of": "longest"}
    named = {}
    for name, advantage, of_a_token, mean, clip, rewards, _ in rows:
        name = named[name] = name.split("`")[1]
        algorithm, published = ALGORITHMS[name], PUBLISHED[name]
        bounds = (PPOConfig.sapo_positive, PPOConfig.sapo_negative) if name == "sapo" else astuple(published)[:2]
        assert [float(number) for number in re.findall(r"\d[\d.e-]*", clip)][:2] == list(bounds), name
        assert rewards.replace("−", "-") == f"{published.wrong:g}, {published.right:g}"
        assert [losses[said] for said in losses if of_a_token.startswith(said)] == [algorithm.loss], name
        assert ("of a sequence" in of_a_token or "over a sequence" in of_a_token) == algorithm.whole, name
        assert means[mean.partition(" the sum")[0]] == algorithm.mean, name
        if like := re.fullmatch(r"as `(\w+)`", advantage):
            assert algorithm.advantages is ALGORITHMS[like[1]].advantages, name
    assert set(named.values()) == set(ALGORITHMS) == set(PUBLISHED)


def test_the_table_of_formats_has_the_fields_in_the_order_in_which_they_decide():
    table = (ROOT / "docs" / "data.md").read_text().partition("## Formats")[2].partition("\n\nA `prompt`")[0]
    first = [re.match(r"\| ([^|]*)\|", line)[1] for line in table.splitlines() if line.startswith("| `")]
    assert [name for cell in first for name in re.findall(r"`([^`]+)`", cell)] == list(FORMATS)


def test_the_page_of_commands_has_every_option_that_help_prints():
    """What argparse itself prints is the oracle."""
    page = (ROOT / "docs" / "commands.md").read_text()
    sections = dict(zip(*[iter(re.split(r"^## areal (\w+)$", page, flags=re.MULTILINE)[1:])] * 2, strict=True))
    assert list(sections) == list(COMMANDS)
    for name, command in COMMANDS.items():
        printed = set(re.findall(r"--[a-z][\w-]*", parser_of(command.module).format_usage()))
        assert printed - set(re.findall(r"--[a-z][\w-]*", sections[name])) == set(), name


def test_the_messages_of_troubleshooting_are_in_the_code():
    """Each as one piece of a text there, whatever lines and quotes divide it."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    sources = [path.read_text() for top in ("areal_megatron", "launch") for path in (ROOT / top).rglob("*.py")]
    code = re.sub(r'"\s*\n\s*f?"', "", "\n\n".join(sources))
    assert len(quoted) >= 6 and [message for message in quoted if message not in code] == []


def test_names_of_others_lead_to_the_keys_that_a_refusal_names():
    """The table of docs/coming_from.md, as far as areal_megatron/config/other_names.py has them."""
    checked = 0
    for row in re.findall(r"^\| (`.*) \|$", (ROOT / "docs" / "coming_from.md").read_text(), re.MULTILINE):
        ours, *theirs = row.split("|")
        for name in re.findall(r"[\w.-]*[\w]", " ".join(theirs)):
            found = find(name.lstrip("-"), OTHER_NAMES).partition("=")[0]
            if found and re.search("[_.-]", name):
                assert found in (*re.findall(r"`([^`]+)`", ours), "batch_size"), name
                checked += 1
    assert checked > 30
