"""Models and data sets by their names on the Hugging Face hub: the revision that a name means now, and its files.

A launcher, or a command that a person runs, fetches them into the hub's cache (HF_HOME, HF_HUB_CACHE) before anything
starts; the processes of a run find them there and never ask the hub. HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE mean what
they mean to huggingface_hub. No token is printed.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from areal_megatron.config import ConfigError
from areal_megatron.process.errors import first_line, printable
from areal_megatron.process.files import names_like

DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow")
"""Files that hold rows of a data set."""
_REPO = r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*"
_REVISION = r"(?:@(?P<revision>[^@:,\s]+))?"
_MODEL = re.compile(rf"(?P<name>{_REPO}){_REVISION}")
_DATA = re.compile(rf"(?P<name>{_REPO}){_REVISION}(?::(?:(?P<subset>[\w.-]+)/)?(?P<split>[\w.-]+))?", re.ASCII)
_ADDRESS = "hf://datasets/"
_OWN_REFS = r"refs/(?:convert/[^/@,\s]+|pr/\d+)"
"""Revisions with a slash that the hub itself makes, such as the rows of a data set as Parquet."""
_FILE = re.compile(rf"{_ADDRESS}(?P<name>{_REPO})(?:@(?P<revision>{_OWN_REFS}|[^/@,\s]+))?/(?P<file>.+)")
_SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<revision>[0-9a-f]{40})/?$")
_WHOLE = re.compile(r"[0-9a-f]{40}")
_WEIGHTS = re.compile(r"(?!consolidated)[^/]*\.safetensors")
_SHARD = re.compile(r"-\d+-of-\d+(-[0-9a-f]+)?$")
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""How files of a split are called, as the hub's own viewer and the datasets library understand them."""
_HELD = {"hf": "its model", "adapter": "its adapter"}
"""The folders of a run with what can be loaded."""
_CARD_CHARACTERS = 1 << 20
"""The part of a data set's README.md that is read."""
_PROGRESS_S = 10.0
_SLACK_BYTES = 1 << 20
"""What a file may be longer than the hub's list says."""


@dataclass(frozen=True)
class HubRepo:
    """A repository of the hub at a revision."""

    kind: str
    """model or dataset"""
    name: str
    """OWNER/NAME"""
    revision: str = ""
    """A branch, a tag or the 40 digits of a commit; empty: what its main branch is now."""

    def __str__(self) -> str:
        return self.name + (f"@{self.revision}" if self.revision else "")

    @property
    def is_pinned(self) -> bool:
        return bool(_WHOLE.fullmatch(self.revision))


@dataclass(frozen=True)
class HubData:
    """What a part of data.train or data.eval names on the hub: the split of a data set, or one file of it."""

    repo: HubRepo
    subset: str = ""
    """Empty: the only one, or the one that the data set has as its default."""
    split: str = ""
    """Empty: `train`, or the only one."""
    file: str = ""

    @classmethod
    def parse(cls, text: str) -> HubData | None:
        """Parses OWNER/NAME[@REVISION][:[SUBSET/]SPLIT] or hf://datasets/OWNER/NAME[@REVISION]/FILE.

        Returns None for what is none, exists on this disk, or ends as a file of data does. Raises ConfigError for an
        address without a file.
        """
        if text.startswith(_ADDRESS):
            if not (found := _FILE.fullmatch(text)):
                raise ConfigError(f"{text}: expected {_ADDRESS}OWNER/NAME[@REVISION]/FILE")
            return cls(HubRepo("dataset", found["name"], found["revision"] or ""), file=found["file"])
        found = _DATA.fullmatch(text)
        if not found or text.endswith(DATA_SUFFIXES) or any(map(os.path.exists, (text, found["name"]))):
            return None
        repo = HubRepo("dataset", found["name"], found["revision"] or "")
        return cls(repo, found["subset"] or "", found["split"] or "")

    def __str__(self) -> str:
        if self.file:
            return f"{_ADDRESS}{self.repo}/{self.file}"
        return str(self.repo) + f":{self.subset}{'/' * bool(self.subset)}{self.split}" * bool(self.split)


