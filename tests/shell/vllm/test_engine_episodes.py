"""Episodes from engines, which decode others while environments work, in this process and on servers. All fakes."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from environment_fakes import THREE_TURNS
from episode_fakes import Here, Late, environments
from fakes import VOCABULARY, problem, tokenizer
from hypothesis import given, settings
from shell.vllm.test_vllm_sampler import KEY, Engine, sampler

from grpo_fn.core.batch import check_rollout
from grpo_fn.core.types import Rollout
from grpo_fn.shell.vllm.colocated import ColocatedEngine
from grpo_fn.shell.vllm.engine import (
    DueRequests,
    EngineCompletion,
    GenerationRequest,
    OnTurn,
    SamplingParams,
)
from grpo_fn.shell.vllm.vllm_sampler import VllmSampler

pytestmark = pytest.mark.timeout(60)
TURN = 4  # tokens of every turn
ROWS = 4


class Even(Engine):
    """Turns of `TURN` tokens, from the seed alone."""

    ranks = 1

    @staticmethod
    def answer(request: GenerationRequest, seed: int) -> EngineCompletion:
        tokens = [(seed + 7 * i) % (VOCABULARY - 1) for i in range(min(TURN, request.max_tokens))]
        return EngineCompletion(tokens, [-token / 4 for token in tokens], True, 0)


class Stepped(Even):
    """An engine in this process: a step draws a token of every request, and calls `before` with its number first."""

    overlaps, repeatable, batch_invariant = False, True, False

    def __init__(self, before: Callable[[int], None] = lambda step: None) -> None:
        super().__init__()
        self.before = before
        self.drawn: list[list[int]] = []  # rows that each step drew a token of

    def generate_turns(self, due: DueRequests, *, params: SamplingParams, on_turn: OnTurn) -> None:
        running: dict[int, list[Any]] = {}  # the answer, and tokens still to be drawn
        while (requests := due(len(self.drawn), bool(running))) or running:
            for b, request in requests:
                assert b not in running
                answer = self.answer(request, *request.seeds)
                running[b] = [answer, len(answer.tokens)]
            self.before(len(self.drawn))
            self.drawn.append([*running])
            for b, state in [*running.items()]:
                state[1] -= 1
                if not state[1]:
                    del running[b]
                    on_turn(b, len(self.drawn), state[0])


def asking(engine: Engine, caller: Any, answer_steps: int | None, max_rows: int = ROWS) -> VllmSampler:
    of = environments(tokenizer(), caller, answer_steps=answer_steps, max_turn_tokens=TURN + 1)
    return sampler(engine, environments=of, max_new_tokens=40, max_total_tokens=200, max_rows=max_rows)


def sampled(*how: Any) -> Rollout:
    """One sample of each problem, with three turns."""
    rollout = asking(*how).sample([problem(100 + i, "a7") for i in range(ROWS)], 1, key=KEY)
    check_rollout(rollout)
    assert [len(turns) for turns in rollout.turns] == [3] * ROWS
    return rollout


def same(got: Rollout, expected: Rollout) -> None:
    assert got.turns == expected.turns
    assert all(torch.equal(a, b) for a, b in zip(got[:4], expected[:4], strict=True))


@pytest.mark.parametrize(
    ("answer_steps", "repeatable", "batch_invariant"), [(None, True, False), (2, False, False), (2, True, True)]
)
def test_rows_are_decoded_to_their_ends_while_the_environment_of_one_works(
    answer_steps, repeatable, batch_invariant
) -> None:
    """Where rows go on as answers come: the slow one's first turn is answered when the others' episodes are over."""
    late = Late(slow=[100])
    engine = Stepped(lambda step: late.release() if step == 3 * TURN - 1 else None)  # the last step of the others
    engine.repeatable, engine.batch_invariant = repeatable, batch_invariant
    rollout = sampled(engine, late, answer_steps)
    assert engine.drawn[:TURN] == [[0, 1, 2, 3]] * TURN
    assert engine.drawn[TURN : 3 * TURN] == [[1, 2, 3]] * (2 * TURN), "the engine waited, or the slow row did not"
    assert engine.drawn[3 * TURN : 4 * TURN] == [[0]] * TURN
    same(rollout, sampled(Stepped(), Here(THREE_TURNS), 2))


def first_turn_of(row: int, tokens: int) -> Callable[[GenerationRequest, int], EngineCompletion]:
    """Answers as `Even`, but the first turn of a row is shorter, so that the others decode when it waits."""
    calls = iter(range(10**6))
    return lambda request, seed: Even.answer(
        request._replace(max_tokens=tokens) if next(calls) == row else request, seed
    )


@pytest.mark.parametrize("answer_steps", [0, 1, 2, 7])
def test_rows_go_on_after_a_counted_number_of_steps_however_late_answers_are(answer_steps: int) -> None:
    late = Late(slow=[101]) if answer_steps else Here(THREE_TURNS, delays=[0.01])  # with 0 it is waited for at once
    engine, plain = Stepped(lambda step: late.release() if answer_steps else None), Stepped()
    for one in (engine, plain):
        one.answer = first_turn_of(1, TURN - 2)
    same(sampled(engine, late, answer_steps), sampled(plain, Here(THREE_TURNS), answer_steps))
    assert engine.drawn == plain.drawn, "how late an answer is has changed what is decoded together"
    assert engine.drawn[:2] == [[0, 1, 2, 3]] * 2
    # It meets the others in mid-turn: rows at different turns in one engine.
    together = min(answer_steps, 2)
    assert engine.drawn[2:4] == [[0, 2, 3]] * together + [[0, 2, 3, 1]] * (2 - together)


@settings(max_examples=max(5, settings.default.max_examples // 10), deadline=None)
@given(
    delays=st.lists(st.floats(0.0, 0.004), min_size=1, max_size=5),
    answer_steps=st.sampled_from([None, 0, 2]),
    overlaps=st.booleans(),
    width=st.integers(1, 5),
)
def test_the_order_of_answers_changes_no_row(delays, answer_steps, overlaps, width) -> None:
    """Of engines that draw a function of the seed; nor does the number of threads."""
    engine = Even() if overlaps else Stepped()
    got = sampled(engine, Here(THREE_TURNS, delays=delays), answer_steps, width)
    same(got, sampled(Stepped(), Here(THREE_TURNS), 2))


def test_on_servers_a_row_whose_environment_works_keeps_no_thread() -> None:
    """One turn at once, and the first row's answer comes when all others are over."""
    late = Late(slow=[100])
    engine, requests = Even(), []

    def answer(request: GenerationRequest, seed: int) -> EngineCompletion:
        requests.append(request)
        if len(requests) == 1 + 3 * (ROWS - 1):
            late.release()
        return Even.answer(request, seed)

    engine.answer = answer
    same(sampled(engine, late, 2, 1), sampled(Stepped(), Here(THREE_TURNS), 2))


