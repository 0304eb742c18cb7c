"""The functions of a configuration, each called once on something small before anything expensive starts."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from grpo_fn.core import prng
from grpo_fn.core.environment import Message
from grpo_fn.core.partials import function_and_knobs
from grpo_fn.core.problem import Completion, Problem, RewardFn
from grpo_fn.core.types import Reward, Rollout
from grpo_fn.rewards.judge import Judge, judges_of
from grpo_fn.shell.episodes.answers import Answer
from grpo_fn.shell.reward_workers.judge_client import JudgeRecord, check_endpoint
from grpo_fn.shell.reward_workers.reward_pool import Loss, RewardError, RewardPool
from grpo_fn.tasks.task import Task
from grpo_fn.trainer.sections import Episodes, Settings


def try_token_sampler(token_sampler: Callable[..., Any], temperature: float) -> None:
    """Raise ValueError unless the token sampler draws a token and its log-prob for every row."""
    logits, u = torch.linspace(-1, 1, 20).view(4, 5), torch.tensor([0.1, 0.4, 0.6, 0.9])
    names = [*own_functions(token_sampler)]
    users = [name for name in names if not name.startswith("grpo_fn.")]
    try:
        draws = token_sampler(logits, u, temperature=temperature)
        if isinstance(draws, tuple) and len(draws) == 2:
            fault = wrong_tensor(draws[0], (4,), torch.long) or wrong_tensor(draws[1], (4,), torch.float32)
        else:
            fault = shown_type(draws)
    except Exception as error:
        if isinstance(error, ValueError) and not users:
            raise  # grpo_fn's own say what they got and expected
        fault = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
    if fault is not None:
        raise ValueError(
            f"sections.Sampling.token_sampler: got {fault} from {', '.join(users or names[:1])} on a toy step, "
            "expected (token [B] of integers, logp [B] in nats) for (logits [B, V], u [B])"
        )


def wrong_tensor(value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    """What is wrong with a tensor that is to have this shape and kind of numbers, and to be finite; None if nothing."""
    if not isinstance(value, Tensor):
        return shown_type(value)
    kinds = (value.dtype is torch.bool, value.is_floating_point())
    if kinds != (dtype is torch.bool, dtype.is_floating_point):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')}"
    if tuple(value.shape) != shape:
        return f"a tensor of shape {list(value.shape)}"
    return None if value.isfinite().all() else "a tensor with numbers that are not finite"


def shown_type(value: Any) -> str:
    """The type of what was returned, and its length where it is a tuple."""
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple) else "")


def own_functions(value: Any) -> Iterator[str]:
    """The functions in a knob's value, at any depth, as module.name; those of a user come without ours."""
    if callable(value):
        function, knobs = function_and_knobs(value)
        yield f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
        value = [*knobs.values()]
    for item in value if isinstance(value, list | tuple) else ():
        yield from own_functions(item)


# -- task, optimizer and schedule


T = TypeVar("T")


def try_task(make: Any) -> Task:
    """The task that a configuration makes, with a first training problem that can be drawn."""
    expected = "a function of no arguments that returns a grpo_fn.tasks.task.Task (from_rows makes one of a list)"
    if not callable(make):
        at = " (bound with (), which calls it too early?)" if isinstance(make, Task) else ""
        raise ValueError(f"sections.Data.task: got {shown_type(make)}{at}, expected {expected}")
    task = _called("sections.Data.task", make, make, expected=expected)
    if not isinstance(task, Task):
        raise ValueError(f"sections.Data.task: got {shown_type(task)} from {_name(make)}, expected {expected}")
    problems: list[Any] = list(task.test[:1])
    if task.size:
        draw = _called(
            "sections.Data.task", make, lambda: task.train(prng.key(0, device="cpu"), 0), expected="a Problem"
        )
        problems.append(draw)
    for problem in problems:
        if not isinstance(problem, Problem):
            raise ValueError(
                f"sections.Data.task: got {shown_type(problem)} as a problem of {_name(make)}, expected a Problem"
            )
    return task


def try_optimizer(optimizer: Callable[..., Any]) -> None:
    """Raise ValueError unless it makes a torch optimizer of parameters."""
    knob, expected = "sections.PolicyUpdate.optimizer", "a torch.optim.Optimizer of the parameters that it is given"
    result = _called(knob, optimizer, lambda: optimizer([nn.Parameter(torch.zeros(2, 2))]), expected=expected)
    if not isinstance(result, torch.optim.Optimizer):
        raise ValueError(f"{knob}: got {shown_type(result)} from {_name(optimizer)}, expected {expected}")


