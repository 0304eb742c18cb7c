"""Functions that do not fit one another or the run are named before anything is loaded; those of our presets fit."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from catalogue import AROUND_THE_SAMPLER, all_corrections, bound, token_losses
from steps import PRESETS, preset

from grpo_fn.algo import (
    advantage,
    corrections,
    credit,
    distillation,
    masking,
    objective,
    supervised,
)
from grpo_fn.algo.step import Algorithm, from_sampler, from_trainer
from grpo_fn.config import load_config
from grpo_fn.core.partials import needs
from grpo_fn.tasks import arithmetic
from grpo_fn.trainer import teachers
from grpo_fn.trainer.sections import Demonstrations, Settings, Teacher
from grpo_fn.trainer.validate import check_algorithm, check_parts

EPISODES = Path(__file__).resolve().parents[1] / "e2e" / "episodes.gin"
# What every preset needs. At a7e8c7d trials with made-up rows found out the same; these answers were compared with
# them, preset by preset: reference, teacher, energies, groups, demonstrations, episodes, and what stale samples ask.
GROUPS = frozenset({"groups"})
PRESET_NEEDS = {
    **dict.fromkeys(["cispo", "clip_cov", "dapo", "dr_grpo", "dro", "fipo", "gdpo", "gigpo", "gmpo"], GROUPS),
    **dict.fromkeys(["gspo", "kl_cov", "luspo", "max_rl", "pass_at_k", "prompt_mean", "sapo"], GROUPS),
    **dict.fromkeys(["grpo", "reinforce_plus_plus_baseline"], GROUPS | {"logp_ref"}),
    "reinforce_plus_plus": frozenset({"logp_ref"}),
    **dict.fromkeys(["dppo", "dppo_kl", "glm5", "vespo"], GROUPS | {"logp_sampled"}),
    "m2po": GROUPS | {"logp_sampled", "trainer_logp"},
    **dict.fromkeys(["opo", "real", "rloo", "turn_returns"], GROUPS | {"fresh_samples"}),
    "otb": frozenset({"energy", "fresh_samples"}),
    **dict.fromkeys(["opd", "iw_opd"], frozenset({"logp_teacher", "fresh_samples"})),
    "mopd": frozenset({"logp_teacher", "logp_sampled"}),
    **dict.fromkeys(["sdft", "sdpo"], frozenset({"logp_teacher"})),
    "rlsd": GROUPS | {"logp_teacher"},
    "chord": GROUPS | {"demonstrations"},
    "echo": GROUPS | {"episodes"},
}
TEACHER = Teacher(
    models={"teacher": "a/folder"},
    key=teachers.one_teacher,
    prompt=None,
    encode_prompt=None,
    offload=False,
    relative_entropy=False,
)
WORKED = {"max_value": 5, "operations": 3, "test_size": 8, "worked_share": 0.5}
DEMONSTRATIONS = Demonstrations(task=partial(arithmetic.demonstration_task, **WORKED), rows=16)


@cache
def settings() -> Settings:
    """Those of a run of episodes."""
    return Settings(**load_config(["run/arithmetic.gin", str(EPISODES)], []).kwargs())


def check(algorithm: Algorithm | supervised.Stage, *, max_staleness: int = 0, **changes: object) -> None:
    """The checks of a run of six steps with this algorithm, without a teacher, demonstrations or episodes."""
    sampling = replace(settings().sampling, max_staleness=max_staleness)
    plain = {"steps": 6, "algorithm": algorithm, "sampling": sampling, "episodes": None}
    check_algorithm(replace(settings(), **{**plain, **changes}))


def refuse(value: Algorithm | supervised.Stage, text: str, **run: object) -> None:
    """The checks of such a run end with this text."""
    with pytest.raises(ValueError, match=text):
        check(value, **run)


def algorithm(name: str = "dr_grpo", **changes: object) -> Algorithm:
    """A preset's, with other fields."""
    return replace(preset(name), **changes)


def with_knobs(function: partial, **knobs: object) -> partial:
    """A function with other knobs."""
    return partial(function.func, **{**function.keywords, **knobs})


def of_objective(name: str = "dr_grpo", **knobs: object) -> Algorithm:
    """A preset's, with other knobs of its objective."""
    return algorithm(name, objective=with_knobs(preset(name).objective, **knobs))


