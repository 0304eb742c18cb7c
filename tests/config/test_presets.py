"""Every preset of gin/algo: it says what it is, resolves on a run file, and laid over any other is exactly itself."""

import re
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest

from grpo_fn.algo import objective
from grpo_fn.algo.step import Algorithm
from grpo_fn.config import load_config, parse_gin
from grpo_fn.config.parse import GIN_FOLDER
from grpo_fn.config.resolve import Bindings, Node, canonical_text, fill_macros, resolve
from grpo_fn.train import MACROS, train
from grpo_fn.trainer.sections import Settings
from grpo_fn.trainer.validate import check_algorithm

PROJECT = Path(__file__).resolve().parents[2]
PRESETS = sorted(path.stem for path in (PROJECT / "gin" / "algo").glob("*.gin"))
# Knobs of step.Algorithm and of its objective that belong to the run: no preset may switch them off.
OF_THE_RUN = {"prompts", "group_size", "epochs", "minibatches", "old_logp", "control"}
BASE_LINES = 150
# What a preset needs of the run file, as its header says.
OWN_PASS = ["--gin_param", "step.Algorithm.old_logp = @step.from_trainer"]
TEACHER = ["--gin_file", "scale/teacher.gin", "--gin_param", "TEACHER = @models.TinyModel()"]
DEMONSTRATIONS = ["--gin_file", "task/demonstrations.gin"]  # of the task itself, where a user names a file
DEMONSTRATIONS += ["--gin_param", "sections.Demonstrations.task = @arithmetic.demonstration_task"]
for knob in ("max_value = 5", "operations = 3", "test_size = 8", "worked_share = 0.5"):
    DEMONSTRATIONS += ["--gin_param", f"arithmetic.demonstration_task.{knob}"]
EPISODES = ["--gin_file", str(PROJECT / "tests" / "e2e" / "episodes.gin")]
SELF_TEACHER, SIBLING_TEACHER = (["--gin_file", f"scale/{name}_teacher.gin"] for name in ("self", "sibling"))
NEEDS = {
    "m2po": (OWN_PASS, "expected step.Algorithm.old_logp = @step.from_trainer"),
    "chord": (DEMONSTRATIONS, "expected some: --gin_file task/demonstrations.gin"),
    **dict.fromkeys(["opd", "mopd", "iw_opd", "rlsd"], (TEACHER, "expected one: --gin_file scale/teacher.gin")),
    "sdft": (SELF_TEACHER, "expected one: --gin_file scale/teacher.gin"),
    "echo": (EPISODES, "expected @sections.Episodes(), or step.Algorithm.beside without @supervised.observations"),
    "sdpo": (SIBLING_TEACHER, "expected one: --gin_file scale/teacher.gin"),
}
each_preset = pytest.mark.parametrize("name", PRESETS)


@cache
def algorithm(name: str) -> Node:
    """The algorithm that the run file and this preset on top resolve to."""
    return load_config(["run/arithmetic.gin", f"algo/{name}.gin"], []).root.knobs["algorithm"]


read = cache(lambda *files: parse_gin(files, []))  # its bindings are for looking at


def over(below: list[str], name: str) -> Bindings:
    """What the run file, some presets and another one on top bind: `parse_gin` of all, each of them read once."""
    lower, upper = read("run/arithmetic.gin", *(f"algo/{each}.gin" for each in below)), read(f"algo/{name}.gin")
    laid = Bindings(**{part.name: getattr(lower, part.name) | getattr(upper, part.name) for part in fields(Bindings)})
    laid.used_at = upper.used_at | lower.used_at
    laid.knobs = {key: lower.knobs.get(key, {}) | upper.knobs.get(key, {}) for key in laid.knobs}
    return laid


@each_preset
def test_a_preset_opens_with_its_paper_and_what_it_takes_from_it(name):
    lines = (PROJECT / "gin" / "algo" / f"{name}.gin").read_text(encoding="utf-8").splitlines()
    text = "\n".join(takewhile(lambda line: line.startswith("#"), lines))
    assert re.search(r"arXiv:\d{4}\.\d{5}", text.splitlines()[0]), "no citation on the first line"
    assert re.search("From the (paper|code|documentation):", text)


def bound_for(function: Callable, bindings: Bindings) -> dict[str, object]:
    """The knobs of a function that files bind, in no scope."""
    return bindings.knobs.get(("", function), {})


