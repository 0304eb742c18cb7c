"""Slurm's commands as small programs on PATH: nodes are local processes, and every call is written down.

They do what Slurm does where the launcher depends on it: srun starts its command on every node with SLURM_NODEID and
SLURM_GPUS_ON_NODE set, ends with the highest exit code, and answers SIGTERM by killing its tasks outright; scancel
--signal reaches the tasks, and fails while the step has not started; scontrol knows the nodes and the job's state.
"""

from pathlib import Path

from launch.launching import program

SRUN = """
srun_options=()
while [[ $1 == --* ]]; do srun_options+=("$1"); shift; done
trap 'kill -KILL "${pids[@]}"' TERM
pids=()
for ((node = 0; node < SLURM_NNODES; node++)); do
  if [[ -n ${FAKE_CODE:-} ]]; then # a step that runs until SIGTERM, and ends with this code
    bash -c 'trap "exit $FAKE_CODE" TERM; touch "$FAKE/running"; while [[ -z $FAKE_SHORT ]]; do sleep 0.05; done
             exit $FAKE_CODE' &
  else
    SLURM_NODEID=$node SLURM_GPUS_ON_NODE=$FAKE_GPUS "$@" &
  fi
  pids+=($!)
done
printf '%s\\n' "${pids[@]}" >"$FAKE/tasks"
worst=0
for pid in "${pids[@]}"; do
  wait "$pid"
  code=$?
  if ((code > worst)); then worst=$code; fi
done
exit "$worst"
"""
SCANCEL = """
[[ -s $FAKE/tasks ]] || { echo "scancel: error: Invalid job id specified" >&2; exit 1; }
[[ $1 == --signal=TERM && $2 == "$SLURM_JOB_ID.0" ]] || exit 1
xargs kill -TERM <"$FAKE/tasks"
"""
SCONTROL = """
case "$1 $2" in
  "show hostnames") [[ $3 == "$SLURM_JOB_NODELIST" ]] && tr ',' '\\n' <<<"$FAKE_NODES" ;;
  "show job") echo "JobId=$SLURM_JOB_ID JobName=x JobState=$FAKE_STATE Reason=None" ;;
esac
"""


def install(folder: Path) -> None:
    """Put the commands into `folder`."""
    for name, text in {"srun": SRUN, "scancel": SCANCEL, "scontrol": SCONTROL}.items():
        listen = 'printf "%s\\n" "${0##*/} $*" >>"$FAKE/calls"'
        program(folder, name, f"#!/usr/bin/env bash\n{listen}\n{text}")


def job(folder: Path, *, nodes: str = "localhost,node-b", **more: str) -> dict[str, str]:
    """What Slurm puts into a job's environment; `folder` keeps the calls."""
    return {
        "FAKE": str(folder),
        "FAKE_NODES": nodes,
        "FAKE_STATE": "RUNNING",
        "LOG_DIR": str(folder / "logs"),
        "FAKE_GPUS": "1",
        "FAKE_SHORT": "",
        "SLURM_JOB_ID": "4242",
        "SLURM_JOB_NAME": "grpo",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_NNODES": str(nodes.count(",") + 1),
        "SLURM_SUBMIT_DIR": str(Path(__file__).resolve().parents[2]),
    } | more


def calls(folder: Path, name: str) -> list[str]:
    """How a command was called, one line a call."""
    path = folder / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} ")]
