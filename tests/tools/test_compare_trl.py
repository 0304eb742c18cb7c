"""compare_trl.py of tools/import_config: what is compared, how it is judged, and the comparison where TRL is there."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import compare_trl
import compare_trl_ours
import pytest
import torch
from e2e.running import TESTS

TRL_PYTHON = TESTS.parent / ".venv-trl" / "bin" / "python"


def test_there_are_enough_configurations_and_none_is_there_twice() -> None:
    found = compare_trl_ours.CASES
    assert len(found) > 200
    assert len({case.name for case in found}) == len(found)
    carried = [case for case in found if not isinstance(compare_trl.draft_of(case.config), str)]
    assert len(carried) > 150
    of = {key for case in carried for key, value in case.config.items() if compare_trl_ours.BASE.get(key) != value}
    expected = {"loss_type", "scale_rewards", "beta", "delta", "num_iterations", "temperature", "use_vllm"}
    assert expected | {"importance_sampling_level", "top_entropy_quantile", "mask_truncated_completions"} <= of


def test_every_named_difference_has_words_that_the_importer_writes() -> None:
    """Words that are never written could name nothing; those that always are would hide differences."""
    pairs = [(case, compare_trl.draft_of(case.config)) for case in compare_trl_ours.CASES]
    named = [set(compare_trl.named(case, draft)) for case, draft in pairs if not isinstance(draft, str)]
    assert set.union(*named) == set(compare_trl.NOTES)
    assert any(not names for names in named)


CASE = "loss_type=dapo, beta=0.1"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """A configuration, its samples, and the gradients of one update of our own as those of TRL."""
    folder = tmp_path_factory.mktemp("compare")
    model, shared = compare_trl_ours.samples(folder)
    (case,) = [case for case in compare_trl_ours.CASES if case.name == CASE]
    made = compare_trl_ours.imported(case, compare_trl.draft_of(case.config), shared, model, folder)
    update = {"params": made.policy.params}
    (grads,) = compare_trl_ours.gradients(made, [update])
    return case, shared, model, folder, update, grads


def judged(
    world: tuple[Any, ...], grads: dict[str, torch.Tensor], *, unscored: bool = False, **changes: Any
) -> compare_trl.Result:
    case, shared, model, folder, update, _ = world
    case = compare_trl_ours.Case(case.config | changes, unscored)
    theirs = {"updates": [{**update, "grads": grads}]}
    return compare_trl.judged(case, compare_trl.draft_of(case.config), theirs, shared, model, folder)


def test_the_same_gradient_is_equal_and_another_is_silent(world: tuple[Any, ...]) -> None:
    grads = world[-1]
    assert sum(float(g.abs().sum()) for g in grads.values()) > 0
    found = judged(world, grads)
    assert (found.outcome, found.apart) == ("equal", 0.0)
    found = judged(world, {name: 1.001 * g for name, g in grads.items()})
    assert found.outcome == "silent"
    assert found.apart == pytest.approx(1e-3, rel=1e-2)


def test_a_difference_counts_as_named_only_with_a_note_of_its_own(world: tuple[Any, ...]) -> None:
    other = {name: 1.5 * g for name, g in world[-1].items()}
    found = judged(world, other, top_entropy_quantile=0.5)
    assert (found.outcome, found.said) == ("named", "entropy quantile")
    assert judged(world, other).outcome == "silent"  # the note of rewards of None is no excuse where there are none
    assert judged(world, other, unscored=True).said == "unscored rows"


def test_another_number_of_optimizer_steps_is_a_difference(world: tuple[Any, ...]) -> None:
    case, shared, model, folder, update, grads = world
    theirs = {"updates": [{**update, "grads": grads}] * 2}
    found = compare_trl.judged(case, compare_trl.draft_of(case.config), theirs, shared, model, folder)
    assert (found.outcome, found.apart) == ("silent", float("inf"))


def test_a_python_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_trl.main(["--trl_python", str(tmp_path / "none")]) == 2
    assert "expected the python of TRL's environment" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(compare_trl.DEADLINE)
@pytest.mark.skipif(not TRL_PYTHON.exists(), reason="wants .venv-trl, made from tools/bench/trl.requirements.txt")
def test_no_configuration_differs_silently(tmp_path: Path) -> None:
    """TRL's own trainer, every configuration: minutes."""
    tool = Path(compare_trl.__file__)
    command = [sys.executable, str(tool), "--trl_python", str(TRL_PYTHON), "--out", str(tmp_path / "page.md")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=compare_trl.DEADLINE, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "| silent | 0 |" in (tmp_path / "page.md").read_text()
