"""Builds a release and checks it: an archive of the sources, a wheel, and the text of the tag (RELEASING.md).

    python tools/release.py [--dry-run]

The archive is built from what git has, and the wheel from the archive. Writes dist/; with --dry-run into a folder that
it removes. Needs git, setuptools, wheel and packaging, and no network. Exit code 0: both are whole, 2: something is
wrong, in one line.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

from packaging.metadata import Metadata

ROOT = Path(__file__).resolve().parent.parent
_SECTION = re.compile(r"^## \[(?P<name>[^\]]+)\](?: - (?P<date>\d{4}-\d\d-\d\d))?$", re.MULTILINE)


class NotReleasable(ValueError):
    """Says what is to be corrected."""


def version_of(setup: str) -> str:
    """Returns the version that the text of setup.py has. Raises NotReleasable."""
    found = re.findall(r'^    version="(\d+\.\d+\.\d+)",$', setup, re.MULTILINE)
    if len(found) != 1:
        raise NotReleasable('setup.py: expected one line `version="X.Y.Z",`')
    return found[0]


def tag_text(changelog: str, version: str, unreleased: bool = False) -> str:
    """Returns the text of the tag: the changes of a version, or those that are not released. Raises NotReleasable."""
    name = "Unreleased" if unreleased else version
    sections = list(_SECTION.finditer(changelog))
    place = next((number for number, section in enumerate(sections) if section["name"] == name), None)
    if place is None:
        raise NotReleasable(f"CHANGELOG.md: no section [{name}]")
    if not unreleased and not sections[place]["date"]:
        raise NotReleasable(f"CHANGELOG.md: section [{name}] has no date: write `## [{name}] - YYYY-MM-DD`")
    end = sections[place + 1].start() if place + 1 < len(sections) else len(changelog)
    changes = changelog[sections[place].end() : end].strip()
    if not changes:
        raise NotReleasable(f"CHANGELOG.md: section [{name}] is empty")
    return f"areal_megatron {version}\n\n{changes}\n"


def build(folder: Path, tree: str) -> tuple[Path, Path]:
    """Builds the archive of a git tree and a wheel from it; returns their paths. Raises NotReleasable."""
    sources, out, build = (folder / name for name in ("sources", "out", "build"))
    for path in (sources, out, build):
        path.mkdir()
    archive = subprocess.run(["git", "archive", tree], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-x"], cwd=sources, check=True, input=archive)
    _quietly([sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", out], sources)
    [sdist] = out.glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        packed.extractall(build, filter="data")
    [unpacked] = build.iterdir()
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", out]
    _quietly([sys.executable, "-m", "pip", "wheel", unpacked, *options], folder)
    [wheel] = out.glob("*.whl")
    return sdist, wheel


def check(sdist: Path, wheel: Path, version: str) -> None:
    """Raises NotReleasable if a file is missing in one of them, or their metadata is not as indices want it."""
    tracked = _git("ls-files", "areal_megatron", "launch").splitlines()
    with zipfile.ZipFile(wheel) as packed:
        held = set(packed.namelist())
        [described] = [name for name in held if name.endswith(".dist-info/METADATA")]
        metadata = Metadata.from_email(packed.read(described), validate=True)
    with tarfile.open(sdist) as packed:
        archived = {str(PurePosixPath(*PurePosixPath(name).parts[1:])) for name in packed.getnames()}
    wanted = {re.sub(r"^launch/", "areal_megatron/launch/", path) for path in tracked if path.endswith(".py")}
    for where, names in (("wheel", held), ("archive", archived)):
        if missing := sorted(wanted - names):
            raise NotReleasable(f"the {where} lacks {len(missing)} modules, such as {missing[0]}")
    for name in ("README.md", "LICENSE", "setup.py", "pyproject.toml"):
        if name not in archived:
            raise NotReleasable(f"the archive lacks {name}")
    if str(metadata.version) != version:
        raise NotReleasable(f"the wheel is of version {metadata.version}, setup.py says {version}")
    if not metadata.description or not metadata.summary:
        raise NotReleasable("the wheel has no description")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, encoding="utf-8")
    return done.stdout


def _quietly(command: list[object], folder: Path) -> None:
    program = [*map(str, command)]
    done = subprocess.run(program, cwd=folder, capture_output=True, encoding="utf-8", timeout=600)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise NotReleasable(f"{' '.join(map(str, command[1:4]))} failed: {last}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="keep nothing, and take [Unreleased] of the changelog")
    dry = parser.parse_args().dry_run
    try:
        version = version_of((ROOT / "setup.py").read_text(encoding="utf-8"))
        text = tag_text((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version, dry)
        if not dry and _git("status", "--porcelain"):
            raise NotReleasable(
                "there are changes that are not committed, and a release is built from what is: commit them"
            )
        with tempfile.TemporaryDirectory() as folder:
            sdist, wheel = build(Path(folder), "HEAD")
            check(sdist, wheel, version)
            if not dry:
                (ROOT / "dist").mkdir(exist_ok=True)
                for path in (sdist, wheel):
                    shutil.move(path, ROOT / "dist" / path.name)
                (ROOT / "dist" / "TAG").write_text(text, encoding="utf-8")
    except NotReleasable as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print(f"{text}\n{sdist.name} and {wheel.name}: whole")
    return 0


if __name__ == "__main__":
    sys.exit(main())
