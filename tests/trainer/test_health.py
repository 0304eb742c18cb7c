"""Invariants of every rule of health: it says something exactly on its condition, never raises, and is said once."""

import importlib
import inspect
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given

import grpo_fn
from grpo_fn.trainer import health
from grpo_fn.trainer.sections import Health

# Rules of the table with shorter windows and other limits, so that short histories decide.
SHORT = {
    **{name: {"steps": 3} for name in ("few_groups_with_signal", "invalid_high", "truncated_high")},
    **{name: {"window": 3} for name in ("entropy_collapsed", "length_exploded", "reward_falling", "generation_slow")},
    "reward_without_accuracy": {"evaluations": 3},
    # More steps than the healthy histories have: a reward that moves by 4 % around one value is flat, if they go on.
    "reward_flat": {"steps": 44},
    "loss_spike": {"window": 5},
}
LIMITS = {"overflowing": 3, "entropy_collapsed": 0.25, "length_exploded": 2.0, "loss_spike": 4.0}


def with_limit(name: str, limit: float) -> health.LimitRule:
    rule = health.RULES[name]
    return replace(rule, limit=limit, measure=partial(rule.measure, **SHORT.get(name, {})))


RULES = {name: with_limit(name, LIMITS.get(name, rule.limit)) for name, rule in health.RULES.items()}

# A line that makes each rule speak when the history is made of such lines, and what it is made of when all is well.
WELL = {
    "loss/kl": 0.01,
    "loss/entropy": 0.8,
    "loss/grad_norm": 0.5,
    "loss/logprob_diff_mean": 1e-5,
    "loss/objective": 0.0,
    "reward/mean": 0.4,
    "reward/correct_rate": 0.4,
    "advantage/zero_variance_groups": 0.2,
    "reward/invalid": 0.0,
    "generation/truncated": 0.05,
    "generation/length_mean": 60.0,
    "generation/tokens_per_second": 1000.0,
    "optimizer/overflows": 2.0,
    "eval/accuracy": 0.5,
}
NAMES = [*WELL, "step", "time/total", "loss/ratio_max"]

numbers = st.floats()  # NaN and infinities among them
histories = st.lists(st.dictionaries(st.sampled_from(NAMES), numbers), max_size=24)
positive = st.floats(1e-3, 1e3)


def lines(*metrics: dict) -> list[dict]:
    return [{"step": float(i), **one} for i, one in enumerate(metrics)]


def column(name: str, values: list) -> list[dict]:
    """A healthy history in which one metric takes these values; None leaves it out."""
    rest = {key: value for key, value in WELL.items() if key != name}
    return lines(*[{**rest, **({} if value is None else {name: value})} for value in values])


# Every rule -----------------------------------------------------------------------------------------------------------


def test_every_rule_of_the_table_is_tested_here_and_on_the_page_with_its_limit() -> None:
    assert SPEAKING.keys() == health.RULES.keys()
    page = (Path(__file__).resolve().parents[2] / "docs" / "monitoring" / "metrics.md").read_text()
    lines = dict(re.findall(r"^\| `(\w+)` \| .* \| ([\d.]+)[^|]* \|$", page, re.MULTILINE))
    assert {name: float(limit) for name, limit in lines.items()} == {n: rule.limit for n, rule in health.RULES.items()}


@given(histories)
def test_on_any_history_a_rule_says_nothing_or_a_text_and_the_same_again(history) -> None:
    before = repr(history)
    for rule in RULES.values():
        said = rule(history)
        assert said is None or (isinstance(said, str) and len(said) > 80)
        assert rule(history) == said
    assert repr(history) == before


