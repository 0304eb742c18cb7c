"""Whether the machine has what rewards, judges and engines need, before anything expensive starts."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from grpo_fn import sandbox
from grpo_fn.core.partials import uses_of
from grpo_fn.rewards.judge import Judge, judges_of
from grpo_fn.shell.reward_workers.judge_client import check_endpoint
from grpo_fn.shell.reward_workers.judge_record import JudgeRecord
from grpo_fn.shell.reward_workers.reward_pool import RewardPool
from grpo_fn.trainer.sections import Settings


def check_sandboxes(rewards: Iterable[Any]) -> None:
    """Try every sandbox that the rewards run programs in. Raises ValueError where one cannot be had here."""
    for runner in uses_of(sandbox.run_program, [*rewards]):
        try:
            sandbox.check_runner(runner)
        except RuntimeError as error:
            raise ValueError(error) from error


def check_engines(samplers: Iterable[Any]) -> None:
    """Raise ValueError where what an engine of the samplers is made of is not here: vLLM, a GPU."""
    from grpo_fn.shell.vllm import process_guards, vllm_sampler, vllm_transfer

    samplers = [*samplers]
    if any(uses_of(vllm_sampler.colocated_sampler, samplers)):
        process_guards.check_installed("sampler")
    if any(uses_of(vllm_transfer.nccl_transfer, samplers)):
        vllm_transfer.check_here()


# -- judges: each names its model before a run begins, and its answers go on record


FOLDER = "judge"  # in the run folder


def judges_of_run(settings: Settings) -> list[Judge]:
    """The judges that a run asks."""
    found = {id(judge): judge for judge in judges_of([settings.rewards.reward, *settings.evaluation.graders])}
    judges = [*found.values()]
    names = [judge.name for judge in judges]
    if len({*names}) != len(names):
        raise ValueError(f"judge.Judge.name: got {', '.join(names)}, wanted a name of its own for each judge")
    return judges


def check_judges_answer(settings: Settings, run_dir: Path, *, main: bool) -> None:
    """Look whether every judge is there and has its model, first of all; a run that has begun asks nothing."""
    if main and not (run_dir / FOLDER).is_dir():
        for judge in judges_of_run(settings):
            asyncio.run(check_endpoint(judge))


def with_record(settings: Settings, run_dir: Path, rank: int) -> Settings:
    """The settings, with pools whose judges have one record: that of the run."""
    pool = partial(recorded_pool, settings.rewards.pool, JudgeRecord(run_dir / FOLDER, rank))
    return replace(settings, rewards=replace(settings.rewards, pool=pool))


def recorded_pool(make: Callable[[], RewardPool], record: JudgeRecord) -> RewardPool:
    """A pool whose judges are on record."""
    pool = make()
    pool.judges.record = record
    return pool
