"""The rules of health in a run: said once, where people look; one that ends the run leaves it whole."""

from pathlib import Path

from e2e.running import board, command, finish, outcome

from grpo_fn.shell.process import EXIT_UNHEALTHY


def warned(run: Path, rule: str) -> list[str]:
    """The lines of the log in which a rule speaks."""
    return [line for line in (run / "log.txt").read_text().splitlines() if f"health, {rule}:" in line]


def test_a_rule_that_ends_the_run_saves_it_and_the_same_command_goes_on(
    cache: Path, whole: Path, tmp_path: Path
) -> None:
    changes = {"sections__Health__stop": ["grad_norm_high"], "sections__Health__limits": {"grad_norm_high": 1e-9}}
    argv = command(cache, tmp_path / "run", **changes)
    assert finish(argv, tmp_path / "out") == EXIT_UNHEALTHY, (tmp_path / "out").read_text()
    said = (tmp_path / "out").read_text()
    assert "health, grad_norm_high: loss/grad_norm is" in said
    assert "ended by grad_norm_high (sections.Health.stop) after step 1, which is saved" in said
    assert (tmp_path / "run" / "checkpoints" / "step_1").is_dir()
    assert not (tmp_path / "run" / "summary.json").exists()
    # There is no news since; and what complains may be changed while a run is interrupted.
    assert finish(command(cache, tmp_path / "run"), tmp_path / "out") == 0, (tmp_path / "out").read_text()
    assert len(warned(tmp_path / "run", "grad_norm_high")) == 1
    assert outcome(tmp_path / "run") == outcome(whole)
    texts = board(tmp_path / "run").Tensors("health/text_summary")
    assert "grad&#95;norm&#95;high" in texts[0].tensor_proto.string_val[0].decode()
    assert texts[0].step == 1


def test_a_warning_is_said_once_and_changes_nothing(whole: Path) -> None:
    assert len(warned(whole, "truncated_high")) == 1  # a model that knows nothing does not stop
    assert "Raise sections.Sampling.max_new_tokens" in warned(whole, "truncated_high")[0]