def test_the_shared_preset_binds_every_knob_of_an_algorithm_but_those_of_the_run() -> None:
    """Or what was laid under a preset would show through."""
    shared = read("algorithm.gin")
    assert bound_for(Algorithm, shared).keys() == {knob.name for knob in fields(Algorithm)} - OF_THE_RUN
    of_objective = {"kl", "beta", "entropy_bonus"}
    assert bound_for(objective.policy_objective, shared).keys() == of_objective
    for name in PRESETS:
        knobs = bound_for(objective.policy_objective, read(f"algo/{name}.gin")).keys()
        assert knobs == of_objective | {"token_loss", "loss_aggregation"}, name  # the run says importance_correction
        assert not bound_for(Algorithm, read(f"algo/{name}.gin")).keys() & OF_THE_RUN, name


def test_a_preset_includes_what_all_share_and_binds_nothing_to_the_value_that_it_has_there(tmp_path: Path) -> None:
    shared = read("algorithm.gin").knobs
    for name in PRESETS:
        text = (GIN_FOLDER / "algo" / f"{name}.gin").read_text()
        assert text.count('\ninclude "') == text.count('\ninclude "algorithm.gin"\n') == 1, name
        (tmp_path / f"{name}.gin").write_text(text.replace('include "algorithm.gin"\n', ""))
        alone = parse_gin([str(tmp_path / f"{name}.gin")], []).knobs
        again = [
            f"{target.__name__}.{knob}"
            for (scope, target), knobs in alone.items()
            for knob, value in knobs.items()
            if knob in (there := shared.get((scope, target), {})) and there[knob] == value
        ]
        assert not again, f"{name}: {again}"


def test_base_gin_fits_a_few_screens() -> None:
    assert len((GIN_FOLDER / "base.gin").read_text().splitlines()) <= BASE_LINES


def test_a_preset_over_another_is_the_preset_alone() -> None:
    """Over all of them: a knob that one leaves behind has the value that the last of them binds."""
    for name in PRESETS:
        laid = over(PRESETS, name)
        fill_macros(laid, MACROS)
        text = canonical_text(resolve(laid, train, ["algorithm"]).knobs["algorithm"])
        assert text == canonical_text(algorithm(name)), name
    files = ["run/arithmetic.gin", "algo/chord.gin", "algo/dr_grpo.gin"]  # as the program lays one over another
    assert load_config(files, []).root.knobs["algorithm"] == algorithm("dr_grpo")


def test_no_two_presets_are_the_same() -> None:
    assert len({canonical_text(algorithm(name)) for name in PRESETS}) == len(PRESETS)


@each_preset
def test_a_preset_is_ready_to_run(name: str) -> None:
    """With what its header says that it needs, and not without."""
    needed, refusal = NEEDS.get(name, ([], ""))
    files = ["run/arithmetic.gin", f"algo/{name}.gin", *flagged(needed, "--gin_file")]
    if needed:
        with pytest.raises(ValueError, match=re.escape(refusal)):
            check_algorithm(Settings(**load_config(files[:2], []).kwargs()))
    check_algorithm(Settings(**load_config(files, flagged(needed, "--gin_param")).kwargs()))


def flagged(argv: list[str], flag: str) -> list[str]:
    """The values of a flag that is given more than once."""
    return [value for name, value in zip(argv[::2], argv[1::2], strict=True) if name == flag]


def test_a_preset_is_laid_over_a_run_file_that_binds_no_macro(tmp_path: Path) -> None:
    plain = load_config(["run/arithmetic.gin"], []).text
    for macro, value in (("MAX_NEW_TOKENS", "24"), ("STEPS", "60"), ("SEED", "3")):
        plain = re.sub(rf"^{macro} = .*\n", "", plain, flags=re.MULTILINE)
        plain = re.sub(rf"^objective\.constant_length\.max_length = %{macro}\n", "", plain, flags=re.MULTILINE)
        plain = plain.replace(f"%{macro}", value)
    (tmp_path / "mine.gin").write_text(plain)
    root = load_config([str(tmp_path / "mine.gin"), "algo/dr_grpo.gin"], []).root
    objective_knobs = root.knobs["algorithm"].knobs["objective"].knobs
    assert objective_knobs["loss_aggregation"].knobs["max_length"] == 24
    assert root.knobs["steps"] == 60