def model_folder(
    text: str, key: str, weights: bool = True, before: str = "", check: Callable[[str], None] | None = None
) -> str:
    """Returns the folder of a model: `text` itself if it is one, else the cached folder of the hub's model
    OWNER/NAME[@REVISION].

    Files missing from the cache are downloaded, with a line on stderr now and then; without `weights` only the
    description and the tokenizer. `before`: the folder used so far by a run to be resumed; it goes on with that
    revision. Text that names neither a folder nor a model of the hub is returned as it is. `check` sees the folder with
    the description and the tokenizer of a model of the hub before its weights are fetched. Raises ConfigError that
    begins with `key`.
    """
    if os.path.exists(text):  # not where this user may not look
        _check_no_run(Path(text), key)
        return text
    if cached := _SNAPSHOT.search(text):  # of a run whose cache has been cleaned since
        repo = HubRepo("model", f"{cached['owner']}/{cached['name']}", cached["revision"])
    elif found := _MODEL.fullmatch(text):
        repo = HubRepo("model", found["name"], found["revision"] or "")
    else:
        return text
    earlier = _SNAPSHOT.search(before)
    known = {f"{earlier['owner']}/{earlier['name']}": earlier["revision"]} if earlier else {}
    repo = pin(repo, key, known)
    description = ["*.json", "*.jinja", "*.txt", "*.model"]
    without = ["*/*.json", "*/*.txt", "*/*.model", "*/*.safetensors", "consolidated*"]  # not */*.jinja, more templates
    if weights and check is not None:
        check(_fetch(repo, description, key, without))
    folder = _fetch(repo, [*description, *(["*.safetensors"] if weights else [])], key, without)
    if weights and not any(Path(folder).glob("*.safetensors")):
        raise ConfigError(f"{key}: {repo.name} has no *.safetensors file on the hub; name a model that has some")
    print(f"{key}: {repo.name} at {repo.revision}: {folder}", file=sys.stderr, flush=True)
    return folder


def _check_no_run(folder: Path, key: str) -> None:
    if os.path.exists(folder / "config.json") or not os.path.exists(folder / "config.yaml"):
        return
    held = [f"{what} in {folder / name}" for name, what in _HELD.items() if os.path.exists(folder / name)]
    cure = " and ".join(held) or "no model yet: let it end, or areal convert to-hf makes one of a checkpoint"
    raise ConfigError(f"{key}: {folder} is the folder of a run, which has {cure}")


def has_weights(folder: str) -> bool:
    """Whether no weights of a model's folder are to be fetched: it is a user's own, or in the hub's cache with all of
    the files that the hub lists. Asks nobody."""
    if not (cached := _SNAPSHOT.search(folder)):
        return os.path.exists(folder)
    repo = HubRepo("model", f"{cached['owner']}/{cached['name']}", cached["revision"])
    names = [name for name in _names(repo, Path(folder)) if _WEIGHTS.fullmatch(name)]
    return bool(names) and all((Path(folder) / name).exists() for name in names)


def pin(repo: HubRepo, key: str, before: Mapping[str, str]) -> HubRepo:
    """Returns the repository at the commit that its revision means now.

    `before`: name → commit that a resumed run has read so far, the default without a revision. Raises ConfigError if
    there is none, and if a branch or tag has moved since.
    """
    from areal_megatron.hub import hub_client

    if repo.is_pinned:
        return repo
    if not repo.revision and repo.name in before:
        return replace(repo, revision=before[repo.name])
    if repo.revision and not hub_client.is_revision(repo.revision):
        raise ConfigError(f"{key}: {printable(repo.revision, 60)} can be no branch, tag or commit of {repo.name}")
    with _explained(repo, key):
        found = replace(repo, revision=_resolved(repo))
    if before.get(repo.name, found.revision) != found.revision:
        raise ConfigError(
            f"{key}: {repo} is {found.revision} now, and the run began with {before[repo.name]}: write "
            f"{repo.name}@{before[repo.name]} to go on with that"
        )
    return found


