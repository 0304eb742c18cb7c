"""TRL's side of compare_trl.py: the gradients of its GRPOTrainer. Only TRL's own environment runs this file.

    .venv-trl/bin/python tools/import_config/compare_trl_side.py WORK.pt OUT.pt

WORK.pt has the model's folder, the samples with their log-probs and rewards, and the configurations. The trainer is
TRL's, from its data loader to its backward pass: what it samples is given, and before each of its optimizer steps the
parameters and their gradients are written down.
"""

import sys
from pathlib import Path
from typing import Any


def main(work: Path, out: Path) -> int:
    """Train on every configuration for one rollout and write down what each update had."""
    import datasets
    import torch
    import transformers
    import trl

    torch.set_num_threads(1)  # a model of a few thousand parameters
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    shared = torch.load(work, weights_only=False)
    found = []
    for number, case in enumerate(shared["cases"]):
        try:
            found.append({"updates": updates(shared, case, out.parent / "trl")})
        except Exception as error:  # TRL's refusals have no type of their own; the reader of OUT judges them
            found.append({"error": f"{type(error).__name__}: {' '.join(str(error).split())}"})
        print(f"{number + 1}/{len(shared['cases'])}", flush=True)
    used = {module.__name__: module.__version__ for module in (torch, transformers, trl)}
    torch.save({"cases": found, "versions": used}, out)
    return 0


def updates(shared: dict[str, Any], case: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Each optimizer step of one rollout: parameters before it, and gradients."""
    import datasets
    import torch
    import trl
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.trainer import grpo_trainer

    noted: list[dict[str, Any]] = []

    class Noting(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **others: Any) -> None:
            named = dict(model.named_parameters())
            noted.append(
                {
                    "params": {name: p.detach().clone() for name, p in named.items()},
                    "grads": {
                        name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named.items()
                    },
                }
            )

    class NoEngine:
        def __init__(self, **settings: Any) -> None: ...

        def sync_weights(self) -> None: ...

    grpo_trainer.VLLMGeneration = NoEngine
    rows, first = shared["rows"], shared["first_token"]
    rewards = shared["rewards_with_none"] if case["unscored"] else shared["rewards"]
    settings = {"output_dir": str(folder), "use_cpu": True, "report_to": "none", "save_strategy": "no"}
    settings |= {"disable_tqdm": True, "logging_strategy": "no", "seed": 0}
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(shared["model"], dtype=torch.float64),
        args=trl.GRPOConfig(**settings, **case["config"]),
        reward_funcs=lambda completion_ids, **others: [rewards[ids[0] - first] for ids in completion_ids],
        train_dataset=datasets.Dataset.from_dict({"prompt": shared["prompts"]}),
        processing_class=AutoTokenizer.from_pretrained(shared["model"], padding_side="left"),
        callbacks=[Noting()],
    )
    if trainer.ref_model is not None:
        trainer.ref_model.double().load_state_dict(shared["reference"])
    trainer._generate_single_turn = given(shared, rows, logps=trainer.use_vllm)
    trainer.train()
    return noted


def given(shared: dict[str, Any], rows: list[dict[str, Any]], *, logps: bool) -> Any:
    """What stands in the place of generation: the prompt's own rows in their order; an engine gives log-probs, too."""

    def sampled(prompt_ids: Any, images: Any, fields: Any, num_generations: int, **others: Any) -> Any:
        places = [shared["prompt_ids"].index(list(map(int, ids))) for ids in prompt_ids]
        taken = [rows[p * num_generations + b % num_generations] for b, p in enumerate(places)]
        return [row["completion"] for row in taken], [row["logps"] for row in taken] if logps else None

    return sampled


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
