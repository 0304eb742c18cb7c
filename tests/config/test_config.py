"""Configuration: what a gin file says is what the root receives, and every mistake is reported in its own line."""

import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import fixture_module as fm
import gin
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn import run
from grpo_fn.config import Config, is_relative_path, load_config, parse

HEADER = "from __gin__ import dynamic_registration\nimport fixture_module as fm\n"
RUN = (
    HEADER
    + """
STEPS = 10
fm.root:
    steps = %STEPS
    rate = 1e-6
    objective = @fm.objective
    advantage = @fm.plain
    task = @fm.task()
fm.task.size = 3
fm.objective:
    token_loss = @fm.scale
    beta = 0.5
fm.scale.factor = 2
fm.scale.offset = 3
"""
)


def load_text(text: str, *params: str, root: str = "fixture_module.root", more: dict[str, str] | None = None) -> Config:
    """Load a gin text, with other files beside it."""
    with TemporaryDirectory() as folder:
        for name, content in {"main.gin": text, **(more or {})}.items():
            Path(folder, name).write_text(content.replace("$HERE", folder), encoding="utf-8")
        return load_config([f"{folder}/main.gin"], params, root=root)


def value_of(text: str, *params: str) -> Any:
    """What `anything` is given by the text `text` in a gin file."""
    return load_text(f"{HEADER}fm.anything.value = {text}\n", *params, root="fixture_module.anything").kwargs()["value"]


def complaint(text: str, *params: str, **more: Any) -> str:
    """The error of loading, as the user sees it."""
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load_text(text, *params, **more)
    return re.sub(r"/\S*/main\.gin", "main.gin", str(caught.value))


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"))
    | st.binary(max_size=4)
)
literals = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=4) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


# What is said is what is received.


@given(literals)
def test_literals_come_through_unchanged_also_by_way_of_a_macro(value: Any) -> None:
    text = source_text(value)
    assert repr(value_of(text)) == repr(value)
    assert repr(value_of(f"%X\nX = {text}")) == repr(value)


@given(literals, st.booleans())
def test_the_dumped_text_loads_to_the_same_values_and_the_same_text(value: Any, macro: bool) -> None:
    literal = source_text(value)
    text = f"{HEADER}fm.anything.value = " + (f"%X\nX = {literal}" if macro else literal)
    first = load_text(text, root="fixture_module.anything")
    again = load_text(first.text, root="fixture_module.anything")
    assert repr(again.kwargs()) == repr(first.kwargs()) == repr({"value": value})
    assert (again.text, again.fingerprint) == (first.text, first.fingerprint)


def source_text(value: Any) -> str:
    """A literal as gin writes it; Python writes infinity in a way that gin does not read."""
    match value:
        case float():
            return repr(value).replace("inf", "1e999")
        case list():
            return f"[{', '.join(map(source_text, value))}]"
        case tuple():
            return f"({''.join(source_text(v) + ',' for v in value)})"
        case dict():
            return f"{{{', '.join(f'{key!r}: {source_text(v)}' for key, v in value.items())}}}"
    return repr(value)


def test_references_become_plain_functions_and_partials() -> None:
    kwargs = load_text(RUN).kwargs()
    assert kwargs["advantage"] is fm.plain
    assert kwargs["steps"] == 10
    objective = kwargs["objective"]
    assert type(objective) is partial
    assert objective.func is fm.objective
    assert objective.keywords["token_loss"].func is fm.scale
    assert objective(4, batch=1, totals=2) == (4 * 2 + 3) * 0.5 + 3


def test_nothing_of_gin_is_handed_to_the_root() -> None:
    kwargs = load_text(RUN, 'fm.root.extra={"x": [@fm.shift, (@a/fm.shift, %STEPS)], "y": @fm.Sampler}').kwargs()
    again = pickle.loads(pickle.dumps(kwargs))
    assert repr(again["extra"]) == repr(kwargs["extra"])
    assert all(not type(leaf).__module__.startswith("gin") for leaf in leaves(kwargs))
    assert kwargs["extra"]["y"] is fm.Sampler
    assert gin.config_str() == ""  # nor does it stay behind in the module


