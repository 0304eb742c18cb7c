"""A run is the same run on any number of ranks: the same tokens, rewards, advantages, losses and evaluation."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from crew import CPU, crew
from e2e.test_ranks import APART, ROUNDED  # how far extremes over single tokens may be apart
from fakes import MODELS, VOCABULARY, problem, tokenizer
from hypothesis import given, settings
from steps import preset
from test_fsdp_ranks import Case, scale_of
from transformers import AutoConfig

from grpo_fn.algo import group_sampling
from grpo_fn.algo.step import AT_THE_START, Algorithm, from_sampler, from_trainer, grpo_step
from grpo_fn.core import prng, sampling
from grpo_fn.core.problem import Completion, Problem
from grpo_fn.core.types import Groups
from grpo_fn.rewards.combine import combine, score_serially
from grpo_fn.shell.model.hf import encode_prompt
from grpo_fn.shell.model.logprob_model import LogprobModel
from grpo_fn.shell.model.lora import LoRA
from grpo_fn.shell.policy.fsdp import FSDPPolicy
from grpo_fn.shell.policy.load_and_shard import ModelSpec, load_and_shard
from grpo_fn.shell.policy.optimizer import adamw
from grpo_fn.shell.sampler.interface import DataParallelSampler, rank_share, spread_score
from grpo_fn.shell.sampler.local.local_sampler import LocalSampler
from grpo_fn.shell.world import World, alone
from grpo_fn.trainer.evaluation import GradedAnswer, evaluate, summarise

pytestmark = pytest.mark.xdist_group("spread")
EXAMPLES = settings.default.max_examples
KEY = prng.key(23, device="cpu")
ADAPTERS = LoRA(rank=2, alpha=8.0, dropout=0.0, targets="all-linear")
NEW_TOKENS = 6
ENDS = [VOCABULARY - 1, *range(0, 60, 2)]  # every so many rows end early


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("model")
    model = MODELS["qwen2_tied"](VOCABULARY)
    model.generation_config.eos_token_id = ENDS
    model.save_pretrained(made)
    return made


# -- tasks and rewards


def asked(first: int, count: int) -> Sequence[Problem]:
    """Prompts of different lengths."""
    return [problem(uid, "Tom has apples. "[: 3 + 5 * uid % 11]) for uid in range(first, first + count)]


HELD_OUT = tuple(asked(1000, 5))


def letters(asked: Problem, given: Completion) -> float | None:
    """The share of letters among the characters; what begins with a digit cannot be scored."""
    if given.text[:1].isdigit():
        return None
    return sum(c.isalpha() for c in given.text) / max(1, len(given.text))


def short(asked: Problem, given: Completion) -> float:
    return 1.0 - given.length / NEW_TOKENS


# -- a run


class Plan(NamedTuple):
    """What a run does, wherever it does it."""

    algo: str
    prompts: int
    minibatches: int
    epochs: int
    micro_tokens: int
    group_size: int = 3
    steps: int = 2
    adapted: bool = False
    dynamic: bool = False
    token_sampler: Callable = sampling.categorical


class Step(NamedTuple):
    """What a rank saw of a step."""

    groups: Groups
    adv: torch.Tensor
    batch: Any
    ratio: torch.Tensor
    figures: dict[str, float]


class Run(NamedTuple):
    steps: list[Step]
    judged: list[GradedAnswer]
    figures: dict[str, float]


def silent(name: str) -> nullcontext:
    return nullcontext()


def unmoved(step: int) -> float:
    return 1.0


def run(world: World, folder: Path, strategy: str, plan: Plan, how: Algorithm) -> Run:
    """So many steps and an evaluation, put together as `train` and `loop` do."""
    placing = ModelSpec(
        folder=str(folder),
        config=AutoConfig.from_pretrained(folder),
        dtype=torch.float32,
        attention="sdpa",
        adapters=ADAPTERS if plan.adapted else None,
        logprob_model=partial(LogprobModel, temperature=1.0, logits_chunk_elements=2**20),
        parallelism=scale_of(Case("", strategy)),
        key=KEY,
    )
    placed = load_and_shard(world, placing, reference=True, teachers={})
    policy = FSDPPolicy(
        placed.logprob_model,
        world=world,
        data=placed.data,
        reference_model=placed.reference_model,
        dropout_modules=placed.dropout_modules,
        seed=0,
        micro_tokens=plan.micro_tokens,
        min_micro_batches=1,
        # Not as small an eps as usual: Adam would turn the rounding of tiny gradients into steps as long as others.
        optimizer=partial(adamw, lr=0.02, beta1=0.9, beta2=0.95, eps=1e-2, weight_decay=0.0),
        schedule=unmoved,
        loss_scale=None,
        initial_scale=1.0,
        max_grad_norm=1.0,
    )
    token_sampler = partial(plan.token_sampler, temperature=1.0)
    own = LocalSampler(
        model=placed.decoding(),
        tokenizer=tokenizer(),
        token_sampler=token_sampler,
        encode=encode_prompt,
        max_new_tokens=NEW_TOKENS,
        stop=(),
        max_rows=64,
    )
    sampler, score = DataParallelSampler(own, world), spread_score(score_serially, world)
    algo = replace(
        how,
        group_sampling=partial(group_sampling.dynamic, max_gen_batches=2) if plan.dynamic else None,
        old_logp=from_trainer if plan.adapted else from_sampler,
        prompts=plan.prompts,
        group_size=plan.group_size,
        epochs=plan.epochs,
        minibatches=plan.minibatches,
    )
    reward = partial(combine, parts=[letters, short], weights=[1.0, 0.5], score=score)
    sampler.load(policy)
    carried, steps = AT_THE_START, []
    for _ in range(plan.steps):
        seen, carried, figures = grpo_step(
            policy,
            sampler,
            asked,
            carried,
            key=KEY,
            algo=algo,
            reward=reward,
            span=silent,
            teacher=None,
            demonstrations=None,
        )
        steps.append(Step(*seen, figures))
    greedy = DataParallelSampler(replace(own, token_sampler=sampling.greedy), world)
    judged = evaluate(greedy, sampler, HELD_OUT, key=KEY, judges=[short, letters], samples=2, answer=None, score=score)
    return Run(steps, judged, summarise(judged, ks=(1, 2), by=()))


@lru_cache(maxsize=64)
def on_one(folder: Path, plan: Plan) -> Run:
    return run(alone(CPU), folder, "full_shard", plan, preset(plan.algo))


def texts(groups: Groups) -> list[list[int]]:
    """Every row's prompt and completion; what pads it may differ, and is left out."""
    tokens, mask = groups.rollout.tokens.tolist(), groups.rollout.mask
    ends = (torch.arange(1, mask.shape[1] + 1) * mask).amax(-1).tolist()
    return [row[:end] for row, end in zip(tokens, ends, strict=True)]


