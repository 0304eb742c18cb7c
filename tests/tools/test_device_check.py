"""The command for a GPU: its checks pass on a CPU at toy shapes, and what fails, hangs or dies stops nothing else."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import device_check
import hypothesis.strategies as st
import pytest
import torch
from device_runner import FAILED, LEFT_OUT, OK, Check, Figure, Outcome, Setting, outcomes_apart, outcomes_here
from device_shapes import EOS, QWEN, Shape, Work
from hypothesis import given
from torch import nn

from grpo_fn.shell.model import hf
from grpo_fn.trainer.plan import kv_bytes_per_token

ROOT = Path(__file__).resolve().parents[2]
TOY = ["--device", "cpu", "--tiny"]


@pytest.mark.slow
def test_every_check_that_a_cpu_can_do_passes_and_is_in_the_table(tmp_path: Path) -> None:
    table, results = tmp_path / "new" / "table.md", []

    def run(*args) -> Iterator[Outcome]:
        for outcome in outcomes_here(*args):
            results.append(outcome)
            yield outcome

    code = device_check.main([*TOY, "--out", str(table)], run=run)
    left = {outcome.check.name: outcome.message for outcome in results if outcome.state != OK}
    assert code == 0, left
    assert [outcome.check.name for outcome in results] == ["machine", *(check.name for check in device_check.CHECKS)]
    assert left.keys() == {check.name for check in device_check.CHECKS if check.only_cuda}
    page = table.read_text()
    assert all(f"| `{check.name}` |" in page for check in device_check.CHECKS)
    assert f"torch {torch.__version__}" in page
    assert "the figures below mean nothing" in page
    assert "missed" not in page  # goals mean nothing at toy shapes


def fake(name: str, deadline: float = 30.0) -> Check:
    return Check(name, "", f"device_fakes:{name}", deadline)


@pytest.mark.slow
def test_a_check_that_fails_hangs_or_dies_is_reported_and_the_next_begins_in_a_fresh_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT / "tests" / "tools"), str(ROOT))))
    checks = [fake(n, 0.5 if n == "late" else 30.0) for n in ("fine", "absent", "wrong", "late", "fatal")]
    results = [*outcomes_apart(checks, Setting("cpu", True, str(tmp_path)), 120.0)]
    assert [outcome.check for outcome in results] == checks
    assert [outcome.state for outcome in results] == [OK, LEFT_OUT, FAILED, FAILED, FAILED]
    assert results[0].figures[0].value != os.getpid()
    assert [outcome.message for outcome in results[1:]] == [
        "nothing to compare with",
        "AssertionError: got 1, expected 2",
        "the process ended with 1, its deadline is 0.5 s; its last words are above",
        "the process ended with 7, its deadline is 30 s; its last words are above",
    ]
    cut, after = outcomes_apart([fake("late"), fake("fine")], Setting("cpu", True, str(tmp_path / "new")), 2.0)
    assert (cut.state, cut.message) == (LEFT_OUT, "had 2 of its 30 s before the run's limit")
    assert (after.state, after.message) == (LEFT_OUT, "the 2 s of the run were over")


def test_every_check_belongs_to_one_of_the_commands() -> None:
    parts = [device_check.selected("", part) for part in device_check.PARTS]
    assert all(parts)
    assert [*chain(*parts)] == device_check.CHECKS
    assert [check.name for check in device_check.selected("prng,step", "steps")] == ["step"]


def test_a_failure_is_the_exit_code_and_a_missed_goal_is_not_and_each_check_is_written_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    table, sizes = tmp_path / "table.md", []

    def run(*args) -> Iterator[Outcome]:
        for outcome in outcomes_here(*args):
            yield outcome
            sizes.append(table.read_text().count("\n| `"))

    monkeypatch.setattr(device_check, "MACHINE", fake("absent"))
    for names, code in ((["fine"], 0), (["fine", "wrong"], 1)):
        monkeypatch.setattr(device_check, "CHECKS", [fake(name) for name in names])
        assert device_check.main(["--device", "cuda", "--out", str(table)], run=run) == code
        rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
        assert rows[3] == "|  |  | wished for | 1 | >= 2 | **missed** |"
        assert rows[4:] == ["| `wrong` | **FAILED** | AssertionError: got 1, expected 2 |  |  |  |"][: len(names) - 1]
    assert sizes == [0, 1, 0, 1, 2]
    monkeypatch.setattr(device_check, "MACHINE", fake("wrong"))  # without the device nothing else is tried
    assert device_check.main(["--out", str(tmp_path / "none.md")], run=outcomes_here) == 1
    assert not (tmp_path / "none.md").exists()


@pytest.mark.parametrize("config", [{}, {"PYTORCH_ALLOC_CONF": "x"}, {"PYTORCH_CUDA_ALLOC_CONF": "x"}])
def test_checks_begin_with_an_allocator_that_grows_its_segments_unless_it_was_configured(
    config: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = {name: value for name, value in os.environ.items() if not name.startswith("PYTORCH_")}
    monkeypatch.setattr(os, "environ", bare | config)
    before: list[dict[str, str]] = []

    def run(checks: list[Check], *_) -> Iterator[Outcome]:
        before.append({name: value for name, value in os.environ.items() if name.startswith("PYTORCH_")})
        return (Outcome(check, OK, (), "", 0.0) for check in checks)

    assert device_check.main([*TOY, "--only", "prng"], run=run) == 0
    assert before == [config or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--only", "prng,typo"], "--only: got typo, expected some of prng, "),
        (["--device", "cpu"], "got --device cpu, expected --tiny with it"),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        device_check.main(flags)
    assert message in capsys.readouterr().err


@given(st.floats(-10, 10), st.none() | st.floats(-10, 10), st.none() | st.floats(-10, 10))
def test_a_goal_is_met_within_its_bounds(value: float, low: float | None, high: float | None) -> None:
    met = (low is None or low <= value) and (high is None or value <= high)
    assert Figure("x", value, at_least=low, at_most=high).met == (None if low is None and high is None else met)


# -- what figures are made from


@pytest.mark.parametrize(("shape", "billions"), [(QWEN["0.5b"], 0.494), (QWEN["1.5b"], 1.544)])
def test_shapes_are_the_published_ones(shape: Shape, billions: float) -> None:
    model = hf.empty_model(shape.config())
    assert shape.parameters() == sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert shape.matrices() == sum(m.weight.numel() for m in model.model.modules() if isinstance(m, nn.Linear))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(billions * 1e9, rel=1e-3)
    assert shape.kv_bytes(2) == kv_bytes_per_token(shape.config(), 2)
    assert model.config.eos_token_id == EOS


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 6), st.integers(1, 7))
def test_operations_are_those_of_every_token_read_and_every_pair_seen(
    groups: int, size: int, prompt: int, new: int
) -> None:
    shape = Shape(10, 8, 3, 2, 1, 12)
    pairs = groups * (sum(range(1, prompt + 1)) + size * sum(prompt + t + 1 for t in range(new)))
    read, sampled = groups * (prompt + size * new), groups * size * new
    work = Work(groups, size, prompt, new)
    assert work.tokens == read
    assert work.flops(shape) == 6 * (shape.matrices() * read + 10 * 8 * sampled + 2 * 3 * 8 * pairs)


def test_the_device_check_needs_neither_gin_nor_math_verify_nor_an_http_client() -> None:
    """What a bare machine has is enough: all that is imported at the top of files, followed from file to file."""
    waiting = [path for path in (ROOT / "tools" / "device_check").glob("device_*.py") if path.name != "device_vllm.py"]
    files, others = {*waiting}, set()
    while waiting:
        for node in ast.parse(waiting.pop().read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                base = (ROOT if name.startswith("grpo_fn") else ROOT / "tools" / "device_check") / name.replace(
                    ".", "/"
                )
                file = next((f for f in (base.with_suffix(".py"), base / "__init__.py") if f.is_file()), None)
                others |= (
                    {name.split(".")[0]} if file is None and not name.startswith(("grpo_fn", "device_")) else set()
                )
                waiting += [file] if file is not None and file not in files else []
                files |= {file} - {None}
    assert ROOT / "grpo_fn" / "shell" / "sampler" / "local" / "local_sampler.py" in files
    bare = {"torch", "transformers", "einops", "jaxtyping", "safetensors", "huggingface_hub", "tokenizers", "numpy"}
    assert others - sys.stdlib_module_names - bare <= {"psutil", "packaging", "tqdm", "tensorboard"}


@pytest.mark.slow
def test_the_device_check_runs_as_a_program_from_anywhere(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "device_check"), *TOY, "--only", "prng,memory"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[3/3] memory: ok" in done.stdout