# -- the presets


def test_presets_declare_what_trials_with_made_up_rows_found_out() -> None:
    assert {name: needs([*vars(preset(name)).values()]) for name in PRESETS} == PRESET_NEEDS


def test_every_preset_fits_a_run_that_provides_what_it_needs() -> None:
    for name, declared in PRESET_NEEDS.items():
        provided = {
            "teacher": TEACHER if "logp_teacher" in declared else None,
            "demonstrations": DEMONSTRATIONS if "demonstrations" in declared else None,
            "episodes": settings().episodes if "episodes" in declared else None,
        }
        old_logp = from_trainer if "trainer_logp" in declared else from_sampler
        check(algorithm(name, old_logp=old_logp), **provided)
        check_parts(preset(name).credit, ["correct", "boxed"])


@pytest.mark.parametrize("need", ["logp_teacher", "demonstrations", "episodes"])
def test_a_preset_that_needs_what_the_run_has_not_is_refused_with_the_knob_that_provides_it(need: str) -> None:
    knob = {"logp_teacher": "teacher"}.get(need, need)
    for name, declared in PRESET_NEEDS.items():
        if need in declared:
            with pytest.raises(
                ValueError, match=rf"^train\.train\.{knob}: got None with an algorithm that learns from"
            ):
                check(algorithm(name))


# -- a reference, a teacher


def test_a_divergence_to_a_teacher_reads_the_teacher_and_no_reference() -> None:
    taught = partial(
        objective.with_teacher_divergence,
        objective=preset("dr_grpo").objective,
        divergence=objective.k3,
        loss_aggregation=objective.token_mean,
        coef=0.1,
    )
    assert needs(taught) == {"logp_teacher"}
    with pytest.raises(ValueError, match=r"^train\.train\.teacher: got None"):
        check(algorithm(objective=taught))
    check(algorithm(objective=taught), teacher=TEACHER)


# -- log-probs of the sampler and of the trainer

BY_THE_POLICY = {"off_policy_sequence_mask"}  # asks the policy as it is, whatever logp_old is
REFUSED_TO_CORRECT = (
    r"^step\.Algorithm\.old_logp: got @step\.from_sampler with a function that compares logp_old with the sampler's"
)
REFUSED_TO_BE_STALE = (
    r"^max_staleness: got 3 .*from_trainer and .*importance_correction = @corrections\.truncated_weight"
)


def test_a_function_that_compares_the_sampler_with_itself_is_refused() -> None:
    for value in all_corrections().values():
        corrected = of_objective(importance_correction=value)
        check(replace(corrected, old_logp=from_trainer))
        if value.func.__name__ in BY_THE_POLICY:
            check(corrected)
        else:
            refuse(corrected, REFUSED_TO_CORRECT)
    check(of_objective(importance_correction=None))
    truncated = partial(corrections.truncated_weight, ratio=corrections.token_ratio, cap=2.0)
    weighed = with_knobs(preset("otb").credit, energy_weight=truncated)
    furthest = partial(masking.second_moment_tokens, limit=0.04)
    for compared in (algorithm(token_mask=furthest), algorithm("otb", credit=weighed)):
        refuse(compared, REFUSED_TO_CORRECT)
        check(replace(compared, old_logp=from_trainer))


def test_stale_samples_need_an_objective_that_asks_the_sampler() -> None:
    """Through a ratio to the sampler, a correction, or the loss itself; a KL to the reference is none of them."""
    kinds = {value.func.__name__: value for value in all_corrections().values()}
    for token_loss in token_losses().values():
        name = token_loss.func.__name__
        for correction in (None, *kinds.values()):
            knobs = {"token_loss": token_loss, "importance_correction": correction, "beta": 0.3}
            by_ratio = of_objective(**knobs)
            by_trainer = replace(by_ratio, old_logp=from_trainer)
            check(by_trainer, max_staleness=0)
            if correction is not None or name in AROUND_THE_SAMPLER:
                check(by_trainer, max_staleness=3)
            else:
                refuse(by_trainer, REFUSED_TO_BE_STALE, max_staleness=3)
            if correction is None and name == "reinforce":
                refuse(by_ratio, REFUSED_TO_BE_STALE, max_staleness=3)
            elif correction is None or correction.func.__name__ in BY_THE_POLICY:
                check(by_ratio, max_staleness=3)


