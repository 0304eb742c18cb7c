"""The policy as its own teacher: as it is, as it began, or the exponential moving average of its weights.

Each is a function `(policy, start, *, knobs) -> ReferenceModel`, called once when a run is built: what it returns is
entered whenever the teacher is asked. What such a teacher knows better than the policy comes with the prompt that it
reads (`sections.Teacher.prompt`).
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

from grpo_fn.shell.policy.fsdp import FSDPPolicy, ReferenceModel

SelfTeacher = Callable[[FSDPPolicy, ReferenceModel | None], ReferenceModel]


def live(policy: FSDPPolicy, start: ReferenceModel | None) -> ReferenceModel:
    """The policy as it is when the teacher is asked, before the step's update. It costs no memory.

    Args:
        policy: the policy.
        start: the frozen start model; not read.

    Returns:
        The policy's model.
    """
    return partial(nullcontext, policy.logprob_model)


def start_model(policy: FSDPPolicy, start: ReferenceModel | None) -> ReferenceModel:
    """The policy as it began: the frozen copy that a KL to a reference needs, too; with adapters, the model without.

    Args:
        policy: the policy; not read.
        start: the frozen start model.

    Returns:
        The frozen start model.

    Raises:
        ValueError: none was kept.
    """
    if start is None:
        raise ValueError("self_teachers.start_model: got a run that keeps no frozen start model, wanted one")
    return start


def moving_average(policy: FSDPPolicy, start: ReferenceModel | None, *, rate: float) -> ReferenceModel:
    """The exponential moving average of the policy's weights: e <- e + rate (theta - e) after each update.

    SDFT (arXiv:2601.19897), SDPO (arXiv:2601.20802); from TRL's documentation. It begins as the policy does. Kept in
    float32, of what trains alone, spread over the devices as the policy is, and in the checkpoints.

    Args:
        policy: the policy.
        start: the frozen start model; not read.
        rate: share of the new weights, above 0 and up to 1; 1 is the live policy.

    Returns:
        The policy's model under the averaged weights.

    Raises:
        ValueError: a rate that is none.
    """
    return policy.keep_average(rate)