@given(st.lists(st.dictionaries(st.sampled_from(sorted(WELL)), st.floats(-0.04, 0.04)), max_size=40))
def test_a_healthy_run_is_left_in_peace(wobbles) -> None:
    """Each metric within 4 % of where it is, a counter of overflows that stands still, any metric missing."""
    history = lines(*[{k: v * (1 + w.get(k, 0.0)) for k, v in WELL.items() if len(w) < 9 or k in w} for w in wobbles])
    history = [{**one, "optimizer/overflows": 2.0} for one in history]
    history = [{k: v for k, v in one.items() if k != "eval/accuracy" or i % 5 == 0} for i, one in enumerate(history)]
    assert [name for name, rule in RULES.items() if rule(history) is not None] == []


@given(histories)
def test_null_and_nan_and_infinity_are_alike_so_that_a_resumed_run_judges_as_one_that_was_not(history) -> None:
    rows = [{k: v for k, v in one.items() if k != "step"} for one in history]
    read = [{k: v if math.isfinite(v) else None for k, v in row.items()} for row in rows]
    again = [health.history_line(i, row) for i, row in enumerate(read)]
    assert repr(again) == repr([health.history_line(i, row) for i, row in enumerate(rows)])
    in_memory = [{**row, "step": float(i)} for i, row in enumerate(rows)]
    assert [rule(again) for rule in RULES.values()] == [rule(in_memory) for rule in RULES.values()]


# What each rule is about ----------------------------------------------------------------------------------------------

ABOVE = [("kl_high", "loss/kl", 0.5), ("kl_high", "loss/kl_start", 0.5), ("grad_norm_high", "loss/grad_norm", 10.0)]
ABOVE += [("logprob_diff_high", "loss/logprob_diff_mean", 0.1)]
SHARES = [
    ("few_groups_with_signal", "advantage/zero_variance_groups", 0.9),
    ("invalid_high", "reward/invalid", 0.5),
    ("truncated_high", "generation/truncated", 0.5),
]


@pytest.mark.parametrize(("name", "metric", "limit"), ABOVE)
@given(st.lists(st.floats(-1.0, 30.0) | st.none() | st.just(math.nan), min_size=1, max_size=6))
def test_a_limit_is_on_the_newest_value_alone(name, metric, limit, values) -> None:
    said = RULES[name](column(metric, values))
    assert (said is not None) == (values[-1] is not None and values[-1] > limit)
    if said:
        assert f"{metric} is {values[-1]:.3g} at step {len(values) - 1}, above {limit:g}" in said


@pytest.mark.parametrize(("name", "metric", "share"), SHARES)
@given(st.lists(st.floats(0.0, 1.0) | st.just("limit") | st.none(), max_size=8))
def test_a_share_has_to_be_reached_in_every_one_of_the_last_steps(name, metric, share, values) -> None:
    values = [share if value == "limit" else value for value in values]
    there = [value for value in values if value is not None]
    said = RULES[name](column(metric, values))
    assert (said is not None) == (len(there) >= 3 and all(value >= share for value in there[-3:]))


@pytest.mark.parametrize(("rate", "side"), [(0.3, "too hard"), (0.7, "too easy")])
def test_no_signal_says_on_which_side_the_problems_are_wrong(rate, side) -> None:
    history = [{**line, "reward/correct_rate": rate} for line in column("advantage/zero_variance_groups", [1.0] * 3)]
    assert side in RULES["few_groups_with_signal"](history)


def test_a_step_whose_rows_were_all_lost_is_not_called_too_hard() -> None:
    history = [{**one, "reward/correct_rate": 0.0, "reward/invalid": 1.0} for one in SPEAKING["few_groups_with_signal"]]
    assert RULES["few_groups_with_signal"](history) is None
    assert "said None" in RULES["invalid_high"](history)
    history[-1] |= {"reward/timeouts": 3.0, "reward/worker_crashes": 2.0, "reward/exceptions": 0.0}
    assert "(timeouts 3, worker_crashes 2)" in RULES["invalid_high"](history)


