# Sourced by the scripts of this folder with CONFIG set, in the repository's folder; "$@": key=value overrides.
# shellcheck shell=bash

# The usual soft limit of 1,024 open files is less than the controller's connections to a large rollout pool.
ulimit -S -n "$(ulimit -H -n)"
# The launcher's lines are in slurm-JOB.out when they are written, also if the job is killed.
export PYTHONUNBUFFERED="${PYTHONUNBUFFERED:-1}"
# A failing NCCL says why; its default is to say nothing. Which interface it takes is the cluster's affair:
# set NCCL_SOCKET_IFNAME or NCCL_IB_HCA before sbatch where its own choice is wrong.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"

PYTHON="${PYTHON:-.venv/bin/python}"
command -v "$PYTHON" >/dev/null || { echo "error: no $PYTHON in $PWD: run 'make setup' there, or set PYTHON" >&2; exit 2; }
# machine.host=auto: the nodes talk over the interface with the default route; override it, e.g. machine.host=ib0.
# exec: the signal before the time limit goes to this process, which has to be the launcher.
exec "$PYTHON" -m launch.slurm "$CONFIG" --restarts=10 resume=auto machine.host=auto "$@"
