"""Decoding with each token sampler in turn: tokens a CPU second, and what that is of `categorical`'s.

The local sampler writes completions of the arithmetic task with one thread; the medians of the process's CPU seconds
are compared: what else the machine does moves those less than the wall clock.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from functools import partial

import torch
from bench import in_turn, table
from transformers import AutoModelForCausalLM

from grpo_fn.core import prng, sampling
from grpo_fn.core.checks import check_positive
from grpo_fn.shell.model import hf
from grpo_fn.shell.sampler.local.local_sampler import LocalSampler
from grpo_fn.tasks import arithmetic

CUT = {"temperature": 1.0, "top_k": 0, "top_p": 0.9}
TOKEN_SAMPLERS = {
    "categorical": partial(sampling.categorical, temperature=1.0),
    "gumbel_max": partial(sampling.gumbel_max, temperature=1.0),
    "nucleus, top_p 0.9": partial(sampling.nucleus, **CUT),
    "gumbel_max_nucleus, top_p 0.9": partial(sampling.gumbel_max_nucleus, **CUT),
}


def samplers(args: argparse.Namespace) -> Iterator[str]:
    """A row for each token sampler. Raises ValueError for numbers below 1 and for a folder without a model."""
    check_positive(prompts=args.prompts, group_size=args.group_size, new_tokens=args.new_tokens, repeats=args.repeats)
    torch.set_num_threads(1)
    folder, key = hf.Pretrained(args.model).folder(), prng.key(0, device="cpu")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), hf.load_tokenizer(folder)
    task = arithmetic.task(max_value=5, operations=3, test_size=128)
    problems = [task.train(key, index) for index in range(args.prompts)]
    limits = {"encode": hf.encode_prompt, "max_new_tokens": args.new_tokens, "stop": (), "max_rows": 1024}

    def speed(repeat: int, *, sampler: LocalSampler) -> float:
        begun = time.process_time()
        drawn = int(sampler.sample(problems, args.group_size, key=key).mask.sum())
        return drawn / (time.process_time() - begun)

    sides = {
        name: partial(
            speed, sampler=LocalSampler(model=model, tokenizer=tokenizer, token_sampler=token_sampler, **limits)
        )
        for name, token_sampler in TOKEN_SAMPLERS.items()
    }
    speeds = in_turn(sides, args.repeats + 1)  # the first of each is a warm-up
    medians = {name: statistics.median(of_one[1:]) for name, of_one in speeds.items()}
    rows = [(name, f"{speed:.0f}", f"{speed / medians['categorical']:.2f}") for name, speed in medians.items()]
    yield from table(("token sampler", "tokens a CPU second", "of `categorical`"), rows)
