"""Whether a model folder opens in transformers, seen without loading its weights."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from grpo_fn.shell.model import hf, load_weights


def open_in_transformers(folder: str) -> dict[str, Any]:
    """Config, tokenizer, the files' headers against the model's shape, and a forward pass that computes nothing.

    Raises ValueError for what training would refuse, and whatever the model raises on four tokens on the meta device.
    """
    config = hf.Pretrained(folder).config()
    tokenizer = hf.load_tokenizer(folder)
    stored = load_weights.entries(Path(folder))
    model = load_weights.meta_causal_lm(config, attention="eager", dtype=torch.float32)
    load_weights.check_weight_files(model, Path(folder), prefix="")
    return {
        "architecture": type(model).__name__,
        "parameters": hf.parameter_count(model),
        "dtypes": dict(Counter(entry.dtype for entry in stored.values())),
        "tokens": len(tokenizer),
        "template": tokenizer.chat_template is not None,
        "forward": _forward(config),
    }


def _forward(config: PretrainedConfig) -> str:
    """Empty where it went through, or why that cannot be seen on the meta device.

    All of the model is there, buffers too; with eager attention, which every architecture has.
    """
    with torch.device("meta"), torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        inputs = {
            "input_ids": torch.zeros(1, 4, dtype=torch.long),
            "position_ids": torch.arange(4)[None],
            "attention_mask": torch.zeros(1, 1, 4, 4),  # whole: transformers makes one by looking at values
        }
        try:
            model(**inputs, use_cache=False)
        except (NotImplementedError, RuntimeError) as error:
            if "meta" not in str(error):  # which is what torch says where a route depends on values
                raise
            return str(error)
    return ""