def leaves(value: Any) -> list[Any]:
    """Every object inside, through containers, partials and what decorators wrap."""
    match value:
        case partial():
            return [value, *leaves(value.func), *leaves(value.keywords)]
        case dict():
            return [value, *(leaf for item in value.items() for part in item for leaf in leaves(part))]
        case list() | tuple():
            return [value, *(leaf for item in value for leaf in leaves(item))]
    return [value, *(leaves(value.__wrapped__) if hasattr(value, "__wrapped__") else [])]


def test_an_evaluated_reference_is_called_once_for_equal_knobs() -> None:
    fm.calls.clear()
    first, second, other = value_of("[@fm.task(), @fm.task(), @a/fm.task()]\nfm.task.size = 3\na/fm.task.size = 4")
    assert first is second
    assert (first, other) == (("task", 3), ("task", 4))
    assert fm.calls == [3, 4]


scopes = st.sampled_from(["", "a/", "b/", "a/b/", "b/a/"])
knobs = st.dictionaries(st.tuples(scopes, st.sampled_from(["factor", "offset"])), st.integers(0, 99), max_size=8)


@given(knobs, scopes, scopes)
def test_scopes_mean_what_they_mean_to_gin(bound: dict[tuple[str, str], int], outside: str, inside: str) -> None:
    bound = {("", "factor"): 1, ("", "offset"): 2, **bound}
    lines = [f"{scope}fm.scale.{knob} = {value}" for (scope, knob), value in bound.items()]
    text = f"@{outside}fm.outer\nfm.outer.inner = @{inside}fm.scale\n" + "\n".join(lines)
    frozen = value_of(text)
    try:
        gin.parse_config(f"{HEADER}fm.anything.value = {text}")
        live = gin.get_configurable(fm.anything)()
        assert frozen(10) == live(10)
    finally:
        gin.clear_config()


def test_a_later_binding_beats_an_earlier_one_and_an_include() -> None:
    base = {"base.gin": f"{HEADER}fm.anything.value = 1\n"}
    include = f'include "$HERE/base.gin"\n{HEADER}'
    assert load_text(include, root="fixture_module.anything", more=base).kwargs() == {"value": 1}
    text = f"{include}fm.anything.value = 2\n"
    assert load_text(text, root="fixture_module.anything", more=base).kwargs() == {"value": 2}
    assert load_text(text, "fm.anything.value=3", root="fixture_module.anything", more=base).kwargs() == {"value": 3}
    last = load_text(text, "fm.anything.value=3", "fm.anything.value=4", root="fixture_module.anything", more=base)
    assert last.kwargs() == {"value": 4}


# Command-line parameters.


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("/data/model", "/data/model"),
        ("2wiki", "2wiki"),
        ("a b=c", "a b=c"),
        ("'quoted'", "quoted"),
        ("7", 7),
        ("-1e-6", -1e-6),
        ("None", None),
        ("[1, 'x']", [1, "x"]),
        (" 3 ", 3),
    ],
)
def test_a_macro_takes_what_shells_leave_of_a_value(said: str, meant: Any) -> None:
    got = value_of("%X\nX = 0", f"X={said}")
    assert got == meant
    assert type(got) is type(meant)


@pytest.mark.parametrize("said", ["'open", '"open', "[1, 2", "{1: ", "(", "@fm..x", "%", "", "true", "none", "FALSE"])
def test_a_broken_literal_is_no_string(said: str) -> None:
    message = complaint(RUN, f"STEPS={said}")
    assert message.startswith(f"--set 'STEPS={said}'" if "'" not in said else '--set "STEPS=')
    assert "expected a gin value" in message


def test_parameters_may_name_functions_and_knobs_through_the_imports_of_the_files() -> None:
    config = load_text(RUN, "fm.root.advantage=@s/fm.shift", "s/fm.shift.by=%STEPS", "STEPS=7", "fm.root.rate=2")
    assert config.kwargs()["advantage"](1) == 8
    assert config.kwargs()["rate"] == 2


