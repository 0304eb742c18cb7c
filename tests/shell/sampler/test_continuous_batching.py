"""Slots filled again, steps that are captured, models that need another cache: a row stays what it is alone."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from fakes import VOCABULARY, qwen2_tied
from families import FAMILIES
from hypothesis import given, settings
from test_local_sampler import EOS, KEY, assert_as_alone, completions, problems, sampler
from torch import nn
from transformers import BloomConfig, BloomForCausalLM, DynamicCache, Qwen2Config

from grpo_fn.core.problem import Completion, Problem
from grpo_fn.shell.model import blocks
from grpo_fn.shell.reward_workers.reward_pool import ScoringInterrupted
from grpo_fn.shell.sampler.local import decode_step, hf_cache_decode, local_sampler
from grpo_fn.shell.sampler.local.cuda_steps import (
    GraphCache,
    buffer_size,
    graph_size,
)
from grpo_fn.shell.sampler.local.decode_step import (
    EAGER_CODE,
    DecodeEngine,
    Sizes,
    StepCode,
    decoding_unsupported_reason,
    exact_size,
    group_rows,
)
from grpo_fn.shell.sampler.local.local_sampler import LocalSampler, SharedDecoder

EXAMPLES = settings.default.max_examples
COSTLY = settings(max_examples=max(4, EXAMPLES // 20))
TEXTS = ["Tom has", "aT é 7", "7 7 7 a a a T T", "a7"]
CPU = torch.device("cpu")
# As on CUDA: few shapes, several steps between looks.
SMALL = Sizes(partial(graph_size, least=1), partial(graph_size, least=4), buffer_size, 3)


def held(module: nn.Module, graphs: GraphCache | None = None, code: StepCode = EAGER_CODE) -> SharedDecoder:
    """Decodes in a way that is not this machine's own."""
    made = SharedDecoder()
    assert decoding_unsupported_reason(module, CPU) is None
    made.model, made.engine = module, DecodeEngine(module, sizes=SMALL, graphs=graphs, code=code)
    return made


@lru_cache(maxsize=16)
def ending(name: str) -> nn.Module:
    """A model of the family, for which every fourth token or so ends a completion."""
    made = FAMILIES[name](VOCABULARY)
    made.generation_config.eos_token_id = [EOS, *range(0, 140, 2)]
    return made


def family(name: str, **knobs) -> LocalSampler:
    s = sampler(**knobs)
    return LocalSampler(**{**vars(s), "model": ending(name)})


@pytest.mark.parametrize("name", list(FAMILIES))
def test_rows_that_come_when_others_have_ended_are_the_plain_loops(name: str) -> None:
    s = family(name, max_rows=3)
    assert_as_alone(s, TEXTS, s.sample(problems(TEXTS), 2, key=KEY))
    assert s.shared.engine is not None  # no family is decoded with a cache that grows


@pytest.mark.parametrize("name", ["gemma2_capped", "qwen3_untied"])
def test_rows_that_have_drawn_far_more_attend_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever rows are not all alike, which in this test are too few for it to pay."""
    monkeypatch.setattr(local_sampler, "shorter_columns", lambda drawn: int(drawn.median()))
    apart, advance = [], DecodeEngine.advance

    def watched(self: DecodeEngine, *step, long: decode_step.LongRows | None, **how) -> None:
        apart.append(0 if long is None else len(long.number))
        advance(self, *step, long=long, **how)

    monkeypatch.setattr(DecodeEngine, "advance", watched)
    s = family(name, max_rows=6, max_new_tokens=24)
    assert_as_alone(s, TEXTS, s.sample(problems(TEXTS), 5, key=KEY))
    assert sum(n > 0 for n in apart) > 2


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60))
def test_a_second_computation_is_the_cheapest_split_or_none(drawn: list[int]) -> None:
    found, longest = decode_step.shorter_columns(torch.tensor(drawn)), max(drawn)
    costs = {c: len(drawn) * c + decode_step.GATHER_COST * longest * sum(n > c for n in drawn) for c in drawn}
    saved = costs[longest] - min(costs.values())
    assert found == longest or costs[found] == min(costs.values())
    assert (found < longest) is (saved > max(decode_step.MIN_SAVED, costs[longest] // 4))


@COSTLY
@given(
    st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3), st.integers(1, 3), st.integers(1, 9), st.integers(1, 6)
)
def test_looking_seldom_and_few_shapes_change_nothing(texts, group_size, max_rows, new) -> None:
    knobs = {"max_rows": max_rows, "max_new_tokens": new, "stop": ("a", "é")}
    expected = sampler(**knobs).sample(problems(texts), group_size, key=KEY)
    s = sampler(**knobs)
    run = GraphCache(lambda: lambda step: (step(), step(), step)[2])  # warms up as a real one does
    got = LocalSampler(**{**vars(s), "shared": held(s.model, run)}).sample(problems(texts), group_size, key=KEY)
    assert completions(got) == completions(expected)
    assert torch.equal(got.truncated, expected.truncated)
    torch.testing.assert_close(got.logp_sampled, expected.logp_sampled, rtol=0, atol=1e-5)


# -- captured steps


class Counting:
    """Captures nothing, and counts what it is asked to capture and to replay."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            step()

        return replay


