"""What the server that forks runs and ranks has done before it forks: they neither load nor build it once more each.

The server imports this module and nothing else, whether `crew` or `e2e.running` starts it.
"""

import gc
from importlib import import_module

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

NEEDED = (
    *(
        "e2e.running",
        "grpo_fn.trainer.loop",
        "grpo_fn.train",
        "grpo_fn.shell.policy.load_and_shard",
        "grpo_fn.shell.sampler.local.local_sampler",
    ),
    *("grpo_fn.rewards.math", "experiments.tiny.models", "e2e.rewards", "pytest", "hypothesis.strategies"),
    *(f"grpo_fn.algo.{name}" for name in ("advantage", "corrections", "losses", "masking", "objective")),
    *(f"transformers.models.{name}.modeling_{name}" for name in ("qwen2", "qwen3", "gemma2")),
    *("torch.distributed.tensor", "torch.profiler", "torch.utils.tensorboard"),
    *("transformers.generation", "transformers.loss.loss_utils", "einops._torch_specific"),
)

for name in NEEDED:
    import_module(name)
get_checkpoint_conversion_mapping("qwen2")  # a thousand patterns, compiled by the process that opens a model first
gc.collect()
gc.freeze()  # no process scans all of this again whenever garbage is collected
