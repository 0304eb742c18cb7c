"""Attacks on a reward: a bandit looks for the attempt that pays best on some problems, and others say what it gets.

An attempt is a text, or a script that says one turn after the other of an episode.

What is reported is measured on problems that the search has not seen, so that the best of many texts does not owe its
score to chance. Scores of one text on one problem are the reward's; a row that cannot be scored counts as 0.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from grpo_fn.config.resolve import bind_function, knob_names
from grpo_fn.core.display_text import escape_control
from grpo_fn.core.environment import Message, PlainData
from grpo_fn.core.partials import function_and_knobs
from grpo_fn.core.problem import Completion, Problem, RewardFn, Turn, transcript
from grpo_fn.lab.attacks import ATTACKS, EPISODE_ATTACKS, Script, Seen, token_estimate
from grpo_fn.rewards.combine import combine, part_names
from grpo_fn.score.scoring import RewardSpec, known_reward, reward_of
from grpo_fn.shell.episodes.answers import Answer
from grpo_fn.shell.episodes.chat_format import MakeChatFormat, ReadCalls
from grpo_fn.shell.episodes.episode_rows import EnvironmentCaller, OnFailure
from grpo_fn.shell.reward_workers.reward_pool import RewardError, RewardPool
from grpo_fn.tasks.task import Task, sample_tests
from grpo_fn.trainer.requirements import check_sandboxes
from grpo_fn.trainer.sections import Data, Episodes, Rewards

ROWS = 4  # problems of one pull
MEMORY_MB = 1024
LONGEST_TEXT = 100  # characters of a text that are printed
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
SUBJECTS = ("Algebra", "Counting & Probability", "Geometry", "Intermediate Algebra", "Number Theory", "Prealgebra")
TASKS = {
    "arithmetic": ("grpo_fn.tasks.arithmetic.task", {"max_value": 5, "operations": 3, "test_size": 128}),
    "gsm8k": ("grpo_fn.tasks.benchmarks.gsm8k", {"template": "{question}" + BOXED}),
    "math": (
        "grpo_fn.tasks.benchmarks.math",
        {
            **{"train": ["train.jsonl"], "test": "math500.jsonl", "template": "{problem}" + BOXED},
            **{"levels": [1, 2, 3, 4, 5], "subjects": [*SUBJECTS, "Precalculus"]},
        },
    ),
    "mbpp": (
        "grpo_fn.tasks.benchmarks.mbpp",
        {
            **{"file": "mbpp.jsonl", "train": ["train"], "test": ["test"], "shown_tests": 3},
            "template": "{text}\nYour code should pass these tests:\n{tests}",
        },
    ),
}


# -- what is attacked: texts that a reward scores, or scripts that are played against an environment first

Scores = Callable[[Sequence[Problem], Sequence[str]], list[float]]
ScoreCompletions = Callable[[Sequence[Problem], Sequence[Completion]], list[float]]
Attempt = str | Script


class Scored(NamedTuple):
    """What an attempt got on a problem, and what was said."""

    score: float
    text: str


class Target(NamedTuple):
    """What is attacked: the attempts of each attack on a problem, and what they get."""

    attempts: Callable[[Problem], Mapping[str, Sequence[Attempt]]]  # as many for every problem
    golds: Callable[[Problem], Sequence[Attempt]]  # that know the answer: the best of them is what golds get
    scores: Callable[[Sequence[Problem], Sequence[Attempt]], list[Scored]]


def weighted_sum(pool: RewardPool, parts: Sequence[RewardFn], weights: Sequence[float]) -> ScoreCompletions:
    """(problems, completions) -> the weighted sum of the parts, a part that cannot be scored counting as 0."""

    def scored(problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float]:
        columns = [pool.score(part, problems, completions) for part in parts]
        return [
            sum(weight * (value or 0.0) for weight, value in zip(weights, row, strict=True))
            for row in zip(*columns, strict=True)
        ]

    return scored


# -- texts


def text_target(scores: Scores) -> Target:
    """Texts of `attacks.ATTACKS`, each made of a problem's prompt."""

    def scored(problems: Sequence[Problem], texts: Sequence[Any]) -> list[Scored]:
        return [Scored(*one) for one in zip(scores(problems, texts), texts, strict=True)]

    def attempts(problem: Problem) -> Mapping[str, Sequence[Attempt]]:
        return {name: attack(problem.prompt) for name, attack in ATTACKS.items()}

    return Target(attempts, lambda problem: (_gold_text(problem),), scored)