@given(st.lists(st.integers(0, 2), max_size=8))
def test_overflowing_is_a_count_that_rises_in_every_step(rises) -> None:
    counts = [float(sum(rises[: i + 1])) for i in range(len(rises))]
    said = RULES["overflowing"](column("optimizer/overflows", counts))
    assert (said is not None) == (len(rises) >= 4 and all(rises[-3:]))


@given(st.dictionaries(st.sampled_from(NAMES), st.floats(allow_nan=True), min_size=1))
def test_not_finite_names_what_is_not_and_only_of_its_groups(figures) -> None:
    figures = {name: x for name, x in figures.items() if name != "optimizer/overflows"}  # its own test is the next
    said = RULES["not_finite"]([figures])
    bad = [n for n, v in figures.items() if not math.isfinite(v) and n.split("/")[0] in ("reward", "advantage", "loss")]
    assert (said is not None) == bool(bad)
    if said:
        assert all(name in said for name in sorted(bad)[:4])


@pytest.mark.parametrize(("before", "now", "skipped"), [(2, 3, True), (None, 1, True), (3, 3, False), (3, None, False)])
def test_the_norm_of_a_step_that_float16_skipped_is_no_fault(before, now, skipped) -> None:
    counts = [{} if n is None else {"optimizer/overflows": float(n)} for n in (before, now)]
    history = [{**WELL, "loss/grad_norm": 1.0}, {**WELL, "loss/grad_norm": math.inf}]
    history = [
        {**{k: v for k, v in w.items() if k != "optimizer/overflows"}, **c}
        for w, c in zip(history, counts, strict=True)
    ]
    assert (RULES["not_finite"](history) is None) == skipped
    assert RULES["not_finite"]([*history[:1], {**history[1], "loss/kl": math.nan}]) is not None
    assert RULES["grad_norm_high"](history) is None


ENDS = [("entropy_collapsed", "loss/entropy", 0.25, False), ("length_exploded", "generation/length_mean", 2.0, True)]


@pytest.mark.parametrize(("name", "metric", "times", "up"), ENDS)
@given(st.lists(positive, min_size=3, max_size=3), st.lists(positive, max_size=4), st.lists(positive, max_size=3))
def test_now_is_compared_with_the_beginning_over_windows(name, metric, times, up, first, between, newest) -> None:
    values = [*first, *between, *newest]
    start, now = sum(first) / 3, sum(values[-3:]) / 3
    assume(not math.isclose(now, times * start))
    said = RULES[name](column(metric, values))
    assert (said is not None) == (len(values) >= 6 and (now > times * start if up else now < times * start))


def gamed(accuracies: list[float], rewards: list[list[float]]) -> list[dict]:
    """Evaluations, each followed by the rewards of the steps up to the next one, which is on the last of them."""
    history = [{"eval/accuracy": accuracies[0]}]
    for accuracy, between in zip(accuracies[1:], rewards, strict=True):
        history += [{"reward/mean": reward} for reward in between]
        history[-1] = {**history[-1], "eval/accuracy": accuracy}
    return lines(*history)


shares = st.sampled_from([0.1, 0.2, 0.3, 0.4])
stretches = st.lists(shares, min_size=2, max_size=4)


@given(st.lists(shares, min_size=2, max_size=5), st.data())
def test_reward_without_accuracy_is_a_fall_from_the_best_evaluation_with_reward_rising_since(accuracies, data) -> None:
    rewards = [data.draw(stretches) for _ in accuracies[1:]]
    said = RULES["reward_without_accuracy"](gamed(accuracies, rewards))
    recent = accuracies[-3:]
    best = len(accuracies) - 1 - recent[::-1].index(max(recent))
    since = [reward for between in rewards[best:] for reward in between]
    half = len(since) // 2
    rose = half > 0 and sum(since[-half:]) / half - sum(since[:half]) / half > 0.02
    assert (said is not None) == (max(recent) - recent[-1] > 0.05 and rose)


