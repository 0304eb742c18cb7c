#!/usr/bin/env bash
# Queue the run under Slurm, one node with two V100 unless NODES and GPUS say otherwise:
#
#   experiments/code_slurm_v100/launch.sh --gin_param MODEL=DIR --gin_param DATA=DIR
#
# The same command again goes on where the last job got to, however that ended: the run folder is RUN_DIR (default
# runs/code_slurm_v100) and not the job's. All flags are grpo_fn.run's, folders by their whole path. A run folder of another
# configuration is refused here, before a job is queued; --dry_run says what the run would be and queues nothing.
# Environment: MEM (of a node, default 64G), GRES (gpu:volta:2, say, in place of GPUS), CONSTRAINT (a feature of the nodes),
# PYTHON; sbatch takes partition, account and time limit from SBATCH_PARTITION, SBATCH_ACCOUNT and SBATCH_TIMELIMIT; what the
# job itself reads is in tools/launch/slurm.sbatch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

fail() {
  echo "error: $1" >&2
  exit 2
}

export RUN_DIR=${RUN_DIR:-runs/code_slurm_v100}
nodes=${NODES:-1} gpus=${GPUS:-2}
[[ $nodes =~ ^[1-9][0-9]{0,4}$ ]] || fail "NODES: got '$nodes', expected a whole number from 1"
python=${PYTHON:-}
if [[ -z $python ]]; then
  python=python3
  if [[ -x .venv/bin/python ]]; then python=.venv/bin/python; fi
fi
flags=(--gin_file experiments/code_slurm_v100/run.gin "$@")
count=${GRES:-$gpus} count=${count##*:} # of a node: the number behind a type
[[ $count =~ ^[1-9][0-9]{0,2}$ ]] || fail "GPUS, GRES: got '${GRES:-$gpus}', expected a number, or one behind the type: volta:2"
plan=("$python" -m grpo_fn.run --run_dir "$RUN_DIR" --ranks $((nodes * count)) --hosts "$nodes" "${flags[@]}")
for word in "$@"; do
  if [[ $word == --dry_run ]]; then exec "${plan[@]}"; fi
done
if [[ -e $RUN_DIR/run.json ]]; then "${plan[@]}" --dry_run >/dev/null || exit; fi

command -v sbatch >/dev/null || fail "got no sbatch on PATH, expected a host of Slurm's; without it: tools/launch/torchrun.sh"
options=(--job-name=code_slurm_v100 --nodes="$nodes" --mem="${MEM:-64G}")
if [[ ${GRES:-} ]]; then options+=(--gres="$GRES"); else options+=(--gpus-per-node="$gpus"); fi
if [[ ${CONSTRAINT:-} ]]; then options+=(--constraint="$CONSTRAINT"); fi
exec sbatch "${options[@]}" tools/launch/slurm.sbatch "${flags[@]}"