def test_a_name_that_two_files_use_differently_is_refused() -> None:
    other = {"other.gin": "from __gin__ import dynamic_registration\nimport difflib as fm\n"}
    message = complaint(f'include "$HERE/other.gin"\n{RUN}', "fm.root.steps=1", more=other)
    assert "got fm, which stands for difflib and for fixture_module" in message


def test_a_macro_that_no_file_binds_stands_for_its_knob(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fm, "MACROS", {"HOW_MANY": "fixture_module.root.steps"}, raising=False)
    without = RUN.replace("STEPS = 10\n", "").replace("%STEPS", "4")
    over = "fm.objective.beta = %HOW_MANY\n"
    config = load_text(f"{without}{over}")
    assert config.root.knobs["steps"] == config.root.knobs["objective"].knobs["beta"] == 4
    again = load_text(config.text, "HOW_MANY=6")  # both, as they are tied
    assert again.root.knobs["steps"] == again.root.knobs["objective"].knobs["beta"] == 6
    assert load_text(f"{without}{over}", "HOW_MANY=6").root.knobs["steps"] == 4  # bound: it is what it is bound to
    assert "HOW_MANY: got no value for this macro" in complaint(f"{without.replace('steps = 4', 'rate = 0.1')}{over}")
    assert "%HOW_MANY: got a circle" in complaint(
        f"{without.replace('steps = 4', 'steps = %HOW_MANY')}HOW_MANY = %HOW_MANY\n"
    )


def test_a_key_of_a_dictionary_may_be_a_macro_for_text_or_a_number() -> None:
    config = load_text(f"{RUN}NAME = 'gsm8k'\nfm.root.extra = {{%NAME: 2.0, 'math': %STEPS}}\n")
    assert config.root.knobs["extra"] == {"gsm8k": 2.0, "math": 10}
    assert load_text(config.text).root.knobs["extra"] == {"gsm8k": 2.0, "math": 10}
    twice = complaint(f"{RUN}NAME = 'math'\nfm.root.extra = {{%NAME: 2.0, 'math': %STEPS}}\n")
    assert "fixture_module.root: got two keys 'math'" in twice
    wrong = complaint(f"{RUN}fm.root.extra = {{@fm.scale: 2.0}}\n")
    assert "fixture_module.root: got @fixture_module.scale as a key of a dictionary, expected text or a number" in wrong


def test_a_stored_configuration_has_absolute_paths_and_is_of_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("here/rows", "here/model", "there", "moved/rows", "moved/model"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "here" / "rows" / "a.jsonl").touch()
    params = ["MODEL=model", "DATA=rows"]
    (tmp_path / "gsm8k.gin").write_text(
        "from __gin__ import dynamic_registration\nfrom grpo_fn.tasks import benchmarks\n"
        'include "run/gsm8k.gin"\nbenchmarks.gsm8k.template = "rows"\n'
    )
    monkeypatch.chdir(tmp_path / "here")
    given = load_config(["../gsm8k.gin"], params)
    assert given.root.knobs["model"] == "model"  # the run uses what it was given
    for line in (
        f"DATA = '{tmp_path}/here/rows'",
        f"MODEL = '{tmp_path}/here/model'",
        "benchmarks.gsm8k.template = 'rows'",
    ):
        assert f"\n{line}\n" in given.text
    written, absolute = given.fingerprint.split("/")
    (tmp_path / "config.gin").write_text(given.text)
    monkeypatch.chdir(tmp_path / "there")
    again = load_config([str(tmp_path / "config.gin")], [])
    assert (again.text, again.fingerprint) == (given.text, absolute)
    assert load_config(["../gsm8k.gin"], params).fingerprint == written  # nothing of those names is here
    monkeypatch.chdir(tmp_path / "moved")
    moved = load_config(["../gsm8k.gin"], params)
    assert moved.fingerprint.split("/")[0] == written
    assert moved.fingerprint.split("/")[1] not in (written, absolute)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("rows", True), ("rows/*.jsonl", True), ("./rows", True)),
        *(("row", False), ("rows/*.csv", False), ("", False), ("~", False), ("/", False)),
    ],
)
def test_a_path_is_relative_where_it_names_what_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: bool
) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").touch()
    (tmp_path / "~").mkdir()
    monkeypatch.chdir(tmp_path)
    assert is_relative_path(text) is expected


