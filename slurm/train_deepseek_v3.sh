#!/bin/bash
# DeepSeek-V3, a model of experts with latent attention: sbatch slurm/train_deepseek_v3.sh [key=value ...]
#SBATCH --job-name=deepseek-v3
#SBATCH --nodes=128
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@600
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.out
CONFIG=configs/deepseek_v3.yaml
cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
[ -f slurm/run.sh ] || { echo "error: no slurm/run.sh in $PWD: submit from the repository's folder, 'sbatch slurm/train_deepseek_v3.sh'" >&2; exit 2; }
# shellcheck source=slurm/run.sh
source slurm/run.sh "$@"
