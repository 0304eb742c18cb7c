"""A user's function that does not fit is named with got and wanted before anything is loaded; all of ours fit."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from e2e.running import command, finish

from grpo_fn.algo import controllers, credit, group_sampling, importance, losses, masking, step
from grpo_fn.config import freeze, load_config
from grpo_fn.core import sampling
from grpo_fn.trainer.checks import supervised_stage, try_out

PROJECT = Path(__file__).resolve().parents[2]
ALGOS = sorted(path.stem for path in (PROJECT / "gin" / "algo").glob("*.gin"))


def algorithm(name: str = "dr_grpo", **changed: object) -> step.Algorithm:
    """The section of a configuration; `changed` are its fields."""
    config = load_config(["run/arithmetic.gin", f"algo/{name}.gin"], [])
    made = freeze(config.root.knobs["algorithm"], {})
    return type(made)(**{**vars(made), **changed})


def tried(made: step.Algorithm) -> None:
    how = {"names": supervised_stage.SAMPLED, "kind": supervised_stage.TOKEN_LOSS}
    try_out.try_objective("step.Algorithm.objective", made.objective, made.group_size, **how)
    try_out.try_credit(made, ["correct", "boxed"])


@pytest.mark.parametrize("name", ALGOS)
def test_every_algorithm_of_ours_fits(name: str) -> None:
    tried(algorithm(name))


@pytest.mark.parametrize("name", ALGOS)
def test_a_pass_more_is_taken_only_where_something_reads_what_it_finds(name: str) -> None:
    made = algorithm(name)
    assert try_out.reads_energy(made.baseline) is (name == "otb")
    assert try_out.reads_logp(made.reweighting) is (name == "real")


# -- weights of energies


def weighed(name: str, **changed: object) -> step.Algorithm:
    return algorithm(name, energy_weight=partial(importance.truncated_weight, cap=2.0), **changed)


def test_weights_of_energies_want_a_baseline_that_reads_them_and_log_probs_of_the_trainer():
    try_out.check_energy_weight(algorithm("grpo"))
    try_out.check_energy_weight(weighed("otb", old_logp=step.from_trainer))
    with pytest.raises(ValueError, match=r"energy_weight: got weights with a baseline that reads no energy, wanted"):
        try_out.check_energy_weight(weighed("grpo", old_logp=step.from_trainer))
    with pytest.raises(ValueError, match=r"energy_weight: got .* so every weight is 1: wanted .*from_trainer"):
        try_out.check_energy_weight(weighed("otb"))


@pytest.mark.parametrize(
    ("weight", "found"),
    [
        (importance.no_correction, False),
        (partial(importance.truncated_weight, cap=2.0), True),
        (partial(importance.masked_weight, low=0.5, high=5.0), True),
        (partial(importance.sequence_masked_weight, low=0.99, high=1.01), True),
    ],
)
def test_weights_are_asked_whether_they_weigh(weight: Callable, found: bool) -> None:
    assert try_out.weighs_energies(weight) is found


# -- token losses


def takes_one(logp):
    return logp, {}


def no_pair(logp, row):
    return -logp * row.adv


def no_ratio(logp, row):
    return -logp * row.adv, {"clip_low": logp, "clip_high": logp}


def infinite_slope(logp, row):
    return (logp - logp.detach()).sqrt() * row.adv, {"ratio": logp, "clip_low": logp, "clip_high": logp}


def one_number(logp, row):
    return -logp * row.adv, {"ratio": logp.mean(), "clip_low": logp, "clip_high": logp}


def raises(logp, row):
    raise KeyError("a typing error")


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (takes_one, r"TypeError: takes_one\(\) takes 1 positional argument but 2 were given"),
        (no_pair, r"\w+Error: "),
        (no_ratio, "no diagnostic ratio"),
        (infinite_slope, "gradient: a tensor with numbers that are not finite"),
        (one_number, r"(ratio: a tensor of shape \[32\]|TypeCheckError: )"),  # types are checked where tests run
        (raises, "KeyError: 'a typing error'"),
    ],
)
def test_a_token_loss_that_does_not_fit_is_named(loss: Callable, got: str) -> None:
    made = algorithm()
    knobs = made.objective.keywords
    changed = partial(made.objective.func, **{**knobs, "token_loss": loss})
    with pytest.raises(ValueError, match=rf"^step\.Algorithm\.objective: got {got}") as caught:
        tried(algorithm(objective=changed))
    text = str(caught.value)
    assert f" from test_try_out.{loss.__name__} on a toy step, wanted a finite value" in text
    assert "\n" not in text


def test_errors_of_our_own_functions_are_as_they_were() -> None:
    made = algorithm()
    wrong = partial(losses.dual_clip, clip_low=0.2, clip_high=0.2, cap=0.5)
    changed = partial(made.objective.func, **{**made.objective.keywords, "token_loss": wrong})
    with pytest.raises(ValueError, match=r"cap: got 0\.5|cap.*wanted"):
        tried(algorithm(objective=changed))


# -- advantages, filters, token masks


def one_for_all(reward, valid):
    return reward.mean()


def divides_by_nothing(reward, valid):
    return reward / (valid.sum() - len(reward))


def as_numbers(rollout, adv):
    return adv.sum(-1)


def by_token(rollout, adv):
    return adv > 0


def of_one_row(batch, keys):
    return batch.mask[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"credit": partial(credit.outcome, advantage=one_for_all)}, r"credit: got .* from test_try_out\.one_for_all"),
        (
            {"credit": partial(credit.outcome, advantage=divides_by_nothing)},
            r"credit: got a tensor with numbers that are not finite from test_try_out\.divides_by_nothing",
        ),
        (
            {"filters": [as_numbers]},
            r"filters: got a tensor of float32 from test_try_out\.as_numbers .* wanted booleans",
        ),
        ({"filters": [by_token]}, r"filters: got a tensor of shape \[2, 16, 4\] from test_try_out\.by_token"),
        ({"token_mask": of_one_row}, r"token_mask: got a tensor of shape \[4\] from test_try_out\.of_one_row"),
    ],
)
def test_what_a_step_asks_about_its_samples_is_named(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=rf"^step\.Algorithm\.{said}"):
        tried(algorithm(group_size=16, **changes))


def test_functions_that_a_step_does_not_call_on_rows_are_left_alone() -> None:
    tried(
        algorithm(
            kl_control=controllers.constant_gain,
            group_sampling=group_sampling.keep_all,
            token_mask=masking.no_tokens,
        )
    )


# -- token samplers


def tokens_alone(logits, u, *, temperature):
    return logits.argmax(-1)


def as_floats(logits, u, *, temperature):
    return u, u


@pytest.mark.parametrize(
    ("token_sampler", "got"),
    [(tokens_alone, "a Tensor"), (as_floats, "a tensor of float32"), (torch.add, "TypeError: ")],
)
def test_a_token_sampler_that_does_not_fit_is_named(token_sampler: Callable, got: str) -> None:
    with pytest.raises(ValueError, match=rf"^sections\.Sampling\.token_sampler: got {got}"):
        try_out.try_token_sampler(token_sampler, 0.7)
    try_out.try_token_sampler(sampling.categorical, 0.7)


# -- in a run


def test_a_dry_run_ends_with_one_line_and_makes_nothing(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "over.gin").write_text(
        "from __gin__ import dynamic_registration\n"
        "from grpo_fn.algo import objective\n"
        "from trainer import test_try_out\n"
        "objective.policy_objective.token_loss = @test_try_out.no_ratio\n"
    )
    argv = command(cache, tmp_path / "run", "--gin_file", str(tmp_path / "over.gin"), "--dry_run")
    assert finish(argv, tmp_path / "out") == 2
    said = (tmp_path / "out").read_text()
    assert "step.Algorithm.objective: got no diagnostic ratio from trainer.test_try_out.no_ratio" in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()
