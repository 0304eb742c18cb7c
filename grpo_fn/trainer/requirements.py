"""Whether the machine has what rewards and engines need, before anything expensive starts. It starts without torch."""

from collections.abc import Iterable
from typing import Any

from grpo_fn import sandbox
from grpo_fn.core.partials import uses_of


def check_sandboxes(rewards: Iterable[Any]) -> None:
    """Try every sandbox that the rewards run programs in. Raises ValueError where one cannot be had here."""
    for runner in uses_of(sandbox.run_program, [*rewards]):
        try:
            sandbox.check_runner(runner)
        except RuntimeError as error:
            raise ValueError(error) from error


def check_engines(samplers: Iterable[Any]) -> None:
    """Raise ValueError where what an engine of the samplers is made of is not here: vLLM, a GPU."""
    from grpo_fn.shell.vllm import engine, vllm_sampler, vllm_transfer

    samplers = [*samplers]
    if any(uses_of(vllm_sampler.colocated_sampler, samplers)):
        engine.check_installed("sampler")
    if any(uses_of(vllm_transfer.NcclTransfer, samplers)):
        vllm_transfer.check_nccl_transfer()
