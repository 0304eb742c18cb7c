"""What a device cannot do, and what does not go together, is said before anything is loaded."""

from functools import partial

import pytest
import torch
from crew import crew

from grpo_fn.shell.model.blocks import eager, no_checkpointing, torch_compile
from grpo_fn.shell.policy.mesh import Parallelism, check_precision
from grpo_fn.shell.world import World

CARDS = {"Tesla V100": (7, 0), "Tesla T4": (7, 5), "A100": (8, 0), "H200": (9, 0)}
KNOBS = {
    **{
        "dp_replicate": 1,
        "dp_shard": "rest",
        "reshard_after_forward": True,
        "offload": False,
        "offload_reference": False,
    },
    **{"activation_checkpointing": no_checkpointing, "collective_timeout": 60.0},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("card", list(CARDS))
def test_bfloat16_is_refused_on_cards_before_ampere_and_float16_named(monkeypatch, card, dtype):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: CARDS[card])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card)
    if dtype is torch.bfloat16 and CARDS[card] < (8, 0):
        with pytest.raises(ValueError, match=rf"got bfloat16 on {card}.* expected float16 .*scale/fp16\.gin"):
            check_precision(dtype, torch.device("cuda:0"))
    else:
        check_precision(dtype, torch.device("cuda:0"))


def test_a_cpu_computes_in_every_precision():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check_precision(dtype, torch.device("cpu"))


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
