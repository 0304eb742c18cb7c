"""The work of `tools/bench`: a model folder, prompts in a file, and how much of it is done."""

import json
import os
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import bench_reward
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.tiny import models, tasks
from grpo_fn.core import prng
from grpo_fn.environments.tool_use import describe_tools
from grpo_fn.shell.model import hf
from grpo_fn.tasks import arithmetic

WORDS = 40_000  # of the text that a vocabulary of 32,000 entries is learned from
TOKENS = 32_000  # of a tokenizer, at most: further entries of a model's vocabulary spell nothing
LETTERS = "abcdefghijklmnopqrstuvwxyz"
QUESTIONS = partial(tasks.products, max_value=99, test_size=128)  # for the calculator
MAX_TURNS = 3
TOTAL = 128  # tokens of a slot of an episode: more than the question, all that is sampled and two observations
DESCRIPTION = describe_tools({"calculator": bench_reward.calculator})  # the tool's schema, as chat templates write it


class Work(NamedTuple):
    """A model and the completions of one step, or the episodes of one. Weights are random, or warm-started to call."""

    sizes: models.Sizes
    prompts: int
    group_size: int
    prompt_tokens: int  # of every prompt; 0: word problems, as long as they come
    new_tokens: int
    micro_tokens: int = 16_384  # of ours, in one forward and backward pass
    logits_chunk_elements: int = 2**24  # of ours, logits in one chunk of the head
    trl_rows: int = 0  # of a micro-batch of TRL's; 0: all
    warm_start: int = 0  # updates towards calls of the calculator; 0: no episodes
    instructions: str = ""  # system message of an episode
    dtype: str = "float32"  # that both sides compute in, over weights in float32
    speed_bar: float | None = None  # completions per second, at least so many times TRL's; None: no bar
    memory_bar: float | None = None  # peak memory, at most this share of TRL's


def sizes_of(
    vocabulary: int, hidden: int, layers: int, heads: int, intermediate: int, positions: int, kv_heads: int = 0
) -> models.Sizes:
    """A Qwen2's sizes; without `kv_heads` as many key and value heads as others."""
    attention = {"heads": heads, "kv_heads": kv_heads or heads}
    mlp = {"hidden": hidden, "layers": layers, "intermediate": intermediate}
    return models.Sizes(vocabulary=vocabulary, positions=positions, **attention, **mlp)


# Qwen2.5-0.5B's shape is for a card, in bfloat16; TRL takes 32 rows at once, more do not fit.
HALF_B = Work(sizes_of(151_936, 896, 24, 14, 4864, 1024, 2), 32, 16, 128, 512, 32_768, 2**27, 32, dtype="bfloat16")
CALCULATOR = Work(sizes_of(276, 128, 2, 4, 384, 160), 16, 16, 0, 64, warm_start=150, speed_bar=2.5)
SCALES = {
    "tiny": Work(sizes_of(352, 32, 1, 2, 64, 128), 2, 4, 0, 4),
    "arithmetic": Work(sizes_of(352, 128, 2, 4, 512, 128), 32, 16, 0, 9, speed_bar=2.5),
    "small": Work(sizes_of(32_000, 384, 8, 6, 1024, 256), 8, 8, 64, 128, 2048, 2**26, speed_bar=3.0, memory_bar=1 / 3),
    "0.5b": HALF_B._replace(speed_bar=3.0),
    "calculator_tiny": Work(sizes_of(276, 32, 1, 2, 64, 160), 2, 4, 0, 64, warm_start=2),
    "calculator": CALCULATOR,
    "calculator_described": CALCULATOR._replace(
        sizes=sizes_of(276, 128, 2, 4, 384, 512), warm_start=400, instructions=DESCRIPTION
    ),
}