def test_a_file_of_the_working_folder_does_not_take_the_place_of_one_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.gin").write_text('include "run/arithmetic.gin"\n')
    with pytest.raises(ValueError, match=r"got an include of base\.gin, and a file .*base\.gin that gin would read in"):
        load_config(["base.gin"], [])
    (tmp_path / "base.gin").rename(tmp_path / "mine.gin")
    assert load_config(["mine.gin"], []).root.knobs["steps"] > 0


# Mistakes, each reported with its name.


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("STPES = 5", "STPES: nothing uses this macro (bound at main.gin:LINE); did you mean STEPS?"),
        ("ZZ = 5", "ZZ: nothing uses this macro (bound at main.gin:LINE); macros in use: STEPS"),
        (
            "fm.root.rate = %RATE",
            "RATE: got no value for this macro (used at main.gin:LINE by fixture_module.root), expected "
            "--set 'RATE=...' or a line `RATE = ...` in a gin file",
        ),
        ("STEPS = %STEPS", "%STEPS: got a circle, %STEPS -> %STEPS; expected a value that does not need itself"),
        (
            "fm.root.stps = 1",
            "main.gin:LINE: fm.root: got a binding for stps, expected one of steps, rate, objective, advantage, task, "
            "extra; did you mean steps?",
        ),
        (
            "fm.root.size = 1",
            "main.gin:LINE: fm.root: got a binding for size, expected one of steps, rate, objective, advantage, task, "
            "extra; there is ",
        ),
        (
            "fm.shift.x = 1",
            "main.gin:LINE: fm.shift: got a binding for x, which is data (positional), expected a keyword-only",
        ),
        ("fm.objective.batch = 1", "fixture_module.objective: got a binding for batch, expected none, as the program"),
        ("fm.root.rate = 'fast'", "fixture_module.root.rate: got 'fast' (str), expected float"),
        ("fm.root.steps = @fm.plain", "fixture_module.root.steps: got @fixture_module.plain, expected int"),
        ("fm.root.advantage = @fm.plan", "main.gin:LINE: fm.plan: fixture_module has no plan; did you mean plain?"),
        ("fm.root.advantage = @fm.nameless", "fixture_module.<lambda>: got <function <lambda>"),
        ("fm.root.advantage = @fm", "main.gin:LINE: got fm, expected module.function"),
        (
            "fm.root.advantage = %gin.REQUIRED",
            "main.gin:LINE: got %gin.REQUIRED, expected a value, a macro or a",
        ),
        ("fm.root.rate 1", "main.gin:LINE: "),
        ("include 'no/such.gin'", "main.gin: got 'no/such.gin', expected a gin file"),
        ("include '$HERE/main.gin'", "main.gin: got an include of main.gin, which includes this file"),
        ("fm.root.task = @fm.shift()", "@fixture_module.shift(): got no value for x, expected @fixture_module.shift"),
    ],
)
def test_every_mistake_is_one_line_that_names_it(line: str, expected: str) -> None:
    message = complaint(f"{RUN}{line}\n")
    assert message.startswith(expected.replace("LINE", str(RUN.count("\n") + 1)))
    assert "\n" not in message


def test_a_knob_of_another_function_is_pointed_at() -> None:
    places = complaint(f"{RUN}fm.root.size = 1\n").partition("; there is ")[2].split(", ")
    assert "fm.task.size" in places  # others are of functions that an earlier test has loaded


@pytest.mark.parametrize(
    ("param", "expected"),
    [
        ("fm.shift.by=2", "the run does not use fixture_module.shift, expected a knob that has an effect"),
        (
            "fm.broken_task.size=3",
            "the run does not use fixture_module.broken_task, expected a knob that has an effect; did you mean "
            "fixture_module.task.size?",
        ),
        ("s/fm.task.size=3", "the run does not use fixture_module.task in the scope s, expected a knob that has an"),
    ],
)
def test_a_knob_of_a_function_that_the_run_does_not_use_is_refused_on_the_command_line(
    param: str, expected: str
) -> None:
    assert complaint(RUN, param).startswith(f"--set {param!r}: {expected}")
    assert load_text(f"{RUN}{param}\n").fingerprint == load_text(RUN).fingerprint  # in a file it may be for another one


