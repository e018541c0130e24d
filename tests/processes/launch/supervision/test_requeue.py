"""Whether a job is queued again, and how, also while slurmctld is too busy to answer; Slurm's client programs are
scripts here."""

import pytest

from areal_megatron.launch import slurm
from areal_megatron.launch.slurm import Outcome, queue_again
from areal_megatron.launch.supervision import node
from areal_megatron.run.folder import RunFolder
from tests.e2e.test_run import small

BUSY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Writes a script for each program; in it `$ASKED` is how often it has been called before."""

    def write(**bodies: str):
        for name, body in bodies.items():
            path = tmp_path / name
            count = f"ASKED=$(cat {path}.asked 2>/dev/null || echo 0); echo $((ASKED + 1)) > {path}.asked\n"
            path.write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/calls\n{count}{body}\n')
            path.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(slurm, "_KILLED_S", 0)
    monkeypatch.setattr(slurm.signal, "signal", lambda *_: None)
    write.requeued = lambda: (tmp_path / "calls").read_text().splitlines().count("scontrol requeue 7")
    return write


def test_a_busy_controller_is_asked_again(programs, capsys):
    programs(scontrol=f'[ $ASKED -ge 2 ] || {{ echo "{BUSY}" >&2; exit 1; }}')
    slurm.requeue(longest_s=30, again_s=0.01)
    assert programs.requeued() == 3
    said = capsys.readouterr()
    assert said.out == "queueing the job again\n" and not said.err


def test_one_that_refuses_for_good_is_believed(programs, capsys):
    programs(scontrol='echo "Requested operation is presently disabled" >&2; exit 1')
    assert slurm.requeue(longest_s=0.1, again_s=0.01) == slurm.Outcome.STOPPED
    said = capsys.readouterr()
    assert "cannot be queued again: Requested operation is presently disabled; submit it once more" in said.err
    assert said.out == "queueing the job again\n" and programs.requeued() > 1


def test_supervisors_that_are_left_alone_stay_until_the_job_is_requeued(programs):
    """The batch host is taken out at the second look; the first two requests are refused."""
    programs(
        squeue='case $ASKED in 0) echo "RUNNING node0 node[0-1]";; 1|2|3) echo "RUNNING node0 node1";; '
        '*) echo "PENDING  ";; esac',
        scontrol='if [ "$1" = show ]; then echo "$3" | sed "s/node.0-1./node0\\nnode1/"; exit; fi\n'
        f'[ $ASKED -ge 4 ] || {{ echo "{BUSY}" >&2; exit 1; }}',
    )
    node.requeue_stranded_job(longest_s=30, look_s=0.01)
    assert programs.requeued() == 3


def test_supervisors_of_a_job_that_is_over_leave(programs):
    programs(squeue='echo "COMPLETING node0 node[0-1]"', scontrol="exit 1")
    node.requeue_stranded_job(longest_s=30, look_s=0.01)
    assert programs.requeued() == 0


PREEMPTED = 'echo "JobId=7 StartTime=2026-11-23T10:00:00 PreemptTime=2026-11-23T10:05:00"'
NOT_PREEMPTED = 'echo "JobId=7 StartTime=2026-11-23T10:06:00 PreemptTime={}"'


def test_a_job_that_makes_room_before_its_first_batch_is_queued_again_every_time(programs, tmp_path):
    programs(scontrol=PREEMPTED)
    run = RunFolder(tmp_path / "run")
    run.create()
    for times in range(1, 6):
        run.begin()
        assert queue_again(run) == Outcome.STOPPED and programs.requeued() == times


@pytest.mark.parametrize("preempted", ["None", "2026-11-23T10:05:00"], ids=["never", "an earlier time"])
def test_a_job_that_fails_again_and_again_is_given_up(programs, tmp_path, monkeypatch, capsys, preempted):
    programs(scontrol=NOT_PREEMPTED.format(preempted))
    run = RunFolder(tmp_path / "run")
    assert [queue_again(run) for _ in range(2)] == [Outcome.STOPPED] * 2
    programs(scontrol=PREEMPTED)
    assert queue_again(run) == Outcome.STOPPED, "that one does not count"
    programs(scontrol=NOT_PREEMPTED.format(preempted))
    capsys.readouterr()
    assert queue_again(run) == Outcome.FAILED and programs.requeued() == 3
    said = capsys.readouterr()
    assert "error: the job has ended 3 times in a row before it had saved anything" in said.err and not said.out
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert queue_again(run) == Outcome.STOPPED, "another job begins anew"


def test_the_folder_of_a_run_that_is_away_is_not_made_again(programs, tmp_path, capsys):
    programs(scontrol=NOT_PREEMPTED.format("None"))
    run = RunFolder(tmp_path / "run")
    run.create()
    run.begin()
    (tmp_path / "run").rename(tmp_path / "moved")
    assert queue_again(run) == Outcome.STOPPED and not (tmp_path / "run").exists()
    assert "this end of the job cannot be counted" in capsys.readouterr().err


def test_a_job_whose_nodes_do_not_come_together_is_queued_again_three_times(
    programs, world, tmp_path, monkeypatch, capsys
):
    programs(
        scontrol="case $1 in show) [ $2 = hostnames ] && echo node0; exit 0;; esac",
        srun="exec cat >/dev/null",
    )
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node0")
    overrides = small(world, **{"machine.gather_s": 0.3, "machine.device": "cpu", "name": "run", "runs_dir": tmp_path})
    for code in (Outcome.STOPPED, Outcome.STOPPED, Outcome.FAILED):
        assert slurm.main(["configs/tiny_cpu.yaml", "resume=auto", *overrides]) == code
        assert "1 of 1 nodes did not answer within 0 s: node0" in capsys.readouterr().err
    assert programs.requeued() == 2
