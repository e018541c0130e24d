"""Files and folders that appear whole or not at all."""

import os

import pytest

from areal_megatron.process.files import set_aside, whole_folder, write_atomically


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize(("old", "new"), [("old", "new"), (b"old", b"\x00new")])
def test_a_file_keeps_its_old_content_if_writing_fails(tmp_path, monkeypatch, old, new, sync):
    path = tmp_path / "file"
    read = path.read_text if isinstance(old, str) else path.read_bytes
    write_atomically(path, old, sync=sync)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda source, target: (_ for _ in ()).throw(OSError("no space")))
        with pytest.raises(OSError, match="no space"):
            write_atomically(path, new, sync=sync)
    assert read() == old
    write_atomically(path, new, sync=sync)
    assert read() == new


@pytest.mark.parametrize("sync", [False, True])
def test_a_folder_takes_the_place_of_an_older_one_or_leaves_it(tmp_path, sync):
    path = tmp_path / "folder"
    for content in ("first", "second"):
        with whole_folder(path, sync=sync) as folder:
            (folder / "inner").mkdir()
            (folder / "inner" / "file").write_text(content)
            assert content == "first" or (path / "inner" / "file").read_text() == "first"
        assert (path / "inner" / "file").read_text() == content
    with pytest.raises(KeyboardInterrupt), whole_folder(path, sync=sync):
        raise KeyboardInterrupt
    assert (path / "inner" / "file").read_text() == "second"
    assert [entry.name for entry in path.parent.iterdir()] == ["folder"]


def test_a_folder_is_filled_by_one_process_at_a_time(tmp_path):
    path, left_behind = tmp_path / "folder", tmp_path / ".folder.partial"
    left_behind.mkdir()
    (left_behind / "of one that was killed").touch()
    with whole_folder(path) as folder:
        (folder / "file").write_text("first")
        with pytest.raises(OSError, match="another process is writing it"), whole_folder(path) as other:
            (other / "file").write_text("second")
    assert [file.name for file in path.iterdir()] == ["file"]
    assert (path / "file").read_text() == "first"
    with whole_folder(path) as folder:
        (folder / "file").write_text("second")
    assert (path / "file").read_text() == "second"


def test_a_folder_that_is_to_hold_another_is_not_made(tmp_path):
    with pytest.raises(FileNotFoundError), whole_folder(tmp_path / "away" / "folder"):
        pass
    assert not (tmp_path / "away").exists()


def test_what_is_set_aside_replaces_what_was_set_aside_before(tmp_path):
    for content in ("one", "two"):
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / content).touch()
        assert set_aside(tmp_path / "folder", "removed") == tmp_path / ".folder.removed"
    assert [path.name for path in (tmp_path / ".folder.removed").iterdir()] == ["two"]
    set_aside(tmp_path / "folder", "removed")
    assert (tmp_path / ".folder.removed" / "two").exists(), "there was nothing to take its place"
