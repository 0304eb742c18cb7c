"""Meshes over many ranks, of files of gin/scale; apart from trace_collectives.py, which needs the device."""

from dataclasses import replace
from typing import NamedTuple

from grpo_fn.config import load_config
from grpo_fn.config.parse import GIN_FOLDER, parse_gin
from grpo_fn.shell.model.blocks import eager
from grpo_fn.shell.policy.fsdp import Optimizer
from grpo_fn.shell.policy.mesh import Parallelism

RANKS, ON_HOST = 64, 8
RUN = "run/arithmetic.gin"
# Files of gin/scale, each laid over those before it.
MESHES: dict[str, tuple[str, ...]] = {
    "full_shard": ("full_shard",),
    "shard_grad_op": ("shard_grad_op",),
    "hybrid_shard": ("hybrid_shard",),
    "no_shard": ("no_shard",),
    "offload": ("offload",),
    "activation_checkpointing": ("activation_checkpointing",),
    "tensor_parallel": ("tensor_parallel",),
    "hybrid_shard+tensor_parallel": ("hybrid_shard", "tensor_parallel"),
    "no_shard+tensor_parallel": ("no_shard", "tensor_parallel"),
    "hybrid_shard+offload": ("hybrid_shard", "offload"),
    "hybrid_shard+muon": ("hybrid_shard", "muon"),  # which gathers matrices in the update
}
# Knobs of Parallelism that change no collective, or none before blocks run: how a block is computed.
WITHIN_A_RANK = {"compile"}


class Spread(NamedTuple):
    """How a model lies on the ranks, and what moves its weights."""

    parallelism: Parallelism
    optimizer: Optimizer


def spread_of(mesh: str) -> Spread:
    """What the files bind, with blocks that run as written: there is no compiler for the fake device."""
    bound = load_config([RUN, *(f"scale/{name}.gin" for name in MESHES[mesh])], []).kwargs()
    return Spread(replace(bound["parallelism"], compile=eager), bound["policy"].optimizer)


def mesh_files() -> set[str]:
    """The files of gin/scale that bind a knob of the mesh."""
    found = set()
    for path in (GIN_FOLDER / "scale").glob("*.gin"):
        for (_, target), knobs in parse_gin([f"scale/{path.name}"], []).knobs.items():
            if target is Parallelism and knobs.keys() - WITHIN_A_RANK:
                found.add(path.stem)
    return found
