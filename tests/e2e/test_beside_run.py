"""Evaluation beside the training: the same figures at the same steps as in its midst, whenever they come."""

import math
import re
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from e2e.faults import ASK, Doom, job
from e2e.running import AtFileEvent, AtPhase, after_step, board, command, ended, finish, metrics, outcome
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_fn.shell.checkpoint import store
from grpo_fn.trainer import async_eval

KILL = signal.SIGKILL
BESIDE = {"sections__Evaluation__async_sampler": "@local_sampler.local"}
# Sampled answers and long steps, so that no two policies give the same ones.
CHANGES: dict[str, Any] = {
    "sections__Evaluation__samples": 3,
    "sections__Evaluation__ks": (1, 2),
    "sections__Evaluation__graders": "[@rewards.named, @rewards.digits]",
    "optimizer__adamw__lr": 3e-2,
}
LATE = {"eval/lag_steps", "eval/seconds"}

Harm = Callable[[], None]


def comparable(folder: Path) -> dict[str, Any]:
    """All of a finished run that does not depend on when an evaluation came."""
    found = outcome(folder)
    rows = [{name: value for name, value in row.items() if name not in LATE} for row in found["metrics"]]
    return {**found, "metrics": rows}


def arguments(cache: Path, folder: Path, **changes: Any) -> list[str]:
    return command(cache, folder, **{**CHANGES, **BESIDE, **changes})