def test_a_function_of_ones_own_says_itself_that_its_samples_have_to_be_fresh() -> None:
    def own(scores, batch, totals, gains):
        return (scores.logp * batch.adv).sum()

    check(algorithm(objective=own), max_staleness=1)
    own.NEEDS = frozenset({"fresh_samples"})
    check(algorithm(objective=own))
    with pytest.raises(ValueError, match="max_staleness: got 1"):
        check(algorithm(objective=own), max_staleness=1)


# -- groups


ONE = r"^group_size: got 1 with an advantage that compares within a group \(always 0\), expected 2 or more"


def test_a_group_of_one_has_nothing_to_compare_with() -> None:
    for value in bound(advantage, "reward", "valid").values():
        compared = algorithm(credit=partial(credit.outcome, advantage=value))
        check(compared)
        refuse(replace(compared, group_size=1), ONE)
    center = advantage.mean_centered
    for value in (
        credit.outcome_length_baseline,
        partial(credit.batch_scaled, credit=partial(credit.outcome, advantage=center), eps=1e-4),
        partial(credit.per_part, advantage=center, weights={"correct": 1.0}),
        partial(credit.turn_returns, advantage=center, gamma=1.0),
        partial(distillation.teacher_reweighted, credit=compared.credit, share=None, lam=0.5, clip=0.2),
    ):
        refuse(algorithm(credit=value, group_size=1), ONE, teacher=TEACHER)


def test_a_group_of_one_is_fine_where_the_batch_or_a_teachers_gap_is_learned_from() -> None:
    to_go = partial(credit.reward_to_go, beta=0.0)
    for value in (None, to_go, partial(credit.token_whitened, credit=to_go, eps=1e-8)):
        check(algorithm(credit=value, group_size=1))
    for rewards in (None, preset("dr_grpo").credit):
        for value in (
            partial(distillation.teacher_gap, credit=rewards, share=None, coef=1.0),
            partial(distillation.early_teacher_gap, credit=rewards, share=None, coef=1.0, gamma=0.5),
        ):
            check(algorithm(credit=value, group_size=1), teacher=TEACHER)


def test_a_credit_that_weighs_a_part_that_there_is_not_is_refused() -> None:
    weighed = partial(credit.per_part, advantage=advantage.mean_centered, weights={"correct": 1.0, "polite": 0.5})
    for value in (weighed, partial(credit.row_whitened, credit=weighed, eps=1e-4)):
        check_parts(value, ["correct", "polite"])
        with pytest.raises(
            ValueError, match=r"weights: got parts \['polite'\], expected some of \['boxed', 'correct'\]"
        ):
            check_parts(value, ["correct", "boxed"])
    with pytest.raises(ValueError, match=r"weights: got parts \[\], expected some of \['correct'\]"):
        check_parts(with_knobs(weighed, weights={}), ["correct"])
    check_parts(None, ["correct"])
    check_parts(preset("grpo").credit, [])


# -- demonstrations, observations and shares


def test_demonstrations_that_nothing_learns_from_and_rows_that_do_not_split_are_refused() -> None:
    refuse(
        algorithm(),
        r"^train\.train\.demonstrations: got some with an algorithm that does not learn from them, expected None, or",
        demonstrations=DEMONSTRATIONS,
    )
    check(algorithm("chord", minibatches=4), demonstrations=DEMONSTRATIONS)
    refuse(
        algorithm("chord", minibatches=3),
        r"^sections\.Demonstrations\.rows: got 16 for 3 minibatches, expected a multiple",
        demonstrations=DEMONSTRATIONS,
    )


def test_a_supervised_stage_has_neither_a_teacher_nor_other_demonstrations() -> None:
    plain = partial(supervised.cross_entropy, token_weight=None, loss_aggregation=objective.token_mean)
    stage = supervised.Stage(objective=plain, prompts=4)
    check(stage)
    for name, value in (("teacher", TEACHER), ("demonstrations", DEMONSTRATIONS)):
        refuse(stage, rf"^train\.train\.{name}: got one in a supervised stage, expected None", **{name: value})


