#!/bin/bash
# GLM-4.7-Flash, latent attention and experts: sbatch slurm/train_glm4.7_flash.sh [key=value ...]
#SBATCH --job-name=glm4.7-flash
#SBATCH --nodes=6
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@600
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.out
CONFIG=configs/glm4.7_flash.yaml
cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
[ -f slurm/run.sh ] || { echo "error: no slurm/run.sh in $PWD: submit from the repository's folder, 'sbatch slurm/train_glm4.7_flash.sh'" >&2; exit 2; }
# shellcheck source=slurm/run.sh
source slurm/run.sh "$@"
