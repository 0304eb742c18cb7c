#!/usr/bin/env bash
# Queue the run under Slurm, one node with two V100 unless NODES and GPUS say otherwise:
#
#   experiments/code_slurm_v100/launch.sh --gin_param MODEL=DIR --gin_param DATA=DIR
#
# The same command again goes on where the last job got to, however that ended: the run folder is RUN_DIR (default
# runs/code_slurm_v100) and not the job's. All flags are grpo_fn.run's. sbatch takes partition, account and time limit from
# SBATCH_PARTITION, SBATCH_ACCOUNT and SBATCH_TIMELIMIT; what the job itself reads is in tools/launch/slurm.sbatch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export RUN_DIR=${RUN_DIR:-runs/code_slurm_v100}
exec sbatch --job-name=code_slurm_v100 --nodes="${NODES:-1}" --gpus-per-node="${GPUS:-2}" tools/launch/slurm.sbatch \
  --gin_file experiments/code_slurm_v100/run.gin "$@"