def test_steps_are_captured_again_when_weights_have_moved() -> None:
    module, counting = ending("qwen3_untied"), Counting()
    s = LocalSampler(**{**vars(sampler()), "model": module, "shared": held(module, GraphCache(lambda: counting))})
    first = s.sample(problems(TEXTS), 2, key=KEY)
    assert torch.equal(s.sample(problems(TEXTS), 2, key=KEY).tokens, first.tokens)
    shapes, replayed = counting.captured, counting.replayed
    assert shapes == len(s.shared.engine.graphs.used)
    s.sample(problems(TEXTS), 2, key=KEY)
    assert counting.captured == shapes
    assert counting.replayed > replayed
    module.lm_head.weight.data = module.lm_head.weight.data.clone()
    for _ in range(2):
        assert torch.equal(s.sample(problems(TEXTS), 2, key=KEY).tokens, first.tokens)
    assert counting.captured == 2 * shapes


# -- compiled steps


# Tracing alone shows what has to be built how often; building the code of all parts takes minutes. A family is traced
# for so many of the shapes in compiled_decoding.ASKED: a size that changes has its parts traced anew, for seconds.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "choice", "families"),
    [("aot_eager", "gumbel_max", {"gemma2_capped": 3}), ("inductor", "categorical", {"qwen3_untied": 2})],
)
def test_compiled_steps_draw_the_same_and_are_not_built_again(
    backend: str, choice: str, families: dict[str, int]
) -> None:
    program = Path(__file__).with_name("compiled_decoding.py")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(program), backend, choice, json.dumps(families)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert ran.returncode == 0, ran.stderr
    every = json.loads(ran.stdout.splitlines()[-1])
    assert every.keys() == families.keys()
    for name, found in every.items():
        assert len(found["same"]) == 2 * families[name]
        assert all(found["same"]), name
        assert max(found["apart"]) < 1e-5, name
        once, again = found["built"][len(found["built"]) // 2 - 1], found["built"][-1]
        assert 0 < once == again < 30, name


@given(st.integers(1, 5000), st.sampled_from([1, 64]))
def test_sizes_are_few_and_not_much_larger_than_asked_for(n: int, least: int) -> None:
    size = graph_size(n, least=least)
    assert n <= size <= max(least, 2 * n - 1)
    assert graph_size(size, least=least) == size
    assert n <= buffer_size(n) <= 1.5 * n
    assert buffer_size(buffer_size(n)) == buffer_size(n)


# -- lanes


@given(st.lists(st.integers(-1, 4), min_size=1, max_size=20))
def test_every_row_has_its_own_lane_at_its_prompt(homes: list[int]) -> None:
    home = torch.tensor(homes)
    there = home >= 0
    wide = max(1, int(torch.bincount(home[there], minlength=5).max()))
    found = group_rows(home.clamp(min=0), there, 5, wide)
    assert len(found.row) == 5 * wide
    for row in there.nonzero()[:, 0].tolist():
        assert int(found.row[found.place[row]]) == row
        assert int(found.place[row]) // wide == homes[row]


# -- memory


def test_buffers_stay_where_they_are_and_are_gone_at_rest() -> None:
    s = sampler()
    s.sample(problems(TEXTS), 4, key=KEY)
    engine = s.shared.engine

    def places() -> list[int]:
        held = *engine.live, *engine.drawn.layers[0], *engine.prompts.layers[0]
        return [*(x.data_ptr() for x in held), engine.drawn.bytes, engine.prompts.bytes]

    where = places()
    for asked, group_size in ((TEXTS[:1], 1), (TEXTS, 4), (TEXTS[1:], 2)):
        s.sample(problems(asked), group_size, key=KEY)
        assert places() == where
    s.rest()
    assert engine.drawn is engine.prompts is engine.live is None


# -- rows that are reported


@pytest.mark.parametrize(("max_rows", "fit"), [(3, True), (64, False)])
def test_every_row_is_reported_once_as_the_rollout_has_it(max_rows: int, fit: bool) -> None:
    reported = Counter[tuple[int, Completion]]()

    def on_completions(of: Sequence[Problem], completions: Sequence[Completion]) -> None:
        reported.update((problem.uid, completion) for problem, completion in zip(of, completions, strict=True))

    s = sampler(max_rows=max_rows, on_completions=on_completions)
    if not fit:
        s.shared.model = s.model  # as if it had been asked, and were not
    rollout = s.sample(problems(TEXTS), 3, key=KEY)
    drawn, truncated = rollout.mask.sum(-1).tolist(), rollout.truncated.tolist()
    rows = enumerate(zip(rollout.text, drawn, truncated, strict=True))
    assert reported == Counter((100 + b // 3, Completion(*row)) for b, row in rows)


def test_a_row_is_reported_before_the_last_one_is_drawn() -> None:
    steps: list[int] = []
    s = sampler(max_rows=3, on_completions=lambda problems, completions: steps.append(len(shapes)))
    shapes: list[torch.Size] = []
    with s.model.register_forward_pre_hook(
        lambda m, a, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
    ):
        s.sample(problems(TEXTS), 3, key=KEY)
    assert steps[0] < steps[-1] == len(shapes)


@pytest.mark.parametrize("fit", [True, False])
def test_a_check_that_raises_ends_it_and_the_next_call_is_as_ever(fit: bool) -> None:
    steps: list[None] = []

    def check() -> None:
        if len(steps) > whole + 2:
            raise ScoringInterrupted("asked to stop")

    s = sampler(max_rows=3)
    if not fit:
        s.shared.model = s.model  # as if it had been asked, and were not
    right = s.sample(problems(TEXTS), 3, key=KEY)
    with s.model.register_forward_pre_hook(lambda *_: steps.append(None)):
        s.sample(problems(TEXTS), 3, key=KEY)
        whole = len(steps)
        with pytest.raises(ScoringInterrupted, match="asked to stop"):
            s.for_evaluation(s.token_sampler, check).sample(problems(TEXTS), 3, key=KEY)
    assert len(steps) == whole + 3 < 2 * whole
    again = s.sample(problems(TEXTS), 3, key=KEY)
    assert again.text == right.text
    assert torch.equal(again.logp_sampled, right.logp_sampled)


# -- models that are not fit


def bloom() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 2, "n_head": 2, "eos_token_id": EOS}
    return BloomForCausalLM(BloomConfig(**sizes, pad_token_id=EOS)).eval()


def test_a_model_that_attends_in_its_own_way_is_decoded_with_its_own_cache() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module = bloom()
    module.generation_config.eos_token_id = [EOS, *range(0, 80, 2)]
    s = LocalSampler(**{**vars(sampler(max_rows=5)), "model": module, "shared": SharedDecoder()})
    with pytest.warns(
        RuntimeWarning, match=f"{type(module).__name__} is decoded with a cache that grows, not in slots: "
    ):
        rollout = s.sample(problems(TEXTS), 3, key=KEY)
    assert_as_alone(s, TEXTS, rollout)


class AnyKeyword(nn.Module):
    config = Qwen2Config()

    def forward(self, **given):
        self.given = given
        return SimpleNamespace(logits=torch.zeros(1, 1, 3))


class Old(AnyKeyword):
    def forward(self, *, past_key_values=None, **given):
        return super().forward(past_key_values=past_key_values, **given)


class New(AnyKeyword):
    def forward(self, *, cache=None, **given):
        return super().forward(cache=cache, **given)


@pytest.mark.parametrize(
    ("made", "version", "name"),
    [
        (Old, "5.30", "past_key_values"),
        (New, "5.16", "cache"),
        (AnyKeyword, "5.23.4", "past_key_values"),
        (AnyKeyword, "5.24.0", "cache"),
    ],
)
def test_the_cache_comes_under_the_name_that_the_model_knows(made, version, name, monkeypatch) -> None:
    monkeypatch.setattr(hf_cache_decode.transformers, "__version__", version)
    model, cache, one = made(), DynamicCache(), torch.ones(1, 1, dtype=torch.long)
    hf_cache_decode.forward(model, one, one > 0, one, cache)
    assert model.given[name] is cache
    assert len(model.given.keys() & {"cache", "past_key_values"}) == 1


# -- blocks


def test_blocks_that_are_compiled_for_training_decode_as_written() -> None:
    module = qwen2_tied(VOCABULARY)
    plain, got = (LocalSampler(**{**vars(sampler()), "model": module, "shared": SharedDecoder()}) for _ in range(2))
    expected = plain.sample(problems(TEXTS), 2, key=KEY)
    for block in blocks.blocks(module):
        changed = object.__new__(blocks.CompiledForward)
        changed.forward, changed.fast, changed.which = block.forward, None, blocks._uncached  # calling None fails
        block.forward = changed
    got.shared.model = module  # without the trial whether it is fit, for which compiled blocks would run too
    sizes = Sizes(exact_size, exact_size, exact_size, 1)
    got.shared.engine = DecodeEngine(module, sizes=sizes, code=EAGER_CODE)
    assert torch.equal(got.sample(problems(TEXTS), 2, key=KEY).tokens, expected.tokens)
