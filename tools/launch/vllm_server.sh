#!/usr/bin/env bash
# Start a vLLM server that runs draw completions from and give their weights to (vllm_sampler.dedicated_sampler):
#
#   tools/launch/vllm_server.sh MODEL --dtype bfloat16 [further arguments of `vllm serve`]
#
# MODEL is the folder or hub name that the run trains, --dtype what the run computes in. Arguments given here come last,
# so they win over this script's, and the run says so if it cannot work with them.
# Environment: PYTHON (with vLLM; default .venv/bin/python, else python3), HOST (default 127.0.0.1), PORT (default 8000),
# TRANSFER (nccl or file, default file: as vllm_servers.DedicatedEngine.transfer of the run),
# KV_CACHE_BYTES (without a GPU only, default 1 GiB), VLLM_API_KEY (asked of clients on the routes that vLLM guards).
#
# Any process that reaches the port can replace the weights: the routes for that have no key. Keep it inside a network you trust.
set -euo pipefail

fail() {
  echo "error: $1" >&2
  exit 2
}

whole_number() { # NAME VALUE LOWEST HIGHEST
  if [[ $2 =~ ^[0-9]{1,15}$ ]] && ((10#$2 >= $3 && 10#$2 <= $4)); then return; fi
  fail "$1: got '$2', expected a whole number from $3 to $4"
}

(($#)) && [[ $1 != -* ]] || fail "got '${1:-nothing}' as the first argument, expected a model folder or hub name"
model=$1 && shift

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-}
if [[ -z $python ]]; then
  python=python3
  if [[ -x $root/.venv/bin/python ]]; then python=$root/.venv/bin/python; fi
fi
gpu=
if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then gpu=1; fi
host=${HOST:-127.0.0.1}
port=${PORT:-8000}
transfer=${TRANSFER:-file}
kv_cache=${KV_CACHE_BYTES:-$((2 ** 30))}
whole_number PORT "$port" 1 65535
whole_number KV_CACHE_BYTES "$kv_cache" 1 $((10 ** 15 - 1))
[[ $transfer == nccl || $transfer == file ]] || fail "TRANSFER: got '$transfer', expected nccl or file"
"$python" -c 'import importlib.util as i, sys; sys.exit(not i.find_spec("vllm"))' 2>/dev/null ||
  fail "got no vLLM from $python, expected a Python with it (pip install '.[vllm]', or set PYTHON)"

own=(
  --host "$host" --port "$port"
  --enable-scale-out # completions of token ids
  --logprobs-mode processed_logprobs # under the distribution that tokens are drawn from, temperature and all
  --worker-extension-cls grpo_fn.shell.vllm.worker_extension.Extension
  --weight-transfer-config "{\"backend\": \"grpo_$transfer\"}"
  --disable-uvicorn-access-log
)
if [[ -z $gpu ]]; then
  export TORCHDYNAMO_DISABLE=1 # there is nothing to compile for, and compiling takes minutes
  # A prompt that is read in two parts takes back a draw of its generator, which those of the CPU cannot (0.32).
  own+=(--enforce-eager --kv-cache-memory-bytes "$kv_cache" --no-enable-chunked-prefill)
fi
export VLLM_SERVER_DEV_MODE=1 # the routes that weights come in by
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

echo "vLLM server: starting on http://$host:$port, weights come by $transfer" >&2
"$python" -c '
import os, sys, time, urllib.request

url, server = sys.argv[1], int(sys.argv[2])  # which may have ended before this began
while os.getppid() == server:
    try:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/health", timeout=5)
    except OSError:
        time.sleep(1)
    else:
        sys.exit(print(f"vLLM server: ready on {url}", file=sys.stderr))
' "http://$host:$port" "$$" &

serve=(-m vllm.entrypoints.cli.main serve "$model")
if ! "$python" -c 'from importlib.metadata import version; version("vllm")' 2>/dev/null; then
  serve=(-m vllm.entrypoints.launchers.api_server.entry --model "$model") # a build of another name, which `serve` refuses
fi
exec "$python" "${serve[@]}" "${own[@]}" "$@"
