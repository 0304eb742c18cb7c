"""The work that `tools/bench trl` gives to both sides: a model folder, prompts in a file, and how much of it."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import bench_calculator
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from grpo_fn.core import prng
from grpo_fn.shell.model import hf, tiny_model
from grpo_fn.tasks import arithmetic

WORDS = 40_000  # of the text that a vocabulary of 32,000 entries is learned from
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Work(NamedTuple):
    """A model with random weights, and the completions of one step; or one that has learned to call a calculator, and
    the episodes of one step."""

    shape: tiny_model.Shape
    prompts: int
    group_size: int
    prompt_tokens: int  # of every prompt; 0: word problems, as long as they come
    new_tokens: int
    micro_tokens: int  # of ours, in one forward and backward pass
    logits_chunk_elements: int  # of ours, logits in one chunk of the head
    warm_start: int = 0  # supervised steps towards calls of the calculator; 0: none, and completions instead
    instructions: str = ""  # system message of an episode
    warm_start_lr: float = 3e-3
    initializer_range: float = 0.07  # that of gin/run/calculator.gin
    dtype: str = "float32"  # that both sides compute in, over weights in float32


def shape(
    vocabulary: int,
    hidden: int,
    layers: int,
    heads: int,
    intermediate: int,
    positions: int,
    kv_heads: int | None = None,
) -> tiny_model.Shape:
    """A Qwen2's sizes; without `kv_heads` as many key and value heads as others."""
    return tiny_model.Shape(
        vocabulary=vocabulary,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads or heads,
        intermediate=intermediate,
        positions=positions,
    )


SCALES = {
    "tiny": Work(shape(352, 32, 1, 2, 64, 128), 2, 4, 0, 4, 16_384, 2**24),
    "arithmetic": Work(shape(352, 128, 2, 4, 512, 128), 32, 16, 0, 9, 16_384, 2**24),
    "calculator_tiny": Work(shape(276, 32, 1, 2, 64, 160), 2, 4, 0, 64, 16_384, 2**24, 2),
    "calculator": Work(shape(276, 128, 2, 4, 384, 160), 16, 16, 0, 64, 16_384, 2**24, 150),
    "calculator_described": Work(
        shape(276, 128, 2, 4, 384, 512), 16, 16, 0, 64, 16_384, 2**24, 400, bench_calculator.DESCRIPTION
    ),
    # The blocks of Qwen2.5-0.5B, for a card.
    "calculator_card": Work(
        shape(276, 896, 24, 14, 4864, 160, kv_heads=2),
        *(16, 16, 0, 64, 16_384, 2**24, 250),
        warm_start_lr=3e-4,
        initializer_range=0.02,
        dtype="bfloat16",
    ),
    "small": Work(shape(32_000, 384, 8, 6, 1024, 256), 8, 8, 64, 128, 2048, 2**26),
}
LR, BETA2 = 1e-6, 0.99