def make(work: Work, steps: int, folder: Path) -> dict[str, Any]:
    """Write the model and the prompts of so many steps to `folder`; returns the settings that both sides share."""
    count = work.prompts * steps + 1  # one is held out: a run of ours has to hold out
    openings = (make_calls if work.warm_start else make_random)(work, count, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    shared = work._asdict()
    del shared["sizes"], shared["warm_start"]
    return shared | {
        "model": str(folder / "model"),
        "prompts_file": str(folder / "prompts.jsonl"),
        "chats_file": str(folder / "chats.jsonl") if work.warm_start else None,
        "max_turns": MAX_TURNS if work.warm_start else None,
        "total_tokens": TOTAL + len(tokenizer(work.instructions)["input_ids"]),
        "parameters": sum(p.numel() for p in model.parameters()),
        "prompt_tokens": sum(len(tokenizer(text)["input_ids"]) for text in openings) / len(openings),
        "steps": steps,
        "lr": 1e-6,
        "beta2": 0.99,
    }


def make_random(work: Work, count: int, folder: Path) -> list[str]:
    """Write a model with random weights and so many distinct prompts, which are returned."""
    key, task = prng.key(0, device="cpu"), arithmetic.task(max_value=5, operations=3, test_size=128)
    text_key, prompt_key = prng.fold_in(key, 1), prng.fold_in(key, 2)
    lessons = models.word_problem_lessons(0, task=lambda: task, worked_share=0.0)
    texts = [words(text_key, WORDS)] if work.prompt_tokens else [*lessons.texts]
    tokenizer = models.train_tokenizer(texts, vocabulary=min(TOKENS, work.sizes.vocabulary))
    config = work.sizes.config()
    config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    hf.export(models.random_model(config, seed=0), tokenizer, folder / "model")
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
    write_lines(folder / "prompts.jsonl", [{"prompt": prompt, "answer": "0"} for prompt in prompts])
    return list(prompts)


def words(key: torch.Tensor, count: int) -> str:
    """Random words of four to eleven letters."""
    u = prng.uniform(key, count * 12, low=0.0, high=1.0, dtype=torch.float64).view(count, 12)
    letters, lengths = (u[:, :11] * len(LETTERS)).long().tolist(), (4 + u[:, 11] * 8).long().tolist()
    return " ".join("".join(LETTERS[i] for i in row[:n]) for row, n in zip(letters, lengths, strict=True))


def make_calls(work: Work, count: int, folder: Path) -> list[str]:
    """Write a model that calls the calculator and so many questions; returns the texts that episodes begin with."""
    calls = partial(models.calculator_lessons, task=QUESTIONS, tool_share=1.0, instructions=work.instructions)
    sizes = replace(work.sizes, initializer_range=0.07)  # that of gin/run/calculator.gin
    recipe = models.TinyModel(**asdict(sizes), lessons=calls, steps=work.warm_start, rows=16, seed=0)
    device, report = "cuda" if torch.cuda.is_available() else "cpu", partial(print, file=sys.stderr, flush=True)
    models.make_model(recipe, folder / "model", device=device, report=report)
    task, key = QUESTIONS(), prng.key(1, device="cpu")
    questions = list(dict.fromkeys(task.train(key, uid).prompt for uid in range(2 * count)))[:count]
    system = [{"role": "system", "content": work.instructions}] if work.instructions else []
    chats = [{"prompt": [*system, {"role": "user", "content": question}]} for question in questions]
    write_lines(folder / "prompts.jsonl", [{"prompt": question, "answer": "0"} for question in questions])
    write_lines(folder / "chats.jsonl", chats)
    return [f"{work.instructions}\n{question}" if work.instructions else question for question in questions]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def gin_flags(shared: dict[str, Any]) -> list[str]:
    """The flags of our run: the gin files beside this one, and the work."""
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
    files, bindings = ["bench.gin"], {knob: shared[name] for knob, name in names.items()}
    if shared["max_turns"]:
        files.append("episodes.gin")
        bindings |= {
            "sections.Episodes.max_turns": MAX_TURNS,
            "sections.Episodes.max_turn_tokens": shared["new_tokens"],
            "sections.Episodes.workers": max(1, (os.cpu_count() or 1) // 4),  # for calls that come at once
            "sections.Sampling.max_total_tokens": shared["total_tokens"],
            "tool_use.environment.instructions": shared["instructions"],
            "tool_use.environment.max_turns": MAX_TURNS,
        }
    here = Path(__file__).resolve().parent
    flags = [("--gin_file", str(here / file)) for file in files]
    flags += [("--gin_param", f"{knob}={value!r}") for knob, value in bindings.items()]
    return [part for flag in flags for part in flag]
