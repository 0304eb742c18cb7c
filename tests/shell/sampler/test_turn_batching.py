"""Episodes in slots: every row is what a plain loop over that row alone gives, in whatever order answers come."""

import re
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from environment_fakes import TALK, THREE_TURNS, broken
from episode_fakes import Here, Late, environments
from fakes import MODELS, VOCABULARY, problem, tokenizer
from hypothesis import given, settings
from policies import local

from grpo_fn.core import prng
from grpo_fn.core.batch import check_rollout
from grpo_fn.core.environment import Environment, Message, ToolCall
from grpo_fn.core.problem import Completion, Problem
from grpo_fn.core.sampling import categorical
from grpo_fn.core.types import Rollout
from grpo_fn.rewards.combine import completions_of
from grpo_fn.shell.episodes.answers import Answer, EnvironmentCall, decode_answer
from grpo_fn.shell.episodes.chat_format import TextFormat
from grpo_fn.shell.episodes.episode_rows import (
    ENVIRONMENT,
    START,
    Tape,
    Taped,
    TapeDiffers,
    as_observation,
    as_unscorable,
    environment_seeds,
)
from grpo_fn.shell.model.hf import encode_prompt
from grpo_fn.shell.policy.optimizer import adamw
from grpo_fn.shell.sampler.local.local_sampler import LocalSampler, split_by_width

EOS = VOCABULARY - 1
KEY = prng.key(5, device="cpu")
texts = st.lists(st.text("aT 7\né", min_size=1, max_size=9), min_size=1, max_size=3)


def sampler(name: str = "qwen2_tied", *, caller: Here | None = None, **knobs) -> LocalSampler:
    model = MODELS[name](VOCABULARY)
    model.generation_config.eos_token_id = [EOS, *range(0, 60, 2)]
    of_episodes = ("max_turns", "max_turn_tokens", "answer_steps", "tape", "pure", "fails", "chat")
    ours = {k: knobs.pop(k) for k in of_episodes if k in knobs}
    return LocalSampler(
        **{"model": model, "tokenizer": tokenizer(), "token_sampler": partial(categorical, temperature=0.4)},
        **{"encode": encode_prompt, "environments": environments(tokenizer(), caller, **ours)},
        **{"max_new_tokens": 14, "stop": (), "max_rows": 64, "max_total_tokens": 60, **knobs},
    )


def problems(asked: list[str]) -> list:
    return [problem(100 + i, prompt) for i, prompt in enumerate(asked)]


def alone(s: LocalSampler, prompt: str, uid: int, g: int) -> tuple[list[int], list[bool], list[float], str]:
    """The plain loop over one row, without cache or batch: tokens behind the opening, which are sampled, the limit."""
    of, call = s.environments, EnvironmentCall(TALK)
    u = prng.uniform(prng.fold_in(KEY, uid, g), s.max_new_tokens, dtype=torch.float32, low=0.0, high=1.0)
    base = prng.fold_in(KEY, ENVIRONMENT)
    (seed,) = environment_seeds(base, torch.tensor([uid]), START)
    begun = decode_answer(call("start", problem(uid, prompt), seed))
    opening, state = of.chat.open(begun.messages), begun.state
    tokens, mask, logps, n = [], [], [], 0
    for turn in range(of.max_turns):
        at = len(tokens)
        while True:
            with torch.no_grad():
                logits = s.model(input_ids=torch.tensor([opening + tokens])).logits[:, -1]
            token, logp = s.token_sampler(logits, u[n : n + 1])
            tokens, mask, logps, n = [*tokens, int(token)], [*mask, True], [*logps, float(logp)], n + 1
            if tokens[-1] in s.model.generation_config.eos_token_id:
                break
            if n == s.max_new_tokens:
                return tokens, mask, logps, "tokens"
            if len(tokens) - at == of.max_turn_tokens:
                return tokens, mask, logps, "turn_tokens"
            if len(opening) + len(tokens) == s.max_total_tokens:
                return tokens, mask, logps, "context"
        (seed,) = environment_seeds(base, torch.tensor([uid]), g, turn)
        found = decode_answer(call("step", state, of.chat.parse(tokens[at:]), seed))
        state = found.state
        if found.done:
            return tokens, mask, logps, ""
        observed = [*([] if tokens[-1] == of.chat.end else [of.chat.end]), *of.chat.extend(found.messages)]
        if turn + 1 == of.max_turns:
            return tokens, mask, logps, "turns"
        if n == s.max_new_tokens:
            return tokens, mask, logps, "tokens"
        if len(opening) + len(tokens) + len(observed) >= s.max_total_tokens:
            return tokens, mask, logps, "context"
        tokens, mask = [*tokens, *observed], [*mask, *([False] * len(observed))]
    raise AssertionError("unreachable")


