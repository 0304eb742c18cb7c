"""A rank of a torchrun job that trains and samples: argv is a model folder, tensor_parallel, and its output folder.

It has its own process group, as the trainer has; the engine is made in it, pushed to twice and closed, and the
group goes on.
"""

import json
import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engines import ENDS, Case, asked, colocated, completions, refill
from episode_fakes import Here, environments
from episodes_of_engines import CALCULATOR, calls_the_calculator, ends, problems
from fakes import tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_fn.core import prng
from grpo_fn.shell.sampler.interface import DataParallelSampler, SamplerContext
from grpo_fn.shell.vllm.engine import StaleEngine
from grpo_fn.shell.vllm.vllm_sampler import export_weights
from grpo_fn.shell.world import World, join_world

KEY = prng.key(5, device="cpu")
TEXTS = ["Tom has", "a", "7 + 7", "He buys 30 more. " * 20]


def measure(world: World, folder: str, tensor_parallel: int) -> dict[str, Any]:
    """What this rank found."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    config = AutoConfig.from_pretrained(folder)
    context = SamplerContext(
        folder=folder, config=config, dtype=torch.float32, world=world, adapters=None, full_model=lambda: model
    )
    with closing(colocated(context, tensor_parallel=tensor_parallel)) as sampler:
        case, spread, gaps = Case(model, context, sampler), DataParallelSampler(sampler, world), []
        for seed in (1, 2):
            refill(model, seed)
            held = sampler.engine.push_weights(export_weights(case.policy(), context), version=seed)
            rollout = spread.sample(asked(TEXTS), 3, key=KEY)
            gaps.append(case.gap(rollout))
        turns = replace(
            sampler,
            environments=environments(
                tokenizer(),
                Here(CALCULATOR, [0.02 * world.rank, 0.0, 0.01]),
                chat=calls_the_calculator(tokenizer()),
                max_turn_tokens=12,
            ),
            ends=ends(),
            max_new_tokens=40,
        )
        all_ranks = DataParallelSampler(turns, world).sample(problems(short=2, long=2), 2, key=KEY)
        by_itself = turns.sample(problems(short=2, long=2), 2, key=KEY)
        gaps += [case.gap(all_ranks), case.gap(by_itself)]
        found = {
            "turns": str(all_ranks.turns),
            "turns by itself": str(by_itself.turns),
            "rows": completions(all_ranks),
            "rows by itself": completions(by_itself),
            "gaps": gaps,
            "engines": spread.engines,
            "completions": completions(rollout),
            "truncated": rollout.truncated.tolist(),
            "held": str(held),
            "stale": lost_on(world, world.size - 1, case),
        }
    total = torch.ones(1)
    dist.all_reduce(total)
    return {**found, "ranks": int(total), "ends": ENDS}


def lost_on(world: World, rank: int, case: Case) -> bool:
    """Whether this rank finds its engine stale when one rank loses a tensor on the way."""
    llm = case.sampler.engine.llm
    if world.rank == rank:
        llm.collective_rpc = partial(losing, llm.collective_rpc)
    try:
        case.renewed(3)
    except StaleEngine:
        return True
    return False


def losing(real: Any, method: str, kwargs: dict[str, Any]) -> Any:
    """A reload without the last block's down projection."""
    kept = ((name, x) for name, x in kwargs["weights_iterator"] if "1.mlp.down_proj" not in name)
    return real(method, kwargs={"weights_iterator": kept})


if __name__ == "__main__":
    folder, ranks, out = sys.argv[1:]
    world = join_world("cpu", deadline=120.0)
    found = measure(world, folder, int(ranks))
    Path(out, f"{world.rank}.json").write_text(json.dumps(found))
    world.leave()
