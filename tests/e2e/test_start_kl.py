"""The KL to the start model: what a reference would have measured, at the steps asked for, and nothing else changes."""

from pathlib import Path

import pytest
from e2e.faults import job
from e2e.running import command, finish, metrics, outcome

EVERY_STEP = {"sections__Logging__start_kl_every": 1}
REFERENCE = """
from __gin__ import dynamic_registration
from grpo_fn.algo import objective
from grpo_fn.algo import objective

objective.policy_objective.beta = 1e-12
objective.policy_objective.kl = @objective.k3
"""


def run(cache: Path, folder: Path, *flags: str, **changes: object) -> Path:
    code = finish(command(cache, folder / "run", *flags, **changes), folder.with_suffix(".out"))
    assert code == 0, folder.with_suffix(".out").read_text()
    return folder / "run"


def start_kl(run_dir: Path) -> dict[int, float]:
    return {row["step"]: row["loss/kl_start"] for row in metrics(run_dir) if "loss/kl_start" in row}


@pytest.mark.slow
def test_it_is_that_to_a_reference_and_the_run_is_the_same(cache: Path, tmp_path: Path) -> None:
    calm, watched = run(cache, tmp_path / "calm"), run(cache, tmp_path / "watched", **EVERY_STEP)
    (tmp_path / "over.gin").write_text(REFERENCE)
    kept = run(cache, tmp_path / "kept", "--gin_file", str(tmp_path / "over.gin"))
    found = start_kl(watched)
    assert [*found] == [1, 2, 3, 4, 5, 6]
    assert found[1] == pytest.approx(0.0, abs=1e-9)
    assert found[6] > 1e-6
    assert not start_kl(calm)
    measured = {row["step"]: row["loss/kl"] for row in metrics(kept) if "loss/kl" in row}
    assert {step: found[step] for step in measured} == pytest.approx(measured, rel=1e-3, abs=1e-9)
    one, other = outcome(calm), outcome(watched)
    drop = lambda rows: [{k: v for k, v in row.items() if k != "loss/kl_start"} for row in rows]  # noqa: E731
    assert drop(one.pop("metrics")) == drop(other.pop("metrics"))
    assert one == other


@pytest.mark.slow
def test_it_is_the_same_for_two_ranks_and_costs_adapters_no_copy(cache: Path, tmp_path: Path) -> None:
    flags = ["--gin_file", "scale/lora.gin", "--gin_param", "lora.LoRA.rank=4"]
    alone = run(cache, tmp_path / "alone", *flags, sections__Logging__start_kl_every=3)
    over = job(
        tmp_path / "two", 2, command(cache, tmp_path / "two" / "run", *flags, sections__Logging__start_kl_every=3)
    )
    assert over.code == 0, over.everything()
    found, both = start_kl(alone), start_kl(tmp_path / "two" / "run")
    assert [*found] == [*both] == [3, 6]
    assert found[6] > 0
    assert both == pytest.approx(found, rel=1e-3, abs=1e-9)
