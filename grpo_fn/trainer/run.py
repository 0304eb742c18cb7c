"""TrainingRun: the pieces of a run, put together by `build`, used by the loop and by replay."""

import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo_fn.algo.curricula import begin_curriculum, check_arrays, sample_and_follow
from grpo_fn.algo.group_sampling import Explore, GroupBatch
from grpo_fn.algo.step import AT_THE_START, Algorithm
from grpo_fn.algo.supervised import Stage
from grpo_fn.config import Config
from grpo_fn.core import prng
from grpo_fn.core.problem import Problem, Scorer
from grpo_fn.core.types import Carry, Groups, Reward, Rollout
from grpo_fn.shell.episodes.episode_rows import Environments
from grpo_fn.shell.policy.fsdp import FSDPPolicy, ReferenceModel
from grpo_fn.shell.reward_workers.reward_pool import RewardPool
from grpo_fn.shell.sampler.interface import DataParallelSampler, EngineSampler, TrainingSampler
from grpo_fn.shell.world import World
from grpo_fn.tasks.task import Task
from grpo_fn.trainer.sections import Settings

DATA, SAMPLING, EVALUATION, ADAPTERS, PROBING, SHOWING, CHOOSING = range(7)  # streams of the run's key

SampleGroups = Callable[[Explore, Carry, int], GroupBatch]


@dataclass(frozen=True)
class RunRequest:
    """What the command line asks for."""

    config: Config
    run_dir: Path
    dry_run: bool
    ranks: int  # that a dry run is asked about, evenly on so many hosts
    hosts: int
    force: bool


@dataclass(frozen=True)
class AsyncEvaluator:
    """A sampler whose engine the training does not need, and workers of its own for the graders."""

    sampler: EngineSampler
    pool: Callable[[], RewardPool]
    key: Tensor


@dataclass(frozen=True)
class TrainingRun:
    """The pieces of a run: its settings, and what was made from them."""

    settings: Settings
    request: RunRequest
    key: Tensor
    world: World
    policy: FSDPPolicy
    start_model: ReferenceModel | None  # the frozen start model, where a copy is kept
    sampler: TrainingSampler
    greedy: DataParallelSampler  # the same engine, for greedy answers
    sampled: DataParallelSampler  # the same engine, as the evaluation draws
    tokenizer: PreTrainedTokenizerBase
    algo: Algorithm | Stage
    reward: Callable[[Sequence[Problem], Rollout], Reward]
    teacher: Callable[[Groups, Tensor], Tensor] | None  # log-probs of the sampled tokens under the teachers
    demonstration_rows: Callable[[Sequence[Problem]], Rollout]  # of problems, one row each
    demonstrations: Callable[[int], Rollout] | None  # steps taken -> given rows beside the sampled ones
    task: Task
    # Starts an engine of its own for evaluations. None: the training's engine evaluates, and the training waits.
    evaluator: Callable[[], AbstractContextManager[AsyncEvaluator]] | None
    pool: RewardPool
    environments: Environments | None  # of rows that are episodes
    score: Scorer
    plan: Sequence[str]  # the numbers of the run, for the log
    ranks: Sequence[str]  # a line for each rank, for the log
    started: float  # time.perf_counter() when the program began to work

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return self.request.run_dir

    @property
    def held_out(self) -> Sequence[Problem]:
        """The problems of the evaluation."""
        return self.task.test


def resume_command(run_dir: Path, ranks: int) -> str:
    """The command that goes on with a run, whatever it was started with: its folder holds the configuration."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    hosts = f"--nnodes {ranks // here} " if ranks > here else ""
    launcher = "python" if ranks == 1 else f"torchrun {hosts}--nproc-per-node {here}"
    return f"{launcher} -m grpo_fn.run " + shlex.join(
        ["--gin_file", str(run_dir / "config.gin"), "--run_dir", str(run_dir)]
    )


# -- which problems a step asks


def first_carry(run: TrainingRun) -> Carry:
    """What the first step gets."""
    if run.settings.curriculum is None:
        return AT_THE_START
    key = prng.fold_in(run.key, CHOOSING)
    return AT_THE_START._replace(curriculum=begin_curriculum(run.settings.curriculum, len(run.task.arms), key))


def check_restored(run: TrainingRun, carried: Carry) -> Carry:
    """What a checkpoint holds, for a run with a curriculum or without one.

    Raises ValueError for the state of another curriculum, or one over other arms.
    """
    wanted, got = first_carry(run).curriculum, carried.curriculum
    if wanted is None or got is None:
        return carried._replace(curriculum=wanted)
    check_arrays({"turns": got.turns, **got.arrays}, {"turns": wanted.turns, **wanted.arrays}, "checkpoint, curriculum")
    return carried


def follow_groups(settings: Settings, task: Task, group_sampling: SampleGroups | None) -> SampleGroups | None:
    """A group sampling that also moves the state of the run's curriculum, if it has one."""
    if settings.curriculum is None:
        return group_sampling
    return partial(sample_and_follow, group_sampling=group_sampling, curriculum=settings.curriculum, labels=task.arms)


def run_algorithm(settings: Settings, task: Task) -> Algorithm | Stage:
    """The algorithm of a run's settings, its groups followed by the curriculum."""
    if settings.curriculum is None:
        return settings.algorithm
    groups = follow_groups(settings, task, settings.algorithm.group_sampling)
    return replace(settings.algorithm, group_sampling=groups)


def draws_to_check(settings: Settings, task: Task) -> int:
    """Training problems from the first one on among which all that the run may ask are, an epoch at most.

    A curriculum may ask a single arm all the time; where there are rows, all of them are looked at anyway.
    """
    draws = settings.algorithm.prompts * settings.steps
    if settings.curriculum is not None and not task.rows:
        draws *= len(task.arms)
    return min(task.size, draws)