def test_a_function_of_a_module_that_is_none_is_named_where_it_is() -> None:
    with pytest.raises(ValueError, match=r"got kl, expected a module that .*; there is objective\.k3$"):
        load_config(["run/arithmetic.gin"], ["objective.policy_objective.kl=@kl.k3"])


def test_everything_unbound_is_listed_at_once() -> None:
    text = f"{HEADER}fm.root.objective = @fm.objective\nfm.objective.beta = %BETA\nfm.root.advantage = @s/fm.scale\n"
    assert complaint(text).splitlines() == [
        "fixture_module.root: got no value for steps, rate, task, expected each bound in a gin file or with --set",
        "s/fixture_module.scale: got no value for factor, offset, expected each bound in a gin file or with --set",
        "fixture_module.objective: got no value for token_loss, expected each bound in a gin file or with --set",
        "BETA: got no value for this macro (used at main.gin:4 by fixture_module.objective), expected --set "
        "'BETA=...' or a line `BETA = ...` in a gin file",
    ]


def test_plain_annotations_are_checked_and_an_integer_is_a_float() -> None:
    knobs = {"count": "1", "ratio": "1", "name": "'x'", "flag": "False"}

    def typed(**changed: str) -> str:
        return "@fm.typed\n" + "\n".join(f"fm.typed.{k} = {v}" for k, v in {**knobs, **changed}.items())

    assert value_of(typed()).keywords == {"count": 1, "ratio": 1, "name": "x", "flag": False}
    for changed in ({"count": "1.0"}, {"ratio": "True"}, {"name": "1"}, {"flag": "0"}, {"flag": "[True]"}):
        with pytest.raises(ValueError, match=r"fixture_module\.typed"):
            value_of(typed(**changed))


def test_an_error_inside_an_imported_module_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breaks_on_import.py").write_text("x = 1\ny = x / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    message = complaint(f"{HEADER}import breaks_on_import\nfm.anything.value = 1\n", root="fixture_module.anything")
    assert message.startswith("main.gin:3: ZeroDivisionError: division by zero (raised at ")
    assert message.endswith("breaks_on_import.py:2)")


def test_a_missing_gin_file_names_a_near_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "arithmetic.gin").write_text("")
    monkeypatch.setattr(parse, "GIN_FOLDER", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"got 'run/arithmetik.gin'.*did you mean run/arithmetic.gin\?"):
        load_config(["run/arithmetik.gin"], [])


@pytest.mark.parametrize("param", ["STEPS", "=3", "1X=3", "fm.root.=3"])
def test_a_parameter_is_name_equals_value(param: str) -> None:
    assert "expected NAME=VALUE" in complaint(RUN, param)


# Another function that takes some of the root's knobs.


def taken(text: str, *params: str, taker: str = "fixture_module.taker") -> Config:
    with TemporaryDirectory() as folder:
        Path(folder, "main.gin").write_text(text, encoding="utf-8")
        return load_config([f"{folder}/main.gin"], params, root="fixture_module.root", taker=taker)


def test_a_taker_receives_what_is_bound_for_the_root_and_nothing_else() -> None:
    fm.calls.clear()
    whole, part = load_text(RUN, "fm.root.objective=@fm.objective").kwargs(), taken(RUN).kwargs()
    assert part.keys() == {"steps", "objective"}
    assert repr(part) == repr({name: whole[name] for name in part})
    assert part["objective"](4, batch=1, totals=2) == whole["objective"](4, batch=1, totals=2)
    assert fm.calls == [3]  # by the whole: a task that is not taken is not made


def test_knobs_that_no_taker_takes_may_be_unbound_and_others_may_not() -> None:
    bare = f"{HEADER}fm.root.objective = %WHAT\nfm.root.rate = %NEVER\n"
    assert taken(bare, "WHAT=1", "fm.root.steps=2").kwargs() == {"steps": 2, "objective": 1}
    with pytest.raises(ValueError, match=r"^fixture_module\.root: got no value for steps, expected each") as caught:
        taken(bare)
    assert "WHAT: got no value for this macro" in str(caught.value)
    assert "NEVER" not in str(caught.value)


