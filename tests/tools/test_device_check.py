"""The command for a GPU: its checks pass on a CPU at toy shapes, and what fails, hangs or dies stops nothing else."""

import ast
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import device_check
import device_runner
import device_speed
import hypothesis.strategies as st
import pytest
import torch
from device_parts import scale
from device_runner import FAILED, LEFT_OUT, OK, Check, Figure, Outcome, Setting, apart, here
from device_shapes import EOS, QWEN, Shape, Work
from hypothesis import given
from torch import nn

from grpo_fn.shell.model import hf
from grpo_fn.trainer.plan import kv_bytes_per_token

ROOT = Path(__file__).resolve().parents[2]
H100 = 79.6 * 2**30  # bytes as its driver shows them
NOWHERE = Setting(device="cpu", tiny=True, scratch="/nowhere")


@pytest.mark.slow
def test_every_check_that_a_cpu_can_do_passes_and_is_in_the_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seen: list[Outcome] = []

    def run(*asked) -> Iterator[Outcome]:
        for outcome in here(*asked):
            seen.append(outcome)
            yield outcome

    checks = device_check.CHECKS
    argv = ["--device", "cpu", "--tiny", "--out", str(tmp_path / "new" / "table.md")]
    code = device_check.main(argv, run=run)
    said = {outcome.check.name: outcome.said for outcome in seen if outcome.state != OK}
    assert code == 0, said
    assert [outcome.check.name for outcome in seen] == ["machine", *(check.name for check in checks)]
    assert said.keys() == {check.name for check in checks if check.only_cuda}
    assert all(outcome.figures for outcome in seen if outcome.state == OK)
    table = (tmp_path / "new" / "table.md").read_text()
    assert table in capsys.readouterr().out
    assert f"torch {torch.__version__}" in table
    assert "the figures below mean nothing" in table
    assert "missed" not in table, "goals mean nothing at toy shapes"
    for check in checks:
        assert f"| `{check.name}` |" in table


ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is torch's older name


