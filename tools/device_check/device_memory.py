"""A 1.5B model trained with adapters inside a hard cap of 8 GB: the allocator of this process gives no more.

The cap is on what tensors and their gaps take; CUDA's own context (some 0.5 GB) stands beside it, as on a card that has
so much more.
"""

import torch
from device_parts import GB, built, require
from device_runner import Figure, Setting
from device_shapes import QWEN_LARGE, folder, sized
from device_step import Work, parts, taken

from grpo_fn.shell.model import blocks
from grpo_fn.shell.model.load_weights import is_adapter
from grpo_fn.shell.model.lora import LoRA
from grpo_fn.shell.policy.fsdp import FSDPPolicy
from grpo_fn.shell.sampler.fingerprint import NOTHING, Fingerprint, weight_fingerprint

CAP = 8 * GB
ADAPTERS = LoRA(rank=16, alpha=32.0, dropout=0.05, targets=("q_proj", "k_proj", "v_proj", "o_proj"))


def capped(setting: Setting) -> list[Figure]:
    """The recipe of experiments/gsm8k_lora_8gb as its launcher starts it on one card, on random prompts."""
    on_cuda = setting.device == "cuda"
    if on_cuda:
        cap()
    work = Work(1, 4, 4, 6, 1) if setting.tiny else Work(4, 8, 128, 256, 3)
    bench = built(
        setting,
        folder(setting, sized(setting, QWEN_LARGE)),
        torch.bfloat16,
        adapters=ADAPTERS,
        micro_tokens=2048,
        logits_chunk_elements=2**22,
        lr=5e-5,
        activation_checkpointing=blocks.full_checkpointing,
    )
    before = {trained: held(bench.policy, trained) for trained in (True, False)}
    steps = taken(bench, work, setting.device)
    require(held(bench.policy, True) != before[True], "got the same adapters after training")
    require(held(bench.policy, False) == before[False], "got another base after training the adapters")
    reserved = [torch.cuda.max_memory_reserved() / GB] if on_cuda else []
    return [
        *(Figure("reserved at most", most, "GB", at_most=CAP / GB) for most in reserved),
        Figure("steps completed", float(1 + work.steps)),
        Figure("a step", sum(steps.seconds) / len(steps.seconds), "s"),
        *parts(steps),
    ]


def cap() -> None:
    """Set it, and see that it holds: half a gigabyte more than all of it is refused."""
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, CAP / total))
    try:
        torch.empty(int(CAP + GB / 2), dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return
    raise AssertionError(f"got {(CAP + GB / 2) / GB:g} GB from the allocator, wanted a cap at {CAP / GB:g} GB")


def held(policy: FSDPPolicy, trained: bool) -> Fingerprint:
    """Of the adapters, or of what they stand beside."""
    some = (weight_fingerprint(x) for name, x in policy.named_tensors().items() if is_adapter(name) == trained)
    return sum(some, NOTHING)
