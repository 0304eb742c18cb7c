"""Whether a model folder opens in vLLM, seen without building an engine."""

import importlib
from typing import Any

REFUSED = 300  # characters of vLLM's message, which goes on to list every architecture


def open_in_vllm(folder: str) -> dict[str, Any]:
    """What vLLM makes of the folder's config, or why it is `refused`; with "" for a folder, whether it imports at all.

    `head_dims` are those that its attention takes, None where that is not a list.
    """
    vllm = importlib.import_module("vllm")
    platform = importlib.import_module("vllm.platforms").current_platform
    found = {"version": vllm.__version__, "platform": platform.device_type}
    if not folder:
        return found
    try:  # the tokenizer is not vLLM's affair: it is given token ids
        config = importlib.import_module("vllm.config").ModelConfig(model=folder, skip_tokenizer_init=True)
    except ValueError as error:
        return found | {"refused": str(error)[:REFUSED]}
    attention = importlib.import_module("vllm.v1.attention.backends.cpu_attn") if platform.is_cpu() else None
    return found | {
        "architecture": config.architectures[0],
        "native": not config.using_transformers_backend(),
        "generates": config.runner_type == "generate",
        "dtype": str(config.dtype).removeprefix("torch."),
        "positions": config.max_model_len,
        "head_dim": config.get_head_size(),
        "head_dims": attention and attention.CPUAttentionBackend.get_supported_head_sizes(),
    }
