"""What rewards and engines need of the machine, found out before anything expensive starts."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from grpo_fn.shell import sandbox


def check_sandboxes(rewards: Iterable[Any]) -> None:
    """Try every sandbox that the rewards run programs in. Raises ValueError where one cannot be had here."""
    for runner in bound([*rewards], sandbox.run_program):
        try:
            sandbox.check_runner(runner)
        except RuntimeError as error:
            raise ValueError(error) from error


def check_engines(samplers: Iterable[Any]) -> None:
    """Raise ValueError where what an engine of the samplers is made of is not here: vLLM, a GPU."""
    from grpo_fn.shell.vllm import nccl_transfer, process_guards, vllm_sampler

    samplers = [*samplers]
    if any(bound(samplers, vllm_sampler.colocated_sampler)):
        process_guards.check_installed("sampler")
    if any(bound(samplers, nccl_transfer.nccl)):
        nccl_transfer.check_here()


def bound(value: Any, function: Callable[..., Any]) -> Iterator[partial]:
    """Every partial of the function among what a value is bound to, at any depth."""
    match value:
        case partial(func=found) if found is function:
            yield value
        case partial():
            yield from bound(value.keywords, function)
        case dict():
            yield from bound([*value.values()], function)
        case list() | tuple():
            for item in value:
                yield from bound(item, function)
