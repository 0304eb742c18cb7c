"""Validate a configuration before anything expensive starts: its sections, its data, what its functions declare, and
those that can be called on something small, each called once."""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from grpo_fn.algo import credit as credits
from grpo_fn.algo import distillation, supervised
from grpo_fn.algo.curricula import Curriculum, begin_curriculum, choose_uids, update_curriculum
from grpo_fn.algo.step import Algorithm, from_sampler
from grpo_fn.algo.supervised import Stage
from grpo_fn.core import prng
from grpo_fn.core.batch import outcome_reward
from grpo_fn.core.environment import Message
from grpo_fn.core.partials import check_positive, describe_function, function_and_knobs, needs, uses_of
from grpo_fn.core.problem import Completion, Problem, RewardFn
from grpo_fn.core.types import Reward, Rollout
from grpo_fn.rewards.judge import Judge, judges_of
from grpo_fn.shell.logging import stopwatch
from grpo_fn.shell.model import hf
from grpo_fn.shell.model.attention import check_attention, check_attention_choice, model_attention
from grpo_fn.shell.model.blocks import torch_compile
from grpo_fn.shell.policy import memory_estimate
from grpo_fn.shell.reward_workers.reward_pool import RewardError, RewardPool
from grpo_fn.shell.world import find_device
from grpo_fn.tasks.task import Task, sample_tests
from grpo_fn.trainer.plan import ValidatedPlan
from grpo_fn.trainer.requirements import check_engines, check_sandboxes
from grpo_fn.trainer.sections import Episodes, Settings, model_source
from grpo_fn.trainer.teachers import find_teachers, moving_average, start_model, uses_teacher

T = TypeVar("T")
U = TypeVar("U")
TokenSampler = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def validate(settings: Settings) -> ValidatedPlan:
    """Check that the sections fit together, and find out what `build` needs to know. Loads data, no weights.

    Raises ValueError naming what was got and expected.
    """
    s, algorithm = settings, settings.algorithm
    stopwatch.check_profile_steps(s.logging.profile_steps, s.steps)
    check_sandboxes([s.rewards.reward, *s.evaluation.graders])
    judges_of_run(s)
    try_token_sampler(s.sampling.token_sampler, s.sampling.temperature)
    check_algorithm(s)
    drawn = partial(s.sampling.token_sampler, temperature=s.sampling.temperature)
    check_full_support(drawn, s.sampling.temperature, s.sampling.allow_biased)
    check_deterministic(s.compute.deterministic, s.parallelism.compile)
    updates = algorithm.epochs * algorithm.minibatches
    try_optimizer(s.policy.optimizer)
    try_schedule(s.policy.schedule, updates * s.steps)
    dtype, source = hf.find_dtype(s.compute.dtype), model_source(s.model, "train.train.model")
    check_attention_choice(s.compute.attention, dtype)
    config, task = both(source.config, lambda: sample_tests(try_task(s.data.task), s.evaluation.problems))
    model_attention(s.compute.attention, config)
    check_positive(train_rows=task.size, held_out_problems=len(task.test))
    parts, scored = reward_parts(s.rewards.reward, task.test[0])
    try_rewards("sections.Rewards.reward", scored, task.test[0], s.rewards.pool)
    try_rewards("sections.Evaluation.graders", s.evaluation.graders, task.test[0], s.rewards.pool)
    declared = needs(vars(algorithm))
    check_parts(getattr(algorithm, "credit", None), parts)
    check_curriculum_of_run(s, task, parts)
    reference = "logp_ref" in declared
    return ValidatedPlan(
        source=source,
        config=config,
        dtype=dtype,
        task=task,
        reference=reference,
        frozen=reference or s.logging.start_kl_every > 0 or uses_teacher(s, start_model),
        average=uses_teacher(s, moving_average),
        teachers=find_teachers(s, config),
        parts=parts,
        demonstrations=None if s.demonstrations is None else try_task(s.demonstrations.task),
        parameters=hf.parameter_count(hf.empty_model(config)),
        trained=memory_estimate.trained_parameters(config, s.lora),
    )