def _resolved(repo: HubRepo) -> str:
    """Returns the commit that the revision means now; if the hub is silent, what it meant when the cache asked last."""
    from huggingface_hub import HfApi, errors  # half a second

    from areal_megatron.hub import hub_client

    commit = ""
    with hub_client.asking(str(repo)):
        for left in reversed(range(hub_client.TRIES)):
            try:
                revision = repo.revision or None
                commit = HfApi().resolve_revision(repo.name, repo_type=repo.kind, revision=revision).resolved
                break
            except errors.RevisionResolutionError as e:
                if not left or not isinstance(e.__cause__, TimeoutError | hub_client.httpx2.TimeoutException):
                    raise
    if not _WHOLE.fullmatch(commit):
        raise ConfigError(f"{_hub()} calls a commit {printable(commit, 60)}")
    return commit


def fetch_data(data: HubData, key: str, before: Mapping[str, str]) -> HubData:
    """Brings the files into the cache and returns the same at the commit that its revision means now. Raises
    ConfigError that begins with `key`; `before` as in `pin`."""
    pinned = replace(data, repo=pin(data.repo, key, before))
    if data.file:
        folder = _fetch(pinned.repo, [_literal(data.file)], key)
        if not (Path(folder) / data.file).is_file():
            raise ConfigError(f"{key}: {data.repo.name} has no file {data.file}")
        return pinned
    folder = _fetch(pinned.repo, ["README.md"], key)
    files = _chosen(pinned, folder, key)
    _fetch(pinned.repo, [_literal(file) for file in files], key)
    return pinned


def data_files(data: HubData) -> list[Path]:
    """Returns the files of a data set in the cache, without asking the hub. Raises ConfigError if one is not there."""
    from huggingface_hub import HfApi

    repo, key = data.repo, str(data)
    if not data.repo.is_pinned:
        with _explained(repo, key):
            resolved = HfApi().resolve_revision(
                repo.name, repo_type=repo.kind, revision=repo.revision or None, local_files_only=True
            )
        repo = replace(repo, revision=resolved.resolved)
    files = (
        [data.file]
        if data.file
        else _chosen(replace(data, repo=repo), _fetch(repo, ["README.md"], key, local=True), key)
    )
    folder = Path(_fetch(repo, [_literal(file) for file in files], key, local=True))
    if missing := [file for file in files if not (folder / file).is_file()]:
        raise ConfigError(_not_cached(repo, key, f"without {missing[0]}"))
    return [folder / file for file in files]


def _chosen(data: HubData, folder: str, key: str) -> list[str]:
    try:
        return split_files(_names(data.repo, Path(folder)), _card(Path(folder)), data)
    except ConfigError as e:
        raise ConfigError(f"{key}: {printable(str(e), 1000)}") from None


def _names(repo: HubRepo, folder: Path) -> list[str]:
    """Returns the names of all files of a pinned repository; without a list of them, those in the cache."""
    listed = _listed(repo)
    return (
        list(listed) if listed is not None else [str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()]
    )


def split_files(files: Sequence[str], card: dict[str, Any], data: HubData) -> list[str]:
    """Returns the files of a split, of all `files` of a data set, whose README.md begins with `card`.

    The card's `configs` decide; without them the names of files and folders, and files whose names say nothing are of
    the split train. Raises ConfigError that says which subsets and splits there are.
    """
    files = sorted(file for file in files if file.endswith(DATA_SUFFIXES))
    subsets = _subsets(card)
    if subsets:
        splits = _subset(subsets, data)
        named = {split: _matching(files, patterns) for split, patterns in splits.items()}
    else:
        below = [file for file in files if not data.subset or file.startswith(f"{data.subset}/")]
        named = _by_name(below)
    named = {split: found for split, found in named.items() if found}
    if not named:
        place = f" in {data.subset}/" if data.subset else ""
        raise ConfigError(
            f"{data.repo.name} has no {', '.join(DATA_SUFFIXES)} file{place}; convert it, and name the file"
        )
    split = data.split or ("train" if "train" in named else next(iter(named)) if len(named) == 1 else "")
    if split not in named:
        asked = f"no split {data.split}" if data.split else "several splits"
        raise ConfigError(
            f"{data.repo.name} has {asked}; it has {', '.join(named)}: write {_shown(data, next(iter(named)))}"
        )
    sets = sorted({_SHARD.sub("", file.rpartition(".")[0]) for file in named[split]})
    if len(sets) > 1 and not subsets and not _keyword(named[split][0]):
        raise ConfigError(
            f"{data.repo.name} holds several sets, {', '.join(sets[:5])}{'…' * (len(sets) > 5)}: name a file, as "
            f"{_ADDRESS}{data.repo.name}/{named[split][0]}"
        )
    return named[split]


