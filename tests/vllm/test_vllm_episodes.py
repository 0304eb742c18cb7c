"""Episodes of several turns from the real engine in this process: token ids in and out, and no waiting for tools."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from engines import Case, case
from environment_fakes import THREE_TURNS
from episode_fakes import Here, Late, environments
from episodes_of_engines import CALCULATOR, RESULT, calls_the_calculator, ends, problems
from fakes import tokenizer

from grpo_fn.core import prng
from grpo_fn.core.batch import check_rollout
from grpo_fn.core.problem import Completion, Problem
from grpo_fn.core.types import Rollout
from grpo_fn.shell.vllm.vllm_sampler import VllmSampler

pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.timeout(300)]
KEY = prng.key(5, device="cpu")
CLOSE = 1e-4  # nats; float32 through two layers gives 2e-5
BLOCK = 128  # tokens of a cached prefix in vLLM's CPU build
GROUP = 3


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    with case("qwen2", tmp_path_factory.mktemp("turns") / "model", tied=True) as made:
        made.renewed(3)
        yield made


def with_turns(plain: Case, caller: Any, **knobs: Any) -> VllmSampler:
    """The engine's sampler, which plays episodes; a third of all tokens end a turn."""
    knobs = {"chat": calls_the_calculator(tokenizer()), "max_turn_tokens": 12, **knobs}
    of = environments(tokenizer(), caller, **knobs)
    return replace(plain.sampler, environments=of, ends=ends(), max_new_tokens=40, max_total_tokens=300)


def same(got: Rollout, expected: Rollout) -> None:
    assert got.turns == expected.turns
    assert all(torch.equal(a, b) for a, b in zip(got[:4], expected[:4], strict=True))


def test_calculator_episodes_are_the_policys_and_observations_are_masked(plain: Case) -> None:
    sampler = with_turns(plain, Here(CALCULATOR))
    rollout = sampler.sample(problems(short=2, long=1), GROUP, key=KEY)
    check_rollout(rollout)
    assert plain.gap(rollout) < CLOSE
    assert Counter(len(turns) for turns in rollout.turns)[3] > 1, "expected episodes with two observations"
    for row, mask, turns in zip(rollout.tokens, rollout.mask, rollout.turns, strict=True):
        ids, at = row.tolist(), int(mask.int().argmax())
        for turn, after in pairwise(turns):
            at += turn.length
            closing = [] if ids[at - 1] == sampler.environments.chat.end else [sampler.environments.chat.end]
            observed = [*closing, *tokenizer()(f"\n{RESULT}\n")["input_ids"]]
            assert turn.observation == RESULT
            assert ids[at : at + len(observed)] == observed
            assert not mask[at : at + len(observed)].any()
            assert mask[at + len(observed) : at + len(observed) + after.length].all()
            at += len(observed)


def test_a_later_turn_reads_its_opening_from_the_prefix_cache(plain: Case) -> None:
    plain.renewed(4)  # nothing is cached
    sampler = with_turns(plain, Here(CALCULATOR))
    sampler.figures()
    rollout = sampler.sample(problems(short=0, long=2), GROUP, key=KEY)
    figures, later = sampler.figures(), sum(len(turns) - 1 for turns in rollout.turns)
    assert later > GROUP
    assert figures["engine/requests"] == len(rollout.turns) + later
    assert figures["engine/cached_tokens"] >= BLOCK * later
    assert figures["engine/prompt_tokens"] > figures["engine/cached_tokens"]


def test_the_same_twice_and_in_whatever_order_environments_answer(plain: Case) -> None:
    asked, found = problems(short=3, long=1), []
    for delays in ([], [], [0.02, 0.0, 0.07, 0.01], [0.0, 0.05, 0.0]):
        plain.renewed(5)
        found.append(with_turns(plain, Here(CALCULATOR, delays)).sample(asked, GROUP, key=KEY))
    for other in found[1:]:
        same(other, found[0])


@pytest.mark.parametrize("answer_steps", [None, 4])
def test_a_row_is_drawn_as_it_is_alone(plain: Case, answer_steps: int | None) -> None:
    plain.renewed(6)
    sampler = with_turns(plain, Here(CALCULATOR, [0.01, 0.0, 0.03]), answer_steps=answer_steps)
    asked = problems(short=3, long=1)
    whole = sampler.sample(asked, GROUP, key=KEY)
    for p, one in enumerate(asked):
        alone = sampler.sample([one], GROUP, key=KEY)
        assert alone.turns == whole.turns[p * GROUP : (p + 1) * GROUP]
        rows = slice(p * GROUP, (p + 1) * GROUP)
        expected = whole.logp_sampled[rows][whole.mask[rows]]
        torch.testing.assert_close(alone.logp_sampled[alone.mask], expected, rtol=0, atol=CLOSE)


def test_the_engine_decodes_while_an_environment_works(plain: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow one answers when all other episodes are over: an engine that waited for it would wait for ever."""
    asked, late, over, steps = problems(short=4, long=0), Late(slow=[100]), [], Counter()
    engine = plain.sampler.engine.llm.llm_engine

    def step(real: Any) -> Any:
        steps["slow one works" if late.held else "no slow one"] += 1
        return real()

    def ended(of: Sequence[Problem], _: Sequence[Completion]) -> None:
        over.extend(problem.uid for problem in of)
        if len(over) == 3:
            late.release()

    monkeypatch.setattr(engine, "step", partial(step, engine.step))
    sampler = replace(with_turns(plain, late, answer_steps=None), on_completions=ended)
    assert not sampler.repeatable
    rollout = sampler.sample(asked, 1, key=KEY)
    assert over[-1] == 100
    assert steps["slow one works"] >= 3, "expected steps for the others' later turns"
    assert [len(turns) for turns in rollout.turns] == [3] * 4
    expected = with_turns(plain, Here(THREE_TURNS)).sample(asked, 1, key=KEY)
    assert rollout.turns == expected.turns
    assert torch.equal(rollout.tokens, expected.tokens)


def test_rows_are_at_different_turns_in_one_step(plain: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, at_once = with_turns(plain, Here(CALCULATOR), answer_steps=1), []
    engine = plain.sampler.engine.llm.llm_engine
    turn, running = Counter(), {}

    def add(real: Any, name: str, *given: Any) -> Any:
        row = name.split()[1]
        turn[row] += 1
        running[name] = turn[row]
        return real(name, *given)

    def step(real: Any) -> Any:
        at_once.append({*running.values()})
        outputs = real()
        for out in outputs:
            running.pop(out.request_id)
        return outputs

    monkeypatch.setattr(engine, "add_request", partial(add, engine.add_request))
    monkeypatch.setattr(engine, "step", partial(step, engine.step))
    sampler.sample(problems(short=4, long=1), GROUP, key=KEY)
    assert any(len(turns) > 1 for turns in at_once)
