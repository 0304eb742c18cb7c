"""What the documented commands find in the place of published data, Slurm, vLLM and W&B."""

import json
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.fake_slurm import install


def rows(folder: Path) -> None:
    """Some rows of every data set, made up, under the names and fields of the published files."""
    sums = [(f"What is {n} and {n + 1}?", f"{2 * n + 1}") for n in range(1, 9)]
    gsm8k = [{"question": f"{q} %s", "answer": f"Add them. #### {a}"} for q, a in sums]
    algebra = [
        {"problem": f"{q} %s", "answer": a, "solution": f"\\boxed{{{a}}}", "level": LEVELS[i], "subject": SUBJECTS[i]}
        for i, (q, a) in enumerate(sums)
    ]
    lines(folder / "gsm8k" / "train.jsonl", gsm8k, "Now?")
    lines(folder / "gsm8k" / "test.jsonl", gsm8k, "Then?")
    lines(folder / "math" / "train.jsonl", algebra, "Now?")
    lines(folder / "math" / "test.jsonl", algebra, "Then?")
    lines(folder / "math" / "math500.jsonl", algebra, "Then?")
    lines(folder / "mbpp" / "mbpp.jsonl", [mbpp(n) for n in (*range(1, 5), *range(11, 15), *range(601, 609))], "")
    lines(folder / "rows.jsonl", [{"completion": f"\\boxed{{{a}}}", "answer": a} for _, a in sums[:2]], "")
    shown = [{"prompt": q, "completion": f"\\boxed{{{a}}}"} for q, a in sums]
    lines(folder / "demonstrations.jsonl", shown, "")
    program = {"completion": "```python\ndef f():\n    return 1\n```", "tests": ["assert f() == 1"]}
    lines(folder / "programs.jsonl", [program], "")


LEVELS = (1, 2, 3, 4, 5, "Level ?", 1, 2)
SUBJECTS = ("Algebra", "Counting & Probability", "Geometry", "Intermediate Algebra")
SUBJECTS += ("Number Theory", "Prealgebra", "Precalculus", "Algebra")


def mbpp(number: int) -> dict:
    """A problem of MBPP."""
    test = [f"assert f{number}(1) == {number + 1}"]
    code = f"def f{number}(x):\n    return x + {number}"
    return {
        "task_id": number,
        "text": f"Write a function f{number} that adds {number}.",
        "code": code,
        "test_list": test,
        "test_setup_code": "",
        "challenge_test_list": [],
    }


def lines(path: Path, found: Sequence[dict], what: str) -> None:
    """Rows as a .jsonl file; `what` stands for %s."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row).replace("%s", what) + "\n" for row in found))


def programs(folder: Path) -> None:
    """Slurm's commands, W&B's package, and a Python that writes down what a launcher would start.

    That Python answers for a vLLM server and for a module that it is asked for; all else it is.
    """
    install(folder)
    executable(folder / "sbatch", SBATCH)
    executable(folder / "python", PYTHON.format(python=sys.executable, serve=folder / "serve.py"))
    (folder / "python3").symlink_to("python")
    (folder / "serve.py").write_text(SERVE)
    (folder / "packages").mkdir()
    (folder / "packages" / "wandb.py").write_text(WANDB)
    (folder / "packages" / "trackio.py").write_text(TRACKIO)


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


PYTHON = """#!/usr/bin/env bash
if [[ $1 == *tools/launch/agent.py ]]; then printf '%s\\0' "$@" >"$NOTES/agent"; exit; fi
if [[ $1 == -m && $2 == vllm.* ]]; then printf '%s\\0' "$@" >"$NOTES/vllm"; exec "{python}" "{serve}" "$PORT"; fi
if [[ $1 == -c && $2 == *vllm* ]]; then exit; fi
exec "{python}" "$@"
"""
# As Slurm starts a script: a copy, in the environment of a job.
SBATCH = """#!/usr/bin/env bash
printf '%s\\0' "$@" >"$NOTES/sbatch"
while [[ $1 == --* ]]; do
  case $1 in --nodes=*) nodes=${1#*=} ;; --gpus-per-node=*) export FAKE_GPUS=${1#*=} ;; esac
  shift
done
export SLURM_NNODES=${nodes:-1} SLURM_SUBMIT_DIR=$PWD
FAKE_NODES=$(seq -s, -f node-%g "$SLURM_NNODES") exec bash "$@"
"""
# Healthy until no process waits for it any more.
SERVE = """
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer


class Well(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()


# Another worker's page may have a server on this port, for some seconds.
give_up = time.monotonic() + 120
while True:
    try:
        server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Well)
        break
    except OSError:
        if time.monotonic() > give_up:
            raise
        time.sleep(0.2)
threading.Timer(float(os.environ["SERVED"]), os._exit, [0]).start()
server.serve_forever()
"""
TRACKIO = """
from types import SimpleNamespace

Histogram = Table = lambda *given, **named: None


def init(*, project, name, resume, config, embed, auto_log_gpu, auto_log_cpu):
    assert project == "grpo_fn" and resume == "allow" and config
    return SimpleNamespace(log=lambda values, step: None)


def finish():
    pass
"""
WANDB = """
from pathlib import Path
from types import SimpleNamespace

tensorboard = SimpleNamespace(patch=lambda root_logdir, save: Path(root_logdir).parts, unpatch=lambda: None)
Settings = Table = SimpleNamespace


def init(*, entity, project, mode, id, resume, name, dir, config, sync_tensorboard, settings):
    assert mode == "offline" and sync_tensorboard and config
    (Path(dir) / "wandb" / "stand-in").write_text(name)
    return SimpleNamespace(finish=lambda exit_code: None, log=lambda values: None)
"""
