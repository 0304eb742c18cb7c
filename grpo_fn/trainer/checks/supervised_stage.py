"""Whether a run is a supervised stage, and whether objectives, demonstrations and their share of a step fit."""

import math
from collections.abc import Sequence

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from grpo_fn.algo.step import Algorithm
from grpo_fn.algo.supervised import supervised_step
from grpo_fn.core import prng
from grpo_fn.core.partials import function_and_knobs
from grpo_fn.core.problem import Problem
from grpo_fn.shell.model.demonstrations import check_demonstrations
from grpo_fn.shell.sampler.interface import positions
from grpo_fn.tasks.task import Task, train_problems
from grpo_fn.trainer.checks.try_out import try_objective
from grpo_fn.trainer.run import SHOWING
from grpo_fn.trainer.sections import Settings

SAMPLED = ("ratio", "clip_low", "clip_high", "correction", "kl", "entropy")  # an objective's diagnostics of each token
GIVEN = ("nll", "token_weight")  # those of one of given tokens
TOKEN_LOSS = "a token loss takes (logp [T], row) and returns (loss [T], {ratio, clip_low, clip_high})"
TOKEN_WEIGHT = "supervised.cross_entropy has them; a token weight takes (logp [T], row) and returns [T]"


def is_supervised(algorithm: Algorithm) -> bool:
    """Whether steps learn from given completions alone, and sample nothing.

    Args:
        algorithm: its `stage`.
    """
    return function_and_knobs(algorithm.stage)[0] is supervised_step


def check_stage(settings: Settings) -> None:
    """Raise ValueError for objectives that cannot be called, and for given completions that nothing learns from.

    Args:
        settings: their algorithm, steps and demonstrations.
    """
    algorithm, shown = settings.algorithm, settings.demonstrations
    size, given = algorithm.group_size, {"names": GIVEN, "kind": TOKEN_WEIGHT}
    if is_supervised(algorithm):
        check_supervised(settings)
        try_objective("step.Algorithm.objective", algorithm.objective, size, **given)
        return
    try_objective("step.Algorithm.objective", algorithm.objective, size, names=SAMPLED, kind=TOKEN_LOSS)
    try_objective("step.Algorithm.supervised", algorithm.supervised, size, **given)
    check_observations(settings.algorithm.observation_coef, with_episodes=settings.episodes is not None)
    shares = [algorithm.supervised_share(step) for step in range(settings.steps)]
    if not all(0 <= mu <= 1 for mu in shares):
        odd = next(step for step, mu in enumerate(shares) if not 0 <= mu <= 1)
        raise ValueError(
            f"step.Algorithm.supervised_share: got {shares[odd]} after {odd} steps, wanted a share, 0 to 1"
        )
    if any(shares) and shown is None:
        raise ValueError(
            "train.train.demonstrations: got None with an algorithm that learns from given completions too, wanted "
            "some: --gin_file task/demonstrations.gin --gin_param DEMONSTRATIONS='FILE', or "
            "step.Algorithm.supervised_share = @supervised.sampled_alone"
        )
    if shown is not None and shown.rows % algorithm.minibatches:
        raise ValueError(
            f"sections.Demonstrations.rows: got {shown.rows} for {algorithm.minibatches} minibatches, wanted a multiple"
        )


def check_observations(coef: float, *, with_episodes: bool) -> None:
    """Raise ValueError for a weight of observations that is none, or has no episodes to take them from.

    Args:
        coef: `step.Algorithm.observation_coef`.
        with_episodes: whether the run has episodes.
    """
    if not 0 <= coef < math.inf:
        raise ValueError(f"step.Algorithm.observation_coef: got {coef}, wanted a finite number of at least 0")
    if coef and not with_episodes:
        raise ValueError(
            f"step.Algorithm.observation_coef: got {coef} in a run without episodes, in which no environment writes "
            "anything, wanted 0.0, or train.train.episodes = @sections.Episodes()"
        )


def shown_key(settings: Settings) -> Tensor:
    """Key of the stream of demonstrations beside sampled completions.

    Args:
        settings: their seed.
    """
    return prng.fold_in(prng.key(settings.seed, device="cpu"), SHOWING)


def look_at_demonstrations(
    settings: Settings,
    shown: Task | None,
    drawn: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    config: PretrainedConfig,
) -> None:
    """Raise ValueError for a demonstration of the run, or a held-out one, that cannot be made or is too long.

    Args:
        settings: of the run.
        shown: the task of demonstrations beside sampled completions, if there is one.
        drawn: training problems of the run, which have demonstrations in a supervised stage.
        tokenizer: the policy's.
        task: its held-out problems.
        config: of the policy's model, whose positions are the limit.
    """
    problems = [*drawn, *task.test] if is_supervised(settings.algorithm) else []
    if shown is not None:
        draws = min(shown.size, settings.demonstrations.rows * settings.steps) if shown.rows else settings.steps
        problems += train_problems(shown, shown_key(settings), 0, draws)
    check_demonstrations(
        problems,
        tokenizer=tokenizer,
        demonstration=settings.data.demonstration,
        encode=settings.data.encode_prompt,
        most=settings.sampling.max_total_tokens or positions(config),
    )


def check_supervised(settings: Settings) -> None:
    """Raise ValueError for a supervised stage with numbers or parts that only sampled completions have a use for.

    Args:
        settings: their algorithm, teacher and demonstrations.
    """
    if settings.algorithm.group_size != 1:
        raise ValueError(
            f"group_size: got {settings.algorithm.group_size} in a supervised stage, wanted 1: each problem has one "
            "demonstration"
        )
    odd = [name for name in ("teacher", "demonstrations") if getattr(settings, name) is not None]
    if odd:
        raise ValueError(
            f"train.train.{odd[0]}: got one in a supervised stage, wanted None: sections.Data.task has what is learned"
        )
