#!/bin/bash
# Qwen3.5-397B-A17B, gated delta nets and experts; texts alone: sbatch slurm/train_qwen3.5_397b_a17b.sh [key=value ...]
#SBATCH --job-name=qwen3.5-397b-a17b
#SBATCH --nodes=32
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@600
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.out
CONFIG=configs/qwen3.5_397b_a17b.yaml
cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
[ -f slurm/run.sh ] || { echo "error: no slurm/run.sh in $PWD: submit from the repository's folder, 'sbatch slurm/train_qwen3.5_397b_a17b.sh'" >&2; exit 2; }
# shellcheck source=slurm/run.sh
source slurm/run.sh "$@"
