"""TrainingRun: the pieces of a run, put together by `build`, used by the loop and by replay."""

import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo_fn.algo.step import StepAlgorithm
from grpo_fn.config import Config
from grpo_fn.core.problem import Problem, Scorer
from grpo_fn.shell.episodes.episode_rows import Environments
from grpo_fn.shell.policy.fsdp import FSDPPolicy, ReferenceModel
from grpo_fn.shell.reward_workers.reward_pool import RewardPool
from grpo_fn.shell.sampler.data_parallel import DataParallelSampler
from grpo_fn.shell.sampler.interface import EngineSampler, TrainingSampler
from grpo_fn.shell.world import World
from grpo_fn.tasks.task import Task
from grpo_fn.trainer.sections import Settings

DATA, SAMPLING, EVALUATION, ADAPTERS, PROBING, SHOWING = range(6)  # streams of the run's key


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
    algo: StepAlgorithm
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