def try_schedule(schedule: Callable[[int], Any], updates: int) -> None:
    """Raise ValueError unless it gives a finite factor of at least 0 for the first and the last update."""
    knob, expected = "sections.PolicyUpdate.schedule", "a finite number of at least 0, the factor of the learning rate"
    for update in (0, max(0, updates - 1)):
        factor = _called(knob, schedule, lambda at=update: schedule(at), expected=expected)
        number = not isinstance(factor, bool | Tensor) and isinstance(factor, int | float)
        if not number or not isfinite(factor) or factor < 0:
            got = repr(factor) if number else shown_type(factor)
            raise ValueError(f"{knob}: got {got} from {_name(schedule)} at update {update}, expected {expected}")


def _name(function: Any) -> str:
    names = [*own_functions(function)]
    return ", ".join([name for name in names if not name.startswith("grpo_fn.")] or names[:1])


def _called(knob: str, function: Any, call: Callable[[], T], *, expected: str) -> T:
    try:
        return call()
    except (ValueError, OSError):
        raise  # bad input of the function's own, which says what it got
    except Exception as error:
        text = str(error).strip()
        got = f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
        raise ValueError(f"{knob}: got {got} from {_name(function)}, expected {expected}") from error


# -- rewards and graders, in a worker on two toy completions


def reward_parts(reward: Callable[..., Reward], problem: Problem) -> tuple[list[str], list[RewardFn]]:
    """The parts of a reward, found by calling it on two empty completions whose scores are all 0."""
    mask = torch.tensor([[False, True], [False, True]])
    rollout = Rollout(mask.long(), mask, torch.zeros(2, 2), ~mask[:, 1], ("", ""))
    functions: list[RewardFn] = []

    def score(fn: RewardFn, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float | None]:
        functions.append(fn)
        return [0.0] * len(completions)

    result = reward((problem,), rollout, score=score)
    if not isinstance(result, Reward):
        raise ValueError(
            f"reward: got {type(result).__name__} from sections.Rewards.reward, expected a core.types.Reward"
        )
    return [*result.parts], functions


def try_rewards(knob: str, fns: Sequence[RewardFn], problem: Problem, make_pool: Callable[[], RewardPool]) -> None:
    """Raise ValueError unless each function gives a number or None for the answer of a problem and for an empty text.

    A row that is late or whose worker dies is no error here: the run loses such rows and goes on.
    """
    texts = (Completion(problem.answer, 1, False), Completion("", 1, True))
    for fn in fns:
        names = [name for name in own_functions(fn) if not name.startswith("grpo_fn.")]
        if not names:
            continue
        lost: list[Loss] = []
        with make_pool() as pool:
            try:
                pool.judge(fn, [problem] * len(texts), texts, report=lost.append)
            except RewardError as error:  # no worker could load it
                raise ValueError(f"{knob}: {error}") from error
        raised = [loss for loss in lost if loss.cause == "exceptions"]
        if raised and (pool.stop_on_error or len(raised) == len(texts)):
            reason = raised[0].reason
            raise ValueError(
                f"{knob}: {', '.join(names)}, called with problem {problem.uid} and a toy completion: {reason}"
                + ("" if "expected" in reason else "; expected a finite number or None")
            )


# -- judges: each names its model before a run begins, and its answers go on record


FOLDER = "judge"  # in the run folder


def judges_of_run(settings: Settings) -> list[Judge]:
    """The judges that a run asks."""
    by_identity = {id(judge): judge for judge in judges_of([settings.rewards.reward, *settings.evaluation.graders])}
    judges = [*by_identity.values()]
    names = [judge.name for judge in judges]
    if len({*names}) != len(names):
        raise ValueError(f"judge.Judge.name: got {', '.join(names)}, expected a name of its own for each judge")
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
    pool.judge_record = record
    return pool


# -- an environment, which has to begin an episode and to answer any text


TEXTS = ("", "text", "<tool_call>", "\N{REPLACEMENT CHARACTER}")  # an environment answers to any message


def try_environment(episodes: Episodes | None, problem: Problem) -> None:
    """Raise ValueError unless the environment answers a problem and any text.

    It is asked in a worker process, as in the run. What is wrong for one text only is no error here, as a row bears it.
    """
    if episodes is None:
        return
    name = episodes.name
    with episodes.pool() as pool:
        opening = pool.start(problem, 0).result()
        require_answer(f"sections.Episodes.environment: {name}.start of problem {problem.uid}", opening)
        if not opening.messages:
            raise ValueError(
                f"sections.Episodes.environment: {name}.start: got no messages, expected what is read first"
            )
        answers = [pool.step(opening.state, Message("assistant", text), 0) for text in TEXTS]
        replies = [future.result() for future in answers]
    if all(answer.failure for answer in replies):
        require_answer(f"sections.Episodes.environment: {name} of problem {problem.uid}", replies[0])
    for answer in replies:
        if not answer.failure and not answer.done and not answer.messages:
            raise ValueError(
                f"sections.Episodes.environment: {name}: got a step that is not done and has no messages, expected an "
                "observation that the policy reads"
            )


def require_answer(what: str, answer: Answer) -> None:
    """Raise ValueError for a failure."""
    if answer.failure:
        raise ValueError(f"{what}: {answer.failure}")
