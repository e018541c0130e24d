"""What a process without the run's keys can do to trainer ranks that it has joined."""

from areal_megatron.run.folder import RunFolder


def test_objects_of_a_stranger_are_not_unpickled(tmp_path, on_ranks):
    RunFolder(tmp_path / "run").create()
    on_ranks("stranger_checks:check_objects", 2)