def text_scores(weighted: ScoreCompletions) -> Scores:
    """Texts as completions that ended by themselves, with lengths as `attacks.token_estimate` has them."""

    def scores(problems: Sequence[Problem], texts: Sequence[str]) -> list[float]:
        return weighted(problems, [Completion(text, token_estimate(text), False) for text in texts])

    return scores


def _gold_text(problem: Problem) -> str:
    return f"```python\n{problem.answer}\n```" if "tests" in problem.meta else rf"\boxed{{{problem.answer}}}"


# -- episodes


def episode_target(episodes: Episodes, weighted: ScoreCompletions, stack: ExitStack) -> Target:
    """The environment in worker processes, which end with the stack."""
    read_calls, pool = calls_reader(episodes.chat_format), stack.enter_context(episodes.pool())
    play = partial(
        play_scripts, pool, read_calls=read_calls, on_failure=episodes.on_failure, max_turns=episodes.max_turns
    )

    def scored(problems: Sequence[Problem], scripts: Sequence[Any]) -> list[Scored]:
        played = play(problems, scripts)
        texts = [transcript(one.text, one.turns) for one in played]
        return [Scored(*one) for one in zip(weighted(problems, played), texts, strict=True)]

    return Target(lambda problem: EPISODE_ATTACKS, _gold_scripts, scored)


def _gold_scripts(problem: Problem) -> Sequence[Script]:
    """The answer as it is marked elsewhere, as it is, and word by word, one a turn."""
    words = problem.answer.split() or [""]
    return (
        lambda seen: _gold_text(problem),
        lambda seen: problem.answer,
        lambda seen: words[min(len(seen.observations), len(words) - 1)],
    )


# -- scripts played against an environment


def calls_reader(chat_format: MakeChatFormat) -> ReadCalls:
    """How a chat format reads tool calls in the text of a turn; no tokenizer is needed for it.

    Raises ValueError for a format without the knob `read_calls`.
    """
    function, knobs = function_and_knobs(chat_format)
    if "read_calls" not in knobs:
        raise ValueError(
            f"sections.Episodes.chat_format: got {function.__module__}.{function.__name__}, which reads calls from "
            "tokens alone, expected one with the knob read_calls: chat_format.tokenizer_template or chat_format.text"
        )
    return knobs["read_calls"]


@dataclass
class _Played:
    """An episode under way."""

    script: Script
    seen: Seen
    state: PlainData
    state_hash: str
    turns: list[Turn] = field(default_factory=list)
    text: str = ""
    done: bool = False

    def completion(self) -> Completion:
        """As a reward sees it; `max_turns` ended what is not done."""
        length = sum(turn.length for turn in self.turns)
        return Completion(self.text, length, not self.done, tuple(self.turns))


def play_scripts(
    caller: EnvironmentCaller,
    problems: Sequence[Problem],
    scripts: Sequence[Script],
    *,
    read_calls: ReadCalls,
    on_failure: OnFailure,
    max_turns: int,
) -> list[Completion]:
    """The episodes of scripts, one for each problem, all turns of a number together."""
    asked = [caller.start(problem, 0) for problem in problems]
    rows = [
        _opened(problem, script, future.result())
        for problem, script, future in zip(problems, scripts, asked, strict=True)
    ]
    for turn in range(max_turns):
        waiting = [_say(row, caller, read_calls, turn) for row in rows if not row.done]
        for row, message, future in waiting:
            _take_in(row, message, future.result(), on_failure)
    return [row.completion() for row in rows]