# Relaunching.


def test_the_dump_needs_no_include_and_keeps_macros() -> None:
    config = load_text(f'include "$HERE/base.gin"\n{HEADER}', "STEPS=11", more={"base.gin": RUN})
    assert "include" not in config.text
    assert "fixture_module.root.steps = %STEPS" in config.text
    assert load_text(config.text).kwargs()["steps"] == 11
    assert load_text(config.text, "STEPS=12").kwargs()["steps"] == 12
    assert load_text(config.text).text == config.text


def test_macros_in_the_table_of_knobs_are_what_they_stand_for_and_strings_are_left_alone() -> None:
    text = f"""{RUN}
LR = 1e-05
INNER = %LR
fm.root.extra = {{"z": [%INNER, '%LR', @a/fm.shift, None], 1: (%STEPS,)}}
a/fm.shift.by = 'a %STEPS = "b"'
fm.shift.by = 1e999
fm.anything.value = %NOWHERE
b/fm.anything.value = [%CIRCLE]
CIRCLE = [%CIRCLE]
"""
    found = load_text(text).hparams
    assert found == {
        "a/fixture_module.shift.by": 'a %STEPS = "b"',
        "b/fixture_module.anything.value": "[[%CIRCLE]]",
        "fixture_module.anything.value": "%NOWHERE",
        "fixture_module.objective.beta": 0.5,
        "fixture_module.objective.token_loss": "@fixture_module.scale",
        "fixture_module.root.advantage": "@fixture_module.plain",
        "fixture_module.root.extra": "{'z': [1e-05, '%LR', @a/fixture_module.shift, None], 1: (10, )}",
        "fixture_module.root.objective": "@fixture_module.objective",
        "fixture_module.root.rate": 1e-6,
        "fixture_module.root.steps": 10,
        "fixture_module.root.task": "@fixture_module.task()",
        "fixture_module.scale.factor": 2,
        "fixture_module.scale.offset": 3,
        "fixture_module.shift.by": "1e999",
        "fixture_module.task.size": 3,
    }
    assert list(found) == sorted(found)


def test_modules_that_share_a_last_name_keep_apart_in_the_dump() -> None:
    text = (
        f"{HEADER}from json import decoder\nfrom xml.dom import minidom as decoder2\nimport json.encoder\n"
        "from importlib import machinery\nfrom multiprocessing.dummy import connection\n"
        "from multiprocessing import connection as other\n"
        "fm.anything.value = [@decoder.JSONDecoder, @decoder2.parse, @json.encoder.JSONEncoder, "
        "@connection.Listener, @other.Listener]\n"
    )
    config = load_text(text, root="fixture_module.anything")
    assert "from multiprocessing import connection as multiprocessing_connection" in config.text
    again = load_text(config.text, root="fixture_module.anything")
    assert again.kwargs() == config.kwargs()
    assert (again.text, again.fingerprint) == (config.text, config.fingerprint)


def test_the_fingerprint_is_blind_to_spelling_and_sees_every_value() -> None:
    base = load_text(RUN).fingerprint
    same = [
        load_text(RUN.replace("STEPS", "HOW_MANY")),
        load_text(
            RUN.replace("import fixture_module as fm", "import fixture_module").replace("fm.", "fixture_module.")
        ),
        load_text(f"{RUN}fm.shift.by = 9\n"),
        load_text(RUN, "fm.root.steps=10"),
        load_text(f"# a comment\n{RUN}"),
        load_text(RUN, "fm.root.advantage=@fm.plain"),
    ]
    other = [
        load_text(RUN, "STEPS=11"),
        load_text(RUN, "fm.scale.offset=4"),
        load_text(RUN, "fm.task.size=4"),
        load_text(RUN, "fm.root.advantage=@fm.shift"),
        load_text(RUN, "fm.root.extra=1"),
    ]
    assert {config.fingerprint for config in same} == {base}
    assert len({base, *(config.fingerprint for config in other)}) == 1 + len(other)