def share_of(value: Callable[[int], float]) -> dict[str, Algorithm]:
    """Algorithms with this share of a step, by the knob it is in."""
    gap = partial(distillation.teacher_gap, credit=None, share=value, coef=1.0)
    reweighted = with_knobs(preset("rlsd").credit, share=value)
    (term,) = preset("chord").beside
    return {
        "credit.share": algorithm("rlsd", credit=reweighted),
        "credit.credit.share": algorithm(credit=partial(credit.token_whitened, credit=gap, eps=1e-8)),
        "beside.share": algorithm("chord", beside=[with_knobs(term, share=value)]),
    }


@pytest.mark.parametrize("knob", ["credit.share", "credit.credit.share", "beside.share"])
def test_a_share_of_a_step_is_one_at_every_step_of_the_run(knob: str) -> None:
    provided = {"teacher": TEACHER, "demonstrations": DEMONSTRATIONS if knob == "beside.share" else None}
    for value in (lambda steps: 0.0, lambda steps: 1.0, lambda steps: steps / 5):
        check(share_of(value)[knob], **provided)
    refuse(
        share_of(lambda steps: steps / 2)[knob],
        rf"^step\.Algorithm\.{re.escape(knob)}: got 1\.5 after 3 steps, expected a share, 0 to 1$",
        **provided,
    )
    for value in (-0.1, float("nan")):
        refuse(share_of(lambda steps, value=value: value)[knob], rf"got {value} after 0 steps", **provided)


@pytest.mark.parametrize("coef", [-0.1, float("nan")])
def test_a_weight_of_observations_is_a_finite_number_of_at_least_0(coef: float) -> None:
    (term,) = preset("echo").beside
    episodes = settings().episodes
    for value in (0.0, 0.1):
        check(algorithm("echo", beside=[with_knobs(term, coef=value)]), episodes=episodes)
    refuse(
        algorithm("echo", beside=[with_knobs(term, coef=coef)]),
        rf"^supervised\.observations\.coef: got {coef}, expected a finite number of at least 0",
        episodes=episodes,
    )


# -- functions of a user's own


def takes_three(logp, row, more):
    return logp


def takes_none():
    return None


def takes_a_knob(logp, row, *, knob):
    return logp


def takes_anything(*args):
    return None


BESIDE = partial(supervised.demonstrations, share=partial(supervised.constant_share, mu=0.1))
WHITENED = partial(credit.token_whitened, eps=1e-8)


@pytest.mark.parametrize(
    ("knob", "changes", "arguments"),
    [
        ("objective.token_loss", lambda f: vars(of_objective(token_loss=f)), "logp, row"),
        ("credit.credit", lambda f: {"credit": partial(WHITENED, credit=f)}, "scored"),
        ("filters", lambda f: {"filters": [masking.drop_truncated, f]}, "rollout, adv"),
        ("beside.objective", lambda f: {"beside": [partial(BESIDE, objective=f)]}, "scores, batch, totals, gains"),
    ],
)
def test_a_function_that_cannot_be_called_is_named_by_its_knob_with_got_and_expected(
    knob: str, changes: Callable[[Callable], dict[str, object]], arguments: str
) -> None:
    refuse(
        algorithm(**changes(takes_none)),
        rf"^step\.Algorithm\.{re.escape(knob)}: got \S*test_algorithm_checks\.takes_none\(\) "
        rf"\(too many positional arguments\), expected a function of \({arguments}\)$",
    )


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (takes_three, r"takes_three\(logp, row, more\) \(missing a required argument: 'more'\)"),
        (takes_a_knob, r"takes_a_knob\(logp, row, \*, knob\) \(missing a required argument: 'knob'\)"),
    ],
)
def test_a_function_that_cannot_be_bound_is_refused_by_name(function: Callable, error: str) -> None:
    refuse(of_objective(token_loss=function), rf"^step\.Algorithm\.objective\.token_loss: got \S*\.{error}, expected a")
    check(of_objective(token_loss=partial(takes_a_knob, knob=1)))
    for fitting in (takes_anything, torch.add):  # a builtin has no signature
        check(of_objective(token_loss=fitting))
