"""What rewards and engines need of the machine, found out before anything expensive starts."""

from collections.abc import Iterable
from typing import Any

from grpo_fn.core.partials import uses_of
from grpo_fn.shell import sandbox


def check_sandboxes(rewards: Iterable[Any]) -> None:
    """Try every sandbox that the rewards run programs in. Raises ValueError where one cannot be had here."""
    for runner in uses_of(sandbox.run_program, [*rewards]):
        try:
            sandbox.check_runner(runner)
        except RuntimeError as error:
            raise ValueError(error) from error


def check_engines(samplers: Iterable[Any]) -> None:
    """Raise ValueError where what an engine of the samplers is made of is not here: vLLM, a GPU."""
    from grpo_fn.shell.vllm import nccl_transfer, process_guards, vllm_sampler

    samplers = [*samplers]
    if any(uses_of(vllm_sampler.colocated_sampler, samplers)):
        process_guards.check_installed("sampler")
    if any(uses_of(nccl_transfer.nccl, samplers)):
        nccl_transfer.check_here()
