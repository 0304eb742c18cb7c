"""The work of `tools/bench trl` and `growth`: a model folder, prompts in a file, and how much of it is done."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import bench_calculator
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_fn.core import prng
from grpo_fn.shell.model import hf, tiny_model
from grpo_fn.shell.model.tiny_tool_model import ToolWarmStart
from grpo_fn.tasks import arithmetic

WORDS = 40_000  # of the text that a vocabulary of 32,000 entries is learned from
TOKENS = 32_000  # of a tokenizer, at most: further entries of a model's vocabulary spell nothing
LETTERS = "abcdefghijklmnopqrstuvwxyz"
LR, BETA2 = 1e-6, 0.99


class Work(NamedTuple):
    """A model and the completions of one step, or the episodes of one. Weights are random, or warm-started to call."""

    shape: tiny_model.Shape
    prompts: int
    group_size: int
    prompt_tokens: int  # of every prompt; 0: word problems, as long as they come
    new_tokens: int
    micro_tokens: int = 16_384  # of ours, in one forward and backward pass
    logits_chunk_elements: int = 2**24  # of ours, logits in one chunk of the head
    trl_rows: int = 0  # of a micro-batch of TRL's; 0: all
    max_rows: int = 1024  # that our sampler decodes at once
    warm_start: ToolWarmStart | None = None  # towards calls of the calculator; None: completions, no episodes
    instructions: str = ""  # system message of an episode
    dtype: str = "float32"  # that both sides compute in, over weights in float32
    speed_bar: float | None = None  # completions per second, at least so many times TRL's; None: no bar
    memory_bar: float | None = None  # peak memory, at most this share of TRL's


def shape(
    vocabulary: int, hidden: int, layers: int, heads: int, intermediate: int, positions: int, kv_heads: int = 0
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


CALLS = bench_calculator.WarmStart
SCALES = {
    "tiny": Work(shape(352, 32, 1, 2, 64, 128), 2, 4, 0, 4),
    "arithmetic": Work(shape(352, 128, 2, 4, 512, 128), 32, 16, 0, 9, speed_bar=2.5),
    "small": Work(shape(32_000, 384, 8, 6, 1024, 256), 8, 8, 64, 128, 2048, 2**26, speed_bar=3.0, memory_bar=1 / 3),
    # Qwen2.5-0.5B's shape for a card, in bfloat16; TRL takes 32 rows at once, more do not fit.
    "0.5b": Work(
        shape(151_936, 896, 24, 14, 4864, 1024, 2), 32, 16, 128, 512, 32_768, 2**27, 32, dtype="bfloat16", speed_bar=3.0
    ),
    "growth": Work(shape(1024, 128, 2, 2, 512, 512), 8, 8, 8, 32, 4096, max_rows=64),
    "calculator_tiny": Work(shape(276, 32, 1, 2, 64, 160), 2, 4, 0, 64, warm_start=CALLS(steps=2, lr=3e-3)),
    "calculator": Work(
        shape(276, 128, 2, 4, 384, 160), 16, 16, 0, 64, warm_start=CALLS(steps=150, lr=3e-3), speed_bar=2.5
    ),
    "calculator_described": Work(
        shape(276, 128, 2, 4, 384, 512),
        *(16, 16, 0, 64),
        warm_start=CALLS(steps=400, lr=3e-3),
        instructions=bench_calculator.DESCRIPTION,
        speed_bar=2.5,
    ),
}


def make(work: Work, steps: int, folder: Path) -> dict[str, Any]:
    """Write the model and the prompts of so many steps to `folder`; returns the settings that both sides share."""
    count = work.prompts * steps + 1  # one is held out: a run of ours has to hold out
    if work.warm_start is None:
        asked = make_random(work, count, folder)
    else:
        asked = bench_calculator.make(
            work.shape,
            work.warm_start,
            instructions=work.instructions,
            count=count,
            folder=folder,
        )
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    shared = work._asdict()
    del shared["shape"], shared["warm_start"]
    return shared | {
        "model": str(folder / "model"),
        "prompts_file": str(folder / "prompts.jsonl"),
        "chats_file": str(folder / "chats.jsonl") if work.warm_start else None,
        "max_turns": bench_calculator.MAX_TURNS if work.warm_start else None,
        "workers": max(1, (os.cpu_count() or 1) // 4),  # of the environment, for calls that come at once
        "total_tokens": bench_calculator.TOTAL + len(tokenizer(work.instructions)["input_ids"]),
        "parameters": sum(p.numel() for p in model.parameters()),
        "prompt_tokens": sum(len(tokenizer(prompt)["input_ids"]) for prompt in asked) / len(asked),
        "steps": steps,
        "lr": LR,
        "beta2": BETA2,
    }


def make_random(work: Work, count: int, folder: Path) -> list[str]:
    """Write a model with random weights and so many distinct prompts, which are returned."""
    key, task = prng.key(0, device="cpu"), arithmetic.task(max_value=5, operations=3, test_size=128)
    of_text, of_prompts = prng.fold_in(key, 1), prng.fold_in(key, 2)
    texts = [words(of_text, WORDS)] if work.prompt_tokens else arithmetic.corpus(task, of_text, 4000)
    tokenizer = tiny_model.train_tokenizer(texts, vocabulary=min(TOKENS, work.shape.vocabulary))
    model = tiny_model.random_model(work.shape, seed=0, eos=tokenizer.eos_token_id)
    hf.export(model, tokenizer, folder / "model")
    prompts: dict[str, None] = {}
    number = 0
    while len(prompts) < count:
        if work.prompt_tokens:
            ids = tokenizer(words(prng.fold_in(of_prompts, number), work.prompt_tokens))["input_ids"]
            text = tokenizer.decode(ids[: work.prompt_tokens])
            # Tokens cut off may be others once they are put together again.
            fits = len(tokenizer(text)["input_ids"]) == work.prompt_tokens
        else:
            text, fits = task.train(of_prompts, number).prompt, True
        prompts |= {text: None} if fits else {}
        number += 1
    rows = "".join(json.dumps({"prompt": prompt, "answer": "0"}) + "\n" for prompt in prompts)
    (folder / "prompts.jsonl").write_text(rows)
    return list(prompts)


def words(key: torch.Tensor, count: int) -> str:
    """Random words of four to eleven letters."""
    u = prng.uniform(key, count * 12, low=0.0, high=1.0, dtype=torch.float64).view(count, 12)
    letters, lengths = (u[:, :11] * len(LETTERS)).long().tolist(), (4 + u[:, 11] * 8).long().tolist()
    return " ".join("".join(LETTERS[i] for i in row[:n]) for row, n in zip(letters, lengths, strict=True))


def gin(shared: dict[str, Any]) -> str:
    """Our run file."""
    return GIN.format(**shared) + (bench_calculator.EPISODES.format(**shared) if shared["max_turns"] else "")


GIN = """# Written by tools/bench.
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
sections.Sampling.max_rows = {max_rows}
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
