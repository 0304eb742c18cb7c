"""The CUDA paths with real numbers and no GPU: a device that is as strict as CUDA about places, waits and memory.

fake_cuda.cpp says what it is and what it cannot show.
"""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("fake_device")  # which one process builds, and the others wait for
EXACT = "gradients,rows,head,fp16,offload,compiled"
OTHERS = "train-0.5b,train-1.5b,train-1.5b-compiled,decode,decode-0.5b,decode-1.5b,step"


@pytest.mark.slow
def test_the_checks_for_a_gpu_pass_on_the_fake_one(on_device) -> None:
    found = on_device("whole_programs.py", "check", EXACT)
    assert found["codes"] == {"check": 0}
    for kernel in ("aten::_flash_attention_forward", "aten::_flash_attention_backward", "aten::mm.dtype"):
        assert found["launches"][kernel] > 0, f"{kernel} is the path of CUDA alone, and was not taken"
    assert found["devices"] == [0]


@pytest.mark.slow
def test_training_and_captured_decoding_pass_on_the_fake_one(on_device) -> None:
    found = on_device("whole_programs.py", "check", OTHERS)
    assert found["codes"] == {"check": 0}
    assert found["replays"] > found["graphs"] > 0
    assert found["launches"]["grpo_fn::split_kv_attention"] > 0


@pytest.mark.slow
def test_captured_steps_replay_what_the_model_computes_and_a_step_seldom_waits(on_device) -> None:
    complaints = on_device("small_checks.py")
    assert set(complaints.values()) == {None}, complaints


@pytest.mark.slow
def test_whole_runs_on_the_second_card_end_well_and_use_no_other(on_device, cache: Path, tmp_path: Path) -> None:
    """Under some files of gin/scale: checkpoints, rewards and figures are made in threads, whose card is the first."""
    small, listed = Path(__file__).resolve().parents[1] / "e2e" / "small.gin", tmp_path / "runs.json"
    runs = {}
    for name in ("adamw_8bit", "compiled", "fp16", "full_shard", "lora", "offload"):
        files = ["run/arithmetic.gin", str(small), "scale/bf16.gin", f"scale/{name}.gin"]
        knobs = [f"models.TinyModel.cache={str(cache)!r}", "STEPS=2", "sections.Compute.device='cuda:1'"]
        laid = [word for file in files for word in ("--gin_file", file)]
        laid += [word for knob in knobs for word in ("--gin_param", knob)]
        runs[name] = [*laid, "--run_dir", str(tmp_path / name)]
    listed.write_text(json.dumps(runs))
    found = on_device("whole_programs.py", "runs", str(listed), seconds=1800)
    assert found["codes"] == dict.fromkeys(runs, 0)
    assert found["devices"] == [1]
