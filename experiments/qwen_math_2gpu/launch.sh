#!/usr/bin/env bash
# Two ranks on this machine, started again when one dies, going on from the newest checkpoint, and beside them on the
# second card a vLLM server that evaluates:
#
#   experiments/qwen_math_2gpu/launch.sh --gin_param MODEL=Qwen/Qwen2.5-1.5B-Instruct --gin_param DATA=DIR --gin_param GSM8K=DIR
#
# All flags are grpo_fn.run's. With --dry_run, --gin_file engine/local.gin, or --gin_param 'EVAL_SERVERS=[...]' for
# servers of your own, none is started. Environment: RUN_DIR (default runs/qwen_math_2gpu), NPROC (default 2), PORT (of
# the server, default 8001), SHARE (of the card's memory that it has, default 0.15), READY_SECONDS (to start in, default
# 900), and what tools/launch/torchrun.sh knows. The server's log is RUN_DIR.server.log. Exit codes: docs/running/cluster.md.
set -euo pipefail
# One host, whose two cards copy to one another over NVLink alone (docs/running/cluster.md).
export NCCL_IB_DISABLE=${NCCL_IB_DISABLE:-1} NCCL_P2P_LEVEL=${NCCL_P2P_LEVEL:-NVL}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
run_dir=${RUN_DIR:-runs/qwen_math_2gpu}
train=("$root/tools/launch/torchrun.sh" --nproc "${NPROC:-2}" --gin_file "$root/experiments/qwen_math_2gpu/run.gin"
  --run_dir "$run_dir" "$@")

fail() {
  echo "error: $1" >&2
  exit 2
}

model=
for word in "$@"; do
  case ${word#--gin_param=} in
    --dry_run | *engine/local.gin | EVAL_SERVERS=*) exec "${train[@]}" ;;
    MODEL=*) model=${word#*MODEL=} ;;
  esac
done
model=${model//[\"\']/}
[[ $model ]] || fail "got no MODEL, expected one, as in --gin_param MODEL=Qwen/Qwen2.5-1.5B-Instruct"
ready=${READY_SECONDS:-900}
[[ $ready =~ ^[1-9][0-9]{0,5}$ ]] || fail "READY_SECONDS: got '$ready', expected a whole number from 1"

python=${PYTHON:-}
if [[ -z $python ]]; then
  python=python3
  if [[ -x $root/.venv/bin/python ]]; then python=$root/.venv/bin/python; fi
fi
port=${PORT:-8001}
log=$run_dir.server.log
mkdir -p "$(dirname "$log")"

answers() { # whether something does at the port
  "$python" -c '
import sys
from urllib.request import ProxyHandler, build_opener

build_opener(ProxyHandler({})).open(sys.argv[1], timeout=5)
' "http://127.0.0.1:$port/health" 2>/dev/null
}

server='' training=''
# shellcheck disable=SC2329 # the trap calls it
stop_server() {
  [[ $server ]] || return 0
  kill -TERM -- "-$server" 2>/dev/null || kill -TERM "$server" 2>/dev/null || return 0
  for _ in {1..60}; do # half a minute to let go of the card
    kill -0 -- "-$server" 2>/dev/null || return 0
    sleep 0.5
  done
  kill -KILL -- "-$server" 2>/dev/null || true
}
trap stop_server EXIT
trap 'exit 143' TERM INT HUP

if answers; then fail "PORT: got $port, where something answers already, expected a free one"; fi
IFS=, read -ra cards <<<"${CUDA_VISIBLE_DEVICES:-0,1}"
# A session of its own: a Ctrl-C is for the training, which may still want an answer before it has saved.
CUDA_VISIBLE_DEVICES=${cards[-1]} PORT=$port TRANSFER=file PYTHON=$python \
  setsid "$root/tools/launch/vllm_server.sh" "$model" --dtype bfloat16 --gpu-memory-utilization "${SHARE:-0.15}" \
  >"$log" 2>&1 &
server=$!
end=$((SECONDS + ready))
until answers; do
  if ! kill -0 "$server" 2>/dev/null; then
    tail -n 5 "$log" >&2
    fail "the evaluation server ended as it started, expected it to stay ($log; without one: --gin_file engine/local.gin)"
  fi
  ((SECONDS < end)) || fail "the evaluation server is not ready after $ready s, expected it sooner ($log; READY_SECONDS)"
  sleep 1
done

"${train[@]}" --gin_param "EVAL_SERVERS=[\"http://127.0.0.1:$port\"]" &
training=$!
# A signal is the training's, which saves; `wait` returns at once then, and is asked again for how the training ended.
trap 'asked=1; kill -TERM "$training" 2>/dev/null || true' TERM INT HUP
asked=1
while [[ $asked ]]; do
  asked='' code=0
  wait "$training" || code=$?
done
exit "$code"
