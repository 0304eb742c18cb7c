#!/usr/bin/env bash
# One rank on one card, with the base model on it once (one_card.gin), started again when it dies:
#
#   experiments/gsm8k_lora_8gb/launch.sh --gin_param MODEL=Qwen/Qwen2.5-1.5B-Instruct --gin_param DATA=DIR
#
# All flags are grpo_fn.run's. Environment: RUN_DIR (default runs/gsm8k_lora_8gb), and what tools/launch/torchrun.sh knows.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec "$here/../../tools/launch/torchrun.sh" --nproc 1 --gin_file "$here/run.gin" --gin_file "$here/one_card.gin" \
  --run_dir "${RUN_DIR:-runs/gsm8k_lora_8gb}" "$@"
