"""What `import grpo_fn` gives: the same runs as the commands, resumed, repeated from their gin file, refused alike."""

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import grpo_fn
from grpo_fn import api, run
from grpo_fn.api import GIN_NAMES, GinCall, TrainingSettings, module_source
from grpo_fn.config import load_config
from grpo_fn.config.parse import overlay_text
from grpo_fn.shell.model import tiny

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = '''
import re
from collections.abc import Sequence as Texts

DIGITS = "0123456789"
ANY = re.compile(r"\\\\d", re.ASCII)


def share(text: str, digits=DIGITS) -> float:
    return sum(c in digits for c in text) / max(1, len(text))


def has_digit(problem, completion) -> float:
    """1 for a digit."""
    return float(bool(ANY.search(completion.text)))


def digits(problem, completion, among: Texts = ()) -> float:
    def inner():
        return share(completion.text)
    return inner()


TABLE = object()
made_here = lambda problem, completion: 0.0


def uses_table(problem, completion):
    return float(TABLE is None)
'''
SMALL = {"prompts": 2, "group_size": 4, "max_new_tokens": 4, "held_out": 4, "lr": 1e-3, "save_every": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of bytes."""
    sizes = tiny.Qwen2Sizes(vocabulary=259, hidden=32, layers=1, positions=128, heads=2, kv_heads=1, intermediate=32)
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny.make_random(sizes, folder, seed=0, chat=False)
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with rows, that the modules and their search path are left as they were after."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    rows = [{"prompt": f"{a} + {b} =", "answer": a + b, "level": a} for a in range(4) for b in range(4)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def script(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script that runs: the module __main__, of a file."""
    path, module = folder / "script.py", ModuleType("__main__")
    path.write_text(SCRIPT)
    exec(compile(SCRIPT, str(path), "exec"), vars(module))
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def test_a_script_trains_resumes_when_it_calls_again_and_its_gin_file_repeats_the_run(
    model: Path, script: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps: list[int] = []
    arguments = {"reward": {script.has_digit: 1.0, script.digits: 0.5}, **SMALL}
    first = grpo_fn.train(model, "mine.jsonl", steps=2, on_step=lambda step, metrics: steps.append(step), **arguments)
    printed = capsys.readouterr().out
    assert 'include "run/rows.gin"' in printed
    assert first.exit_code == 0
    assert first.steps == 2
    again = grpo_fn.train(model, "mine.jsonl", steps=3, on_step=lambda step, metrics: steps.append(step), **arguments)
    assert again.run_dir == first.run_dir
    assert steps == [1, 2, 3]
    assert [*again.metrics] == [0, 1, 2, 3]
    assert 0 <= again.accuracy_before <= 1
    assert again.accuracy_after == again.metrics[3]["eval/accuracy"]
    assert {"reward/has_digit", "reward/digits"} <= again.metrics[1].keys()
    assert again.knobs["train.train.steps"] == 3
    assert len(again.samples()) == 8
    assert len(again.answers(0)) == 4
    with pytest.raises(ValueError, match="got step 9"):
        again.answers(9)
    # Another process, in another folder, in which there is no script: the run folder has all that it needs.
    monkeypatch.delitem(sys.modules, "__main__")
    monkeypatch.chdir("/")
    argv = ["--gin_file", str(folder / again.run_dir / "config.gin"), "--run_dir", str(folder / "repeated")]
    assert run.main(argv) == 0
    weights = "model/model.safetensors"
    assert (folder / "repeated" / weights).read_bytes() == (folder / again.run_dir / weights).read_bytes()


def test_another_algorithm_with_adapters_in_a_notebook_shows_a_bar_and_a_curve(
    model: Path, script: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    notebook, display = ModuleType("IPython"), ModuleType("IPython.display")
    notebook.get_ipython = lambda: SimpleNamespace(config={"IPKernelApp": {}})
    display.HTML = str
    display.display = lambda value, **more: shown.append(value) or SimpleNamespace(update=shown.append)
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    done = grpo_fn.train(
        model, "mine.jsonl", script.digits, algorithm="gspo", steps=1, lora=4, run_dir="here", gin_files=(), **SMALL
    )
    assert "token_loss = @losses.sequence_ratio" in done.config
    assert done.knobs["lora.LoRA.rank"] == 4
    start, bar, curve = shown
    assert 'value="0" max="1"' in start
    assert "step 1 of 1: reward" in bar
    svg = curve._repr_svg_()
    assert svg.count("<polyline") == 2
    assert "held-out accuracy" in svg
    # The folder is free for other processes now, and a run of another configuration is refused there.
    with pytest.raises(grpo_fn.RunError, match="of another configuration"):
        grpo_fn.train(model, "mine.jsonl", script.digits, algorithm="dapo", steps=1, run_dir="here", **SMALL)
    measured = grpo_fn.evaluate("here", out="of_run")
    assert measured.figures["eval/problems"] == 4
    assert measured.accuracy == done.accuracy_after
    every_row = grpo_fn.evaluate(model, "mine.jsonl", script.digits, out="all", max_new_tokens=4)
    assert len(every_row.samples) == 16
    low, high = every_row.interval
    assert low <= every_row.accuracy <= high


def test_completions_are_scored_by_a_name_or_a_function_of_the_script(script: ModuleType, folder: Path) -> None:
    right, wrong, unreadable = grpo_fn.score(
        [{"completion": r"\boxed{7}", "answer": a} for a in ("7", "8", r"\frac{")], "math"
    )
    assert (right.verdict, right.value, wrong.verdict) == ("right", 1.0, "wrong")
    assert (unreadable.value, unreadable.reason) == (None, "the gold answer cannot be parsed")
    (half,) = grpo_fn.score([{"completion": "7a"}], script.digits)
    assert half.value == 0.5
    with pytest.raises(grpo_fn.RunError, match="row 1: got the fields 'text', expected text in 'completion'"):
        grpo_fn.score([{"completion": "7"}, {"text": "7"}], script.digits)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"group_sise": 8}, "got the setting group_sise, .*; did you mean group_size?"),
    ({"algorithm": "dr_grop"}, "got algorithm 'dr_grop', expected one of .*; did you mean dr_grpo?"),
    ({"reward": "made_here"}, "got <lambda>, expected a function that is defined with def"),
    ({"reward": "uses_table"}, "uses_table uses TABLE: got a value of type object of this script or notebook"),
    ({"reward": "nowhere.at_all"}, "REWARD=@nowhere.at_all.*expected a module"),
    ({"lr": object()}, "LR: got <object object at .*, expected a number, text, a list or a function"),
    ({"lr": "fast"}, r"optimizer.adamw.lr: got 'fast' \(str\), expected float"),
    ({"data": "other.jsonl"}, "got other.jsonl, which is no file"),
    ({"knobs": {"step.Algorithm.minibatch": 2}}, "minibatch.*did you mean minibatches?"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[" ".join(change) for change, _ in REFUSED])
def test_what_the_command_refuses_is_an_exception_with_its_text_and_leaves_no_folder(
    change: dict[str, Any], message: str, script: ModuleType, model: Path
) -> None:
    arguments = {"data": "mine.jsonl", "reward": "has_digit"} | SMALL | change
    arguments["reward"] = getattr(script, arguments["reward"], arguments["reward"])
    with pytest.raises(grpo_fn.RunError, match=message) as caught:
        grpo_fn.train(model, steps=1, **arguments)
    assert caught.value.exit_code == 2
    assert not Path("runs").exists() or not [*Path("runs").iterdir()]
    with pytest.raises(grpo_fn.RunError, match=r"without run\.json"):
        grpo_fn.load_run("runs")


def test_a_function_of_a_script_takes_with_it_what_it_uses_and_no_more(script: ModuleType) -> None:
    namespace: dict[str, Any] = {}
    source = module_source("digits", script.digits, vars(script))
    exec(source, namespace)
    assert namespace["digits"](None, SimpleNamespace(text="7a")) == 0.5
    assert "has_digit" not in source
    assert source.count("DIGITS = ") == 1
    assert module_source("has_digit", script.has_digit, vars(script)).count("ANY = re.compile('\\\\\\\\d', 256)") == 1


EXAMPLES: TrainingSettings = {
    "seed": 1, "prompts": 2, "group_size": 4, "max_new_tokens": 4, "lr": 1e-5, "held_out": 4, "eval_every": 0,
    "save_every": 3, "prompt_field": "prompt", "answer_field": "answer", "meta_fields": ["level"],
    "template": "{prompt}!", "temperature": 0.9, "max_rows": 8, "epochs": 2, "minibatches": 2, "beta": 0.1,
    "weight_decay": 0.1, "max_grad_norm": 2.0, "micro_tokens": 512, "device": "cpu", "dtype": "float32",
    "reward_workers": 2, "reward_timeout": 9.0,
}  # fmt: skip


def test_every_setting_sets_a_knob_of_the_run_and_the_printed_file_is_the_run(script: ModuleType, folder: Path) -> None:
    call = GinCall(["run/rows.gin", "algo/grpo.gin"])
    call.bind("MODEL", "tiny")
    call.bind("DATA", "mine.jsonl")
    call.bind_reward(script.has_digit)
    call.add(True, ["scale/bf16.gin"], EXAMPLES, {"optimizer.adamw.beta2": 0.95})
    assert EXAMPLES.keys() == GIN_NAMES.keys()
    with call.user_code_in(folder):
        config = load_config(call.files, call.params)
        (folder / "printed.gin").write_text(overlay_text(call.files, call.params))
        assert load_config([str(folder / "printed.gin")], []).fingerprint == config.fingerprint
    values = {name: config.hparams[name] for name in GIN_NAMES.values() if "." in name}
    assert values["sections.Sampling.temperature"] == 0.9
    assert values["rows.read_problems.meta_fields"] == "['level']"
    assert config.hparams["step.Algorithm.prompts"] == 2


IMPORTS = """
import sys, time
before = time.process_time()
import grpo_fn
seconds = time.process_time() - before
assert seconds < 0.1, seconds
import grpo_fn.score
from grpo_fn import score, train
assert callable(train) and callable(grpo_fn.score) and grpo_fn.score.__module__ == "grpo_fn.api"
assert {*grpo_fn.__all__} <= {*dir(grpo_fn)}
try:
    train("tiny", "mine.jsonl", "math", group_sise=8)
except grpo_fn.RunError as error:
    print(error)
assert "torch" not in sys.modules
"""


def test_the_package_is_imported_at_once_and_refuses_a_misspelt_name_before_it_loads_torch() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, env={**os.environ}, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "did you mean group_size?" in done.stdout


@pytest.mark.parametrize("name", ["train", "score"])
def test_a_module_of_the_same_name_does_not_hide_a_function(name: str) -> None:
    function, module = getattr(api, name), importlib.import_module(f"grpo_fn.{name}")
    setattr(grpo_fn, name, module)  # as Python does when it imports a module for the first time
    assert module is sys.modules[f"grpo_fn.{name}"]
    assert getattr(grpo_fn, name) is function
    assert load_config(["run/arithmetic.gin"], []).root.target.__module__ == "grpo_fn.train"


def test_an_editor_reads_the_names_that_the_package_has() -> None:
    tree = ast.parse((ROOT / "grpo_fn" / "__init__.py").read_text())
    (guarded,) = (node for node in tree.body if isinstance(node, ast.If))
    (names,) = (node.names for node in guarded.body if isinstance(node, ast.ImportFrom))
    assert {alias.name for alias in names} | {"__version__"} == {*grpo_fn.__all__}
    for name in grpo_fn.__all__:
        assert getattr(grpo_fn, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        grpo_fn.trian  # noqa: B018
