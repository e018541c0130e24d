"""A further carrier is one class and one line of CARRIERS: here messages are files in a folder."""

import ast
import os
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from areal_megatron.config import ReshardConfig
from areal_megatron.reshard import carriers
from areal_megatron.reshard.carriers.base import Carrier, Deadline
from areal_megatron.reshard.staging import Staging


class Files(Carrier):
    """A message is a file that its receiver removes."""

    library = "files"
    most_under_way = 3
    folder: Path

    def join(self, keys, members, member):
        self._member = member

    def send(self, flat, peer, tag, deadline):
        path = self._file(self._member, peer, tag)
        path.with_suffix(".part").write_bytes(flat.view(torch.uint8).numpy())
        os.replace(path.with_suffix(".part"), path)

    def receive(self, flat, peer, tag, deadline):
        return self._file(peer, self._member, tag), flat

    def wait(self, work, deadline: Deadline):
        if work is None:  # it is written
            return
        path, flat = work
        while not path.exists():
            if deadline.passed:
                raise RuntimeError(f"there is no {path.name}")
            time.sleep(0.001)
        content = bytearray(path.read_bytes())
        path.unlink()
        flat.copy_(torch.frombuffer(content, dtype=flat.dtype))

    def _file(self, sender, receiver, tag):
        end = self.end
        return self.folder / f"{end.engine}-{end.generation}-{sender}-{receiver}-{tag}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(Files, "folder", tmp_path / "messages", raising=False)
    Files.folder.mkdir()
    monkeypatch.setitem(carriers.CARRIERS, "files", Files)
    return Files.folder


@pytest.mark.parametrize("staging", ["full", "streamed"])
@pytest.mark.parametrize(("update", "dtype"), [("full", torch.float32), ("delta", torch.bfloat16)])
def test_a_carrier_that_is_added_carries_versions_exactly(pools, folder, staging, update, dtype):
    link = pools(sizes={"tp": 2, "pp": 2}, tp=2, link="files", staging=staging, update=update, dtype=dtype)
    link.join(1)
    for version in (1, 2):
        received = link.update(version)
        link.assert_committed()
        assert received.bytes
        assert not list(folder.iterdir()), "all were received"
        link.train({name: tensor + (version == 1) for name, tensor in link.tensors.items()})
    assert all(isinstance(inlet.link.carrier, Files) for inlet in link.inlets)


def test_a_message_that_does_not_come_fails_the_update_at_its_deadline(pools, folder, monkeypatch):
    monkeypatch.setattr(Files, "send", lambda *message: None)
    link = pools(sizes={}, tp=1, link="files", timeout_s=1)
    link.join(1)
    _, error = link.deliver(1)
    assert "engine 0, rank 0, generation 1: update 1: link to engine 0, generation 1: receive bucket 0 " in error
    assert "there is no 0-1-0-1-0" in error


def test_two_carriers_that_do_not_meet_say_so(pools, folder):
    link = pools(sizes={}, tp=1, link="files")
    link._link = "device"
    link.join(1)
    _, error = link.deliver(1)
    assert " has TCP, but " in error or " has files, but " in error


def test_every_carrier_is_a_choice_of_reshard_link():
    (link,) = (field for field in fields(ReshardConfig) if field.name == "link")
    assert set(link.metadata["choices"]) - {"auto"} == set(carriers.CARRIERS)


SETTINGS = {"device", "host", "full", "streamed", "few-changes"}
KINDS = {"Dialer", "Listener"} | {
    kind.__name__ for kind in (*Carrier.__subclasses__(), *Staging.__subclasses__(), carriers.Host, carriers.Tls)
}


def test_carriers_and_stagings_are_told_apart_in_their_own_files_alone():
    """No condition elsewhere names one, nor what `reshard.link` and `reshard.staging` may be."""
    folder, found = Path(carriers.__file__).parents[1], []
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if path.name != "staging.py" and isinstance(node, ast.If | ast.IfExp | ast.While | ast.Match):
                within = ast.walk(node.subject if isinstance(node, ast.Match) else node.test)
                named = ((getattr(part, "id", ""), getattr(part, "value", "")) for part in within)
                found += [f"{path.name}:{node.lineno}" for name, value in named if name in KINDS or _is_setting(value)]
    assert not found


def _is_setting(value):
    return isinstance(value, str) and value in SETTINGS
