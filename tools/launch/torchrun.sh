#!/usr/bin/env bash
# Train on this machine, on all of its devices:
#
#   tools/launch/torchrun.sh [--nproc N] [--max-restarts N] --gin_file run/gsm8k.gin [further flags of grpo_fn.run]
#
# One rank per GPU that nvidia-smi lists; without it NPROC ranks, or one. CUDA_VISIBLE_DEVICES narrows the choice.
# Environment: PYTHON (default .venv/bin/python, else python3), NPROC, MAX_RESTARTS (default 3), GRACE (seconds to save
# after SIGTERM, default 120), MODULE (default grpo_fn.run). --dry_run is printed once, for that number of ranks.
# Exit codes: docs/running/cluster.md.
set -euo pipefail

fail() {
  echo "error: $1" >&2
  exit 2
}

whole_number() { # NAME VALUE LOWEST
  if [[ $2 =~ ^[0-9]{1,6}$ ]] && ((10#$2 >= $3)); then return; fi
  fail "$1: got '$2', expected a whole number from $3"
}

devices() {
  if [[ -n ${NPROC:-} ]]; then
    echo "$NPROC"
  elif [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
    tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .
  elif listed=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU'); then # grep fails when it counts none
    echo "$listed"
  else
    echo 1
  fi
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-}
if [[ -z $python ]]; then
  python=python3
  if [[ -x $root/.venv/bin/python ]]; then python=$root/.venv/bin/python; fi
fi

restarts=${MAX_RESTARTS:-3}
while (($#)); do
  case $1 in
    --max-restarts=*) restarts=${1#*=} && shift ;;
    --nproc=*) NPROC=${1#*=} && shift ;;
    --max-restarts | --nproc)
      (($# > 1)) || fail "$1: got nothing after it, expected a whole number"
      if [[ $1 == --nproc ]]; then NPROC=$2; else restarts=$2; fi
      shift 2
      ;;
    *) break ;;
  esac
done

given=" $* "
[[ $given == *" --gin_file"[\ =]* ]] || fail "got no --gin_file, expected one, as in --gin_file run/arithmetic.gin"
nproc=$(devices)
whole_number NPROC "$nproc" 1
whole_number --max-restarts "$restarts" 0
"$python" -c 'import importlib.util as i, sys; sys.exit(not (i.find_spec("torch") and i.find_spec("psutil")))' 2>/dev/null ||
  fail "got no torchrun from $python, expected a Python with this project installed (make .venv/ready, or set PYTHON)"

for word in "$@"; do
  # Says what so many ranks would do, once, without starting them; --ranks of the user's own comes later and wins.
  if [[ $word == --dry_run ]]; then exec "$python" -m "${MODULE:-grpo_fn.run}" --ranks "$nproc" "$@"; fi
done

exec "$python" "$root/tools/launch/agent.py" --standalone --nproc-per-node="$nproc" --max-restarts="$restarts" \
  -m "${MODULE:-grpo_fn.run}" "$@"