@pytest.fixture(scope="module")
def midst(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of the run with its evaluations in its midst."""
    folder = tmp_path_factory.mktemp("midst")
    assert finish(command(cache, folder / "run", **CHANGES), folder / "out") == 0, (folder / "out").read_text()
    return outcome(folder / "run")


# -- what befalls an evaluation


class Held:
    """Doom: the n-th evaluation is over when it has been looked for looks[n] times, and not before; then one more doom.

    The last number is that of all further ones. But for 0, when it runs beside the steps, it is all done after the last
    look: with the weights of then, were they not its own.
    """

    def __init__(self, *looks: float, then: Harm | None = None) -> None:
        self.looks, self.then = list(looks), then

    def __call__(self) -> None:
        ask, take_in, left = async_eval.run_evaluation, async_eval.record_if_done, [0.0]
        free = threading.Event()

        def asked(*args: Any) -> Any:
            left[0] = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
            free.clear()
            while left[0] > 0 and not free.wait(0.01) and not args[-1]():  # until it is to stop
                pass
            return ask(*args)

        def looked(*args: Any, patience: float, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                free.set()
                patience = 30.0
            return take_in(*args, patience=patience, **kwargs)

        async_eval.run_evaluation, async_eval.record_if_done = asked, looked
        if self.then is not None:
            self.then()


def interrupted(cache: Path, folder: Path, dooms: Sequence[Harm], **changes: Any) -> tuple[Path, list[int]]:
    """Start the same command once for every doom, then to the end; the run folder and the exit codes."""
    return folder / "run", ended(arguments(cache, folder / "run", **changes), folder / "out", dooms)


# -- the same run


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("looks", [0, 4])
def test_evaluation_beside_the_training_measures_what_evaluation_between_steps_does(
    cache: Path, midst: dict[str, Any], tmp_path: Path, looks: int
) -> None:
    """Bit for bit, however late it comes. Evaluations are due every second step: one of four looks is waited for."""
    argv = arguments(cache, tmp_path / "run")
    assert finish(argv, tmp_path / "out", Held(looks)) == 0, (tmp_path / "out").read_text()
    assert comparable(tmp_path / "run") == midst
    assert len({row["eval/pass@1"] for row in midst["metrics"] if "eval/pass@1" in row}) > 2  # policies do differ
    assert len({row["eval/accuracy"] for row in midst["metrics"] if "eval/accuracy" in row}) > 1
    came = {row["step"]: row["eval/lag_steps"] for row in metrics(tmp_path / "run") if "eval/lag_steps" in row}
    said = (tmp_path / "run" / "log.txt").read_text()
    match looks:
        case 0:
            assert came == {0: 1, 2: 1, 4: 1, 6: 0}
        case _:
            assert came == {0: 2, 2: 2, 4: 2, 6: 0}
            assert len(re.findall("waiting for the evaluation of step [024]", said)) == 3
    for row in metrics(tmp_path / "run"):
        assert ("eval/accuracy" in row) == (row["step"] % 2 == 0)
        assert ("eval/seconds" in row) == (row["step"] % 2 == 0)
    assert "before training: accuracy" in said
    assert "evaluation of step 4: accuracy" in said
    events = board(tmp_path / "run").Scalars("eval/accuracy")
    assert [event.step for event in events] == [0, 2, 4, 6]


# -- a run that ends meanwhile

FEW = {f"sections__Checkpoints__{name}": n for name, n in (("every", 1), ("keep_last", 1), ("keep_best", 0))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("looks", "step", "pending", "changes"),
    [
        ((math.inf,), 1, [0], {}),
        ((0, math.inf), 3, [2], {"sections__Checkpoints__every": 50}),  # what is pending is saved all the same
        ((0, math.inf), 3, [2], FEW),  # and kept beside the newest until it has come
        ((0, math.inf), 4, [2, 4], {}),
    ],
    ids=["before the first step", "no checkpoint", "one is kept", "one at work, one due"],
)
def test_asked_to_stop_it_does_not_wait_and_makes_the_evaluations_again(
    cache: Path, midst: dict[str, Any], tmp_path: Path, looks: tuple, step: int, pending: list[int], changes: dict
) -> None:
    argv = arguments(cache, tmp_path / "run", **changes)
    code = finish(argv, tmp_path / "out", Held(*looks, then=AtPhase("generate", step, signal.SIGTERM)))
    assert code == 75, (tmp_path / "out").read_text()
    newest = store.steps(tmp_path / "run" / "checkpoints")[-1]
    assert store.meta(tmp_path / "run" / "checkpoints" / f"step_{newest}")["pending"] == pending
    assert all("eval/accuracy" not in row for row in metrics(tmp_path / "run") if row["step"] in pending)
    assert finish(argv, tmp_path / "out") == 0, (tmp_path / "out").read_text()
    kept = {"kept": None} if changes else {}  # which checkpoints are, goes by late scores as by others
    assert {**comparable(tmp_path / "run"), **kept} == {**midst, **kept}


@pytest.mark.slow
def test_weights_that_are_gone_are_named_and_the_run_goes_on(
    cache: Path, midst: dict[str, Any], tmp_path: Path
) -> None:
    argv = arguments(cache, tmp_path / "run")
    assert finish(argv, tmp_path / "out", Held(0, math.inf, then=AtPhase("generate", 3, signal.SIGTERM))) == 75
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_2")
    assert finish(argv, tmp_path / "out") == 0, (tmp_path / "out").read_text()
    lost = "the evaluation of step 2 is lost, its weights are not there any more: manifest.json is missing"
    assert lost in (tmp_path / "run" / "log.txt").read_text()
    found = comparable(tmp_path / "run")
    assert found["metrics"][2].keys() == midst["metrics"][1].keys()
    found["metrics"].pop(2)
    assert found["metrics"] == [row for row in midst["metrics"] if row["step"] != 2]


DOOMS = st.one_of(
    st.builds(lambda n: lambda folder: AtFileEvent(folder, n, KILL), st.integers(1, 250)),
    st.builds(
        lambda phase, n, later: lambda folder: AtPhase(phase, n, KILL, later),
        st.sampled_from(["evaluate", "generate", "train", "log", "checkpoint"]),
        st.integers(1, 6),
        st.sampled_from([0, 1e-2, 1e-1]),
    ),
)


@pytest.mark.slow
@settings(max_examples=max(4, settings.default.max_examples // 12))
@given(dooms=st.lists(st.tuples(DOOMS, st.integers(0, 3)), min_size=1, max_size=2), every=st.sampled_from([1, 2, 3]))
def test_a_run_with_evaluation_beside_it_killed_at_any_moment_ends_as_undisturbed(
    cache: Path, midst: dict[str, Any], dooms: list[tuple[Callable[[Path], Harm], int]], every: int
) -> None:
    with TemporaryDirectory() as where:
        planned = [Held(looks, then=doom(Path(where) / "run")) for doom, looks in dooms]
        folder, codes = interrupted(cache, Path(where), planned, sections__Checkpoints__every=every)
        assert set(codes) <= {0, -KILL}
        assert {**comparable(folder), "kept": None} == {**midst, "kept": None}


# -- an evaluation that fails


@pytest.mark.slow
def test_two_ranks_train_beside_one_evaluation_and_both_stop_and_go_on(cache: Path, tmp_path: Path) -> None:
    assert job(tmp_path / "midst", 2, command(cache, tmp_path / "midst" / "run", **CHANGES)).code == 0
    argv = arguments(cache, tmp_path / "beside" / "run")
    first = job(tmp_path / "beside", 2, argv, doom=Doom(1, partial(after_step, 3), ASK))
    assert set(first.codes(0).values()) == {75}, first.everything()
    assert job(tmp_path / "second", 2, argv).code == 0
    assert comparable(tmp_path / "beside" / "run") == comparable(tmp_path / "midst" / "run")