@pytest.mark.parametrize("given", [{}, {ALLOCATOR[0]: "x"}, {ALLOCATOR[1]: "x"}])
def test_checks_begin_with_an_allocator_that_grows_its_segments_unless_it_was_configured(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set before the first check begins, in whose process torch reads it."""
    for name in ALLOCATOR:
        monkeypatch.setenv(name, "")  # undone after the test, whatever is set in it
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    seen: list[dict[str, str]] = []

    def run(checks: list[Check], *_) -> Iterator[Outcome]:
        read = "import json, os; print(json.dumps({**os.environ}))"
        found = json.loads(subprocess.run([sys.executable, "-c", read], check=True, capture_output=True).stdout)
        seen.append({name: found[name] for name in ALLOCATOR if name in found})
        for check in checks:
            yield Outcome(check, OK, (), "", 0.0)

    assert device_check.main(["--device", "cpu", "--tiny", "--only", "prng"], run=run) == 0
    assert seen == [given or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}]


def fake(name: str, deadline: float = 30.0) -> Check:
    return Check(name, "", f"device_fakes:{name}", deadline)


@pytest.mark.slow
def test_a_check_that_fails_hangs_or_dies_is_reported_and_the_next_begins_in_a_fresh_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_runner, "GRACE", 0.3)
    checks = [
        fake(name, 0.5 if name == "late" else 30.0) for name in ("fine", "absent", "wrong", "late", "fatal", "fine")
    ]
    got = list(apart(checks, NOWHERE, 120.0))
    assert [outcome.check for outcome in got] == checks
    assert [outcome.state for outcome in got] == [OK, LEFT_OUT, FAILED, FAILED, FAILED, OK]
    assert got[0].figures[0].value != got[-1].figures[0].value
    assert [outcome.said for outcome in got[1:5]] == [
        "nothing to compare with",
        "AssertionError: got 1, expected 2",
        "late: no answer within 0.8 s; its stacks are above",
        "fatal: the process ended with 7; its last words are above",
    ]


def test_no_check_begins_after_the_limit() -> None:
    got = list(apart([fake("fine"), fake("fine")], NOWHERE, -1.0))
    assert [(outcome.state, outcome.said) for outcome in got] == [(LEFT_OUT, "the -1 s of the run were over")] * 2


@pytest.mark.slow
def test_a_check_whose_time_the_limit_cut_short_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_runner, "GRACE", 0.3)
    late, fine = apart([fake("late"), fake("fine")], NOWHERE, 3.0)
    assert (late.state, fine.state) == (LEFT_OUT, LEFT_OUT)
    over = "the 3 s of the run were over"  # before it began, where a process took so long to start
    assert late.said == over or re.fullmatch(r"had [123] of its 30 s before the run's limit", late.said)
    assert fine.said == over


@pytest.mark.slow
def test_a_check_that_dies_after_its_time_was_cut_short_is_left_out() -> None:
    (late,) = apart([fake("late_and_fatal")], NOWHERE, 3.0)
    assert late.state == LEFT_OUT, late.said


def test_a_late_check_prints_where_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    begun, names = time.monotonic(), "thread MainThread:"
    with device_runner.stacks_after(0.05):
        while names not in (said := capsys.readouterr().err) and time.monotonic() - begun < 10:
            time.sleep(0.05)
    assert names in said
    assert "test_a_late_check_prints_where_it_stands" in said
    with device_runner.stacks_after(0.2):
        pass
    time.sleep(0.4)
    assert capsys.readouterr().err == ""


def test_every_check_belongs_to_one_of_the_commands() -> None:
    parts = [device_check.selected("", part) for part in device_check.PARTS]
    assert all(parts)
    assert [*chain(*parts)] == device_check.CHECKS
    assert [check.name for check in device_check.selected("prng,step", "steps")] == ["step"]


def test_the_table_is_written_after_each_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, seen = tmp_path / "table.md", []

    def run(checks: list[Check], *_) -> Iterator[Outcome]:
        for check in checks:
            yield Outcome(check, OK, (Figure("x", 1.0),), "", 0.0)
            seen.append(out.read_text().count("| ok |"))

    monkeypatch.setattr(device_check, "CHECKS", [fake("fine"), fake("late")])
    assert device_check.main(["--device", "cpu", "--tiny", "--out", str(out)], run=run) == 0
    assert seen == [0, 1, 2]


def test_a_failure_is_the_exit_code_and_a_missed_goal_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_check, "MACHINE", fake("absent"))
    for names, code in ((["fine"], 0), (["fine", "wrong"], 1)):
        monkeypatch.setattr(device_check, "CHECKS", [fake(name) for name in names])
        assert device_check.main(["--device", "cuda"], run=here) == code
        rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
        assert rows[3] == "|  |  | wished for | 1 | >= 2 | **missed** |"
        assert rows[4:] == ["| `wrong` | **FAILED** | AssertionError: got 1, expected 2 |  |  |  |"][: len(names) - 1]


def test_without_the_device_nothing_else_is_tried_and_nothing_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device_check, "MACHINE", fake("wrong"))
    monkeypatch.setattr(device_check, "CHECKS", [fake("fatal")])
    assert device_check.main(["--device", "cuda", "--out", str(tmp_path / "table.md")], run=here) == 1
    assert not (tmp_path / "table.md").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--only", "prng,typo"], "--only: got typo, expected some of prng, "),
        (["--device", "cpu"], "got --device cpu, expected --tiny with it"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        device_check.main(flags)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@given(st.floats(-10, 10), st.none() | st.floats(-10, 10), st.none() | st.floats(-10, 10))
def test_a_goal_is_met_within_its_bounds(value: float, low: float | None, high: float | None) -> None:
    met = Figure("x", value, at_least=low, at_most=high).met
    if low is None and high is None:
        assert met is None
    else:
        assert met == ((low is None or low <= value) and (high is None or value <= high))


# -- what figures are made from


@pytest.mark.parametrize(("shape", "billions"), [(QWEN["0.5b"], 0.494), (QWEN["1.5b"], 1.544)])
def test_shapes_are_the_published_ones(shape: Shape, billions: float) -> None:
    model = hf.empty_model(shape.config())
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert shape.parameters() == matrices
    assert shape.matrices() == sum(m.weight.numel() for m in model.model.modules() if isinstance(m, nn.Linear))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(billions * 1e9, rel=1e-3)
    assert shape.kv_bytes(2) == kv_bytes_per_token(shape.config(), 2)
    assert model.config.eos_token_id == EOS


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 6), st.integers(1, 7))
def test_operations_are_those_of_every_token_read_and_every_pair_seen(
    groups: int, size: int, prompt: int, new: int
) -> None:
    shape = Shape(10, 8, 3, 2, 1, 12)
    read = sampled = pairs = 0
    for _ in range(groups):
        pairs += sum(t + 1 for t in range(prompt))
        read += prompt
        for _ in range(size):
            pairs += sum(prompt + t + 1 for t in range(new))
            read, sampled = read + new, sampled + new
    work = Work(groups, size, prompt, new)
    assert work.tokens == read
    assert work.flops(shape) == 6 * (shape.matrices() * read + 10 * 8 * sampled + 2 * 3 * 8 * pairs)


class Asked(Exception):
    """Raised in the place of loading a model, with what it was asked for."""


@pytest.mark.slow
@pytest.mark.parametrize("size", [*QWEN])
def test_what_trains_on_an_h100_leaves_a_quarter_of_it_to_what_the_estimate_does_not_count(
    size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers of reductions, gaps of the allocator, the context: 1.5B does not fit in micro-batches of 16k tokens."""
    shapes: list[Shape] = []

    def asked(setting: Setting, model: str, dtype: torch.dtype, *, micro_tokens: int, compile: Any) -> None:
        raise Asked(dtype, micro_tokens)

    monkeypatch.setattr(device_speed, "folder", lambda setting, shape: shapes.append(shape) or "a model")
    monkeypatch.setattr(device_speed, "built", asked)
    with pytest.raises(Asked) as found:
        device_speed.train(Setting(device="cuda", tiny=False, scratch="/nowhere"), size=size)
    (shape,), (dtype, micro_tokens) = shapes, found.value.args
    model = partial(nn.Identity, logits_chunk_elements=2**27)  # by default, as `built` has it
    placing = SimpleNamespace(
        config=shape.config(), adapters=None, parallelism=scale(), dtype=dtype, attention="sdpa", logprob_model=model
    )
    bench = SimpleNamespace(placing=placing, policy=SimpleNamespace(optimizer=torch.optim.AdamW([torch.zeros(1)])))
    assert device_speed.estimated(bench, micro_tokens, 1152) < 0.75 * H100


# -- what a bare machine needs


def imports(path: Path) -> Iterator[str]:
    """What is imported when the file is, functions left alone."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (name for alias in node.names for name in (node.module, f"{node.module}.{alias.name}"))
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += ast.iter_child_nodes(node)


def file_of(name: str) -> Path | None:
    """The file of a module of ours."""
    base = (ROOT if name.startswith("grpo_fn") else ROOT / "tools" / "device_check").joinpath(*name.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def test_it_needs_neither_gin_nor_math_verify_nor_an_http_client() -> None:
    waiting = [path for path in (ROOT / "tools" / "device_check").glob("device_*.py") if path.name != "device_vllm.py"]
    seen, others = {*waiting}, set()
    while waiting:
        for name in imports(waiting.pop()):
            path = file_of(name)
            others |= {name.split(".")[0]} if path is None and not name.startswith("grpo_fn") else set()
            if path is not None and path not in seen:
                seen.add(path)
                waiting.append(path)
    assert ROOT / "grpo_fn" / "shell" / "sampler" / "local" / "local_sampler.py" in seen
    bare = {"torch", "transformers", "einops", "jaxtyping", "safetensors", "huggingface_hub", "tokenizers", "numpy"}
    extra = {name for name in others if name not in sys.stdlib_module_names and file_of(name) is None} - bare
    assert extra <= {"psutil", "packaging", "tqdm", "tensorboard"}, extra


@pytest.mark.slow
def test_it_runs_as_a_program_from_anywhere(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "tools" / "device_check"),
        "--device",
        "cpu",
        "--tiny",
        "--only",
        "prng,memory",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[3/3] memory: ok" in done.stdout
