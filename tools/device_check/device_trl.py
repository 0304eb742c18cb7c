"""TRL's GRPOTrainer with transformers' generation on the work that `step` measured. Nothing of grpo_fn in here."""

import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from device_runner import Figure, LeftOut, Setting

STEPS = 2  # one to warm up, one that counts


def steps(setting: Setting) -> list[Figure]:
    """As many completions of the same shape, one update a step; the first step is to warm up."""
    for package in ("trl", "datasets"):
        if find_spec(package) is None:
            raise LeftOut(f"{package} is not here")
    note = Path(setting.scratch) / "step.json"
    if not note.is_file():
        raise LeftOut("nothing to compare with: `step` did not come to its end in this run")
    measured = json.loads(note.read_text())
    work = measured["work"]
    _, took = trained(setting, measured["model"], work)
    tokens = work["prompts"] * work["size"] * work["new"]
    return [
        Figure("TRL, end to end", tokens / took, "tokens/s"),
        Figure("TRL, a step", took, "s"),
        Figure("grpo_fn is faster", took / measured["seconds"], "x", at_least=3.0),
    ]


def trained(setting: Setting, model: str, work: dict[str, int]) -> list[float]:
    """Seconds of each step, the one to warm up among them."""
    import trl

    folder = Path(setting.scratch)
    clock = noting()
    trainer = trl.GRPOTrainer(
        model=model,
        args=trl.GRPOConfig(**settings(setting, work, folder / "trl")),
        reward_funcs=even,
        train_dataset=prompts(work, folder),
        processing_class=tokenizer(),
        callbacks=[clock],
    )
    trainer.train()
    return [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)]


def settings(setting: Setting, work: dict[str, int], folder: Path) -> dict[str, Any]:
    """The fields of GRPOConfig: the same work; bfloat16 over float32 weights, nothing computed twice."""
    on_cpu = setting.device == "cpu"
    rows = work["prompts"] * work["size"]
    micro = min(32, rows)
    return {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": rows // micro,
        "num_generations": work["size"],
        "max_completion_length": work["new"],
        "generation_kwargs": {"min_new_tokens": work["new"]},
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.99,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "num_iterations": 1,
        "beta": 0.0,
        "epsilon": 0.2,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "seed": 0,
        "use_cpu": on_cpu,
        "bf16": not on_cpu,
        "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"},
        "gradient_checkpointing": False,
        "optim": "adamw_torch_fused",
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
    }


def prompts(work: dict[str, int], folder: Path) -> Any:
    """Of `prompt` tokens each, one a character."""
    import datasets

    count = work["prompts"] * STEPS
    texts = [f"{number:>{work['prompt']}}"[-work["prompt"] :].replace(" ", "a") for number in range(count)]
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(folder / "datasets"))


def tokenizer() -> Any:
    """Every byte a token, and one that ends a row."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2TokenizerFast

    end = "<|endoftext|>"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {end: 0, **{letter: i for i, letter in enumerate(letters, 1)}}
    return Qwen2TokenizerFast(
        vocab=vocabulary, merges=[], eos_token=end, pad_token=end, unk_token=end, padding_side="left"
    )


def even(completion_ids: list[list[int]], **others: Any) -> list[float]:
    """The share of even tokens, as `step` rewards it."""
    return [sum(token % 2 == 0 for token in row) / max(1, len(row)) for row in completion_ids]


def noting() -> Any:
    """A callback that notes when training began and when each step ended."""
    import torch
    from transformers import TrainerCallback

    class Noting(TrainerCallback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def note(self, *args: Any, **others: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.ends.append(time.perf_counter())

        on_train_begin = note
        on_step_end = note

    return Noting()