def both(first: Callable[[], T], second: Callable[[], U]) -> tuple[T, U]:
    """What both return. Raises ValueError with what is wrong with either, so that it takes one look to mend both."""
    try:
        value = first()
    except ValueError as error:
        try:
            second()
        except (ValueError, OSError) as other:
            raise ValueError(f"{error}; and {other}") from error
        raise
    return value, second()


def check_this_machine(settings: Settings) -> None:
    """Raise ValueError for engines and kernels that are not here; a dry run may be about another machine."""
    check_engines([settings.sampling.sampler, settings.evaluation.async_sampler])
    compute = settings.compute
    device, dtype = find_device(compute.device, 0), hf.find_dtype(compute.dtype)
    check_attention(compute.attention, device, dtype)


def check_deterministic(deterministic: bool, compile_block: Callable[[nn.Module], None]) -> None:
    """Raise ValueError for deterministic kernels with compiled blocks, whose code depends on earlier calls."""
    if deterministic and torch_compile in (compile_block, getattr(compile_block, "func", None)):
        raise ValueError(
            "sections.Compute.deterministic: got True with compiled blocks, whose code is tuned to the sizes that it "
            "meets first; expected mesh.Parallelism.compile = @blocks.eager, or False"
        )


def check_full_support(token_sampler: TokenSampler, temperature: float, allow_biased: bool) -> None:
    """Raise ValueError unless `token_sampler`, its knobs bound, draws from softmax(logits / temperature).

    The policy gradient and every importance ratio are about that distribution. A sampler that cuts its tail (top-p,
    top-k, min-p), draws at another temperature or always takes the likeliest token samples from a policy other than
    the one that the trainer differentiates. Found by drawing from a few known distributions; `allow_biased` skips it.
    """
    if allow_biased:
        return
    wrong = (draws_differ(token_sampler, logits, count, temperature) for logits, count in KNOWN)
    if fault := next(filter(None, wrong), None):
        raise ValueError(
            f"token_sampler: {fault}, expected draws from softmax(logits / {temperature:g}) while training, or the "
            "gradient is that of another policy: sections.Sampling.token_sampler = @sampling.categorical, or "
            "sections.Sampling.allow_biased = True to train all the same"
        )


# Logits and how often to draw from them: a few tokens, drawn often enough to count each; a steep slope, where any min-p
# cuts a tail; nearly even ones over a large vocabulary, where any top-k does.
KNOWN = ((torch.linspace(-1, 1, 8), 4096), (torch.linspace(-20, 0, 64), 64), (torch.linspace(0, 1, 2**16), 64))
EIGHTS = 8  # of each vocabulary, to count draws in


def draws_differ(token_sampler: TokenSampler, logits: Tensor, count: int, temperature: float) -> str | None:
    """The error of `count` draws at evenly spaced u, if they are not from softmax(logits / temperature)."""
    u = (torch.arange(count) + 0.5) / count
    token, logp = token_sampler(logits.expand(count, -1), u)
    true = torch.log_softmax(logits.double() / temperature, dim=-1)
    off = float((logp - true[token]).abs().nan_to_num(torch.inf).max())
    if off > 1e-4 + 1e-6 * float(logits.abs().max()) / temperature:  # float32 rounds logits / temperature
        return f"got log-probabilities up to {off:.2g} nats off"
    expected = true.exp().reshape(EIGHTS, -1).sum(-1) * count
    drawn = torch.bincount(token, minlength=len(logits)).reshape(EIGHTS, -1).sum(-1)
    far = (drawn - expected).abs() > 3 + 5 * expected.sqrt()
    if far.any():
        i = int(far.nonzero()[0, 0])
        return f"got tokens of probability {float(expected[i]) / count:.2g} drawn {int(drawn[i])} times in {count}"
    return None


# -- the algorithm

# Positional arguments of the function in a knob of this name, among the knobs of grpo_fn's own functions at any depth.
ARGUMENTS = {
    **{"objective": ("scores", "batch", "totals", "gains"), "credit": ("scored",), "beside": ("scored",)},
    **{"group_sampling": ("explore", "carried", "prompts"), "old_logp": ("policy", "rollout")},
    **{"filters": ("rollout", "adv"), "token_mask": ("batch", "keys"), "reweighting": ("logp", "rows")},
    **{"control": ("gains", "figures"), "token_loss": ("logp", "row"), "kl": ("logp", "row")},
    **{"importance_correction": ("logp", "row"), "energy_weight": ("logp", "row"), "token_weight": ("logp", "row")},
    **{"loss_aggregation": ("batch", "totals"), "share": ("steps",), "advantage": ("reward", "valid")},
}


