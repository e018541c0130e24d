"""The tests marked gpu, a part for each file: what one leaves of the GPU fails no other, and a limit keeps the others.

Files are named, since collecting the whole tree fails where packages are missing.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from tools.evidence.parts import Finding, Options, Part, Skip

ROOT = Path(__file__).resolve().parents[2]


def files() -> dict[str, Path]:
    """Returns the test files that have tests marked gpu, by name."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    marked = (path for path in found if "pytest.mark.gpu" in path.read_text(encoding="utf-8"))
    return {path.relative_to(ROOT / "tests").as_posix(): path for path in marked}


def tests(options: Options, file: Path) -> Iterator[Finding]:
    if not options.on_cuda:
        raise Skip("asked for a CPU")
    report = options.folder / f"{file.parent.name}-{file.stem}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
    code = subprocess.run([*command, str(file)], cwd=ROOT).returncode
    if not report.exists():
        raise RuntimeError(f"pytest ended with exit code {code}")
    yield from results(report)


def results(report: Path) -> Iterator[Finding]:
    """Reads pytest's report on a file. Raises Skip if every test was skipped, RuntimeError if one has failed."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    wrong = [case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case.find("skipped").get("message", "") for case in cases if case.find("skipped") is not None]
    if skipped and len(skipped) == len(cases):
        raise Skip(f"{len(cases)} tests: {skipped[0]}")
    passed = len(cases) - len(wrong) - len(skipped)
    name = f"tests of {report.stem} that pass"
    yield Finding(name, f"{passed} of {len(cases)}, {len(skipped)} skipped", more=wrong)
    if wrong:
        raise RuntimeError(f"failed: {', '.join(wrong)}")


PARTS: dict[str, Part] = {name: partial(tests, file=file) for name, file in files().items()}