def _opened(problem: Problem, script: Script, found: Answer) -> _Played:
    if found.failure:
        raise RewardError(f"the environment, problem {problem.uid}: got no beginning: {found.failure}")
    opening = "\n".join(message.content for message in found.messages)
    return _Played(script, Seen(problem.prompt, opening, ()), found.state, found.state_hash)


def _say(
    row: _Played, caller: EnvironmentCaller, read_calls: ReadCalls, turn: int
) -> tuple[_Played, Message, Future[Answer]]:
    """The row's next turn, about which the environment is asked."""
    text = row.script(row.seen)
    content, calls, malformed = read_calls(text)
    message = Message("assistant", content, "", calls, malformed)
    row.text = content
    row.turns.append(Turn(text, token_estimate(text), "", None, row.state_hash, len(calls), malformed))
    return row, message, caller.step(row.state, message, turn + 1)


def _take_in(row: _Played, message: Message, found: Answer, on_failure: OnFailure) -> None:
    """The environment's answer to the row's last turn."""
    answer = on_failure(found, bool(message.calls)) if found.failure else found
    said = "\n".join(one.content for one in answer.messages)
    last = row.turns[-1]
    row.turns[-1] = last._replace(observation=said, reward=answer.reward, error=last.error or found.failure)
    row.seen = row.seen._replace(observations=(*row.seen.observations, said))
    row.done = answer.done
    if not found.failure:
        row.state, row.state_hash = answer.state, answer.state_hash


# -- a bandit over arms with unknown mean rewards: UCB1 (Auer, Cesa-Bianchi and Fischer 2002, figure 1), as a value


class Arms(NamedTuple):
    """What is known of each arm: how often it was pulled, and the sum of what it paid."""

    pulls: tuple[int, ...]
    paid: tuple[float, ...]


def fresh_arms(count: int) -> Arms:
    """Arms of which none has been pulled."""
    return Arms((0,) * count, (0.0,) * count)


def record_pull(arms: Arms, arm: int, reward: float) -> Arms:
    """The arms after one more pull."""
    pulls, paid = list(arms.pulls), list(arms.paid)
    pulls[arm] += 1
    paid[arm] += reward
    return Arms(tuple(pulls), tuple(paid))


def mean_paid(arms: Arms) -> list[float]:
    """The mean reward of each arm; minus infinity for one that was never pulled."""
    return [paid / pulls if pulls else -math.inf for pulls, paid in zip(arms.pulls, arms.paid, strict=True)]


def next_arm(arms: Arms, *, spread: float) -> int:
    """The arm with the highest mean + spread * sqrt(2 ln n / n_j); one that was never pulled comes first."""
    if 0 in arms.pulls:
        return arms.pulls.index(0)
    total = math.log(sum(arms.pulls))
    bounds: Sequence[float] = [
        mean + spread * math.sqrt(2 * total / pulls) for mean, pulls in zip(mean_paid(arms), arms.pulls, strict=True)
    ]
    return max(range(len(bounds)), key=bounds.__getitem__)


# -- a campaign


class AttackText(NamedTuple):
    """An attempt of an attack: its place among those that the attack makes of a problem."""

    attack: str
    place: int


class Found(NamedTuple):
    """The best attempt of an attack, its mean score on fresh problems, and what it says about the first of them."""

    which: AttackText
    score: float
    text: str


class Campaign(NamedTuple):
    """What the attacks got, best first, and what the golds get on the same problems."""

    task: str
    reward: str
    problems: int  # that the scores are means over
    gold: float
    found: tuple[Found, ...]


class AttackRequest(NamedTuple):
    """What is asked of `attack_run`."""

    name: str  # of the run, for people
    problems: int
    pulls: int


