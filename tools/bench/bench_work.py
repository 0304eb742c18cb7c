"""The work of `tools/bench`: a model folder, prompts in a file, and how much of it is done."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from experiments.tiny import models
from grpo_fn.core import prng
from grpo_fn.shell.model import hf, tiny
from grpo_fn.tasks import arithmetic

WORDS = 40_000  # of the text that a vocabulary of 32,000 entries is learned from
TOKENS = 32_000  # of a tokenizer, at most: further entries of a model's vocabulary spell nothing
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Work(NamedTuple):
    """A model with random weights and the completions of one step."""

    sizes: tiny.Qwen2Sizes
    prompts: int
    group_size: int
    prompt_tokens: int  # of every prompt; 0: word problems, as long as they come
    new_tokens: int
    micro_tokens: int = 16_384  # of ours, in one forward and backward pass
    logits_chunk_elements: int = 2**24  # of ours, logits in one chunk of the head
    trl_rows: int = 0  # of a micro-batch of TRL's; 0: all
    dtype: str = "float32"  # that both sides compute in, over weights in float32
    speed_bar: float | None = None  # completions per second, at least so many times TRL's; None: no bar
    memory_bar: float | None = None  # peak memory, at most this share of TRL's


def sizes_of(
    vocabulary: int, hidden: int, layers: int, heads: int, intermediate: int, positions: int
) -> tiny.Qwen2Sizes:
    """A Qwen2's sizes, with as many key and value heads as others."""
    return tiny.Qwen2Sizes(
        vocabulary=vocabulary,
        positions=positions,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        intermediate=intermediate,
    )


HALF_B = replace(sizes_of(151_936, 896, 24, 14, 4864, 1024), kv_heads=2)  # Qwen2.5-0.5B's shape
SCALES = {
    "tiny": Work(sizes_of(352, 32, 1, 2, 64, 128), 2, 4, 0, 4),
    "arithmetic": Work(sizes_of(352, 128, 2, 4, 512, 128), 32, 16, 0, 9, speed_bar=2.5),
    "small": Work(sizes_of(32_000, 384, 8, 6, 1024, 256), 8, 8, 64, 128, 2048, 2**26, speed_bar=3.0, memory_bar=1 / 3),
    # For a card; TRL takes 32 rows at once, more do not fit.
    "0.5b": Work(HALF_B, 32, 16, 128, 512, 32_768, 2**27, 32, dtype="bfloat16", speed_bar=3.0),
}


def make(work: Work, steps: int, folder: Path) -> dict[str, Any]:
    """Write the model and the prompts of so many steps to `folder`; returns the settings that both sides share."""
    count = work.prompts * steps + 1  # one is held out: a grpo_fn run has to hold out
    key, task = prng.key(0, device="cpu"), arithmetic.task(max_value=5, operations=3, test_size=128)
    text_key, prompt_key = prng.fold_in(key, 1), prng.fold_in(key, 2)
    lessons = models.word_problem_lessons(0, task=lambda: task, worked_share=0.0)
    texts = [words(text_key, WORDS)] if work.prompt_tokens else [*lessons.texts]
    tokenizer = models.train_tokenizer(texts, vocabulary=min(TOKENS, work.sizes.vocabulary))
    config = work.sizes.config()
    config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    model = tiny.random_model(config, seed=0)
    hf.export(model, tokenizer, folder / "model")
    prompts: dict[str, None] = {}
    number = 0
    while len(prompts) < count:
        if work.prompt_tokens:
            ids = tokenizer(words(prng.fold_in(prompt_key, number), work.prompt_tokens))["input_ids"]
            text = tokenizer.decode(ids[: work.prompt_tokens])
            # Tokens cut off may be others once they are put together again.
            fits = len(tokenizer(text)["input_ids"]) == work.prompt_tokens
        else:
            text, fits = task.train(prompt_key, number).prompt, True
        prompts |= {text: None} if fits else {}
        number += 1
    rows = [json.dumps({"prompt": prompt, "answer": "0"}) + "\n" for prompt in prompts]
    (folder / "prompts.jsonl").write_text("".join(rows))
    shared = work._asdict()
    del shared["sizes"]
    return shared | {
        "model": str(folder / "model"),
        "prompts_file": str(folder / "prompts.jsonl"),
        "parameters": sum(p.numel() for p in model.parameters()),
        "prompt_tokens": sum(len(tokenizer(text)["input_ids"]) for text in prompts) / len(prompts),
        "steps": steps,
        "lr": 1e-6,
        "beta2": 0.99,
    }


def words(key: torch.Tensor, count: int) -> str:
    """Random words of four to eleven letters."""
    u = prng.uniform(key, count * 12, low=0.0, high=1.0, dtype=torch.float64).view(count, 12)
    letters, lengths = (u[:, :11] * len(LETTERS)).long().tolist(), (4 + u[:, 11] * 8).long().tolist()
    return " ".join("".join(LETTERS[i] for i in row[:n]) for row, n in zip(letters, lengths, strict=True))


def gin_flags(shared: dict[str, Any]) -> list[str]:
    """The flags of our run: the gin file beside this one, and the work."""
    names = {
        "STEPS": "steps",
        "DATA": "prompts_file",
        "train.train.model": "model",
        "sections.Compute.dtype": "dtype",
        "sections.Compute.logits_chunk_elements": "logits_chunk_elements",
        "step.Algorithm.prompts": "prompts",
        "step.Algorithm.group_size": "group_size",
        "sections.Sampling.max_new_tokens": "new_tokens",
        "sections.PolicyUpdate.micro_tokens": "micro_tokens",
        "optimizer.adamw.lr": "lr",
        "optimizer.adamw.beta2": "beta2",
    }
    params = [f"{knob}={shared[name]!r}" for knob, name in names.items()]
    file = str(Path(__file__).resolve().with_name("bench.gin"))
    return ["--gin_file", file, *(part for param in params for part in ("--gin_param", param))]
