"""Meshes over many ranks, as files of gin/scale make them; apart from trace_collectives.py, which needs the device."""

from typing import Any

ON_HOST = 8
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "full_shard": (64, {"reshard_after_forward": True}),
    "shard_grad_op": (64, {}),
    "hybrid_shard": (64, {"dp_replicate": "rest", "dp_shard": "host", "reshard_after_forward": True}),
    "no_shard": (64, {"dp_replicate": "rest", "dp_shard": 1}),
    "tensor_parallel": (64, {"tp": 2}),
    "offload": (64, {"reshard_after_forward": True, "offload": True}),
}
