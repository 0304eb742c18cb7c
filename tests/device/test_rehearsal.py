"""The CUDA paths with real numbers and no GPU: a device that is as strict as CUDA about places, waits and memory.

fake_cuda.cpp says what it is and what it cannot show.
"""

import json

import pytest
from count_step_budget import BUDGET, over_budget

pytestmark = pytest.mark.xdist_group("fake_device")
EXACT = "prng,gradients,rows,head,fp16,offload,compiled"


def test_the_checks_for_a_gpu_pass_on_the_fake_one(rehearse) -> None:
    found = rehearse("rehearse.py", "check", EXACT)
    assert found["code"] == 0
    launched = found["launches"]
    for kernel in ("aten::_flash_attention_forward", "aten::_flash_attention_backward", "aten::mm.dtype"):
        assert launched[kernel] > 0, f"{kernel} is the path of CUDA alone, and was not taken"
    assert found["devices"] == [0]


@pytest.mark.slow
def test_the_whole_command_for_one_gpu_passes_on_the_fake_one(rehearse) -> None:
    found = rehearse("rehearse.py", "check", "all")
    assert found["code"] == 0
    assert found["graphs"] > 0
    assert found["replays"] > found["graphs"]


@pytest.mark.slow
def test_decoding_at_a_real_shape(rehearse) -> None:
    found = rehearse("rehearse.py", "larger", "decode", seconds=1800)
    assert found["code"] == 0
    assert 4 < found["graphs"] <= 12, "of two dtypes and of two numbers of slots; shapes are few"


def test_mistakes_that_only_a_gpu_would_show_are_seen(rehearse) -> None:
    found = rehearse("planted_mistakes.py")
    assert set(found["clean"].values()) == {None}, found["clean"]
    assert len(found["planted"]) >= 12
    assert not [what for what, said in found["planted"].items() if said is None]


def test_a_step_waits_for_the_device_and_launches_no_more_than_its_budget(rehearse) -> None:
    over = over_budget(rehearse("count_step.py"), json.loads(BUDGET.read_text()))
    assert not over, f"{'; '.join(over)}; python tests/device/count_step.py --write makes these the budget"


@pytest.mark.parametrize(
    ("counted", "said"),
    [
        ({"train": {"launches": 100, "wait: item": 2}}, []),
        ({"train": {"launches": 105, "wait: item": 1}}, []),
        ({"train": {"launches": 106, "wait: item": 2}}, ["train, launches: got 106, wanted at most 105"]),
        ({"train": {"launches": 90, "wait: item": 3}}, ["train, wait: item: got 3, wanted at most 2"]),
        ({"train": {"launches": 90, "wait: mask": 1}}, ["train, wait: mask: got 1, wanted at most 0"]),
        ({"sync": {"streams": 1}}, ["sync, streams: got 1, wanted at most 0"]),
    ],
)
def test_what_is_over_the_budget_is_named(counted, said) -> None:
    assert over_budget(counted, {"train": {"launches": 100, "wait: item": 2}}) == said
