"""Names that are checked before a module is imported: as its source declares them, which is what they are."""

import re
import subprocess
import sys
from functools import reduce
from importlib import import_module
from inspect import Parameter
from pathlib import Path
from typing import Any

import pytest

from grpo_fn.config import load_config
from grpo_fn.config.parse import GIN_FOLDER
from grpo_fn.config.resolve import full_name, signature
from grpo_fn.config.source import PLAIN, Sources, check_module, takes_text

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_TORCH = """
import sys
from grpo_fn.config import load_config
for params in sys.argv[1:]:
    try:
        load_config(params.split()[:1], params.split()[1:], check_paths=True)
    except (ValueError, OSError) as error:
        print("torch" in sys.modules, str(error).splitlines()[0])
"""
TYPOS = {
    "run/gsm8.gin": "got 'run/gsm8.gin', expected a gin file, from here or from GIN; did you mean run/gsm8k.gin?",
    "run/nothing.gin": "got 'run/nothing.gin', expected a gin file, from here or from GIN",
    "run/gsm8k.gin MODLE=x": "MODLE: nothing uses this macro (bound at --set 'MODLE=x'); did you mean MODEL?",
    "run/gsm8k.gin MODEL=x sections.Sampling.temprature=1": "sections.Sampling: got a binding for temprature, "
    "expected one of sampler, max_rows, ",
    "run/gsm8k.gin step.Algorithm.objective=@losses.clipped_rato": "losses.clipped_rato: losses has no clipped_rato; "
    "did you mean clipped_ratio?",
    "run/gsm8k.gin sction.Sampling.temperature=1": "got sction, expected a module that the gin files import, one",
    "run/gsm8k.gin MODEL=HERE/modle DATA=HERE": "train.train.model: got 'HERE/modle', which does not exist, expected a "
    "file or folder; did you mean model?",
    "run/gsm8k.gin MODEL=x": "DATA: got no value for this macro (used at GIN/run/gsm8k.gin:",
    "run/gsm8k.gin MODEL=x DATA=HERE train.train.steps=1.5": "grpo_fn.train.train.steps: got 1.5 (float), expected int",
    "HERE/wrong.gin": "HERE/wrong.gin:2: No module named 'grpo_fn.algo.losess'; did you mean losses?",
}


def functions_with_knobs() -> list[Any]:
    """Everything that the page of knobs has, which another test holds to what gin files may bind."""
    page = (ROOT / "docs" / "configuration" / "knobs.md").read_text(encoding="utf-8")
    places = re.findall(r"^## \w+\.([\w.]+)\n\n.*\(`([\w.]+)`\)$", page, re.MULTILINE)
    return [reduce(getattr, name.split("."), import_module(module)) for name, module in places]


def declared(parameters: Any) -> list[tuple[Any, ...]]:
    """Names, kinds, whether there is a default, and plain types."""
    rows = []
    for each in parameters:
        annotation = each.annotation if each.annotation in PLAIN.values() else None
        rows.append((each.name, each.kind, each.default is Parameter.empty, annotation))
    return rows


def test_the_source_declares_the_knobs_that_a_function_has() -> None:
    targets, opaque, sources = functions_with_knobs(), [], Sources()
    assert len(targets) > 100
    for target in targets:
        stand_in = sources.stand_in(target.__module__, target.__qualname__.split("."))
        assert full_name(stand_in) == full_name(target)
        assert isinstance(stand_in, type) == isinstance(target, type)
        assert getattr(stand_in, "SUPPLIED", {}) == getattr(target, "SUPPLIED", {})
        parameters = signature(stand_in)
        if any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values()):
            opaque.append(target)
            continue
        assert declared(parameters.values()) == declared(signature(target).values()), full_name(target)
        assert [takes_text(each) for each in parameters.values()] == [
            takes_text(each) for each in signature(target).values()
        ], full_name(target)
    assert len(opaque) <= 2, [full_name(target) for target in opaque]
    source = Sources().module("grpo_fn.train")
    assert source is not None
    assert source.constants["MACROS"] == import_module("grpo_fn.train").MACROS


def test_a_typo_is_reported_with_the_near_name_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "wrong.gin").write_text("from __gin__ import dynamic_registration\nfrom grpo_fn.algo import losess\n")
    words = [text.replace("HERE", str(tmp_path)) for text in TYPOS]
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *words], capture_output=True, text=True, timeout=100)
    lines = done.stdout.splitlines()
    assert len(lines) == len(TYPOS), done.stderr
    for line, message in zip(lines, TYPOS.values(), strict=True):
        assert line.startswith("False ")
        assert message.replace("HERE", str(tmp_path)).replace("GIN", str(GIN_FOLDER)) in line


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("rows.file.path=data/my rows.jsonl", "data/my rows.jsonl"),
        ("rows.file.path='quoted.jsonl'", "quoted.jsonl"),
        ("rows.file.path=a=b.jsonl", "a=b.jsonl"),
        ("rows.file.path=%DATA", "D"),
    ],
)
def test_text_and_paths_need_no_quotes(param: str, value: str) -> None:
    data = ["DATA=D"] if "%" in param else []
    config = load_config(["run/rows.gin"], ["MODEL=M", *data, "REWARD=@math.correct", param])
    assert config.hparams["rows.file.path"] == value
    assert load_config(["run/gsm8k.gin"], ["DATA=D", "train.train.model=a/b"]).root.knobs["model"] == "a/b"


def test_a_number_is_no_text() -> None:
    with pytest.raises(ValueError, match="got 'many', expected a gin value"):
        load_config(["run/gsm8k.gin"], ["MODEL=M", "DATA=D", "train.train.steps=many"])


@pytest.mark.parametrize(
    ("source", "knobs"),
    [
        ("def f(x, *, a: int, b=1): ...", ["a", "b"]),
        ("@decorated\ndef f(*, a): ...", None),
        ("f = other", None),
        ("if x:\n    def f(*, a): ...\nelse:\n    def f(*, b): ...", None),
        ("class f:\n    def __init__(self, a, *, b): ...", ["a", "b"]),
        ("class f(Unknown): ...", None),
        ("class f(Unknown):\n    def __init__(self, a): ...", ["a"]),
        (
            "@dataclass\nclass g:\n    a: int\n@dataclass(kw_only=True)\nclass f(g):\n    b: int = 1",
            ["a", "b"],
        ),
        ("@dataclass\nclass f:\n    a: ClassVar = 1\n    b: int = field(init=False)\n    c: int", ["c"]),
        ("class f(NamedTuple):\n    a: int\n    b: int = 1", ["a", "b"]),
        ("from os import *\n", None),
    ],
)
def test_what_the_source_does_not_say_for_certain_takes_any_knob(
    source: str, knobs: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_a_user.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    parameters = signature(Sources().function("of_a_user", ["f"]))
    assert knobs == (None if "knobs" in parameters else [name for name in parameters if name != "x"])


def test_a_module_that_is_not_there_is_refused_and_others_are_left_to_the_import() -> None:
    with pytest.raises(ValueError, match=r"No module named 'grpo_fn.task'; did you mean tasks\?"):
        check_module("grpo_fn.task.rows")
    with pytest.raises(ValueError, match="No module named 'no_such_module'"):
        check_module("no_such_module")
    check_module("os.path")
    check_module("experiments.tiny.models")
