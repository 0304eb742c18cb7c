"""A figure that comes late counts for its step: in the metrics, for the rules of health, and for what is kept."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings
from profiles import quarter

from grpo_fn.shell.checkpoint import store
from grpo_fn.shell.checkpoint.store import seal
from grpo_fn.shell.logging.metrics_writer import MetricsWriter
from grpo_fn.trainer import async_eval, health
from grpo_fn.trainer.sections import Health
from grpo_fn.trainer.state import BEST, figures_of

numbers = st.floats(width=32) | st.integers(-1000, 1000)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text(encoding="ascii").splitlines()]


def shown(value: float) -> float | None:
    """A number as JSON has it."""
    return value if math.isfinite(value) else None


# -- in the metrics


@settings(max_examples=quarter())
@given(st.dictionaries(st.integers(0, 6), st.tuples(st.integers(0, 6), numbers), max_size=4), st.data())
def test_a_line_ends_as_if_everything_had_been_there_at_once(
    late: Mapping[int, tuple[int, float]], data: st.DataObject
) -> None:
    """Step to (how many steps late, figure): whenever it came, and wherever the run stopped and went on."""
    stops = data.draw(st.sets(st.integers(1, 6)), label="stops")
    with TemporaryDirectory() as folder:
        path, writer = Path(folder), MetricsWriter(Path(folder), start_step=0)
        for now in range(7):
            if now in stops:
                writer.close()
                writer = MetricsWriter(path, start_step=now)
            writer.scalars(now, {"loss/kl": now / 3})
            for step, (after, value) in late.items():
                if now == min(6, step + after):
                    writer.amend(step, {"eval/accuracy": value, "eval/lag_steps": now - step})
        writer.close()
        for row in rows(path):
            step = row["step"]
            expected: dict[str, Any] = {"step": step, "loss/kl": step / 3}
            if step in late:
                after, value = late[step]
                expected |= {"eval/accuracy": shown(value), "eval/lag_steps": min(6 - step, after)}
            assert row == expected
        assert [row["step"] for row in rows(path)] == [*range(7)]
        assert sorted(file.name for file in path.iterdir()) == ["metrics.jsonl", "tensorboard"]


def test_a_resume_undoes_what_came_late_with_its_step_and_keeps_the_rest(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, start_step=0) as writer:
        for now in range(4):
            writer.scalars(now, {"loss/kl": 1.0})
        for step in (1, 3):
            writer.amend(step, {"eval/accuracy": 0.25})
    with MetricsWriter(tmp_path, start_step=3) as writer:
        assert rows(tmp_path)[1] == {"step": 1, "loss/kl": 1.0, "eval/accuracy": 0.25}
        writer.scalars(3, {"loss/kl": 2.0})
    assert rows(tmp_path)[3] == {"step": 3, "loss/kl": 2.0}
    assert figures_of(tmp_path, 1)["eval/accuracy"] == 0.25
    assert "eval/accuracy" not in figures_of(tmp_path, 3)
    assert figures_of(tmp_path, 9) == {}


# -- for the rules of health


def low(history: health.History) -> str | None:
    """The newest evaluation is below a half."""
    value = health.newest_value(history, BEST)
    return None if value is None or value >= 0.5 else f"low: {value}"


def evaluated_low(history: health.History) -> str | None:
    """Any evaluation so far was below a half: it never stops saying so."""
    bad = [line[BEST] for line in history if line.get(BEST, 1.0) < 0.5]
    return f"{bad[0]} once" if bad else None


def high_loss(history: health.History) -> str | None:
    """A rule that does not look at evaluations."""
    value = health.newest_value(history, "loss/kl")
    return None if value is None or value <= 0.5 else f"loss {value}"


RULES = (low, evaluated_low, high_loss)


@given(
    losses=st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=30),
    scores=st.dictionaries(st.integers(0, 29), st.sampled_from([0.0, 1.0]), max_size=5),
)
def test_rules_say_of_a_step_what_they_would_have_said_there(
    losses: Sequence[float], scores: Mapping[int, float]
) -> None:
    """At the step without its evaluation, and when that came: together what they say when it is there at once."""
    rules = Health(warn=RULES, stop=(high_loss,), limits={})
    lines = [health.history_line(step, {"loss/kl": loss}) for step, loss in enumerate(losses)]
    whole = [{**line, **({BEST: scores[i]} if i in scores else {})} for i, line in enumerate(lines)]
    for step in range(len(lines)):
        before = [*whole[:step], lines[step]]
        after = async_eval.amend_history(before, step, {BEST: scores[step]} if step in scores else {})
        assert after == whole[: step + 1]
        first = {found.rule for found in health.new_findings(RULES, before)}
        said, fatal = async_eval.findings_of_late_evaluation(rules, before, after)
        assert fatal == []  # it was said at its step
        assert first.isdisjoint(found.rule for found in said)
        assert first | {found.rule for found in said} >= {found.rule for found in health.new_findings(RULES, after)}
        assert {found.rule for found in said} <= {found.rule for found in health.new_findings(RULES, after)}


def test_a_late_evaluation_may_end_the_run() -> None:
    rules = Health(warn=(), stop=(low,), limits={})
    before = [health.history_line(0, {"loss/kl": 0.0})]
    said, fatal = async_eval.findings_of_late_evaluation(
        rules, before, async_eval.amend_history(before, 0, {BEST: 0.25})
    )
    assert (said, fatal) == ([], [health.HealthFinding("low", "low: 0.25")])


# -- for what is kept


scores = st.none() | st.sampled_from([0.0, 0.5, 1.0])


@settings(max_examples=quarter())
@given(
    found=st.dictionaries(st.integers(0, 50), st.tuples(scores, scores), min_size=1, max_size=6),
    spare=st.sets(st.integers(0, 50)),
    last=st.integers(1, 3),
    best=st.integers(0, 3),
)
def test_pruning_goes_by_late_scores_as_by_those_inside_and_spares_what_is_pending(
    found: Mapping[int, tuple[float | None, float | None]], spare: set[int], last: int, best: int
) -> None:
    """Step to (score in the checkpoint, score that came later)."""
    late = {step: after for step, (_, after) in found.items() if after is not None}
    left = {}
    with TemporaryDirectory() as folder:
        for root, given_late in ((Path(folder) / "late", True), (Path(folder) / "inside", False)):
            for step, (inside, after) in found.items():
                score = inside if given_late or after is None else after
                (root / f"step_{step}").mkdir(parents=True)
                seal(root / f"step_{step}", step, {"metrics": {} if score is None else {"m": score}}, {})
            kept = {"scores": late, "spare": spare} if given_late else {}
            store.prune(root, keep_last=last, keep_best=best, metric="m", **kept)
            left[given_late] = {*store.steps(root)}
    assert left[True] == left[False] | (spare & found.keys())