def check_algorithm(settings: Settings) -> None:
    """Raise ValueError for functions of the algorithm that do not fit one another or the run."""
    algorithm, steps = settings.algorithm, settings.steps
    section = "supervised.Stage." if isinstance(algorithm, supervised.Stage) else "step.Algorithm."
    for knob, value in functions_of(vars(algorithm), section):
        check_signature(knob, value)
        for step in range(steps) if knob.endswith(".share") else ():
            if not 0 <= (share := value(step)) <= 1:
                raise ValueError(f"{knob}: got {share} after {step} steps, expected a share, 0 to 1")
    if isinstance(algorithm, supervised.Stage):
        for name in ("teacher", "demonstrations"):
            if getattr(settings, name) is not None:
                raise ValueError(
                    f"train.train.{name}: got one in a supervised stage, expected None: sections.Data.task has the "
                    "demonstrations of the stage"
                )
        return
    check_provided(settings, algorithm.needs)
    check_sampler_logp(algorithm, settings.sampling.max_staleness)
    check_group_size(algorithm)
    for term in uses_of(supervised.observations, algorithm.beside):
        coef = function_and_knobs(term)[1].get("coef", 0.0)
        if not 0 <= coef < math.inf:
            raise ValueError(f"supervised.observations.coef: got {coef}, expected a finite number of at least 0")


