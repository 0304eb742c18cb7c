#!/usr/bin/env bash
# Two ranks on this machine, started again when one dies, going on from the newest checkpoint:
#
#   experiments/qwen_math_2gpu/launch.sh --gin_param MODEL=Qwen/Qwen2.5-1.5B-Instruct --gin_param DATA=DIR --gin_param GSM8K=DIR
#
# All flags are grpo_fn.run's. Environment: RUN_DIR (default runs/qwen_math_2gpu), NPROC (default 2), and what
# tools/launch/torchrun.sh knows.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
exec "$root/tools/launch/torchrun.sh" --nproc "${NPROC:-2}" --gin_file "$root/experiments/qwen_math_2gpu/run.gin" \
  --run_dir "${RUN_DIR:-runs/qwen_math_2gpu}" "$@"
