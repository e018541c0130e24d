import pytest

from tests.support import debian


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(debian, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(debian.shutil, "which", lambda name, path: None)


def test_a_test_is_skipped_where_there_is_no_apt(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pytest.skip.Exception, match=r"no munged, and munge slurmctld .* No such file .* 'apt-get'"):
        debian.slurm()


def test_a_test_is_skipped_where_nothing_can_be_fetched(monkeypatch, tmp_path):
    apt = tmp_path / "apt-get"
    apt.write_text(
        "#!/bin/sh\necho 'W: no network' >&2\necho 'E: Unable to locate package openmpi-bin' >&2\nexit 100\n"
    )
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(pytest.skip.Exception, match=r"no mpirun, and .*: Unable to locate package openmpi-bin$"):
        debian.openmpi()
    assert {entry.name for entry in debian.CACHE.iterdir()} == {"apt", "lock"}
