"""Decoding with each token sampler in turn, on this machine: tokens a CPU second, and what that is of `categorical`'s.

python tools/bench/bench_samplers.py --model MODEL

MODEL is a Hugging Face folder. The local sampler writes completions of the arithmetic task with one thread; each repeat
times all token samplers one after the other, and the medians of the process's CPU seconds are compared: what else the
machine does moves those less than the wall clock.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial

from grpo_fn.command_line import exit_code
from grpo_fn.core.checks import check_positive


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, metavar="MODEL", help="a Hugging Face folder")
    parser.add_argument("--prompts", type=int, default=24, metavar="P", help="default 24")
    parser.add_argument("--group_size", type=int, default=16, metavar="G", help="default 16")
    parser.add_argument("--new_tokens", type=int, default=32, metavar="T", help="at most (default 32)")
    parser.add_argument("--repeats", type=int, default=7, metavar="R", help="default 7")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print; returns the exit code."""
    return exit_code(partial(compare, flags().parse_args(argv)), interrupted="interrupted")


def compare(args: argparse.Namespace) -> int:
    """A line for each token sampler. Raises ValueError for numbers below 1 and for a folder without a model."""
    check_positive(prompts=args.prompts, group_size=args.group_size, new_tokens=args.new_tokens, repeats=args.repeats)
    import torch
    from transformers import AutoModelForCausalLM

    from grpo_fn.core import prng, sampling
    from grpo_fn.shell.model import hf
    from grpo_fn.shell.sampler.local.local_sampler import LocalSampler
    from grpo_fn.tasks import arithmetic

    torch.set_num_threads(1)
    folder, key = hf.Pretrained(args.model).folder(), prng.key(0, device="cpu")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), hf.load_tokenizer(folder)
    task = arithmetic.task(max_value=5, operations=3, test_size=128)
    problems = [task.train(key, index) for index in range(args.prompts)]
    cut = {"temperature": 1.0, "top_k": 0, "top_p": 0.9}
    chosen = {
        "categorical": partial(sampling.categorical, temperature=1.0),
        "gumbel_max": partial(sampling.gumbel_max, temperature=1.0),
        "nucleus, top_p 0.9": partial(sampling.nucleus, **cut),
        "gumbel_max_nucleus, top_p 0.9": partial(sampling.gumbel_max_nucleus, **cut),
    }
    limits = {"encode": hf.encode_prompt, "max_new_tokens": args.new_tokens, "stop": (), "max_rows": 1024}
    samplers = {
        name: LocalSampler(model=model, tokenizer=tokenizer, token_sampler=token_sampler, **limits)
        for name, token_sampler in chosen.items()
    }
    speeds: dict[str, list[float]] = {name: [] for name in samplers}
    for repeat in range(args.repeats + 1):
        for name, sampler in samplers.items():
            begun = time.process_time()
            drawn = int(sampler.sample(problems, args.group_size, key=key).mask.sum())
            if repeat:  # the first of each is a warm-up
                speeds[name].append(drawn / (time.process_time() - begun))
    base = statistics.median(speeds["categorical"])
    print("| token sampler | tokens a CPU second | of `categorical` |", "|---|---|---|", sep="\n")
    for name, of_one in speeds.items():
        print(f"| {name} | {statistics.median(of_one):.0f} | {statistics.median(of_one) / base:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
