"""What a function declares that a run has to provide before weights are loaded: `f.NEEDS = frozenset({...})`.

    logp_ref        log-probs under a frozen copy of the start model
    logp_teacher    log-probs under a teacher
    energy          |d logp / d logits|^2 of every sampled token, one more forward pass
    logp_sampled    nothing: the function compares the policy with the sampler, so samples may be stale
    trainer_logp    logp_old from the trainer's own pass: the function compares it with the sampler's log-probs
    fresh_samples   samples of the policy as it is: no ratio corrects for older ones
    groups          two samples of a prompt or more: the function compares within a group
    demonstrations  given completions beside the sampled ones
    episodes        rows in which an environment answers

A function that reads logp_ref, logp_teacher or energy without declaring it ends with an error that says so.
"""

from typing import Any

from grpo_fn.core.partials import function_and_knobs

PASSES = ("logp_ref", "logp_teacher", "energy")  # forward passes that a step makes for those who declare them


def needs(value: Any) -> frozenset[str]:
    """What a function and all functions among its knobs declare; also of a list or a mapping of functions.

    NEEDS may be a function of the knobs, which then speaks for them too: a KL with a coefficient of 0 is not there.
    """
    if isinstance(value, list | tuple):
        return frozenset().union(*map(needs, value))
    if isinstance(value, dict):
        return needs([*value.values()])
    if not callable(value):
        return frozenset()
    function, knobs = function_and_knobs(value)
    declared = getattr(function, "NEEDS", frozenset())
    return declared(knobs) if callable(declared) else declared | needs(dict(knobs))


def undeclared(name: str) -> ValueError:
    """The error of a function that reads one of PASSES without declaring it."""
    return ValueError(
        f"got a function of step.Algorithm that reads {name} and does not declare it, so the run has none; "
        f'expected your_function.NEEDS = frozenset({{"{name}"}}) below the function'
    )