@given(st.lists(st.floats(-5.0, 5.0), min_size=44, max_size=60), st.floats(0.0, 1.0), st.floats(0.001, 1.0))
def test_a_flat_reward_is_one_whose_halves_are_alike_and_that_is_not_solved(rewards, right, rise) -> None:
    history = [{**one, "reward/correct_rate": right} for one in column("reward/mean", rewards)]
    halves = [math.fsum(part) / 22 for part in (rewards[-44:-22], rewards[-22:])]
    assume(abs(abs(halves[0] - halves[1]) - rise) > 1e-9)
    said = with_limit("reward_flat", rise)(history)
    assert (said is not None) == (abs(halves[0] - halves[1]) < rise and right < 0.9)


@given(st.lists(st.floats(-5.0, 5.0), min_size=1, max_size=24), st.floats(0.01, 3.0))
def test_a_falling_reward_is_below_the_best_window_before(rewards, fall) -> None:
    means = [math.fsum(rewards[i : i + 3]) / 3 for i in range(len(rewards) - 2)]
    drop = max(means[:-3], default=-math.inf) - means[-1] if len(means) > 3 else -math.inf
    assume(abs(drop - fall) > 1e-9)
    said = with_limit("reward_falling", fall)(column("reward/mean", rewards))
    assert (said is not None) == (drop > fall)


@given(st.lists(st.floats(-1.0, 1.0), min_size=5, max_size=12), st.floats(-1e3, 1e3), st.floats(1.0, 20.0))
def test_a_spike_is_further_from_the_median_than_times_the_furthest_before(losses, newest, times) -> None:
    before = sorted(losses[-5:])
    spread = max(abs(value - before[2]) for value in before)
    assume(abs(abs(newest - before[2]) - times * spread) > 1e-9)
    said = with_limit("loss_spike", times)(column("loss/objective", [*losses, newest]))
    assert (said is not None) == (spread > 0 and abs(newest - before[2]) > times * spread)


# What it says ---------------------------------------------------------------------------------------------------------

PACKAGE = Path(grpo_fn.__file__).parent
SPEAKING = {
    "kl_high": column("loss/kl", [2.0]),
    "grad_norm_high": column("loss/grad_norm", [99.0]),
    "logprob_diff_high": column("loss/logprob_diff_mean", [0.5]),
    "not_finite": column("loss/objective", [math.nan]),
    "few_groups_with_signal": column("advantage/zero_variance_groups", [1.0] * 3),
    "invalid_high": column("reward/invalid", [1.0] * 3),
    "truncated_high": column("generation/truncated", [0.8] * 3),
    "overflowing": column("optimizer/overflows", [1.0, 2.0, 3.0, 4.0]),
    "entropy_collapsed": column("loss/entropy", [1.0] * 3 + [0.01] * 3),
    "length_exploded": column("generation/length_mean", [10.0] * 3 + [90.0] * 3),
    "reward_without_accuracy": gamed([0.5, 0.2], [[0.1, 0.9]]),
    "reward_flat": column("reward/mean", [0.3] * 44),
    "reward_falling": column("reward/mean", [0.8] * 3 + [0.5] * 3),
    "generation_slow": column("generation/tokens_per_second", [100.0] * 3 + [40.0] * 3),
    "loss_spike": column("loss/objective", [0.1, 0.2, 0.1, 0.2, 0.1, 3.0]),
}


@pytest.mark.parametrize("name", RULES)
def test_every_knob_that_a_rule_advises_exists(name) -> None:
    text = RULES[name](SPEAKING[name])
    advised = re.findall(r"\b([a-z_]+)\.([A-Za-z_]+)\.([a-z_]+)\b", text)
    assert advised
    for module, function, knob in advised:
        (path,) = PACKAGE.rglob(f"{module}.py")
        dotted = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        target = getattr(importlib.import_module(dotted), function)
        assert knob in inspect.signature(target).parameters, f"{module}.{function}.{knob}"


