"""check_environment lets the sound pass, and each of its properties catches the environment that breaks it."""

from dataclasses import replace
from functools import partial

import environments_on_trial as trial
import pytest
from profiles import profile, quarter

from grpo_fn import testing
from grpo_fn.core.environment import Environment
from grpo_fn.testing import environments, harness, texts

SCRIPTS = environments.episode_scripts(testing.text_problems(), testing.policy_messages(), 3, shortest=3)
PROBLEM = harness.simplest_example(testing.text_problems())


@pytest.fixture(autouse=True)
def unshrunk():
    """Shrinking a failure that is expected would only take time, and an example is an episode."""
    with profile(phases=harness.UNSHRUNK, max_examples=quarter()):
        yield


def holds_of(invariant, environment):
    harness.for_all(SCRIPTS, partial(invariant, environment), phases=harness.UNSHRUNK)


@pytest.mark.parametrize(
    ("faulty", "invariant"),
    [
        (trial.draws_without_the_key, environments.is_pure),
        (trial.appends_to_the_state, environments.is_pure),
        (trial.goes_by_identity, environments.goes_on_from_a_stored_state),
        (trial.never_ends, environments.ends_within_its_limit),
        (trial.keeps_a_set, environments.state_is_plain),
        (trial.rewards_with_text, environments.types_are_right),
        (trial.speaks_for_the_policy, environments.types_are_right),
    ],
)
def test_a_faulty_environment_is_caught_by_the_invariant_that_it_breaks(faulty, invariant):
    with pytest.raises(AssertionError, match=r"(?s)got .*expected"):
        holds_of(invariant, trial.with_step(faulty))


@pytest.mark.parametrize("faulty", [trial.reads_a_number, trial.trusts_the_calls])
def test_text_that_is_not_expected_is_tried(faulty):
    with pytest.raises(AssertionError, match="expected an answer to any text"):
        environments.takes_any_text(trial.with_step(faulty), PROBLEM, texts.HOSTILE[:4], 5.0)


@pytest.mark.parametrize("faulty", [trial.salted, trial.joins_a_set])
def test_a_salted_hash_shows_in_another_process(faulty):
    with pytest.raises(AssertionError, match="in another process with PYTHONHASHSEED=1"):
        environments.same_in_another_process(trial.with_step(faulty), SCRIPTS)


def test_an_environment_that_no_module_defines_is_refused():
    sound = trial.with_step(trial.step)
    with pytest.raises(AssertionError, match="expected functions that modules define"):
        environments.same_in_another_process(replace(sound, start=lambda problem, key: None), SCRIPTS)


def test_a_sound_environment_passes():
    for invariant in environments.INVARIANTS:
        holds_of(invariant, trial.with_step(trial.step))
    testing.check_environment(trial.with_step(trial.step), max_turns=3, hostile=texts.HOSTILE[:4])


def test_purity_is_checked_of_pure_environments_alone():
    noisy = Environment(start=trial.start, step=partial(trial.draws_without_the_key, limit=3), pure=False)
    testing.check_environment(noisy, max_turns=3, hostile=texts.HOSTILE[:4])
    with pytest.raises(AssertionError):
        testing.check_environment(replace(noisy, pure=True), max_turns=3, hostile=texts.HOSTILE[:4])
