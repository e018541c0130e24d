#!/bin/bash
# GLM-4.5-Air, a model of experts: sbatch slurm/train_glm4.5_air.sh [key=value ...]
#SBATCH --job-name=glm4.5-air
#SBATCH --nodes=16
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@600
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.out
CONFIG=configs/glm4.5_air.yaml
cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
[ -f slurm/run.sh ] || { echo "error: no slurm/run.sh in $PWD: submit from the repository's folder, 'sbatch slurm/train_glm4.5_air.sh'" >&2; exit 2; }
# shellcheck source=slurm/run.sh
source slurm/run.sh "$@"