def close(got: Any, right: Any) -> None:
    torch.testing.assert_close(got, right, rtol=1e-6, atol=1e-6, equal_nan=True)


def check(folder: Path, size: int, strategy: str, plan: Plan) -> None:
    right = on_one(folder, plan)
    moved = right.steps[-1].figures["loss/grad_norm"]
    assert moved > 1e-3  # otherwise nothing was learned, and any policy samples alike
    for found in crew(size).run(run, folder, strategy, plan, preset(plan.algo)):
        assert len(found.steps) == plan.steps
        for got, expected in zip(found.steps, right.steps, strict=True):
            assert got.groups.problems == expected.groups.problems
            assert texts(got.groups) == texts(expected.groups)
            assert torch.equal(got.groups.rollout.mask, expected.groups.rollout.mask)
            assert got.groups.rollout.text == expected.groups.rollout.text
            assert torch.equal(got.groups.rollout.truncated, expected.groups.rollout.truncated)
            close(got.groups.reward, expected.groups.reward)
            close(got.adv, expected.adv)
            close(got.batch.logp_sampled, expected.batch.logp_sampled)
            if isinstance(expected.batch.logp_ref, torch.Tensor):
                close(got.batch.logp_ref, expected.batch.logp_ref)
            assert got.figures.keys() == expected.figures.keys()
            for name, value in expected.figures.items():
                if name == "system/micro_batches":  # fewer where ranks share the rows
                    continue
                near = APART if name.startswith(ROUNDED) else 1e-6
                assert got.figures[name] == pytest.approx(value, rel=near, abs=near, nan_ok=True), name
        assert found.judged == right.judged
        assert found.figures == right.figures


EVEN = Plan("grpo", prompts=4, minibatches=2, epochs=1, micro_tokens=60, steps=3)
ODD = Plan("dapo", prompts=5, minibatches=1, epochs=2, micro_tokens=40)
FEW = Plan("dr_grpo", prompts=3, minibatches=3, epochs=1, micro_tokens=30, group_size=2)._replace(
    token_sampler=sampling.gumbel_max
)
LOW = Plan("gspo", prompts=5, minibatches=1, epochs=1, micro_tokens=50, adapted=True)
AGAIN = Plan("grpo", prompts=3, minibatches=1, epochs=1, micro_tokens=50, dynamic=True)


PLANS = {"even": EVEN, "odd": ODD, "few": FEW, "adapted": LOW, "dynamic": AGAIN}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", list(PLANS))
@pytest.mark.parametrize("turned", [False, True])
def test_the_same_seed_makes_the_same_run_on_any_number_of_ranks(folder, name, turned):
    """Of the two strategies and the two sizes, each with each plan."""
    ways = [(2, "full_shard"), (4, "no_shard")] if turned else [(4, "full_shard"), (2, "no_shard")]
    size, strategy = ways[list(PLANS).index(name) % 2]
    check(folder, size, strategy, PLANS[name])


@given(st.integers(0, 40), st.integers(1, 9))
def test_shares_are_all_items_in_order_and_as_even_as_can_be(items, size):
    shares = [range(items)[rank_share(items, rank, size)] for rank in range(size)]
    assert [i for part in shares for i in part] == list(range(items))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def scored(world: World, n: int) -> tuple[list[float | None], int]:
    """Scores of n rows, and how many of them this rank scored."""
    mine = []

    def score(fn: Any, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float | None]:
        mine.extend(problems)
        return score_serially(fn, problems, completions)

    rows = [Completion("1" * (i % 3 == 0) + "ab." * i, i, False) for i in range(n)]
    return spread_score(score, world)(letters, asked(0, n), rows), len(mine)


@settings(max_examples=max(10, EXAMPLES // 4))
@given(st.sampled_from([2, 4]), st.integers(0, 9))
def test_every_row_is_scored_once_and_known_to_all(size, n):
    found = crew(size).run(scored, n)
    right, _ = scored(alone(CPU), n)
    assert [scores for scores, _ in found] == [right] * size
    assert sum(count for _, count in found) == n
