#!/bin/bash
# boba² 8B on open data, code: sbatch slurm/train_qwen3_8b.sh [key=value ...]
#SBATCH --job-name=boba2-8b-open
#SBATCH --nodes=24
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@600
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.out
CONFIG=configs/qwen3_8b.yaml
cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
[ -f slurm/run.sh ] || { echo "error: no slurm/run.sh in $PWD: submit from the repository's folder, 'sbatch slurm/train_qwen3_8b.sh'" >&2; exit 2; }
# shellcheck source=slurm/run.sh
source slurm/run.sh "$@"
