# Sourced by the scripts of this folder with CONFIG set, in the repository's folder; "$@": key=value overrides.
# shellcheck shell=bash

# Unbuffered, so that slurm-JOB.out has the launcher's lines at once, and even if the job is killed.
export PYTHONUNBUFFERED="${PYTHONUNBUFFERED:-1}"
# NCCL says why it fails; by default it says nothing. If it chooses the wrong interface on your cluster, set
# NCCL_SOCKET_IFNAME or NCCL_IB_HCA before sbatch.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"

PYTHON="${PYTHON:-.venv/bin/python}"
command -v "$PYTHON" >/dev/null || { echo "error: no $PYTHON in $PWD: run 'make setup' there, or set PYTHON" >&2; exit 2; }
# machine.host=auto: nodes talk over the interface with the default route; override it with, e.g., machine.host=ib0.
# exec: the signal before the time limit goes to this process, which must therefore be the launcher.
# Outside a job, 'bash slurm/train_32b.sh ... --dry-run' plans for the nodes that its header asks for.
exec "$PYTHON" -m areal_megatron.launch.slurm "$CONFIG" --restarts=10 --batch-script="$0" resume=auto machine.host=auto "$@"