@pytest.mark.parametrize(
    ("limits", "complaint"),
    [
        ({"kl_hihg": 1.0}, "got the rule 'kl_hihg', expected one of not_finite, kl_high"),
        ({"kl_high": 0.0}, "got 0.0 for kl_high, expected a number above 0"),
        ({"overflowing": 65}, "got 65 for overflowing, expected a number above 0 and at most 64"),
    ],
)
def test_limits_that_cannot_work_are_refused(limits, complaint) -> None:
    with pytest.raises(ValueError, match=re.escape(f"sections.Health.limits: {complaint}")):
        Health(warn=(), stop=(), limits=limits)


def test_rules_are_chosen_by_name_with_their_limits_and_a_function_is_tried_first() -> None:
    health_section = Health(warn=["kl_high", slow], stop=["grad_norm_high"], limits={"kl_high": 1.5})
    warn, stop = health_section.rules()
    assert [health.rule_name(rule) for rule in warn] == ["kl_high", "slow"]
    assert warn[0].limit == 1.5
    assert stop == [health.RULES["grad_norm_high"]]
    with pytest.raises(ValueError, match=re.escape("sections.Health: got the rule 'kl', expected one of not_finite,")):
        Health(warn=[], stop=["kl"], limits={})
    with pytest.raises(ValueError, match="slow: seconds: got -1"):
        Health(warn=[partial(slow, seconds=-1)], stop=[], limits={})


def slow(history: health.History, *, seconds: int = 9) -> str | None:
    if seconds < 0:
        raise ValueError(f"seconds: got {seconds}")
    return None


# What is new and what is remembered -----------------------------------------------------------------------------------

KL = RULES["kl_high"]


def reported_steps(history: list[dict]) -> list[int]:
    """The steps at which the rule was news."""
    return [i for i in range(len(history)) if health.new_findings([KL], history[: i + 1])]


@given(st.lists(st.booleans(), max_size=40))
def test_a_finding_is_news_when_it_begins_and_when_it_begins_anew_after_a_calm(high) -> None:
    history = column("loss/kl", [1.0 if one else 0.1 for one in high])
    expected = [i for i, one in enumerate(high) if one and not any(high[max(0, i - health.CALM) : i])]
    assert reported_steps(history) == expected


@given(st.integers(0, health.FIRST + health.LAST + 60), st.integers(0, 40))
def test_a_resumed_run_remembers_what_one_without_a_break_remembers(old, new) -> None:
    everything = lines(*[{}] * (old + new))
    trimmed = health.trim_history(everything)
    assert health.trim_history([*health.trim_history(everything[:old]), *everything[old:]]) == trimmed
    assert len(trimmed) <= health.FIRST + health.LAST
    assert trimmed[: health.FIRST] == everything[: health.FIRST]
    assert trimmed[-health.LAST :] == everything[-health.LAST :]


@pytest.mark.parametrize("rule", health.RULES.values(), ids=health.RULES)
def test_forgotten_steps_move_no_rule(rule) -> None:
    """A run in which everything gets worse; evaluations every 20 steps."""
    length = health.FIRST + health.LAST + 37
    worse = [
        {
            "loss/kl": 1e-3 * i,
            "loss/grad_norm": 0.02 * i,
            "loss/logprob_diff_mean": 1e-4 * i,
            "advantage/zero_variance_groups": i / length,
            "generation/truncated": i / length,
            "optimizer/overflows": float(i),
            "loss/entropy": math.exp(-i / 100),
            "generation/length_mean": 1.0 + i,
            "reward/mean": i / length - (i > length - 20),
            "generation/tokens_per_second": 1000.0 / (1 + i),
            "loss/objective": i % 7 + 99.0 * (i == length - 1),
            **({"eval/accuracy": 1 - i / length} if i % 20 == 0 else {}),
        }
        for i in range(length)
    ]
    history = lines(*worse)
    assert rule(health.trim_history(history)) == rule(history)