def attack_named(
    *,
    rewards: Sequence[str],
    weights: Sequence[float],
    reward_knobs: Sequence[str],
    task: str,
    task_knobs: Sequence[str],
    problems: int,
    pulls: int,
    workers: int,
) -> Campaign:
    """The campaign of a command line. Raises ValueError for a reward, a task or a number that cannot be used."""
    if weights and len(weights) != len(rewards):
        raise ValueError(f"--weight: got {len(weights)} for {len(rewards)} rewards, expected one for each, or none")
    factors = list(weights) or [1.0] * len(rewards)
    named = [known_reward(name) for name in rewards]
    parts = [reward_of(spec, knobs) for spec, knobs in zip(named, _shared_knobs(named, reward_knobs), strict=True)]
    seconds = max(spec.deadline for spec in named)
    make = partial(RewardPool, workers=workers, timeout_per_completion=seconds, memory_mb=MEMORY_MB, stop_on_error=True)
    found = attack_task(_task(task, task_knobs), parts, factors, make, problems=problems, pulls=pulls)
    return found._replace(task=task, reward=_sum_text(factors, rewards))


def attack_run(request: AttackRequest, *, data: Data, rewards: Rewards, episodes: Episodes | None) -> Campaign:
    """The campaign against the task, the reward and the environment of a run, with its own deadlines."""
    function, knobs = function_and_knobs(rewards.reward)
    if function is not combine:
        raise ValueError(
            f"sections.Rewards.reward: got {function.__module__}.{function.__name__}, expected combine.combine"
        )
    parts, weights = knobs["parts"], knobs["weights"]
    check_sandboxes([*parts, *([] if episodes is None else [episodes.environment.start, episodes.environment.step])])
    numbers = {"problems": request.problems, "pulls": request.pulls}
    found = attack_task(data.task(), parts, weights, rewards.pool, episodes=episodes, **numbers)
    return found._replace(task=request.name, reward=_sum_text(weights, part_names(parts)))


def attack_task(
    task: Task,
    parts: Sequence[RewardFn],
    weights: Sequence[float],
    make_pool: Callable[[], RewardPool],
    *,
    problems: int,
    pulls: int,
    episodes: Episodes | None = None,
) -> Campaign:
    """The campaign against a weighted sum of rewards on held-out problems of a task, a share of each level."""
    held_out = sample_tests(task, problems).test
    if problems < 2 or len(held_out) < 2 or pulls < 0:
        raise ValueError(
            f"got {min(problems, len(held_out))} held-out problems and {pulls} pulls, expected at least 2 and at "
            "least 0"
        )
    try:
        with ExitStack() as stack:
            weighted = weighted_sum(stack.enter_context(make_pool()), parts, weights)
            if episodes is None:
                return attack_target(held_out, text_target(text_scores(weighted)), pulls=pulls)
            return attack_target(held_out, episode_target(episodes, weighted, stack), pulls=pulls)
    except RewardError as error:
        raise ValueError(error) from error


def attack_target(held_out: Sequence[Problem], target: Target, *, pulls: int) -> Campaign:
    """Search on every other problem, measure on those between.

    Every attempt is made on `ROWS` problems, then UCB1 says which is made again, on the next ones; the best attempt of
    each attack is measured.
    """
    searched, fresh = held_out[::2], held_out[1::2]  # alike, where parts of a mixture stand one behind the other
    sizes = {name: len(attempts) for name, attempts in target.attempts(searched[0]).items()}
    tried = [AttackText(name, place) for name, size in sizes.items() for place in range(size)]
    means = mean_paid(_search(tried, searched, target, pulls))
    found = []
    for name in sizes:
        best = max((arm for arm, one in enumerate(tried) if one.attack == name), key=means.__getitem__)
        scored = target.scores(fresh, [_attempt(target, tried[best], problem) for problem in fresh])
        found.append(Found(tried[best], _mean([one.score for one in scored]), scored[0].text))
    golds = zip(*map(target.golds, fresh), strict=True)
    best_gold = max(_mean([one.score for one in target.scores(fresh, attempts)]) for attempts in golds)
    return Campaign("", "", len(fresh), best_gold, tuple(sorted(found, key=lambda one: -one.score)))