def _shown(data: HubData, split: str) -> str:
    return str(replace(data, repo=replace(data.repo, revision=""), split=split))


def _subsets(card: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the entries of a card's `configs` by their names."""
    listed = card.get("configs")
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    return {str(entry.get("config_name", "default")): entry for entry in entries if entry.get("data_files")}


def _subset(subsets: dict[str, dict[str, Any]], data: HubData) -> dict[str, list[str]]:
    """Returns split → patterns of its files."""
    default = [name for name, entry in subsets.items() if entry.get("default") is True or name == "default"]
    name = data.subset or (next(iter(subsets)) if len(subsets) == 1 else default[0] if default else "")
    if name not in subsets:
        asked = f"no subset {data.subset}" if data.subset else "several subsets"
        example = _shown(replace(data, subset=next(iter(subsets))), data.split or "train")
        raise ConfigError(f"{data.repo.name} has {asked}; it has {', '.join(subsets)}: write {example}")
    entry = subsets[name]
    listed, prefix = entry["data_files"], str(entry.get("data_dir") or "")
    if not (isinstance(listed, list) and all(isinstance(part, dict) for part in listed)):
        listed = [{"split": "train", "path": listed}]
    splits: dict[str, list[str]] = {}
    for part in listed:
        paths = part.get("path", [])
        paths = paths if isinstance(paths, list) else [paths]
        splits[str(part.get("split", "train"))] = [f"{prefix}{'/' * bool(prefix)}{path}" for path in paths]
    return splits


def _matching(files: Sequence[str], patterns: Sequence[str]) -> list[str]:
    return [file for file in files if any(matches(file, pattern) for pattern in patterns)]


def matches(file: str, pattern: str) -> bool:
    """Whether the pattern is one of the file: ** is any folders, * anything within one, ? a character. It takes time in
    proportion to both lengths, whatever a data set's card says; a regular expression could take years."""
    places, end = {0}, len(file)  # places: where in the name the pattern so far may end
    for piece in re.findall(r"\*\*/|\*\*|\*|\?|[^*?]+", pattern):
        if not places:
            return False
        if piece == "**":
            places = set(range(min(places), end + 1))
        elif piece == "**/":
            places |= {place for place in range(min(places) + 1, end + 1) if file[place - 1] == "/"}
        elif piece == "*":
            within: set[int] = set()
            for place in range(end + 1):
                if place in places or (place - 1 in within and file[place - 1] != "/"):
                    within.add(place)
            places = within
        elif piece == "?":
            places = {place + 1 for place in places if file[place : place + 1] not in ("", "/")}
        else:
            places = {place + len(piece) for place in places if file.startswith(piece, place)}
    return end in places


def _by_name(files: Sequence[str]) -> dict[str, list[str]]:
    """Returns split → files, by file and folder names; files without a split in their names are used only if no file
    has one."""
    named: dict[str, list[str]] = {}
    for file in files:
        named.setdefault(_keyword(file), []).append(file)
    silent = named.pop("", [])
    return named or {"train": silent}


def _keyword(file: str) -> str:
    words = set(re.split(r"[^a-z]+", file.lower()))
    return next((split for split, keywords in _SPLITS.items() if words & set(keywords)), "")


def _card(folder: Path) -> dict[str, Any]:
    """Returns the YAML that a data set's README.md begins with, {} without any."""
    file = folder / "README.md"
    if not file.is_file():
        return {}
    with file.open(encoding="utf-8", errors="replace") as opened:
        first, *lines = opened.read(_CARD_CHARACTERS).split("\n")
    end = next((number for number, line in enumerate(lines) if line.startswith("---")), 0)
    try:
        tree = yaml.compose("\n".join(lines[:end]), yaml.SafeLoader) if first.rstrip() == "---" else None
        card = yaml.constructor.SafeConstructor().construct_document(tree) if tree and _is_short(tree) else {}
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return card if isinstance(card, dict) else {}


def _is_short(tree: yaml.Node) -> bool:
    """Whether a YAML text stands for no more than one without aliases could: a few aliases of aliases may be more than
    any memory holds."""
    left, length = [tree], 0
    while left:
        node = left.pop()
        length += 1
        if isinstance(node, yaml.ScalarNode):
            length += len(node.value)
        else:
            left += chain(*node.value) if isinstance(node, yaml.MappingNode) else node.value
        if length + len(left) > 2 * _CARD_CHARACTERS:
            return False
    return True


def _literal(file: str) -> str:
    """Returns the pattern of huggingface_hub that matches this file alone."""
    return re.sub(r"([*?[])", r"[\1]", file)


def _listed(repo: HubRepo) -> dict[str, int] | None:
    """Returns name → bytes of all files of a pinned repository, if the cache has a list of them. Raises ConfigError if
    a name in it leads elsewhere."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    from areal_megatron.hub import hub_client

    try:
        files = get_cached_repo_tree(repo.name, repo_type=repo.kind, revision=repo.revision)
    except CachedRepoTreeNotFoundError:
        return None
    for file in files:
        if not (hub_client.is_name(file.path) and hub_client.is_id(file.blob_id)):
            raise ConfigError(f"{_hub()} lists a file that would lie outside of the cache: {printable(file.path, 60)}")
    return {file.path: file.size for file in files}


def _note_listing(repo: HubRepo) -> None:
    """Has the hub's list of the files of a pinned repository noted in the cache, if the hub can be reached."""
    from huggingface_hub import snapshot_download

    from areal_megatron.hub import hub_client

    with hub_client.asking(str(repo)):
        snapshot_download(repo.name, repo_type=repo.kind, revision=repo.revision, allow_patterns=[])


def _fetch(repo: HubRepo, patterns: Sequence[str], key: str, ignore: Sequence[str] = (), local: bool = False) -> str:
    """Returns the folder of a pinned repository in the cache, with all its files that match. Raises ConfigError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.utils import filter_repo_objects

    from areal_megatron.hub import hub_client

    def get(patterns: Sequence[str], **options: Any) -> str:
        return snapshot_download(
            repo.name,
            repo_type=repo.kind,
            revision=repo.revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(ignore),
            **options,
        )

    with _explained(repo, key):
        files = _listed(repo)
        if files is None and not local:
            _note_listing(repo)
            files = _listed(repo)
        if files is None:  # no network; the cache may be of an older huggingface_hub, which noted no list
            return get(patterns, local_files_only=True)
        folder = _folder(repo)
        wanted = filter_repo_objects(files, allow_patterns=list(patterns), ignore_patterns=list(ignore))
        wanted = list(wanted)
        missing = [file for file in wanted if not (folder / file).exists()]
        if missing and local:
            raise ConfigError(_not_cached(repo, key, f"without {missing[0]}"))
        if missing:
            sizes = [files[file] for file in missing]
            with _progress(repo, sum(sizes), len(sizes)), hub_client.asking(str(repo), max(sizes) + _SLACK_BYTES):
                get(patterns)
        if astray := [file for file in wanted if not _is_cached(folder / file)]:
            raise ConfigError(f"{key}: {folder / astray[0]} leads out of the cache {HF_HUB_CACHE}: remove it")
        for file in wanted:
            if (size := (folder / file).stat().st_size) != files[file]:
                raise ConfigError(
                    f"{key}: {os.path.realpath(folder / file)} has {size} bytes, of {file} the hub lists "
                    f"{files[file]}: remove it, and it is fetched again"
                )
        return str(folder)


def _is_cached(file: Path) -> bool:
    """Whether the content of a file, which is a link of the cache, lies in the cache, or is not there."""
    from huggingface_hub.constants import HF_HUB_CACHE

    cache = os.path.realpath(HF_HUB_CACHE)
    return os.path.commonpath([cache, os.path.realpath(file)]) == cache


def _folder(repo: HubRepo) -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE) / f"{repo.kind}s--{repo.name.replace('/', '--')}" / "snapshots" / repo.revision


@contextmanager
def _progress(repo: HubRepo, size: int, files: int) -> Iterator[None]:
    """Tells of a download, in a line every ten seconds."""
    from huggingface_hub.constants import HF_HUB_CACHE

    if not files or size < 1_000_000:
        yield
        return
    blobs = _folder(repo).parents[1] / "blobs"
    print(f"fetching {repo}: {files} files, {size / 1e9:.2f} GB, into {HF_HUB_CACHE}", file=sys.stderr, flush=True)
    before, done = _bytes(blobs), threading.Event()

    def tell() -> None:
        while not done.wait(_PROGRESS_S):
            here = min(max(_bytes(blobs) - before, 0), size)
            print(f"fetching {repo}: {here / 1e9:.2f} of {size / 1e9:.2f} GB", file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    begun = time.monotonic()
    teller.start()
    try:
        yield
    finally:
        done.set()
    print(f"fetched {repo} in {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)


def _bytes(folder: Path) -> int:
    total = 0
    for file in folder.glob("*"):
        try:
            total += file.stat().st_size
        except OSError:  # renamed when it was complete
            continue
    return total


@contextmanager
def _explained(repo: HubRepo, key: str) -> Iterator[None]:
    """Turns the errors of huggingface_hub into ConfigError, of one line that names `key`."""
    from huggingface_hub import errors

    try:
        yield
    except ConfigError as e:
        raise e if str(e).startswith(f"{key}: ") else ConfigError(f"{key}: {e}") from None
    except errors.GatedRepoError:
        raise ConfigError(
            f"{key}: the {repo.kind} {repo.name} is gated: accept its terms on its page, and give the token of that "
            "account (HF_TOKEN, or 'hf auth login')"
        ) from None
    except errors.RepositoryNotFoundError:
        folder = "folder" if repo.kind == "model" else "file or folder"
        raise ConfigError(
            f"{key}: there is no {folder} {repo.name}, and {_hub()} shows no {repo.kind} of this name: fix the name, "
            "or, if it is private, give a token that may read it (HF_TOKEN, or 'hf auth login')"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(
            f"{key}: the {repo.kind} {repo.name} has no revision {repo.revision or 'main'} on {_hub()}: name one that "
            f"it has, {repo.name}@REVISION"
        ) from None
    except (errors.RevisionResolutionError, errors.LocalEntryNotFoundError) as e:
        raise ConfigError(_not_cached(repo, key, _reason(e))) from None
    except errors.HfHubHTTPError as e:
        status = e.response.status_code
        what = (
            "a token that may read it is needed (HF_TOKEN, or 'hf auth login')" if status in (401, 403) else "try again"
        )
        raise ConfigError(f"{key}: {_hub()} answers with status {status} for the {repo.kind} {repo}: {what}") from None
    except Exception as e:  # of the network, the disk and the library
        raise ConfigError(f"{key}: the {repo.kind} {repo} cannot be fetched from {_hub()}: {_said(e)}") from None


def _not_cached(repo: HubRepo, key: str, reason: str) -> str:
    from huggingface_hub.constants import HF_HUB_CACHE

    option = " --repo-type dataset" if repo.kind == "dataset" else ""
    like = names_like(Path(repo.name))
    near = f", did you mean {like[0]}?" if like else ""
    mistyped = f"no folder {repo.name} is here{near or ';'} " if repo.kind == "model" else ""
    return (
        f"{key}: {mistyped}the {repo.kind} {repo} is not whole in the cache {HF_HUB_CACHE}, {reason}: fetch it where "
        f"there is a network ('hf download {repo.name}{option}'), into a cache that all nodes see (HF_HOME), or name a "
        "folder"
    )


def _reason(error: BaseException) -> str:
    from huggingface_hub.constants import is_offline_mode

    if is_offline_mode():
        return "and HF_HUB_OFFLINE forbids to ask the hub"
    cause = error.__cause__
    return f"and {_hub()} cannot be reached ({_said(cause)})" if cause else "where processes of a run look"


def _said(error: BaseException) -> str:
    from huggingface_hub import get_token

    text = f"{type(error).__name__}: {first_line(error)}"
    token: Callable[[str], str] = (lambda t: t.replace(secret, "…")) if (secret := get_token()) else str
    return printable(token(text))


def _hub() -> str:
    from huggingface_hub.constants import ENDPOINT

    return urlsplit(ENDPOINT).hostname or "the hub"
