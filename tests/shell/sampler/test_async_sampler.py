"""Working ahead changes when a batch is sampled, by so many versions at most, and nothing else, even across a stop."""

import io
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from batches import dealt
from crew import CPU, crew
from fakes import WORDS, TablePolicy, TableSampler, problem
from hypothesis import given, settings

from grpo_fn.algo import advantage, credit, group_sampling, losses, objective
from grpo_fn.algo.step import AT_THE_START, Algorithm, grpo_step
from grpo_fn.core import prng
from grpo_fn.core.batch import outcome_reward
from grpo_fn.core.problem import Problem
from grpo_fn.core.types import Carry, Groups, Reward, Rollout
from grpo_fn.shell.checkpoint import store
from grpo_fn.shell.sampler import async_sampler
from grpo_fn.shell.sampler.async_sampler import AsyncSampler, check_staleness
from grpo_fn.shell.sampler.interface import DataParallelSampler
from grpo_fn.shell.world import Elsewhere, World, alone

pytestmark = pytest.mark.xdist_group("ahead")
EXAMPLES = settings.default.max_examples
KEY = prng.key(5, device="cpu")
LONG = 20.0  # seconds; more than anything here takes
ROOT = Path(__file__).resolve().parents[3]


# -- ranks that are threads


class Meeting:
    """Where so many threads lay down what they bring."""

    def __init__(self, size: int) -> None:
        self.brought: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=LONG)


class Rank(World):
    """A world whose ranks are threads of this process."""

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        super().__init__(rank, 1, CPU, deadline=2 * LONG)  # as if alone: no gloo group
        self.size, self.meeting = size, meeting

    def exchange(self, mine: Any, *, what: str) -> list[Any]:
        self.meeting.brought[self.rank] = mine
        self.meeting.barrier.wait()
        everything = [*self.meeting.brought]
        self.meeting.barrier.wait()
        return everything


def ranks(size: int, f: Callable[..., Any], *args: Any) -> list[Any]:
    """What f(world, *args) returned on each of so many ranks, or the error that it raised."""
    if size == 1:
        return [caught(f, alone(CPU), *args)]
    meeting, found = Meeting(size), [None] * size

    def one(rank: int) -> None:
        found[rank] = caught(f, Rank(rank, size, meeting), *args)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def caught(f: Callable[..., Any], *args: Any) -> Any:
    try:
        return f(*args)
    except Exception as error:
        return error


def sound(found: Sequence[Any]) -> Sequence[Any]:
    """What every rank found, where none raised."""
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found


# -- an engine


class Weights(TablePolicy):
    """A policy that is a number, which says which one it is."""

    def __init__(self, number: int) -> None:
        super().__init__(torch.zeros(WORDS), lr=0.0, reference_table=None)
        self.number = number


def drawn(began: int, ended: int, problems: Sequence[Problem], group_size: int, key: torch.Tensor) -> Rollout:
    """What is sampled between two moments: a function of the weights at both, the prompts and the key alone."""
    rows = [
        Random(hash((began, ended, *key.tolist(), p.uid, len(p.prompt), g)))
        for p in problems
        for g in range(group_size)
    ]
    count = torch.tensor([row.randint(1, 4) for row in rows])
    column = torch.arange(1 + int(count.max()))
    mask = (column >= 1) & (column < 1 + count[:, None])
    random = torch.tensor([[row.random() for _ in range(5)] for row in rows])[:, column] * mask
    text = tuple(f"{began} {ended} {row.random()}" for row in rows)
    return Rollout((9 * random).long(), mask, 0.0 - random, count == 4, text)


def passing(uid: int) -> None:
    """It takes a moment, now and then."""
    if uid % 3 == 0:
        time.sleep(0.001)