@pytest.mark.parametrize("engine", [Even(), Stepped()], ids=["servers", "in the process"])
def test_seconds_in_which_nothing_is_drawn_are_counted(engine: Engine) -> None:
    caller = Late([])
    caller.here.delays = [0.2]
    sampled(engine, caller, 2)
    assert 0.3 <= caller.waits["time/environment_wait"] < 5.0  # twice, of all rows at once, once nothing is drawn


@pytest.mark.parametrize("engine", [Even(), Stepped()], ids=["servers", "in the process"])
def test_a_failure_of_an_environment_ends_the_call(engine: Engine) -> None:
    caller = Here(THREE_TURNS)
    caller.step = lambda state, message, key: 1 / 0
    with pytest.raises(ZeroDivisionError):
        sampled(engine, caller, 2)


def test_an_engine_of_several_ranks_counts_steps_and_observes_the_same() -> None:
    engine = Stepped()
    engine.ranks = 2
    with pytest.raises(ValueError, match="got talk, which is not pure, with an engine of 2 ranks"):
        sampler(engine, environments=environments(tokenizer(), pure=False))
    with pytest.raises(ValueError, match=r"answer_steps: got None with an engine of 2 ranks, expected a number"):
        asking(engine, Here(THREE_TURNS), None)


@pytest.mark.parametrize(
    ("answer_steps", "batch_invariant", "repeatable"), [(2, False, True), (None, False, False), (None, True, True)]
)
def test_rows_that_go_on_as_answers_come_may_be_other_rows_the_next_time(
    answer_steps, batch_invariant, repeatable
) -> None:
    """Not where no bit of a row depends on those beside it."""
    engine = Stepped()
    engine.batch_invariant = batch_invariant
    assert asking(engine, Here(THREE_TURNS), answer_steps).repeatable is repeatable


@pytest.mark.parametrize(
    ("device", "asked", "found"),
    [
        ("cpu", "1", (True, False)),
        ("cuda", "1", (True, True)),
        ("cuda", "0", (False, False)),
    ],
)
def test_vllm_repeats_on_the_cpu_and_is_batch_invariant_on_cuda_where_asked(device, asked, found, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", asked)
    engine = object.__new__(ColocatedEngine)
    engine.world = SimpleNamespace(device=torch.device(device))
    assert (engine.repeatable, engine.batch_invariant) == found
