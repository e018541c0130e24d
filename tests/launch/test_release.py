"""What a release and the forge need: a dry run of the release, and workflows that call commands which there are."""

import re
import subprocess
import sys

import pytest
import yaml

from tests.conftest import ROOT
from tools import release

SETUP = 'setup(\n    name="x",\n    version="1.2.3",\n)\n'
CHANGELOG = """\
# Changelog

## [Unreleased]
- new

## [1.2.3] - 2027-01-02
### Added
- this

## [1.2.2] - 2026-01-02
- that
"""


def test_a_dry_run_builds_both_and_keeps_nothing(tmp_path):
    """In a clone: the archive is of what git has."""
    done = subprocess.run(
        [sys.executable, "tools/release.py", "--dry-run"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    version = release.version_of((ROOT / "setup.py").read_text())
    assert done.stdout.startswith(f"areal_megatron {version}\n\n")
    assert done.stdout.endswith(
        f"areal_megatron-{version}.tar.gz and areal_megatron-{version}-py3-none-any.whl: whole\n"
    )
    assert not (ROOT / "dist").exists()


def test_the_tag_says_what_has_changed():
    assert release.version_of(SETUP) == "1.2.3"
    assert release.tag_text(CHANGELOG, "1.2.3") == "areal_megatron 1.2.3\n\n### Added\n- this\n"
    assert release.tag_text(CHANGELOG, "1.2.3", unreleased=True) == "areal_megatron 1.2.3\n\n- new\n"


@pytest.mark.parametrize(
    ("changelog", "problem"),
    [
        (CHANGELOG.replace("1.2.3", "1.3.0"), "no section [1.2.3]"),
        (CHANGELOG.replace(" - 2027-01-02", ""), "section [1.2.3] has no date"),
        (CHANGELOG.replace("### Added\n- this\n", ""), "section [1.2.3] is empty"),
    ],
)
def test_a_version_without_its_changes_is_refused(changelog, problem):
    with pytest.raises(release.NotReleasable, match=re.escape(problem)):
        release.tag_text(changelog, "1.2.3")


def test_the_version_is_in_one_place():
    with pytest.raises(release.NotReleasable, match="expected one line"):
        release.version_of(SETUP.replace("1.2.3", "1.2"))
    version = release.version_of((ROOT / "setup.py").read_text())
    written = subprocess.run(
        ["git", "grep", "-lF", f'"{version}"', "--", "*.py", "*.toml", "*.cff", "*.yml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert written.stdout.splitlines() == ["setup.py"]


def test_workflows_call_commands_that_there_are():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = []
    for file in (ROOT / ".github" / "workflows").iterdir():
        jobs = yaml.safe_load(file.read_text())["jobs"]
        assert all(job["timeout-minutes"] <= 90 for job in jobs.values())
        lines += [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    made = {line.split()[1] for line in lines if line.startswith("make ")}
    assert made == {"lint", "unit", "docs"} <= targets
    programs = [line.split()[1] for line in lines if line.startswith("python tools/")]
    assert programs == ["tools/release.py"] and all((ROOT / program).exists() for program in programs)


def test_forms_and_hooks_can_be_read():
    for file in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("[bf]*.yml"):
        form = yaml.safe_load(file.read_text())
        assert (
            form["name"] and form["description"] and all(part["type"] and part["attributes"] for part in form["body"])
        )
    [hooks] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert {hook["entry"].split()[0] for hook in hooks["hooks"]} <= {".venv/bin/ruff", ".venv/bin/python"}
