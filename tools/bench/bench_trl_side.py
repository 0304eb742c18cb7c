"""TRL's side of `tools/bench`: GRPOTrainer on the work of a folder. Only TRL's own environment runs this file.

    .venv-trl/bin/python tools/bench/bench_trl_side.py WORK.json OUT.json

WORK.json says what is done (bench_work.make); OUT.json gets what each step took.
"""

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any


def main(work: Path, out: Path) -> int:
    """Train and write down what each step took."""
    import bench_reward
    import datasets
    import torch
    import transformers
    import trl
    from transformers import AutoTokenizer

    shared = json.loads(work.read_text())
    clock = step_clock(transformers.TrainerCallback)
    trainer = trl.GRPOTrainer(
        model=shared["model"],
        args=trl.GRPOConfig(**settings(shared, out.parent / "trl", on_card=torch.cuda.is_available())),
        reward_funcs=bench_reward.trl,
        train_dataset=datasets.load_dataset(
            "json", data_files=shared["prompts_file"], split="train", cache_dir=str(out.parent / "datasets")
        ),
        processing_class=AutoTokenizer.from_pretrained(shared["model"], padding_side="left"),
        callbacks=[clock],
    )
    trainer.train()
    used = {module.__name__: module.__version__ for module in (torch, transformers, trl)}
    rows = shared["prompts"] * shared["group_size"]
    out.write_text(json.dumps({"steps": record(clock.ends, trainer.state.log_history, rows), "versions": used}))
    return 0


def settings(shared: dict[str, Any], folder: Path, *, on_card: bool) -> dict[str, Any]:
    """The fields of GRPOConfig: the work, and the fastest that it has."""
    rows = shared["prompts"] * shared["group_size"]
    micro = shared["trl_rows"] or rows
    return {
        "output_dir": str(folder),
        # The work, as the other side gets it.
        "max_steps": shared["steps"],
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": rows // micro,
        "num_generations": shared["group_size"],
        "max_completion_length": shared["new_tokens"],
        "learning_rate": shared["lr"],
        "lr_scheduler_type": "constant",
        "adam_beta2": shared["beta2"],
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "num_iterations": 1,
        "beta": 0.0,
        "epsilon": 0.2,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "loss_type": "grpo",
        "scale_rewards": "group",
        "seed": 0,
        # How: weights in float32, nothing computed twice, nothing written besides a line of figures a step.
        "use_cpu": not on_card,  # ours takes a card where there is one, too
        "bf16": shared["dtype"] == "bfloat16",
        "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"},
        "gradient_checkpointing": False,
        "optim": "adamw_torch_fused",
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
    }


def step_clock(base: type) -> Any:
    """A callback whose `ends` are when training began and when each step ended."""

    class Clock(base):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def note(self, *args: Any, **others: Any) -> None:
            self.ends.append(time.perf_counter())

        on_train_begin = on_step_end = note

    return Clock()


def record(ends: list[float], logged: list[dict[str, Any]], rows: int) -> list[dict[str, float]]:
    """Each step's seconds, from the end of the one before; its rows and their mean length.

    Raises ValueError when what TRL logged lacks the length of every step's completions.
    """
    steps = [line for line in logged if "completions/mean_length" in line]
    if len(steps) != len(ends) - 1:
        raise ValueError(f"got lengths of {len(steps)} steps, expected those of {len(ends) - 1}")
    return [
        {"seconds": after - before, "rows": rows, "length": line["completions/mean_length"]}
        for (before, after), line in zip(pairwise(ends), steps, strict=True)
    ]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