def assert_as_alone(s: LocalSampler, asked: list[str], group_size: int, rollout: Rollout) -> list[str]:
    """The limits that ended the rows."""
    limits = []
    for b, turns in enumerate(rollout.turns):
        p, g = divmod(b, group_size)
        tokens, mask, logps, limit = alone(s, asked[p], 100 + p, g)
        start = int(rollout.mask[b].int().argmax())
        assert rollout.tokens[b, start : start + len(tokens)].tolist() == tokens
        assert rollout.mask[b, start : start + len(tokens)].tolist() == mask
        assert turns[-1].limit == limit
        assert bool(rollout.truncated[b]) is bool(limit)
        assert sum(turn.length for turn in turns) == int(rollout.mask[b].sum())
        torch.testing.assert_close(rollout.logp_sampled[b][rollout.mask[b]], torch.tensor(logps), rtol=0, atol=1e-4)
        limits.append(limit)
    return limits


@pytest.mark.parametrize("name", list(MODELS))
@settings(max_examples=max(3, settings.default.max_examples // 15))
@given(asked=texts, group_size=st.integers(1, 3), max_rows=st.integers(1, 9), answer_steps=st.integers(0, 5))
def test_every_row_is_the_plain_loops(name, asked, group_size, max_rows, answer_steps) -> None:
    s = sampler(name, max_rows=max_rows, answer_steps=answer_steps)
    rollout = s.sample(problems(asked), group_size, key=KEY)
    check_rollout(rollout)
    assert_as_alone(s, asked, group_size, rollout)


@pytest.mark.slow
def test_every_limit_ends_some_row() -> None:
    asked = ["a", "aT 7\n", "7 7 7", "T é a7"]
    found: list[str] = []
    for knobs in (
        {"max_turn_tokens": 9, "max_new_tokens": 40},
        {"max_turns": 2, "max_turn_tokens": 20, "max_new_tokens": 40},
        {"max_new_tokens": 9, "max_turn_tokens": 20},
        {"max_total_tokens": 14, "max_turn_tokens": 20, "max_new_tokens": 40},
    ):
        s = sampler(**knobs)
        found += assert_as_alone(s, asked, 4, s.sample(problems(asked), 4, key=KEY))
    assert set(found) == {"", "turns", "turn_tokens", "tokens", "context"}


@settings(max_examples=max(3, settings.default.max_examples // 12), deadline=None)
@given(delays=st.lists(st.floats(0.0, 0.01), min_size=1, max_size=7), answer_steps=st.integers(0, 4))
def test_the_order_of_answers_changes_no_bit(delays, answer_steps) -> None:
    asked = problems(["aT 7", "7", "T a\n"])
    got, expected = (
        sampler(caller=caller, answer_steps=answer_steps).sample(asked, 3, key=KEY)
        for caller in (Here(delays=delays), Here())
    )
    same(got, expected)


@pytest.mark.timeout(60)
def test_rows_that_go_on_as_answers_come_are_not_held_up_by_a_slow_one() -> None:
    """Its first answer comes when the others' episodes are over; with a number of steps, that would be never."""
    over, late = [], Late(slow=[100])

    def ended(of: Sequence[Problem], _: Sequence[Completion]) -> None:
        over.extend(problem.uid for problem in of)
        if len(over) == 3:
            late.release()

    asked = problems(["aT 7", "7", "T a\n", "a"])
    s = replace(sampler(caller=late, answer_steps=None), on_completions=ended)
    assert not s.repeatable
    rollout = s.sample(asked, 1, key=KEY)
    assert over[-1] == 100
    assert len(rollout.turns[0]) > 1
    expected = sampler(caller=Here(THREE_TURNS)).sample(asked, 1, key=KEY)
    assert rollout.turns == expected.turns
    assert torch.equal(rollout.tokens, expected.tokens)
    torch.testing.assert_close(rollout.logp_sampled, expected.logp_sampled, rtol=0, atol=1e-5)


def test_a_reported_row_is_the_row_of_the_rollout_with_its_turns() -> None:
    reported = []
    s = replace(sampler(answer_steps=3), on_completions=lambda *rows: reported.extend(zip(*rows, strict=True)))
    asked = problems(["aT 7", "7", "T a\n"])
    rollout = s.sample(asked, 3, key=KEY)
    expected = [(asked[b // 3], one) for b, one in enumerate(completions_of(rollout))]
    assert max(len(one.turns) for _, one in expected) > 1
    assert sorted(reported, key=repr) == sorted(expected, key=repr)


@pytest.mark.parametrize("name", ["qwen2_tied", "gemma2_capped"])
def test_the_policys_logp_is_the_samplers(name) -> None:
    s = sampler(name)
    rollout = s.sample(problems(["aT 7\né", "7", "a a a a"]), 3, key=KEY)
    assert not bool((rollout.mask[:, 1:] <= rollout.mask[:, :-1]).all()), "expected observations between turns"
    optimizer = partial(adamw, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0)
    knobs = {"micro_tokens": 60, "min_micro_batches": 1, "max_grad_norm": 1.0, "logits_chunk_elements": 10**4}
    policy = local(s.model, optimizer=optimizer, temperature=0.4, **knobs)
    gap = policy.logp(rollout) - rollout.logp_sampled
    assert float(gap[rollout.mask].abs().max()) < 1e-4


def test_the_model_reads_every_token_once() -> None:
    """A row at a time, so nothing is padded: what is read grows with the tokens of a turn, not with those before it."""
    s, read, asked = sampler(max_rows=1, max_turns=3), [], ["aT 7", "7", "T a\n"]
    s.sample(problems(asked[:1]), 1, key=KEY)  # the first call tries the model out
    s.model.get_input_embeddings().register_forward_hook(lambda _, given, __: read.append(given[0].flatten().tolist()))
    rollout = s.sample(problems(asked), 2, key=KEY)
    expected, reads = [], 0
    for b, turns in enumerate(rollout.turns):
        start, end = int(rollout.mask[b].int().argmax()), int(rollout.mask[b].nonzero().max())
        begun = s.environments.chat.open(opening_of(asked[b // 2], b // 2))
        opening = rollout.tokens[b, start - len(begun) : start].tolist()
        expected += [*(opening if b % 2 == 0 else []), *rollout.tokens[b, start:end].tolist()]
        # Each turn's first token is drawn behind what was read before it, its others after one reading each.
        reads += (b % 2 == 0) + sum(turn.length for turn in turns) - 1
    assert max(map(len, rollout.turns)) == 3
    assert [token for call in read for token in call] == expected
    assert len(read) == reads


def test_a_row_that_waits_for_its_environment_is_in_no_decode_step() -> None:
    s, shapes, asked = sampler(answer_steps=4), [], ["aT 7", "7", "T a\n", "a7 7"]
    s.sample(problems(asked[:1]), 1, key=KEY)  # the first call tries the model out
    with s.model.get_input_embeddings().register_forward_hook(lambda _, given, __: shapes.append(given[0].shape)):
        rollout = s.sample(problems(asked), 6, key=KEY)
    assert max(map(len, rollout.turns)) > 1
    # Prompts are read as one row, observations behind a turn's last token: what is one token wide is a decode step.
    steps = [rows for rows, width in shapes if width == 1]
    assert sum(steps) == sum(turn.length - 1 for turns in rollout.turns for turn in turns)


@given(
    widths=st.lists(st.integers(1, 40), max_size=30).map(sorted), most=st.integers(1, 200), padding=st.integers(0, 60)
)
def test_rows_are_read_together_where_little_is_padding(widths: list[int], most: int, padding: int) -> None:
    found = [widths[some] for some in split_by_width(widths, most=most, padding=padding)]
    assert [width for some in found for width in some] == widths
    for some in found:
        whole = len(some) * max(some)
        assert len(some) == 1 or (whole <= most and whole - sum(some) <= padding)
    for some, after in pairwise(found):
        together = [*some, after[0]]
        whole = len(together) * max(together)
        assert whole > most or whole - sum(together) > padding, "expected as many rows together as may be"


def opening_of(prompt: str, i: int) -> tuple[Message, ...]:
    """What the environment begins an episode with."""
    return decode_answer(EnvironmentCall(TALK)("start", problem(100 + i, prompt), 0)).messages


def taped(rollout: Rollout, **knobs: bool) -> Tape:
    """The tape of two samples of each problem."""
    tape = Tape(**knobs)
    for b, (tokens, mask, turns) in enumerate(zip(rollout.tokens, rollout.mask, rollout.turns, strict=True)):
        tape.episodes[100 + b // 2, b % 2] = Taped(tuple(tokens[: int(mask.int().argmax())].tolist()), turns)
    return tape


def same(got: Rollout, expected: Rollout) -> None:
    assert got.turns == expected.turns
    assert all(torch.equal(a, b) for a, b in zip(got[:4], expected[:4], strict=True))


def test_a_tape_is_read_in_the_place_of_a_tool_that_is_not_pure() -> None:
    asked, caller = problems(["aT 7", "7"]), Here()
    once = sampler().sample(asked, 2, key=KEY)
    same(sampler(caller=caller, tape=taped(once, strict=True), pure=False).sample(asked, 2, key=KEY), once)
    assert not caller.calls


def test_a_pure_environment_that_answers_otherwise_is_named() -> None:
    asked = problems(["aT 7", "7"])
    once = sampler().sample(asked, 2, key=KEY)
    tape = taped(once)
    b, n = next((b, n) for b, turns in enumerate(once.turns) for n, turn in enumerate(turns) if turn.answer)
    turns = [*once.turns[b]]
    turns[n] = turns[n]._replace(answer='{"messages":[]}')
    tape.episodes[100 + b // 2, b % 2] = Taped((), tuple(turns))
    said = rf"talk, problem {100 + b // 2}, sample {b % 2}, turn {n + 1}: got .* says that it is pure, and is not"
    with pytest.raises(TapeDiffers, match=said):
        sampler(tape=tape).sample(asked, 2, key=KEY)


def test_a_call_with_other_arguments_is_not_the_one_on_the_tape() -> None:
    """A message without its calls is empty here: turns differ by their whole text."""
    reads = lambda text: ("", (ToolCall("repeat", {"text": text}),), "")  # noqa: E731
    asked, knobs = problems(["aT 7", "7"]), {"chat": TextFormat(tokenizer(), reads)}
    once = sampler(**knobs).sample(asked, 2, key=KEY)
    tape = taped(once, strict=True)
    b = next(b for b, turns in enumerate(once.turns) if turns[0].answer)
    opening, (first, *rest) = tape.episodes[100 + b // 2, b % 2]
    assert first.text
    changed = first._replace(text=f"{first.text}7", answer='{"messages":[]}')
    tape.episodes[100 + b // 2, b % 2] = Taped(opening, (changed, *rest))
    assert sampler(**knobs, tape=tape).sample(asked, 2, key=KEY).turns == once.turns
    said = f"talk, problem {100 + b // 2}, sample {b % 2}, turn 1: got a turn .* wrote something else"
    with pytest.raises(TapeDiffers, match=said):
        sampler(**knobs, tape=tape, pure=False).sample(asked, 2, key=KEY)


@pytest.mark.parametrize(("fails", "reward"), [(as_observation, 0.0), (as_unscorable, None)])
def test_a_failure_is_what_the_knob_says_and_fails_again_on_the_tape(fails, reward) -> None:
    caller, asked = Here(Environment(start=TALK.start, step=broken, pure=True)), problems(["aT 7", "7"])
    rollout = sampler(caller=caller, fails=fails).sample(asked, 2, key=KEY)
    failed = [turn for turns in rollout.turns for turn in turns if turn.answer]
    assert failed
    assert {turn.reward for turn in failed} == {reward}
    assert {turn.error for turn in failed} == {"RuntimeError: the tool is out of order"}
    assert ("error: RuntimeError" in failed[0].observation) is (fails is as_observation)
    assert sampler(tape=taped(rollout), fails=fails).sample(asked, 2, key=KEY).turns == rollout.turns


class Lost(Here):
    """Its workers are killed whenever they are asked this."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def ask(self, *call: object) -> Future[Answer]:
        if call[0] != self.kind:
            return super().ask(*call)
        future: Future[Answer] = Future()
        future.set_result(Answer(failure="worker died: killed by SIGKILL", lost=True))
        return future


@pytest.mark.parametrize("kind", ["start", "step"])
def test_a_row_whose_worker_was_lost_is_unscorable_whatever_the_knob_says_and_the_log_names_it(kind: str) -> None:
    lost = sampler(caller=Lost(kind), fails=as_observation)
    rollout = lost.sample(problems(["aT 7", "7"]), 3, key=KEY)
    ended = [turns[-1] for turns in rollout.turns]
    assert any("worker died" in turn.error for turn in ended)
    expected = {None} if kind == "start" else {None, 0.0}  # a turn that was cut asks no environment
    assert {turn.reward for turn in ended} <= expected
    assert {turn.reward for turn in ended if turn.error} == {None}
    assert re.fullmatch(r"talk, problem 100\b.*unscorable.*killed by SIGKILL", lost.environments.complaints[0])
