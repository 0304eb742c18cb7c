"""TRL's side of `tools/bench trl`: GRPOTrainer on the work of a folder. Only TRL's own environment runs this file.

    .venv-trl/bin/python tools/bench/bench_trl_side.py WORK.json OUT.json

WORK.json says what is done (bench_work.make); OUT.json is written when training begins, and again when it is over.
"""

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

BEGUN = {"steps": []}


def main(work: Path, out: Path) -> int:
    """Train and write down what each step took."""
    import datasets
    import torch
    import transformers
    import trl
    from bench_reward import trl as reward
    from transformers import AutoTokenizer

    shared = json.loads(work.read_text())
    seen = noting(transformers.TrainerCallback)(out)
    trainer = trl.GRPOTrainer(
        model=shared["model"],
        args=trl.GRPOConfig(**settings(shared, out.parent / "trl")),
        reward_funcs=reward,
        train_dataset=datasets.load_dataset(
            "json", data_files=shared["prompts_file"], split="train", cache_dir=str(out.parent / "datasets")
        ),
        processing_class=AutoTokenizer.from_pretrained(shared["model"], padding_side="left"),
        callbacks=[seen],
    )
    trainer.train()
    used = {module.__name__: module.__version__ for module in (torch, transformers, trl)}
    out.write_text(
        json.dumps(record(seen.ends, trainer.state.log_history, shared["prompts"] * shared["group_size"], used))
    )
    return 0


def settings(shared: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The fields of GRPOConfig: the work, and the fastest that it has for a CPU."""
    rows = shared["prompts"] * shared["group_size"]
    micro = shared["trl_rows"] or rows
    continuous = shared["trl_generation"] == "continuous"
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
        # How: float32, nothing computed twice, nothing written besides a line of figures a step.
        "use_cpu": True,
        "bf16": False,
        "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"},
        "gradient_checkpointing": False,
        "optim": "adamw_torch_fused",
        "use_transformers_continuous_batching": continuous,
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
    }


def noting(base: type) -> type:
    """A callback that notes when training began and when each step ended."""

    class Noting(base):
        def __init__(self, out: Path) -> None:
            self.out, self.ends = out, []

        def on_train_begin(self, *args: Any, **others: Any) -> None:
            self.out.write_text(json.dumps(BEGUN))
            self.ends.append(time.perf_counter())

        def on_step_end(self, *args: Any, **others: Any) -> None:
            self.ends.append(time.perf_counter())

    return Noting


def record(ends: list[float], logged: list[dict[str, Any]], rows: int, used: dict[str, str]) -> dict[str, Any]:
    """What is written down: each step's seconds, from the end of the one before; its rows and their mean length.

    Raises ValueError when what TRL logged lacks the length of every step's completions.
    """
    lengths = [line["completions/mean_length"] for line in logged if "completions/mean_length" in line]
    if len(lengths) != len(ends) - 1:
        raise ValueError(f"got lengths of {len(lengths)} steps, wanted those of {len(ends) - 1}")
    seconds = [after - before for before, after in pairwise(ends)]
    steps = [{"seconds": s, "rows": rows, "length": n} for s, n in zip(seconds, lengths, strict=True)]
    return {"steps": steps, "versions": used}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
