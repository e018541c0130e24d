#!/bin/bash
# Adds engines to a run that is running, as many as the GPUs of the job's nodes hold: sbatch slurm/add_engines.sh RUN
#SBATCH --job-name=engines
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.out
cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
PYTHON="${PYTHON:-.venv/bin/python}"
command -v "$PYTHON" >/dev/null || { echo "error: no $PYTHON in $PWD: run 'make setup' there, or set PYTHON" >&2; exit 2; }
exec srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 "$PYTHON" -m areal_megatron.launch.engines add "$@"
