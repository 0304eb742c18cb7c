"""The split-KV kernel compiled for a card that is not here: python compiled_kernels.py ARCHITECTURE DTYPE.

Its last line is an object with the bytes of shared memory by size of a head, and of the kernel that merges.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from grpo_fn.shell.sampler.local import split_kv_triton as made

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WARP = 32


def shared_bytes(kernel: Any, constants: dict[str, Any], kinds: Callable[[str], str], card: int, **options: int) -> int:
    """Of one program, once there is code for the card."""
    signature = {name: "constexpr" if name in constants else kinds(name) for name in kernel.arg_names}
    compiled = triton.compile(ASTSource(kernel, signature, constants), GPUTarget("cuda", card, WARP), options)
    assert compiled.asm["cubin"]
    return compiled.metadata.shared


def main(card: int, dtype: str) -> dict[str, int]:
    """Heads of 64 and 128, capped and windowed, seven query heads to one of keys."""

    def kinds(name: str) -> str:
        if name in ("query", "prompt_key", "prompt_value", "key", "value", "out"):
            return f"*{dtype}"
        if name in ("row", "lane", "start", "length"):
            return "*i64"
        if name in ("sums", "peaks", "totals"):
            return "*fp32"
        return "fp32" if name in ("scale", "cap") else "i32"

    found = {}
    for size in (64, 128):
        constants = {**made.constants(7, size, size, DTYPES[dtype]), "CAPPED": True, "WINDOWED": True}
        options = {"num_warps": made.WARPS, "num_stages": made.STAGES}
        found[str(size)] = shared_bytes(made.parts_kernel, constants, kinds, card, **options)
    found["merge"] = shared_bytes(made.merge_kernel, {"E": 128, "BE": 128}, kinds, card, num_warps=1)
    return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), sys.argv[2])))
