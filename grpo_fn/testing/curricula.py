"""Properties of a `Curriculum` that a run expects: pure functions over arrays that a checkpoint can hold.

One invariant, one function. An invariant takes the curriculum and a strategy for the number of arms; it raises where it
is broken.
"""

import io
from typing import NamedTuple

import hypothesis.strategies as st
import torch
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from grpo_fn.algo.curricula import Curriculum, check_arms, check_arrays
from grpo_fn.core import prng
from grpo_fn.core.types import Arrays
from grpo_fn.testing.harness import check_claim, holds_for

Arms = SearchStrategy[int]


class CurriculumCase(NamedTuple):
    """Some steps of a run: its arms, a seed, the draws of a step, and pass rates to be dealt out to them."""

    arms: int
    seed: int
    count: int
    rates: list[list[float]]


def check_curriculum(curriculum: Curriculum, *, arms: Arms | None = None) -> None:
    """Check that every invariant of INVARIANTS holds for a curriculum, over made-up runs of a few steps.

    Args:
        curriculum: its functions, their knobs bound.
        arms: draws the number of arms, 1 to 12 where it is None.

    Raises:
        AssertionError: an invariant does not hold, on the example that is shown.
        ValueError: as a run raises it, for arms and arrays that are none.
    """
    for invariant in INVARIANTS:
        invariant(curriculum, st.integers(1, 12) if arms is None else arms)


def curriculum_cases(arms: Arms) -> SearchStrategy[CurriculumCase]:
    """Some steps of runs."""
    rates = st.lists(st.sampled_from([0.0, 0.125, 0.5, 0.875, 1.0]), min_size=1, max_size=6)
    steps = st.lists(rates, min_size=1, max_size=5)
    return st.builds(CurriculumCase, arms, st.integers(0, 2**31), st.integers(1, 9), steps)


@holds_for(curriculum_cases)
def chosen_arms_exist(curriculum: Curriculum, case: CurriculumCase) -> None:
    """Each step gets as many arms as it asks for, and the state stays arrays of the same names, shapes and dtypes."""
    state = start_of(curriculum, case)
    for step, rates in enumerate(case.rates):
        chosen = curriculum.select(state, step_key(case, step), case.count)
        check_arms(chosen, case.count, case.arms)
        after = curriculum.update(state, *dealt_rates(chosen, rates))
        check_arrays(after, state, "update")
        check_claim(all(bool(x.isfinite().all()) for x in after.values()), f"got {after}, expected finite arrays")
        state = after


@holds_for(curriculum_cases)
def nothing_but_the_arguments_counts(curriculum: Curriculum, case: CurriculumCase) -> None:
    """The same call gives the same again, whatever torch's global generator is at, and changes no argument."""
    seen = []
    for seed in (1, 2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            state = start_of(curriculum, case)
            before = stored_again(state)
            chosen = curriculum.select(state, step_key(case, 0), case.count)
            after = curriculum.update(state, *dealt_rates(chosen, case.rates[0]))
        same_arrays(state, before, "the state, which select and update must leave as it is")
        seen.append({**after, "chosen": chosen})
    same_arrays(seen[1], seen[0], "the second call")


@holds_for(curriculum_cases)
def a_stored_state_goes_on_alike(curriculum: Curriculum, case: CurriculumCase) -> None:
    """A run that resumes from a checkpoint chooses what it would have chosen."""
    state = start_of(curriculum, case)
    for step, rates in enumerate(case.rates):
        again = stored_again(state)
        chosen = curriculum.select(state, step_key(case, step), case.count)
        restored = curriculum.select(again, step_key(case, step), case.count)
        same_arrays({"chosen": restored}, {"chosen": chosen}, "from the stored state")
        state = curriculum.update(state, *dealt_rates(chosen, rates))
        same_arrays(curriculum.update(again, *dealt_rates(chosen, rates)), state, "from the stored state")


@holds_for(curriculum_cases)
def a_step_without_verdicts_is_borne(curriculum: Curriculum, case: CurriculumCase) -> None:
    """Where nothing could be scored, update gets empty tensors, and the next step can be chosen all the same."""
    state = start_of(curriculum, case)
    after = curriculum.update(state, torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64))
    check_arrays(after, state, "update without verdicts")
    check_arms(curriculum.select(after, step_key(case, 0), case.count), case.count, case.arms)


INVARIANTS = (
    chosen_arms_exist,
    nothing_but_the_arguments_counts,
    a_stored_state_goes_on_alike,
    a_step_without_verdicts_is_borne,
)


def start_of(curriculum: Curriculum, case: CurriculumCase) -> Arrays:
    """The state before the first step, once it is known to be arrays on the CPU."""
    state = curriculum.start(case.arms, prng.key(case.seed, device="cpu"))
    check_claim(
        all(isinstance(x, Tensor) and x.device.type == "cpu" for x in state.values()),
        f"got {state}, expected a mapping from names to tensors on the CPU",
    )
    return state


def step_key(case: CurriculumCase, step: int) -> Tensor:
    """The key of a step's choice."""
    return prng.fold_in(prng.key(case.seed, device="cpu"), 1, step)


def dealt_rates(chosen: Tensor, rates: list[float]) -> tuple[Tensor, Tensor]:
    """The arms of a step and their pass rates, dealt out in turn."""
    return chosen, torch.tensor(rates, dtype=torch.float64)[torch.arange(len(chosen)) % len(rates)]


def stored_again(state: Arrays) -> Arrays:
    """The arrays as a checkpoint gives them back."""
    file = io.BytesIO()
    torch.save(dict(state), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same_arrays(got: Arrays, expected: Arrays, what: str) -> None:
    """Raise AssertionError unless all bits are the same."""
    check_arrays(got, expected, what)
    odd = [name for name in expected if not torch.equal(got[name], expected[name])]
    check_claim(not odd, f"{what}: got {[got[n] for n in odd]} in {odd}, expected {[expected[n] for n in odd]}")