def make(work: Work, steps: int, folder: Path) -> dict[str, Any]:
    """Write the model and the prompts of so many steps to `folder`; returns the settings that both sides share."""
    count = work.prompts * steps + 1  # one is held out: a run of ours has to hold out
    if work.warm_start:
        asked = bench_calculator.make(work, count=count, folder=folder)
    else:
        asked = make_random(work, count, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    return {
        "model": str(folder / "model"),
        "prompts_file": str(folder / "prompts.jsonl"),
        "chats_file": str(folder / "chats.jsonl") if work.warm_start else None,
        "max_turns": bench_calculator.MAX_TURNS if work.warm_start else None,
        "instructions": work.instructions,
        "workers": max(1, (os.cpu_count() or 1) // 4),  # of the environment, for calls that come at once
        "total_tokens": bench_calculator.TOTAL + len(tokenizer(work.instructions)["input_ids"]),
        "parameters": sum(p.numel() for p in model.parameters()),
        "prompt_tokens": sum(len(tokenizer(prompt)["input_ids"]) for prompt in asked) / len(asked),
        "prompts": work.prompts,
        "group_size": work.group_size,
        "new_tokens": work.new_tokens,
        "micro_tokens": work.micro_tokens,
        "logits_chunk_elements": work.logits_chunk_elements,
        "steps": steps,
        "lr": LR,
        "beta2": BETA2,
        "dtype": work.dtype,
    }


def make_random(work: Work, count: int, folder: Path) -> list[str]:
    """Write a model with random weights and so many prompts, which are returned."""
    key = prng.key(0, device="cpu")
    tokenizer = tiny_model.train_tokenizer(texts(work, key), vocabulary=work.shape.vocabulary)
    model = tiny_model.random_model(work.shape, seed=0, eos=tokenizer.eos_token_id)
    hf.export(model, tokenizer, folder / "model")
    asked = prompts(work, tokenizer, key, count)
    rows = "".join(json.dumps({"prompt": prompt, "answer": "0"}) + "\n" for prompt in asked)
    (folder / "prompts.jsonl").write_text(rows)
    return asked


def texts(work: Work, key: torch.Tensor) -> list[str]:
    """What the tokenizer learns its vocabulary from."""
    if work.prompt_tokens:
        return [" ".join(words(prng.fold_in(key, 1), WORDS))]
    return arithmetic.corpus(problems(), prng.fold_in(key, 1), 4000)


def prompts(work: Work, tokenizer: PreTrainedTokenizerBase, key: torch.Tensor, count: int) -> list[str]:
    """Distinct prompts; random words cut to `prompt_tokens` tokens, or word problems."""
    key = prng.fold_in(key, 2)
    found = cut(tokenizer, key, work.prompt_tokens) if work.prompt_tokens else asked(key)
    distinct: dict[str, None] = {}
    while len(distinct) < count:
        distinct[next(found)] = None
    return list(distinct)


def problems() -> Any:
    """The arithmetic task of gin/run/arithmetic.gin."""
    return arithmetic.task(max_value=5, operations=3, test_size=128)


def asked(key: torch.Tensor) -> Iterator[str]:
    """Word problems."""
    task, uid = problems(), 0
    while True:
        yield task.train(key, uid).prompt
        uid += 1


def cut(tokenizer: PreTrainedTokenizerBase, key: torch.Tensor, tokens: int) -> Iterator[str]:
    """Random words, cut to so many tokens; those that are others once put together again are left out."""
    number = 0
    while True:
        text = " ".join(words(prng.fold_in(key, number), tokens))
        text = tokenizer.decode(tokenizer(text)["input_ids"][:tokens])
        if len(tokenizer(text)["input_ids"]) == tokens:
            yield text
        number += 1


def words(key: torch.Tensor, count: int) -> list[str]:
    """Random words of four to eleven letters."""
    u = prng.uniform(key, count * 12, low=0.0, high=1.0, dtype=torch.float64).view(count, 12)
    letters, lengths = (u[:, :11] * len(LETTERS)).long().tolist(), (4 + u[:, 11] * 8).long().tolist()
    return ["".join(LETTERS[i] for i in row[:n]) for row, n in zip(letters, lengths, strict=True)]


def gin(shared: dict[str, Any]) -> str:
    """Our run file."""
    return GIN.format(**shared) + (bench_calculator.EPISODES.format(**shared) if shared["max_turns"] else "")


GIN = """# Written by tools/bench trl.
from __gin__ import dynamic_registration

import bench_reward
from grpo_fn.algo import kl
from grpo_fn.algo import losses
from grpo_fn.algo import objective
from grpo_fn.algo import step
from grpo_fn.trainer import sections
from grpo_fn import train
from grpo_fn.rewards import combine
from grpo_fn.shell.policy import optimizer
from grpo_fn.shell.model import logprob_model
from grpo_fn.tasks import rows

include "base.gin"
include "algo/grpo.gin"
include "task/rows.gin"

STEPS = {steps}
SEED = 0
DATA = "{prompts_file}"
PROMPT_FIELD = "prompt"

train.train.model = "{model}"
sections.Compute.dtype = "{dtype}"
step.Algorithm.prompts = {prompts}
step.Algorithm.group_size = {group_size}
sections.Sampling.max_new_tokens = {new_tokens}
sections.PolicyUpdate.micro_tokens = {micro_tokens}
sections.Compute.logits_chunk_elements = {logits_chunk_elements}
sections.Evaluation.problems = 1
rows.hold_out.test_size = 1
rows.read_problems.template = "{{prompt}}"

combine.combine.parts = [@bench_reward.ours]
combine.combine.weights = [1.0]
sections.Evaluation.graders = [@bench_reward.ours]

losses.clipped_ratio.clip_low = 0.2
losses.clipped_ratio.clip_high = 0.2
objective.policy_objective.beta = 0.0
optimizer.adamw.lr = {lr}
optimizer.adamw.beta2 = {beta2}
optimizer.constant.warmup = 0

# Off, because the other side has nothing like it: checksums of every step, tables of samples, pages of signals.
sections.Logging.checksums_every = 0
sections.Logging.samples_every = 0
sections.Logging.token_report_every = 0
"""