@dataclass
class Engine:
    """Draws as `drawn` says; `meet` is called with the first uid while completions are under way."""

    meet: Callable[[int], object] = passing
    overlaps: bool = True
    mixes: bool = False
    repeatable: bool = True
    ranks: int = 1
    number: int = -1
    max_rows: int = 64
    complaints: list[str] = field(default_factory=list)
    log: list[tuple[Any, ...]] = field(default_factory=list)

    def sample(self, problems: Sequence[Problem], group_size: int, *, key: torch.Tensor) -> Rollout:
        self.log.append(("sample", tuple(p.uid for p in problems), group_size))
        began = self.number
        self.meet(problems[0].uid)
        return drawn(began, self.number, problems, group_size, key)

    def load(self, policy: Weights) -> None:
        self.log.append(("load", policy.number))
        self.number = policy.number

    def rest(self) -> None:
        self.log.append(("rest",))

    def for_evaluation(self, token_sampler: Any, check: Callable[[], None] | None = None) -> "Engine":
        return self

    def figures(self) -> dict[str, float]:
        return {"engine/number": float(self.number)}

    def close(self) -> None:
        self.log.append(("close",))


def asked(first: int, count: int) -> tuple[Problem, ...]:
    return tuple(problem(uid, "a" * (1 + uid % 7)) for uid in range(first, first + count))


def working(world: World, engine: Engine, max_staleness: int, deadline: float = LONG) -> AsyncSampler:
    return AsyncSampler(DataParallelSampler(engine, world), asked, max_staleness=max_staleness, deadline=deadline)


# -- runs


class Step(NamedTuple):
    """So many batches of so many problems, then new weights."""

    batches: int
    problems: int
    group_size: int


class State(NamedTuple):
    """Between two steps: which weights there are, where the stream stands, what was drained."""

    number: int
    first: int
    drained: list[dict[str, Any]]


class Seen(NamedTuple):
    """What a step was handed."""

    rollouts: list[Rollout]
    figures: dict[str, float]


def run(world: World, steps: Sequence[Step], max_staleness: int, state: State) -> tuple[list[Seen], State, list[str]]:
    """From the state on, in a process of its own."""
    one = working(world, Engine(), max_staleness)
    one.load(Weights(state.number))
    one.refill(state.drained)
    number, first, seen = state.number, state.first, []
    for step in steps:
        rollouts = []
        for _ in range(step.batches):
            rollouts.append(one.sample(asked(first, step.problems), step.group_size, key=KEY))
            first += step.problems
        number += 1
        one.load(Weights(number))
        figures = one.figures()
        assert figures.pop("generation/wait_seconds") >= 0
        seen.append(Seen(rollouts, figures))
    return seen, State(number, first, one.drain()), one.complaints


START = State(0, 0, [])


