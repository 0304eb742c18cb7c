"""Working ahead changes when a batch is sampled, by so many versions at most, and nothing else, even across a stop."""

import io
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from crew import CPU
from fakes import WORDS, TablePolicy, problem
from hypothesis import given

from grpo_fn.core import prng
from grpo_fn.core.problem import Completion, Problem
from grpo_fn.core.types import Rollout
from grpo_fn.rewards.combine import score_serially
from grpo_fn.shell.checkpoint import store
from grpo_fn.shell.sampler import interface
from grpo_fn.shell.sampler.async_sampler import AsyncSampler
from grpo_fn.shell.sampler.interface import DataParallelSampler, rank_share, spread_score
from grpo_fn.shell.world import Elsewhere, World, alone

pytestmark = pytest.mark.xdist_group("ahead")
KEY = prng.key(5, device="cpu")
LONG = 20.0  # seconds; more than anything here takes
ALONE = alone(CPU)


# -- ranks that are threads


class Rank(World):
    """A world whose ranks are threads of this process, which lay down at `barrier` what they bring."""

    def __init__(self, rank: int, size: int, brought: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(rank, 1, CPU, deadline=2 * LONG)  # as if alone: no gloo group
        self.size, self.brought, self.barrier = size, brought, barrier

    def exchange(self, mine: Any, *, what: str) -> list[Any]:
        self.brought[self.rank] = mine
        self.barrier.wait()
        everything = [*self.brought]
        self.barrier.wait()
        return everything


def ranks(size: int, f: Callable[..., Any], *args: Any) -> list[Any]:
    """What f(world, *args) returned on each of so many ranks, or the error that it raised."""
    found: list[Any] = [None] * size
    brought, barrier = [None] * size, threading.Barrier(size, timeout=LONG)

    def call(rank: int) -> None:
        try:
            found[rank] = f(ALONE if size == 1 else Rank(rank, size, brought, barrier), *args)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def sound(found: Sequence[Any]) -> Sequence[Any]:
    """What every rank found, if none raised."""
    for result in found:
        if isinstance(result, Exception):
            raise result
    return found


# -- an engine


class Weights(TablePolicy):
    """A policy that is a number."""

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
    return Rollout((9 * random).long(), mask, 0.0 - random, count == 4, tuple(str(row.random()) for row in rows))


@dataclass
class Engine:
    """Draws as `drawn` says; `meet` is called with the first uid while completions are under way."""

    meet: Callable[[int], object] = lambda uid: None
    overlaps: bool = True
    mixes: bool = False
    repeatable: bool = True
    ranks: int = 1
    number: int = -1
    max_rows: int = 64
    complaints: list[str] = field(default_factory=list)
    log: list[Any] = field(default_factory=list)

    def sample(self, problems: Sequence[Problem], group_size: int, *, key: torch.Tensor) -> Rollout:
        self.log.append(tuple(p.uid for p in problems))
        began = self.number
        self.meet(problems[0].uid)
        return drawn(began, self.number, problems, group_size, key)

    def load(self, policy: Weights) -> None:
        self.number = policy.number

    def rest(self) -> None:
        self.log.append("rest")

    def for_evaluation(self, token_sampler: Any, check: Callable[[], None] | None = None) -> "Engine":
        return self

    def figures(self) -> dict[str, float]:
        return {"engine/number": float(self.number)}

    def close(self) -> None:
        self.log.append("close")


def stream(first: int, count: int) -> tuple[Problem, ...]:
    return tuple(problem(uid, "a" * (1 + uid % 7)) for uid in range(first, first + count))


def sampler(engine: Any, max_staleness: int, world: World = ALONE, deadline: float = LONG) -> DataParallelSampler:
    """As `trainer.build` makes one."""
    if max_staleness == 0:
        return DataParallelSampler(engine, world)
    return AsyncSampler(engine, world, stream=stream, max_staleness=max_staleness, deadline=deadline)


def loaded(engine: Engine, max_staleness: int, batches: int = 0, **how: Any) -> DataParallelSampler:
    """A sampler with weights 0 that has sampled so many batches of two problems."""
    made = sampler(engine, max_staleness, **how)
    made.load(Weights(0))
    for batch in range(batches):
        made.sample(stream(2 * batch, 2), 2, key=KEY)
    return made


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


Seen = list[tuple[list[Rollout], dict[str, float]]]  # of each step


def run(world: World, steps: Sequence[Step], max_staleness: int, state: State) -> tuple[Seen, State, list[str]]:
    """From the state on, as in a process of its own."""
    made, (number, first, drained), seen = sampler(Engine(), max_staleness, world), state, []
    made.load(Weights(number))
    made.refill(drained)
    for step in steps:
        rollouts = []
        for _ in range(step.batches):
            rollouts.append(made.sample(stream(first, step.problems), step.group_size, key=KEY))
            first += step.problems
        number += 1
        made.load(Weights(number))
        figures = made.figures()
        assert figures.pop("generation/wait_seconds") >= 0
        seen.append((rollouts, figures))
    return seen, State(number, first, made.drain()), made.messages()


START = State(0, 0, [])


def stored(drained: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As a checkpoint gives it back."""
    return torch.load(io.BytesIO(store.pack_blobs({"ahead": drained})["ahead.pt"]), weights_only=True)


def same_rollout(got: Rollout, right: Rollout) -> None:
    assert got.text == right.text
    torch.testing.assert_close(got[:4], right[:4], rtol=0.0, atol=0.0, equal_nan=True)


def same_seen(got: Seen, right: Seen) -> None:
    for (rollouts, figures), (right_rollouts, right_figures) in zip(got, right, strict=True):
        assert figures == right_figures
        for x, y in zip(rollouts, right_rollouts, strict=True):
            same_rollout(x, y)


def predicted(steps: Sequence[Step], max_staleness: int) -> list[list[int]]:
    """Which weights each batch of each step is drawn from, by a book of what was requested when."""
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
    for seen, state, _ in sound(ranks(size, run, steps, max_staleness, START)):
        first = 0
        for now, (step, (rollouts, figures)) in enumerate(zip(steps, seen, strict=True)):
            ages = [now - number for number in numbers[now]]
            assert all(0 <= age <= max_staleness for age in ages)
            assert figures == {
                "engine/number": now + 1,
                "generation/staleness": pytest.approx(sum(ages) / len(ages)),
                "generation/staleness_max": max(ages),
            }
            for number, rollout in zip(numbers[now], rollouts, strict=True):
                same_rollout(rollout, drawn(number, number, stream(first, step.problems), step.group_size, KEY))
                first += step.problems
        assert len(state.drained) == max_staleness


@given(st.data(), runs, staleness)
def test_stopped_and_resumed_is_as_if_never_stopped(data, steps, max_staleness):
    """However often, and with whatever number of ranks."""
    ((whole, last, complaints),) = sound(ranks(1, run, steps, max_staleness, START))
    stops = data.draw(st.lists(st.integers(0, len(steps)), max_size=3).map(sorted))
    state, pieces, noted = START, [], []
    for start, end in pairwise([0, *stops, len(steps)]):
        (seen, state, lines), *others = sound(ranks(data.draw(sizes), run, steps[start:end], max_staleness, state))
        pieces, noted = pieces + seen, noted + lines
        state = state._replace(drained=stored(state.drained))
        for other_seen, other_state, _ in others:
            same_seen(other_seen, seen)
            assert repr(stored(other_state.drained)) == repr(state.drained)
    same_seen(pieces, whole)
    assert noted == complaints
    assert repr(state) == repr(last)


# -- what is under way


@contextmanager
def gate() -> Any:
    """An event that sampling threads wait for; they are gone soon after it is set."""
    event = threading.Event()
    try:
        yield event
    finally:
        event.set()
        for thread in threading.enumerate():
            if thread.name == "ahead":
                thread.join(LONG)
                assert not thread.is_alive(), "expected no thread that is left over"


def held_from(event: threading.Event, first: int, begun: threading.Semaphore) -> Callable[[int], None]:
    """Batches from this uid on wait for the event, and are counted in `begun`."""

    def meet(uid: int) -> None:
        begun.release()
        assert uid < first or event.wait(LONG)

    return meet


def test_a_batch_is_handed_out_while_the_next_are_under_way():
    with gate() as event:
        begun = threading.Semaphore(0)
        made = loaded(engine := Engine(meet=held_from(event, 2, begun)), 2)
        same_rollout(made.sample(stream(0, 2), 2, key=KEY), drawn(0, 0, stream(0, 2), 2, KEY))
        assert all(begun.acquire(timeout=LONG) for _ in range(3))
        made.rest()
        assert sorted(engine.log) == [(0, 1), (2, 3), (4, 5)]
        made.close()
        assert engine.log[-1] == "close"
        assert made.drain() == []


@pytest.mark.parametrize("mixes", [False, True])
def test_new_weights_wait_for_what_is_under_way_unless_the_engine_goes_on_with_them(mixes):
    with gate() as event:
        begun = threading.Semaphore(0)
        made = loaded(engine := Engine(meet=held_from(event, 2, begun), mixes=mixes), 1, batches=1)
        assert all(begun.acquire(timeout=LONG) for _ in range(2))
        loading = threading.Thread(target=made.load, args=(Weights(1),))
        loading.start()
        loading.join(LONG if mixes else 0.05)
        assert engine.number == int(mixes)
        event.set()
        loading.join()
        same_rollout(made.sample(stream(2, 2), 2, key=KEY), drawn(0, int(mixes), stream(2, 2), 2, KEY))
        assert made.figures()["generation/staleness"] == 0.5  # of no version, and of one
        assert made.repeatable is not mixes


# -- what goes wrong


class Broken(Exception):
    """Of an engine."""


def failing_at(uid: int, errors: list[BaseException]) -> Callable[[int], None]:
    """The engine raises these errors, one after another, at the problem."""

    def meet(first: int) -> None:
        if first == uid and errors:
            raise errors.pop()

    return meet


def faulty(world: World, error: BaseException, max_staleness: int, use: str) -> Any:
    """Problem 7 is the last rank's."""
    made = loaded(Engine(meet=failing_at(7, [error])), max_staleness, world=world)
    for number, first in enumerate([0, 2, 4], start=1):
        made.sample(stream(first, 2), 2, key=KEY)
        made.load(Weights(number))
    return made.drain() if use == "drain" else made.sample(stream(6, 2), 2, key=KEY)


@pytest.mark.parametrize(
    ("max_staleness", "use", "error"),
    [(1, "sample", Broken("no server answers")), (3, "drain", TimeoutError("its own")), (2, "sample", SystemExit(3))],
)
def test_an_error_in_a_thread_is_raised_at_use_on_every_rank(max_staleness, use, error):
    other, own = ranks(2, faulty, error, max_staleness, use)
    if isinstance(error, SystemExit):
        assert type(own) is RuntimeError
        assert str(own) == "sampling problems 6 to 7, 2 completions each ended by SystemExit: 3"
    else:
        assert own is error
    assert f"while sampling problems 6 to 7, 2 completions each, begun {max_staleness} versions ago" in own.__notes__
    assert type(other) is Elsewhere
    assert str(other).startswith("completions of problems 6 to 7, 2 completions each: rank 1: ")


def test_a_failed_batch_can_be_requested_again():
    made = loaded(Engine(meet=failing_at(2, [Broken("once")])), 1, batches=1)
    with pytest.raises(Broken):
        made.sample(stream(2, 2), 2, key=KEY)
    same_rollout(made.sample(stream(2, 2), 2, key=KEY), drawn(0, 0, stream(2, 2), 2, KEY))


def hanging(world: World, event: threading.Event, use: str) -> None:
    meet = held_from(event, 2 if world.rank == world.size - 1 else 99, threading.Semaphore(0))
    made = loaded(Engine(meet=meet), 1, batches=1, world=world, deadline=0.2)
    uses = {"sample": partial(made.sample, stream(2, 2), 2, key=KEY), "load": partial(made.load, Weights(1))}
    uses.get(use, made.drain)()


@pytest.mark.parametrize(("size", "use"), [(1, "sample"), (2, "load"), (2, "drain")])
def test_an_engine_that_hangs_is_waited_for_until_the_deadline(size, use):
    with gate() as event:
        start = time.monotonic()
        *others, own = ranks(size, hanging, event, use)
        assert time.monotonic() - start < LONG / 2
        assert type(own) is TimeoutError
        late = "got no result of sampling problems 2 to 3, 2 completions each within 0.2 s, expected one by then"
        assert str(own) == late
        assert "event.wait(LONG)" in own.__notes__[0]  # where the thread is
        assert own.__notes__[1] == "begun 0 versions ago: is the engine alive?"
        assert all(type(other) is Elsewhere and late in str(other) for other in others)


def test_a_batch_that_would_be_too_stale_is_refused():
    made = loaded(Engine(), 2, batches=1)
    for number in (1, 2, 3):
        made.load(Weights(number))
    with pytest.raises(RuntimeError, match=r"sampled 3 versions .* max_staleness 2:"):
        made.sample(stream(2, 2), 2, key=KEY)


@pytest.mark.parametrize(
    ("problems", "group_size", "key", "said"),
    [
        (stream(5, 2), 2, KEY, "got problems 5 to 6, 2 completions each, expected"),
        (stream(2, 2), 3, KEY, "got problems 2 to 3, 3 completions each, expected"),
        (stream(2, 2), 2, prng.fold_in(KEY, 1), "each, with other prompts or another key, expected"),
        ((problem(2, "not"), problem(3, "one")), 2, KEY, "each, with other prompts or another key, expected"),
    ],
)
def test_a_batch_that_was_not_predicted_is_sampled_at_once(problems, group_size, key, said):
    made = loaded(Engine(), 2, batches=1)
    made.load(Weights(1))
    same_rollout(made.sample(problems, group_size, key=key), drawn(1, 1, problems, group_size, key))
    (complaint,) = made.messages()
    assert complaint.startswith("dropped 2 batches sampled ahead: ")
    assert complaint.endswith(f"{said} problems 2 to 3, 2 completions each")
    for turn in range(1, 3 * interface.COMPLAINTS):
        made.sample(stream(10 * turn, 2), 2, key=KEY)
    assert len(made.messages()) == interface.COMPLAINTS
    assert made.messages() == []


# -- resuming


@given(runs, st.integers(1, 3), st.integers(0, 3))
def test_a_smaller_bound_drops_what_would_break_it(steps, before, now):
    _, state, _ = run(ALONE, steps, before, START)
    made = sampler(Engine(), now)
    made.load(Weights(state.number))
    made.refill(state.drained)
    step, ages = steps[-1], [batch["age"] for batch in state.drained]
    assert bool(made.complaints) == any(age + place > now for place, age in enumerate(ages))
    for number in range(state.number, state.number + 4):
        made.sample(stream(state.first + (number - state.number) * step.problems, step.problems), 2, key=KEY)
        made.load(Weights(number + 1))
    assert made.figures()["generation/staleness_max"] <= now


def test_the_queue_is_refilled_before_the_first_batch_and_draining_twice_is_draining_once():
    made = sampler(Engine(), 1)
    with pytest.raises(RuntimeError, match="got batches to go on with after 0 loads"):
        made.refill([])
    made.load(Weights(0))
    made.refill([])
    made.sample(stream(0, 2), 2, key=KEY)
    with pytest.raises(RuntimeError, match="with 1 under way"):
        made.refill([])
    assert repr(made.drain()) == repr(made.drain())
    same_rollout(made.sample(stream(2, 2), 2, key=KEY), drawn(0, 0, stream(2, 2), 2, KEY))


# -- knobs


TWO = Rank(0, 2, [None] * 2, threading.Barrier(2))


@pytest.mark.parametrize(
    ("engine", "knobs", "said"),
    [
        (Engine(), {"max_staleness": -1}, "max_staleness: got -1, expected 0 or a positive integer"),
        (Engine(overlaps=False), {}, "max_staleness: got 1 with Engine, .* expected 0"),
        *((Engine(), {"deadline": bad}, f"deadline: got {bad} s, expected more than 0") for bad in (0.0, float("nan"))),
        (Engine(), {"deadline": 1e12}, r"deadline: got 1000000000000\.0 s, expected more than 0"),
        (Engine(), {"world": TWO, "deadline": TWO.deadline}, "less than the 40 s that ranks wait for one another"),
    ],
)
def test_a_knob_that_could_not_mean_anything_is_refused(engine, knobs, said):
    with pytest.raises(ValueError, match=said):
        sampler(engine, **{"max_staleness": 1, **knobs})


# -- sampling and scoring shared among ranks


few = st.integers(1, 4)


@given(st.integers(0, 40), st.integers(1, 9))
def test_shares_are_all_items_in_order_and_as_even_as_can_be(items, size):
    shares = [range(items)[rank_share(items, rank, size)] for rank in range(size)]
    assert [i for part in shares for i in part] == list(range(items))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def sampled_on(world: World, engine_ranks: int, problems: int, group_size: int) -> tuple[Rollout, list[Any]]:
    engine = Engine(ranks=engine_ranks)
    made = DataParallelSampler(engine, world)
    made.load(Weights(1))
    return made.sample(stream(3, problems), group_size, key=KEY), engine.log


@given(few, st.booleans(), st.integers(1, 6), st.integers(1, 3))
def test_every_row_is_sampled_by_one_engine_and_known_to_all_ranks(size, shared, problems, group_size):
    """Also if there are fewer problems than ranks, and if all ranks have one engine together."""
    engine_ranks = size if shared else 1
    right, logs = drawn(1, 1, stream(3, problems), group_size, KEY), []
    for rollout, log in sound(ranks(size, sampled_on, engine_ranks, problems, group_size)):
        same_rollout(rollout, right)
        logs.append(log)
    assert [uid for log in logs[::engine_ranks] for part in log for uid in part] == list(range(3, 3 + problems))


def letters(problem: Problem, completion: Completion) -> float | None:
    """The share of letters among the characters; what begins with a digit cannot be scored."""
    text = completion.text
    return None if text[:1].isdigit() else sum(c.isalpha() for c in text) / max(1, len(text))


def scored(world: World, n: int) -> tuple[list[float | None], int]:
    """Scores of n rows, and how many of them this rank scored."""
    mine = []

    def score(fn: Any, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float | None]:
        mine.extend(problems)
        return score_serially(fn, problems, completions)

    rows = [Completion("1" * (i % 3 == 0) + "ab." * i, i, False) for i in range(n)]
    return spread_score(score, world)(letters, stream(0, n), rows), len(mine)


@given(few, st.integers(0, 9))
def test_every_row_is_scored_once_and_known_to_all(size, n):
    found = sound(ranks(size, scored, n))
    ((right, _),) = sound(ranks(1, scored, n))
    assert [scores for scores, _ in found] == [right] * size
    assert sum(count for _, count in found) == n