def report_attack(campaign: Campaign) -> str:
    """The campaign as a table, best attack first, and what it comes to."""
    best = campaign.found[0]
    rows = [
        f"| {one.which.attack} | {one.score:.3f} | {shown_text(one.text, LONGEST_TEXT)} |" for one in campaign.found
    ]
    return "\n".join(
        [
            f"{campaign.reward} on {campaign.task}: mean scores over {campaign.problems} problems",
            "",
            "| attack | score | its text for the first of them |",
            "|---|---|---|",
            *rows,
            "",
            f"best without the answer: {best.score:.3f} ({best.which.attack}); the golds get {campaign.gold:.3f}",
        ]
    )


def shown_text(text: str, most: int) -> str:
    """A text as the cell of a table: at most so many characters of it, and how many it has."""
    shown = escape_control(text[:most]).replace("\n", r"\n").replace("|", r"\|").replace("`", "'")
    more = f" ... ({len(text)} characters)" if len(text) > most else ""
    return f"`{shown}`{more}" if text else "(empty)"


def _search(tried: Sequence[AttackText], problems: Sequence[Problem], target: Target, pulls: int) -> Arms:
    """The arms after each was pulled once and the bandit `pulls` times."""

    def rows(arm: int, turn: int) -> tuple[list[Problem], list[Attempt]]:
        asked = [problems[(turn * ROWS + row) % len(problems)] for row in range(min(ROWS, len(problems)))]
        return asked, [_attempt(target, tried[arm], problem) for problem in asked]

    def paid_for(asked: Sequence[Problem], attempts: Sequence[Attempt]) -> list[float]:
        return [one.score for one in target.scores(asked, attempts)]

    first = [rows(arm, 0) for arm in range(len(tried))]
    paid = paid_for([problem for asked, _ in first for problem in asked], [one for _, each in first for one in each])
    size = len(first[0][0])
    arms = fresh_arms(len(tried))
    for arm in range(len(tried)):
        arms = record_pull(arms, arm, _mean(paid[arm * size : (arm + 1) * size]))
    for _ in range(pulls):
        arm = next_arm(arms, spread=max(max(paid) - min(paid), 1e-9))
        arms = record_pull(arms, arm, _mean(paid_for(*rows(arm, arms.pulls[arm]))))
    return arms


def _attempt(target: Target, tried: AttackText, problem: Problem) -> Attempt:
    return target.attempts(problem)[tried.attack][tried.place]


def _task(name: str, knobs: Sequence[str]) -> Task:
    function, given = TASKS.get(name, (name, {}))
    own = [f"{knob}={value!r}" for knob, value in given.items()]
    made = bind_function(function, [*own, *knobs], flag="--task_param", short=tuple(TASKS))()
    if not isinstance(made, Task):
        raise ValueError(f"--task {name}: got {type(made).__name__}, expected a function that returns a Task")
    return made


def _shared_knobs(named: Sequence[RewardSpec], knobs: Sequence[str]) -> list[list[str]]:
    """The knobs for each reward: of several, those that it has."""
    if len(named) == 1:
        return [list(knobs)]
    shared: list[list[str]] = []
    for spec in named:
        known = {knob.partition("=")[0].partition(".")[0] for knob in spec.knobs} | knob_names(spec.function, short=())
        shared.append([knob for knob in knobs if knob.partition("=")[0].partition(".")[0].strip() in known])
    taken = {knob for each in shared for knob in each}
    if unknown := [knob for knob in knobs if knob not in taken]:
        raise ValueError(f"--reward_param: got {unknown[0]!r}, expected a knob of one of the rewards")
    return shared


def _sum_text(weights: Sequence[float], names: Sequence[str]) -> str:
    """The sum in words: `math + 0.1 * boxed`."""
    return " + ".join(
        name if weight == 1 else f"{weight:g} * {name}" for weight, name in zip(weights, names, strict=True)
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