def kept(drained: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As a checkpoint gives it back."""
    return torch.load(io.BytesIO(store.pack_blobs({"ahead": drained})["ahead.pt"]), weights_only=True)


def same_rollout(got: Rollout, right: Rollout) -> None:
    assert got.text == right.text
    torch.testing.assert_close(got[:4], right[:4], rtol=0.0, atol=0.0, equal_nan=True)


def same_seen(got: Sequence[Seen], right: Sequence[Seen]) -> None:
    assert len(got) == len(right)
    for mine, theirs in zip(got, right, strict=True):
        assert mine.figures == theirs.figures
        for x, y in zip(mine.rollouts, theirs.rollouts, strict=True):
            same_rollout(x, y)


def predicted(steps: Sequence[Step], max_staleness: int) -> list[list[int]]:
    """Which weights each batch of each step is drawn from, by a book of what was asked for when."""
    book: dict[int, tuple[int, int, int]] = {}  # first uid -> problems, group size, weights
    first, found = 0, []
    for number, step in enumerate(steps):
        found.append([])
        for _ in range(step.batches):
            if book.get(first, (0,))[:2] != (step.problems, step.group_size):
                book.clear()
            for place in range(max_staleness + 1):
                book.setdefault(first + place * step.problems, (step.problems, step.group_size, number))
            found[-1].append(book[first][2])
            first += step.problems
    return found


counts = st.integers(1, 3)
plain = st.builds(Step, batches=counts, problems=st.just(3), group_size=st.just(2))
changing = st.builds(Step, batches=counts, problems=st.integers(1, 3), group_size=st.sampled_from([2, 2, 2, 3]))
runs = st.one_of(st.lists(plain, min_size=1, max_size=6), st.lists(changing, min_size=1, max_size=6))
staleness = st.integers(0, 3)
sizes = st.integers(1, 2)


@given(runs, staleness, sizes)
def test_every_batch_is_that_of_the_weights_it_was_begun_under(steps, max_staleness, size):
    numbers = predicted(steps, max_staleness)
    for seen, _, _ in sound(ranks(size, run, steps, max_staleness, START)):
        first = 0
        for now, (step, one) in enumerate(zip(steps, seen, strict=True)):
            ages = [now - number for number in numbers[now]]
            assert all(0 <= age <= max_staleness for age in ages)
            assert one.figures["generation/staleness"] == pytest.approx(sum(ages) / len(ages))
            assert one.figures["generation/staleness_max"] == max(ages)
            assert one.figures["engine/number"] == now + 1
            for number, rollout in zip(numbers[now], one.rollouts, strict=True):
                same_rollout(rollout, drawn(number, number, asked(first, step.problems), step.group_size, KEY))
                first += step.problems


@given(staleness, sizes, st.integers(1, 8))
def test_one_batch_a_step_is_as_stale_as_allowed_once_the_run_has_gone_on_so_long(max_staleness, size, count):
    for seen, state, complaints in sound(ranks(size, run, [Step(1, 2, 2)] * count, max_staleness, START)):
        assert [s.figures["generation/staleness"] for s in seen] == [min(now, max_staleness) for now in range(count)]
        assert len(state.drained) == max_staleness
        assert complaints == []


@given(st.data(), runs, st.integers(0, 3))
def test_stopped_and_gone_on_with_is_as_if_never_stopped(data, steps, max_staleness):
    """However often, and with whatever number of ranks."""
    whole, last, complaints = sound(ranks(1, run, steps, max_staleness, START))[0]
    stops = data.draw(st.lists(st.integers(0, len(steps)), max_size=3).map(sorted))
    bounds = [0, *stops, len(steps)]
    states, pieces, noted = [START] * 3, [], []
    for start, end in pairwise(bounds):
        found = sound(ranks(data.draw(sizes), run, steps[start:end], max_staleness, states[0]))
        pieces += found[0][0]
        noted += found[0][2]
        states = [state._replace(drained=kept(state.drained)) for _, state, _ in found]
        for other in found[1:]:
            same_seen(other[0], found[0][0])
    same_seen(pieces, whole)
    assert noted == complaints
    assert states[0][:2] == last[:2]
    assert all(repr(state.drained) == repr(last.drained) for state in states)


PLAN = [Step(2, 3, 2), Step(1, 3, 2), Step(1, 2, 2), Step(3, 2, 2)]


@pytest.mark.parametrize("max_staleness", [1, 3])
def test_over_gloo_as_over_threads(max_staleness):
    whole, last, _ = sound(ranks(1, run, PLAN, max_staleness, START))[0]
    found = crew(2).run(run, PLAN[:2], max_staleness, START)
    middle = found[0][1]._replace(drained=kept(found[0][1].drained))
    later = crew(2).run(run, PLAN[2:], max_staleness, middle)
    for one, other in zip(found, later, strict=True):
        same_seen([*one[0], *other[0]], whole)
        assert repr(other[1]) == repr(last)


@given(st.lists(st.sampled_from(["sample", "load", "rest"]), max_size=9), sizes)
def test_without_staleness_it_calls_what_spread_calls(calls, size):
    def played(world: World, wrapped: bool) -> tuple[list[Any], list[Rollout]]:
        engine = Engine(overlaps=False, meet=in_the_ranks_own_thread(threading.current_thread()))
        one = working(world, engine, 0) if wrapped else DataParallelSampler(engine, world)
        first, rollouts = 0, []
        for number, call in enumerate(["load", *calls]):
            if call == "sample":
                rollouts.append(one.sample(asked(first, 3), 2, key=KEY))
                first += 3
            elif call == "load":
                one.load(Weights(number))
            else:
                one.rest()
        one.close()
        return engine.log, rollouts

    for (log, got), (right_log, right) in zip(
        sound(ranks(size, played, True)), sound(ranks(size, played, False)), strict=True
    ):
        assert log == right_log
        for x, y in zip(got, right, strict=True):
            same_rollout(x, y)


def in_the_ranks_own_thread(thread: threading.Thread) -> Callable[[int], None]:
    def meet(uid: int) -> None:
        assert threading.current_thread() is thread

    return meet


def test_without_staleness_there_is_nothing_to_drain():
    _, state, _ = run(alone(CPU), PLAN, 0, START)
    assert state.drained == []


# -- the whole algorithm


class Table(TableSampler):
    overlaps, mixes, repeatable, ranks, max_rows = True, False, True, 1, 64
    complaints: tuple[str, ...] = ()

    def figures(self) -> dict[str, float]:
        return {}

    def for_evaluation(self, token_sampler: Any, check: Callable[[], None] | None = None) -> "Table":
        return self

    def close(self) -> None:
        pass


class Trained(NamedTuple):
    """What there is after some steps, and what was seen on the way."""

    table: torch.Tensor
    carried: Carry
    drained: list[dict[str, Any]]
    figures: list[dict[str, float]]
    learned: list[Groups]


def length_reward(problems: Sequence[Problem], rollout: Rollout) -> Reward:
    value = rollout.mask.sum(-1).double().view(len(problems), -1)
    value = torch.where(torch.tensor([p.uid % 3 == 0 for p in problems])[:, None], 1.0, value)  # no signal
    return outcome_reward(value, torch.ones_like(value, dtype=torch.bool), {"length": value})


def train(world: World, gather: Any, max_staleness: int, steps: int, since: Trained) -> Trained:
    algo = Algorithm(
        objective=partial(
            objective.policy_objective,
            token_loss=partial(losses.clipped_ratio, clip_low=0.2, clip_high=0.2),
            importance_correction=None,
            kl=objective.k3_ratio,
            loss_aggregation=objective.token_mean,
            beta=0.0,
            entropy_bonus=0.0,
        ),
        credit=partial(credit.outcome, advantage=advantage.mean_centered),
        group_sampling=gather,
        prompts=2,
        group_size=3,
    )
    cut = partial(dealt, micro_tokens=100, devices=1)
    policy = TablePolicy(since.table, lr=0.5, reference_table=None, cut=cut)
    one = AsyncSampler(DataParallelSampler(Table(policy), world), asked, max_staleness=max_staleness, deadline=LONG)
    one.load(policy)
    one.refill(since.drained)
    carried, figures, learned = since.carried, [*since.figures], [*since.learned]
    for _ in range(steps):
        how = {"algo": algo, "reward": length_reward, "span": nullcontext, "teacher": None}
        seen, carried, step_figures = grpo_step(policy, one, asked, carried, key=KEY, demonstrations=None, **how)
        own = one.figures()
        own.pop("generation/wait_seconds")
        step_figures.pop("optimizer/step")  # of the policy, which is a new one
        figures.append({**step_figures, **own})
        learned.append(seen.groups)
    return Trained(policy.table, carried, kept(one.drain()), figures, learned)


AFRESH = Trained(torch.linspace(-1.0, 1.0, WORDS).double(), AT_THE_START, [], [], [])
GATHERS = {"every": None, "dynamic": partial(group_sampling.dynamic, max_gen_batches=3)}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", list(GATHERS))
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_training_goes_on_exactly(name, max_staleness):
    gather, steps = GATHERS[name], 6
    whole = sound(ranks(1, train, gather, max_staleness, steps, AFRESH))[0]
    assert not torch.allclose(whole.table, AFRESH.table)  # otherwise any weights sample alike
    waited = [figures.get("generation/carried_over_groups", 0.0) for figures in whole.figures]
    assert any(waited) == (name == "dynamic")  # groups of the step before are part of it
    for stop, sizes in [(1, (1, 2)), (3, (2, 1)), (4, (2, 2))]:
        part = sound(ranks(sizes[0], train, gather, max_staleness, stop, AFRESH))[0]
        rest = sound(ranks(sizes[1], train, gather, max_staleness, steps - stop, part))[-1]
        assert torch.equal(rest.table, whole.table)
        assert repr(rest.figures) == repr(whole.figures)
        for mine, right in zip(rest.learned, whole.learned, strict=True):
            same_rollout(mine.rollout, right.rollout)


# -- what is under way


@contextmanager
def gate() -> Any:
    """Something that threads wait for until the test is over, or lets them go."""
    event = threading.Event()
    try:
        yield event
    finally:
        event.set()
        until = time.monotonic() + LONG
        while any(t.name == "ahead" for t in threading.enumerate()):
            assert time.monotonic() < until, "threads are left over"
            time.sleep(0.005)


def held_from(event: threading.Event, first: int) -> Callable[[int], None]:
    """Batches from this uid on wait for the event."""

    def meet(uid: int) -> None:
        if uid >= first:
            assert event.wait(LONG)

    return meet


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
def test_a_batch_is_handed_out_while_the_next_are_under_way(max_staleness):
    with gate() as event:
        engine = Engine(meet=held_from(event, 2))
        one = working(alone(CPU), engine, max_staleness)
        one.load(Weights(0))
        same_rollout(one.sample(asked(0, 2), 2, key=KEY), drawn(0, 0, asked(0, 2), 2, KEY))
        until = time.monotonic() + LONG
        while len([call for call in engine.log if call[0] == "sample"]) < 1 + max_staleness:
            assert time.monotonic() < until
            time.sleep(0.001)
        under_way = sorted(call[1] for call in engine.log if call[0] == "sample")
        assert under_way == [(2 * i, 2 * i + 1) for i in range(1 + max_staleness)]


def test_new_weights_wait_for_what_is_under_way():
    with gate() as event:
        engine = Engine(meet=held_from(event, 2))
        one = working(alone(CPU), engine, 1)
        one.load(Weights(0))
        one.sample(asked(0, 2), 2, key=KEY)
        loading = threading.Thread(target=one.load, args=(Weights(1),))
        loading.start()
        loading.join(0.05)
        assert engine.number == 0
        event.set()
        loading.join()
        assert engine.number == 1
        same_rollout(one.sample(asked(2, 2), 2, key=KEY), drawn(0, 0, asked(2, 2), 2, KEY))


def test_new_weights_do_not_wait_where_the_engine_goes_on_with_them():
    with gate() as event:
        engine = Engine(meet=held_from(event, 2), mixes=True)
        one = working(alone(CPU), engine, 1)
        one.load(Weights(0))
        one.sample(asked(0, 2), 2, key=KEY)
        until = time.monotonic() + LONG
        while len(engine.log) < 3 and time.monotonic() < until:
            time.sleep(0.001)
        one.load(Weights(1))
        event.set()
        same_rollout(one.sample(asked(2, 2), 2, key=KEY), drawn(0, 1, asked(2, 2), 2, KEY))
        assert one.figures()["generation/staleness"] == 0.5  # the first was of no age, this one began a version ago


@pytest.mark.parametrize("repeatable", [True, False])
@pytest.mark.parametrize("mixes", [True, False])
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_run_repeats_itself_where_the_engine_does_and_no_completion_is_of_two_minds(repeatable, mixes, max_staleness):
    engine = Engine(mixes=mixes)
    engine.repeatable = repeatable
    found = working(alone(CPU), engine, max_staleness).repeatable
    assert found == (repeatable and not (mixes and max_staleness))


def test_it_does_not_rest_while_it_works_ahead():
    engine = Engine()
    working(alone(CPU), engine, 1).rest()
    assert engine.log == []


# -- what goes wrong


class Broken(Exception):
    """Of an engine."""


def failing_at(uid: int, error: BaseException) -> Callable[[int], None]:
    def meet(first: int) -> None:
        if first == uid:
            raise error

    return meet


def faulty(world: World, error: BaseException, max_staleness: int, use: str) -> Any:
    """Problem 7 is the last rank's, or its share's first where there is one rank: uid 6."""
    bad = 7 if world.size == 2 else 6
    one = working(world, Engine(meet=failing_at(bad, error)), max_staleness)
    one.load(Weights(0))
    for number, first in enumerate([0, 2, 4], start=1):
        one.sample(asked(first, 2), 2, key=KEY)
        one.load(Weights(number))
    return one.drain() if use == "drain" else one.sample(asked(6, 2), 2, key=KEY)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("max_staleness", [1, 2, 3])
@pytest.mark.parametrize("use", ["drain", "sample"])
@pytest.mark.parametrize("error", [Broken("no server answers"), SystemExit(3), TimeoutError("its own")])
def test_what_goes_wrong_in_a_thread_is_raised_at_use_on_every_rank(size, max_staleness, use, error):
    *others, own = ranks(size, faulty, error, max_staleness, use)
    if isinstance(error, SystemExit):
        assert type(own) is RuntimeError
        assert str(own) == "sampling problems 6 to 7, 2 completions each ended by SystemExit: 3"
    else:
        assert own is error
    note = f"while sampling problems 6 to 7, 2 completions each, begun {min(3, max_staleness)} versions ago"
    assert note in own.__notes__
    del own.__notes__
    for other in others:
        assert type(other) is Elsewhere
        assert str(other).startswith("completions of problems 6 to 7, 2 completions each: rank 1: ")


def test_what_failed_can_be_asked_for_again():
    left = [Broken("once")]
    engine = Engine(meet=lambda uid: failing_at(2, left.pop())(uid) if uid == 2 and left else None)
    one = working(alone(CPU), engine, 1)
    one.load(Weights(0))
    one.sample(asked(0, 2), 2, key=KEY)
    with pytest.raises(Broken):
        one.sample(asked(2, 2), 2, key=KEY)
    same_rollout(one.sample(asked(2, 2), 2, key=KEY), drawn(0, 0, asked(2, 2), 2, KEY))


def hanging(world: World, event: threading.Event, use: str) -> None:
    meet = held_from(event, 2) if world.rank == world.size - 1 else passing
    one = working(world, Engine(meet=meet), 1, 0.2)
    one.load(Weights(0))
    one.sample(asked(0, 2), 2, key=KEY)
    if use == "sample":
        one.sample(asked(2, 2), 2, key=KEY)
    elif use == "load":
        one.load(Weights(1))
    else:
        one.drain()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("use", ["sample", "load", "drain"])
def test_an_engine_that_hangs_is_waited_for_until_the_deadline(size, use):
    with gate() as event:
        start = time.monotonic()
        *others, own = ranks(size, hanging, event, use)
        assert time.monotonic() - start < LONG / 2
        assert type(own) is TimeoutError
        late = "got no result of sampling problems 2 to 3, 2 completions each within 0.2 s, expected one by then"
        assert str(own) == late
        assert "assert event.wait(LONG)" in own.__notes__[0]  # where the thread is
        assert own.__notes__[1] == "begun 0 versions ago: is the engine alive?"
        for other in others:
            assert type(other) is Elsewhere
            assert late in str(other)


@given(st.integers(1, 3))
def test_what_would_be_too_stale_is_refused(max_staleness):
    one = working(alone(CPU), Engine(), max_staleness)
    one.load(Weights(0))
    one.sample(asked(0, 1), 1, key=KEY)
    for number in range(1, max_staleness + 2):
        one.load(Weights(number))
    with pytest.raises(RuntimeError, match=f"sampled {max_staleness + 1} versions .* max_staleness {max_staleness}:"):
        one.sample(asked(1, 1), 1, key=KEY)


OTHERS = {
    "another place": (partial(asked, 5, 2), 2, KEY, "got problems 5 to 6, 2 completions each, expected"),
    "another size": (partial(asked, 2, 2), 3, KEY, "got problems 2 to 3, 3 completions each, expected"),
    "another count": (partial(asked, 2, 3), 2, KEY, "got problems 2 to 4, 2 completions each, expected"),
    "another key": (partial(asked, 2, 2), 2, prng.fold_in(KEY, 1), "each, with other prompts or another key, expected"),
    "another prompt": (
        lambda: [problem(2, "not that"), problem(3, "one")],
        2,
        KEY,
        "each, with other prompts or another key, expected",
    ),
}


@pytest.mark.parametrize("name", list(OTHERS))
def test_what_was_not_predicted_is_sampled_at_once(name):
    problems, group_size, key, said = OTHERS[name]
    one = working(alone(CPU), Engine(), 2)
    one.load(Weights(0))
    one.sample(asked(0, 2), 2, key=KEY)
    one.load(Weights(1))
    same_rollout(one.sample(problems(), group_size, key=key), drawn(1, 1, problems(), group_size, key))
    (complaint,) = one.complaints
    assert complaint.startswith("dropped 2 batches sampled ahead: ")
    assert said in complaint
    assert complaint.endswith("expected problems 2 to 3, 2 completions each")


def test_complaints_do_not_pile_up():
    one = working(alone(CPU), Engine(), 1)
    one.load(Weights(0))
    for turn in range(3 * async_sampler.COMPLAINTS):
        one.sample(asked(10 * turn, 2), 2, key=KEY)
    assert len(one.complaints) == async_sampler.COMPLAINTS


# -- going on


@given(runs, st.integers(1, 3), st.integers(0, 3))
def test_a_smaller_bound_drops_what_would_break_it(steps, before, now):
    _, state, _ = run(alone(CPU), steps, before, START)
    one = working(alone(CPU), Engine(), now)
    one.load(Weights(state.number))
    one.refill(state.drained)
    step, ages = steps[-1], [batch["age"] for batch in state.drained]
    assert bool(one.complaints) == any(age + place > now for place, age in enumerate(ages))
    for number in range(state.number, state.number + 4):
        one.sample(asked(state.first + (number - state.number) * step.problems, step.problems), 2, key=KEY)
        one.load(Weights(number + 1))
    assert one.figures()["generation/staleness_max"] <= now


def test_draining_twice_is_draining_once():
    one = working(alone(CPU), Engine(), 2)
    one.load(Weights(0))
    one.sample(asked(0, 2), 2, key=KEY)
    assert repr(one.drain()) == repr(one.drain())
    same_rollout(one.sample(asked(2, 2), 2, key=KEY), drawn(0, 0, asked(2, 2), 2, KEY))


def test_it_is_refilled_between_the_first_load_and_the_first_batch():
    one = working(alone(CPU), Engine(), 1)
    with pytest.raises(RuntimeError, match="got batches to go on with after 0 loads"):
        one.refill([])
    one.load(Weights(0))
    one.refill([])
    one.sample(asked(0, 2), 2, key=KEY)
    with pytest.raises(RuntimeError, match="with 1 under way"):
        one.refill([])


# -- the end


def test_closing_abandons_what_is_under_way():
    with gate() as event:
        engine = Engine(meet=held_from(event, 2))
        one = working(alone(CPU), engine, 2)
        one.load(Weights(0))
        one.sample(asked(0, 2), 2, key=KEY)
        one.close()
        assert engine.log[-1] == ("close",)
        assert one.drain() == []


HANGING = """
import threading, torch
from grpo_fn.shell.sampler.async_sampler import start_sampling
start_sampling(None, 0, threading.Event().wait, torch.device("cpu"))
print("begun", flush=True)
"""


@pytest.mark.slow
def test_a_thread_that_hangs_does_not_keep_the_process():
    with subprocess.Popen([sys.executable, "-c", HANGING], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout.readline() == "begun\n"
        start = time.monotonic()
        assert process.wait(LONG) == 0
        assert time.monotonic() - start < LONG / 2


@settings(max_examples=max(10, EXAMPLES // 4))
@given(runs, st.integers(1, 3))
def test_no_thread_is_left(steps, max_staleness):
    with gate():
        run(alone(CPU), steps, max_staleness, START)


# -- knobs


@pytest.mark.parametrize("got", [-1, 1.0, True, None, "1"])
def test_staleness_is_a_whole_number_from_0(got):
    checked = getattr(check_staleness, "__wrapped__", check_staleness)  # of types, in tests
    with pytest.raises(ValueError, match=r"max_staleness: got .*, expected 0 or a positive integer"):
        checked(got, Engine())


@given(st.integers(0, 9))
def test_only_an_engine_that_overlaps_works_ahead(max_staleness):
    check_staleness(max_staleness, Engine())
    with pytest.raises(ValueError, match=r"got .* with Engine, .* expected 0") if max_staleness else nullcontext():
        check_staleness(max_staleness, Engine(overlaps=False))
    with pytest.raises(ValueError, match=r"got .* with Engine") if max_staleness else nullcontext():
        working(alone(CPU), Engine(overlaps=False), max_staleness)


@pytest.mark.parametrize("deadline", [0.0, -1.0, float("nan"), float("inf"), 1e12])
def test_a_deadline_is_one(deadline):
    with pytest.raises(ValueError, match=r"deadline: got .* s, expected more than 0"):
        working(alone(CPU), Engine(), 1, deadline)


def test_a_step_gives_up_before_its_ranks_do():
    world = Rank(0, 2, Meeting(2))
    working(world, Engine(), 0, world.deadline)
    with pytest.raises(ValueError, match="expected less than the 40 s that ranks wait for one another"):
        working(world, Engine(), 1, world.deadline)
