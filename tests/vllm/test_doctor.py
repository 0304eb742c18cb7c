"""The doctor beside the real engine: what it says of a folder is what the engine does with it."""

import json
import subprocess
import sys
from pathlib import Path

from grpo_fn.doctor import checks
from grpo_fn.doctor.probe_vllm import open_in_vllm
from grpo_fn.doctor.report import State
from grpo_fn.shell.model.tiny_model import Shape, make_random

DEADLINE = 300


def folder_with(head_dim: int, path: Path) -> Path:
    shape = Shape(vocabulary=300, hidden=2 * head_dim, layers=2, heads=2, kv_heads=1, intermediate=48, positions=128)
    make_random(shape, path, seed=0, chat=True)
    return path


def examined(folder: Path) -> tuple[int, dict[str, dict]]:
    """The exit code, and what was found of the model, by engine."""
    flags = ["--json", "--model", str(folder), "--timeout", str(DEADLINE)]
    done = subprocess.run(
        [sys.executable, "-m", "grpo_fn.doctor", *flags], capture_output=True, text=True, timeout=2 * DEADLINE
    )
    parsed = json.loads(done.stdout)
    assert parsed["exit"] == done.returncode
    return done.returncode, {row["subject"]: row for row in parsed["findings"] if row["topic"] == "model"}


def test_a_folder_opens_in_both_engines(tmp_path: Path) -> None:
    code, found = examined(folder_with(32, tmp_path / "model"))
    assert code < 2
    assert {name: row["state"] for name, row in found.items()} == {"transformers": "ok", "vLLM": "ok"}
    assert "head_dim 32" in found["vLLM"]["seen"]


def test_a_head_that_the_attention_does_not_take_is_named(tmp_path: Path) -> None:
    finding = checks.check_vllm(open_in_vllm(str(folder_with(16, tmp_path / "model"))), wanted=True)
    assert finding.state is State.BROKEN
    assert "head_dim 16" in finding.seen
    assert "32, 64, 80" in finding.todo


def test_an_architecture_that_vllm_does_not_know_is_named(tmp_path: Path) -> None:
    folder = folder_with(32, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["OfOurOwnForCausalLM"]}))
    finding = checks.check_vllm(open_in_vllm(str(folder)), wanted=True)
    assert finding.state is State.BROKEN
    assert "OfOurOwnForCausalLM" in finding.seen
    assert finding.todo
