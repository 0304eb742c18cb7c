"""What a device cannot do, and what does not go together, is said before anything is loaded."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from crew import crew

from grpo_fn.shell.model.blocks import eager, no_checkpointing, torch_compile
from grpo_fn.shell.policy.mesh import Parallelism, check_precision
from grpo_fn.shell.world import World

KNOBS = {
    **{"dp_replicate": 1, "dp_shard": "rest", "reshard_after_forward": True, "offload": False},
    **{"offload_reference": False, "activation_checkpointing": no_checkpointing, "collective_timeout": 60.0},
}


def test_bfloat16_is_refused_on_cards_before_ampere_and_float16_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    for capability in ((7, 5), (8, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, known=capability: known)
        check_precision(torch.float16, torch.device("cuda:0"))
        check_precision(torch.bfloat16, torch.device("cpu"))
        refused = pytest.raises(ValueError, match=r"got bfloat16 on Tesla T4.* expected float16 .*scale/fp16\.gin")
        with refused if capability < (8, 0) else nullcontext():
            check_precision(torch.bfloat16, torch.device("cuda:0"))


@pytest.mark.parametrize("execution", [torch_compile, partial(torch_compile)])
def test_compiled_blocks_are_not_divided_by_tensor(execution):
    with pytest.raises(ValueError, match="got tp 2 with compiled blocks, expected eager ones"):
        Parallelism(tp=2, compile=execution, **KNOBS)
    Parallelism(tp=1, compile=execution, **KNOBS)
    Parallelism(tp=2, compile=eager, **KNOBS)


def test_a_mode_that_torch_compile_has_not_is_refused_with_the_section():
    Parallelism(tp=1, compile=partial(torch_compile, mode="max-autotune"), **KNOBS)
    with pytest.raises(ValueError, match=r"blocks\.torch_compile\.mode: got 'fastest', expected one of 'default'"):
        Parallelism(tp=1, compile=partial(torch_compile, mode="fastest"), **KNOBS)


def group_timeouts(world: World) -> list[float]:
    """Of how the seconds that each group of a mesh waits differ from the world's; a mesh takes 30 minutes by itself."""
    knobs = {**KNOBS, "dp_shard": 1, "dp_replicate": "rest"}
    mesh = Parallelism(tp=2, compile=eager, **knobs).mesh(world)
    groups = [mesh.get_group(name) for name in mesh.mesh_dim_names]
    waits = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
    return [seconds - world.deadline for seconds in waits]


def test_every_group_of_a_mesh_has_the_deadline_of_the_run():
    assert crew(4).run(group_timeouts) == [[0.0] * 3] * 4