# The command line.


def test_help_needs_no_torch() -> None:
    code = "import sys; from grpo_fn import run; run.flags().format_help(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_mistyped_knob_of_a_parameter_is_named_with_the_one_that_was_meant() -> None:
    with pytest.raises(
        ValueError, match="Sampling: got a binding for temprature, expected one of sampler, max_rows"
    ) as e:
        load_config(["run/arithmetic.gin"], ["sections.Sampling.temprature=1"])
    assert "--set 'sections.Sampling.temprature=1'" in str(e.value)
    assert "did you mean temperature?" in str(e.value)


def test_the_default_run_folder_is_named_after_the_gin_file_and_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    now = datetime(2026, 1, 2, 3, 4, 5)
    assert run.default_run_dir("gin/run/arithmetic.gin", now, None) == Path("runs/arithmetic-20260102-030405")
    assert run.default_run_dir("experiments/idea/run.gin", now, None) == Path("runs/idea-20260102-030405")
    assert run.default_run_dir("experiments/idea/run.gin", now, "job-7") == Path("runs/idea-job-7")
    for taken in ("idea-20260102-030405", "idea-20260102-030405-2", "idea-job-7"):
        (tmp_path / "runs" / taken).mkdir(parents=True)
    assert run.default_run_dir("experiments/idea/run.gin", now, None) == Path("runs/idea-20260102-030405-3")
    assert run.default_run_dir("experiments/idea/run.gin", now, "job-7") == Path("runs/idea-job-7")  # it goes on there


class FakeTrain:
    """In the place of grpo_fn.train: a root, and a launch that records or raises."""

    class EngineRefused(RuntimeError):
        """As an engine's guard raises it."""

    RunRequest = SimpleNamespace

    def __init__(self, launch: Callable[..., int]) -> None:
        self.train, self.launch = fm.root, launch


def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launch: Callable[..., int], *flags: str) -> int:
    """`main` on RUN with another train module."""
    (tmp_path / "x.gin").write_text(RUN)
    monkeypatch.setitem(sys.modules, "grpo_fn.train", FakeTrain(launch))
    return run.main(["--gin_file", str(tmp_path / "x.gin"), *flags])


def test_launch_receives_the_frozen_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    got: dict[str, Any] = {}

    def launch(request: SimpleNamespace, kwargs: dict[str, Any]) -> int:
        got.update(vars(request), kwargs=kwargs)
        return 17

    assert launched(monkeypatch, tmp_path, launch, "--run_dir", "d", "--gin_param", "STEPS=4", "--force") == 17
    config = load_text(RUN, "STEPS=4")
    assert repr(got.pop("kwargs")) == repr(config.kwargs())
    assert got == {
        "config": config,
        "run_dir": Path("d"),
        "ranks": 1,
        "hosts": 1,
        "dry_run": False,
        "force": True,
    }


def test_bad_input_is_a_message_and_a_failure_at_work_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> int:
        raise FileNotFoundError("got no data")

    def fail_at_work(*_: Any, **__: Any) -> int:
        error = ValueError("got a nan")
        error.add_note("in step 3")
        raise error

    def refuse_engine(*_: Any, **__: Any) -> int:
        error = FakeTrain.EngineRefused("got other weights")
        error.add_note("in step 3")
        raise error

    assert launched(monkeypatch, tmp_path, refuse_engine) == 1
    assert capsys.readouterr().err == "error: got other weights; in step 3\n"
    assert launched(monkeypatch, tmp_path, refuse) == 2
    assert capsys.readouterr().err == "error: got no data\n"
    broken = ["--gin_param", "fm.root.task=@fm.broken_task()", "--gin_param", "fm.broken_task.size=7"]
    assert launched(monkeypatch, tmp_path, fail_at_work, *broken) == 2  # before launch
    assert capsys.readouterr().err == "error: got no file for 7\n"
    with pytest.raises(ValueError, match="got a nan"):
        launched(monkeypatch, tmp_path, fail_at_work)