def functions_of(knobs: Any, path: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every function among some knobs, with the knobs that lead to it; also those in grpo_fn's own functions."""
    for name, value in knobs.items():
        for function in value if isinstance(value, list | tuple) else [value]:
            if callable(function):
                yield f"{path}{name}", function
                inner, inner_knobs = function_and_knobs(function)
                if inner.__module__.startswith("grpo_fn."):  # a user's function has knobs of its own meaning
                    yield from functions_of(inner_knobs, f"{path}{name}.")


def check_signature(knob: str, function: Callable[..., Any]) -> None:
    """Raise ValueError for a function that cannot be called with the positional arguments of its knob."""
    names = ARGUMENTS.get(knob.rpartition(".")[2])
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a builtin
        return
    if names is None:
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        name = describe_function(function_and_knobs(function)[0]).removesuffix("{}")
        raise ValueError(
            f"{knob}: got {name}{signature} ({error}), expected a function of ({', '.join(names)})"
        ) from error


def check_provided(settings: Settings, declared: frozenset[str]) -> None:
    """Raise ValueError for what the algorithm declares and the run has not, and for demonstrations without a use."""
    shown = settings.demonstrations
    if "logp_teacher" in declared and settings.teacher is None:
        raise ValueError(
            "train.train.teacher: got None with an algorithm that learns from a teacher, expected one: "
            "--gin_file scale/teacher.gin --set TEACHER='FOLDER', or the policy itself: --gin_file "
            "scale/self_teacher.gin"
        )
    if "demonstrations" in declared and shown is None:
        raise ValueError(
            "train.train.demonstrations: got None with an algorithm that learns from given completions too, expected "
            "some: --gin_file task/demonstrations.gin --set DEMONSTRATIONS='FILE'"
        )
    if "episodes" in declared and settings.episodes is None:
        raise ValueError(
            "train.train.episodes: got None with an algorithm that learns from what environments write, expected "
            "@sections.Episodes(), or step.Algorithm.beside without @supervised.observations"
        )
    if shown is not None and "demonstrations" not in declared:
        raise ValueError(
            "train.train.demonstrations: got some with an algorithm that does not learn from them, expected None, or "
            "step.Algorithm.beside = [@supervised.demonstrations]: --gin_file algo/chord.gin"
        )
    if shown is not None and shown.rows % settings.algorithm.minibatches:
        raise ValueError(
            f"sections.Demonstrations.rows: got {shown.rows} for {settings.algorithm.minibatches} minibatches, "
            "expected a multiple"
        )


def check_sampler_logp(algorithm: Algorithm, max_staleness: int) -> None:
    """Raise ValueError for functions that compare the sampler with itself, and for uncorrected stale samples."""
    declared, learned = algorithm.needs, needs(algorithm.objective)
    itself = function_and_knobs(algorithm.old_logp)[0] is from_sampler
    if itself and "trainer_logp" in declared:
        raise ValueError(
            "step.Algorithm.old_logp: got @step.from_sampler with a function that compares logp_old with the sampler's "
            "log-probs, which are then the same (importance_correction, energy_weight or token_mask), so that its "
            "weights are all 1: expected step.Algorithm.old_logp = @step.from_trainer, or None in that function's place"
        )
    corrects = "trainer_logp" in learned or "logp_sampled" in learned or (itself and "fresh_samples" not in learned)
    if max_staleness > 0 and not corrects:
        raise ValueError(
            f"max_staleness: got {max_staleness} with an objective that does not use the sampler's log-probs of its "
            "samples, so stale ones would be learned from as if they were fresh: expected max_staleness 0, or "
            "step.Algorithm.old_logp = @step.from_trainer and "
            "objective.policy_objective.importance_correction = @corrections.truncated_weight"
        )


def check_group_size(algorithm: Algorithm) -> None:
    """Raise ValueError for groups of one that are compared within."""
    declared = needs(algorithm.credit)
    # A teacher's gap is a signal, unless it only reweighs advantages.
    gap = "logp_teacher" in declared and not any(uses_of(distillation.teacher_reweighted, algorithm.credit))
    if algorithm.group_size == 1 and "groups" in declared and not gap:
        raise ValueError(
            "group_size: got 1 with an advantage that compares within a group (always 0), expected 2 or more"
        )


def check_parts(credit: Callable[..., Any] | None, parts: Sequence[str]) -> None:
    """Raise ValueError for a credit that weighs parts which the reward does not have."""
    for use in uses_of(credits.per_part, credit):
        weights = function_and_knobs(use)[1].get("weights", {})
        unknown = sorted(weights.keys() - {*parts})
        if unknown or not weights:
            raise ValueError(f"weights: got parts {unknown}, expected some of {sorted(parts)}")


# -- whether the curriculum fits the task, the sampler and the rewards, by a first step of it


KNOB = "train.train.curriculum"


def check_curriculum_of_run(settings: Settings, task: Task, parts: Sequence[str]) -> None:
    """Raise ValueError for a curriculum that is none, or that task, sampler, stage or rewards do not fit."""
    curriculum = settings.curriculum
    if curriculum is None:
        return
    if not isinstance(curriculum, Curriculum):
        hint = " (bound without ()?)" if callable(curriculum) else ""
        raise ValueError(
            f"{KNOB}: got {shown_type(curriculum)}{hint}, expected None or a Curriculum: "
            "@curricula.learnability_bandit()"
        )
    if isinstance(settings.algorithm, Stage):
        raise ValueError(f"{KNOB}: got one in a supervised stage, which samples nothing, expected None")
    if settings.sampling.max_staleness:
        raise ValueError(
            f"{KNOB}: got one with sections.Sampling.max_staleness {settings.sampling.max_staleness}, which asks for "
            "problems before the pass rates are known that choose them, expected max_staleness 0, or None"
        )
    state = begin_curriculum(curriculum, len(task.arms), prng.key(0, device="cpu"))
    prompts = settings.algorithm.prompts
    uids = choose_uids(curriculum, state, prng.key(1, device="cpu"), 0, 0, prompts)
    value = (torch.arange(2 * prompts) % 3 / 2).view(prompts, 2)
    reward = outcome_reward(value, torch.ones_like(value, dtype=torch.bool), dict.fromkeys(parts, value))
    update_curriculum(curriculum, state, uids, curriculum.pass_rate(reward))


# -- functions, each called once on something small


def try_token_sampler(token_sampler: Callable[..., Any], temperature: float) -> None:
    """Raise ValueError unless the token sampler draws a token and its log-prob for every row of a toy step."""
    knob = "sections.Sampling.token_sampler"
    expected = "(token [B] of integers, logp [B] in nats) for (logits [B, V], u [B])"
    logits, u = torch.linspace(-1, 1, 20).view(4, 5), torch.tensor([0.1, 0.4, 0.6, 0.9])
    draws = _called(knob, token_sampler, lambda: token_sampler(logits, u, temperature=temperature), expected=expected)
    fault: str | None = shown_type(draws)
    if isinstance(draws, tuple) and len(draws) == 2:
        fault = wrong_tensor(draws[0], (4,), torch.long) or wrong_tensor(draws[1], (4,), torch.float32)
    if fault is not None:
        raise ValueError(f"{knob}: got {fault} from {_name(token_sampler)} on a toy step, expected {expected}")


def wrong_tensor(value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    """The error of a tensor that should be finite and have this shape and kind of numbers; None if it has none."""
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
        if not number or not math.isfinite(factor) or factor < 0:
            got = repr(factor) if number else shown_type(factor)
            raise ValueError(f"{knob}: got {got} from {_name(schedule)} at update {update}, expected {expected}")


def _name(function: Any) -> str:
    names = [*own_functions(function)]
    return ", ".join([name for name in names if not name.startswith("grpo_fn.")] or names[:1])


def _called(knob: str, function: Any, call: Callable[[], T], *, expected: str) -> T:
    try:
        return call()
    except (ValueError, OSError):
        raise  # bad input, which the function has named
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

    A row that is late or whose worker dies is no error here: the run loses such rows and continues.
    """
    texts = (Completion(problem.answer, 1, False), Completion("", 1, True))
    for fn in fns:
        names = [name for name in own_functions(fn) if not name.startswith("grpo_fn.")]
        if not names:
            continue
        with make_pool() as pool:
            stops, pool.stop_on_error = pool.stop_on_error, False
            try:
                outcomes = pool.judge(fn, [problem] * len(texts), texts)
            except RewardError as error:  # no worker could load it
                raise ValueError(f"{knob}: {error}") from error
        raised = [outcome for outcome in outcomes if outcome.cause == "exceptions"]
        if raised and (stops or len(raised) == len(texts)):
            reason = raised[0].reason
            raise ValueError(
                f"{knob}: {', '.join(names)}, called with problem {problem.uid} and a toy completion: {reason}"
                + ("" if "expected" in reason else "; expected a finite number or None")
            )


def judges_of_run(settings: Settings) -> list[Judge]:
    """The judges of a run."""
    by_identity = {id(judge): judge for judge in judges_of([settings.rewards.reward, *settings.evaluation.graders])}
    judges = [*by_identity.values()]
    names = [judge.name for judge in judges]
    if len({*names}) != len(names):
        raise ValueError(f"judge.Judge.name: got {', '.join(names)}, expected a name of its own for each judge")
    return judges


# -- an environment, which has to begin an episode and to answer any text


TEXTS = ("", "text", "<tool_call>", "\N{REPLACEMENT CHARACTER}")  # an environment answers to any message


def try_environment(episodes: Episodes | None, problem: Problem) -> None:
    """Raise ValueError unless the environment answers a problem and any text.

    It runs in a worker process, as in the run. What is wrong for one text only is no error here, as a row bears it.
    """
    if episodes is None:
        return
    name = episodes.name
    with episodes.pool() as pool:
        opening = pool.start(problem, 0).result()
        if opening.failure:
            raise ValueError(f"sections.Episodes.environment: {name}.start of problem {problem.uid}: {opening.failure}")
        if not opening.messages:
            raise ValueError(
                f"sections.Episodes.environment: {name}.start: got no messages, expected what is read first"
            )
        answers = [pool.step(opening.state, Message("assistant", text), 0) for text in TEXTS]
        replies = [future.result() for future in answers]
    if all(answer.failure for answer in replies):
        raise ValueError(f"sections.Episodes.environment: {name} of problem {problem.uid}: {replies[0].failure}")
    for answer in replies:
        if not answer.failure and not answer.done and not answer.messages:
            raise ValueError(
                f"sections.Episodes.environment: {name}: got a step that is not done and has no messages, expected an "
                "observation that the policy reads"
            )
