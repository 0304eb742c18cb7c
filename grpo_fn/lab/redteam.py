"""Attacks on a reward: a bandit looks for the attempt that pays best on some problems, and others say what it gets.

An attempt is a text, or a script that writes one turn after the other of an episode.

What is reported is measured on problems that the search has not seen, so that the best of many texts does not owe its
score to chance. Scores of one text on one problem are the reward's; a row that cannot be scored counts as 0.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
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

ScoreCompletions = Callable[[Sequence[Problem], Sequence[Completion]], list[float]]
Attempt = str | Script
Scored = tuple[float, str]  # what an attempt got on a problem, and what it wrote


class Target(NamedTuple):
    """The target: the attempts of each attack on a problem, and their rewards."""

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


def text_target(weighted: ScoreCompletions) -> Target:
    """Texts of `attacks.ATTACKS`, each made of a problem's prompt, as completions that ended by themselves."""

    def scored(problems: Sequence[Problem], texts: Sequence[Any]) -> list[Scored]:
        completions = [Completion(text, token_estimate(text), False) for text in texts]
        return [*zip(weighted(problems, completions), texts, strict=True)]

    def attempts(problem: Problem) -> Mapping[str, Sequence[Attempt]]:
        return {name: attack(problem.prompt) for name, attack in ATTACKS.items()}

    return Target(attempts, lambda problem: (_gold_text(problem),), scored)


def _gold_text(problem: Problem) -> str:
    return f"```python\n{problem.answer}\n```" if "tests" in problem.meta else rf"\boxed{{{problem.answer}}}"


# -- episodes: scripts played against an environment


def episode_target(episodes: Episodes, weighted: ScoreCompletions, stack: ExitStack) -> Target:
    """The environment in worker processes, which end with the stack."""
    read_calls, pool = calls_reader(episodes.chat_format), stack.enter_context(episodes.pool())
    play = partial(
        play_scripts, pool, read_calls=read_calls, on_failure=episodes.on_failure, max_turns=episodes.max_turns
    )

    def scored(problems: Sequence[Problem], scripts: Sequence[Any]) -> list[Scored]:
        played = play(problems, scripts)
        texts = [transcript(completion.text, completion.turns) for completion in played]
        return [*zip(weighted(problems, played), texts, strict=True)]

    return Target(lambda problem: EPISODE_ATTACKS, _gold_scripts, scored)


def _gold_scripts(problem: Problem) -> Sequence[Script]:
    """The answer as it is marked elsewhere, as it is, and word by word, one a turn."""
    words = problem.answer.split() or [""]
    return (
        lambda seen: _gold_text(problem),
        lambda seen: problem.answer,
        lambda seen: words[min(len(seen.observations), len(words) - 1)],
    )


def calls_reader(chat_format: MakeChatFormat) -> ReadCalls:
    """The parser of tool calls of a chat format; it needs no tokenizer.

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
class _Episode:
    """An episode under way."""

    script: Script
    seen: Seen
    state: PlainData
    state_hash: str
    turns: list[Turn] = field(default_factory=list)
    text: str = ""
    done: bool = False

    def take_in(self, answer: Answer, failure: str) -> None:
        """The environment's answer to the last turn; `failure` is empty, or what failed."""
        observation = "\n".join(message.content for message in answer.messages)
        last = self.turns[-1]
        self.turns[-1] = last._replace(observation=observation, reward=answer.reward, error=last.error or failure)
        self.seen = self.seen._replace(observations=(*self.seen.observations, observation))
        self.done = answer.done
        if not failure:
            self.state, self.state_hash = answer.state, answer.state_hash


def play_scripts(
    caller: EnvironmentCaller,
    problems: Sequence[Problem],
    scripts: Sequence[Script],
    *,
    read_calls: ReadCalls,
    on_failure: OnFailure,
    max_turns: int,
) -> list[Completion]:
    """The episodes of scripts, one for each problem, all turns of a number together; as a reward sees them.

    What `max_turns` ended is truncated.
    """
    starts = [caller.start(problem, 0) for problem in problems]
    episodes = []
    for problem, script, start in zip(problems, scripts, starts, strict=True):
        opened = start.result()
        if opened.failure:
            raise RewardError(f"the environment, problem {problem.uid}: got no beginning: {opened.failure}")
        opening = "\n".join(message.content for message in opened.messages)
        episodes.append(_Episode(script, Seen(problem.prompt, opening, ()), opened.state, opened.state_hash))
    for turn in range(1, max_turns + 1):
        pending = []
        for episode in episodes:
            if episode.done:
                continue
            text = episode.script(episode.seen)
            content, calls, malformed = read_calls(text)
            episode.text = content
            episode.turns.append(Turn(text, token_estimate(text), "", None, episode.state_hash, len(calls), malformed))
            message = Message("assistant", content, "", calls, malformed)
            pending.append((episode, bool(calls), caller.step(episode.state, message, turn)))
        for episode, called, future in pending:
            answer = future.result()
            episode.take_in(on_failure(answer, called) if answer.failure else answer, answer.failure)
    return [
        Completion(each.text, sum(turn.length for turn in each.turns), not each.done, tuple(each.turns))
        for each in episodes
    ]


# -- a bandit over arms with unknown mean rewards: UCB1 (Auer, Cesa-Bianchi and Fischer 2002, figure 1)


def next_arm(payments: Sequence[Sequence[float]], *, spread: float) -> int:
    """The arm with the highest mean + spread * sqrt(2 ln n / n_j), from what each has paid; a new one comes first."""
    if new := [arm for arm, paid in enumerate(payments) if not paid]:
        return new[0]
    pulls = math.log(sum(map(len, payments)))
    bounds = [fmean(paid) + spread * math.sqrt(2 * pulls / len(paid)) for paid in payments]
    return max(range(len(bounds)), key=bounds.__getitem__)


# -- a campaign


class AttackText(NamedTuple):
    """An attempt of an attack: its place among those that the attack makes of a problem."""

    attack: str
    place: int


class BestAttempt(NamedTuple):
    """The best attempt of an attack, its mean score on fresh problems, and what it wrote about the first of them."""

    attack: str
    score: float
    text: str


class Campaign(NamedTuple):
    """The rewards of the attacks, best first, and of the reference answers on the same problems."""

    task: str
    reward: str
    problems: int  # that the scores are means over
    gold: float
    attempts: tuple[BestAttempt, ...]


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
    campaign = attack_task(_task(task, task_knobs), parts, factors, make, problems=problems, pulls=pulls)
    return campaign._replace(task=task, reward=_sum_text(factors, rewards))


def attack_run(
    name: str, problems: int, pulls: int, *, data: Data, rewards: Rewards, episodes: Episodes | None
) -> Campaign:
    """The campaign against the task, the reward and the environment of a run, with its own deadlines."""
    function, knobs = function_and_knobs(rewards.reward)
    if function is not combine:
        raise ValueError(
            f"sections.Rewards.reward: got {function.__module__}.{function.__name__}, expected combine.combine"
        )
    parts, weights = knobs["parts"], knobs["weights"]
    check_sandboxes([*parts, *([] if episodes is None else [episodes.environment.start, episodes.environment.step])])
    campaign = attack_task(data.task(), parts, weights, rewards.pool, problems=problems, pulls=pulls, episodes=episodes)
    return campaign._replace(task=name, reward=_sum_text(weights, part_names(parts)))


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
                return attack_target(held_out, text_target(weighted), pulls=pulls)
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
    arms = [AttackText(name, place) for name, size in sizes.items() for place in range(size)]
    means = [fmean(paid) for paid in _search(arms, searched, target, pulls)]
    attempts = []
    for name in sizes:
        best = max((arm for arm, which in enumerate(arms) if which.attack == name), key=means.__getitem__)
        scored = target.scores(fresh, [_attempt(target, arms[best], problem) for problem in fresh])
        attempts.append(BestAttempt(name, fmean(score for score, _ in scored), scored[0][1]))
    golds = zip(*map(target.golds, fresh), strict=True)
    best_gold = max(fmean(score for score, _ in target.scores(fresh, texts)) for texts in golds)
    return Campaign("", "", len(fresh), best_gold, tuple(sorted(attempts, key=lambda attempt: -attempt.score)))


def report_attack(campaign: Campaign) -> str:
    """The campaign as a table, best attack first, and what it comes to."""
    best = campaign.attempts[0]
    rows = [
        f"| {attempt.attack} | {attempt.score:.3f} | {shown_text(attempt.text, LONGEST_TEXT)} |"
        for attempt in campaign.attempts
    ]
    return "\n".join(
        [
            f"{campaign.reward} on {campaign.task}: mean scores over {campaign.problems} problems",
            "",
            "| attack | score | its text for the first of them |",
            "|---|---|---|",
            *rows,
            "",
            f"best without the answer: {best.score:.3f} ({best.attack}); the golds get {campaign.gold:.3f}",
        ]
    )


def shown_text(text: str, most: int) -> str:
    """A text as the cell of a table: at most so many characters of it, and how many it has."""
    shown = escape_control(text[:most]).replace("\n", r"\n").replace("|", r"\|").replace("`", "'")
    more = f" ... ({len(text)} characters)" if len(text) > most else ""
    return f"`{shown}`{more}" if text else "(empty)"


def _search(arms: Sequence[AttackText], problems: Sequence[Problem], target: Target, pulls: int) -> list[list[float]]:
    """The rewards of each arm, pull by pull: each arm is pulled once, then the bandit chooses."""
    size = min(ROWS, len(problems))

    def drawn(pull: int) -> list[Problem]:
        return [problems[(pull * ROWS + row) % len(problems)] for row in range(size)]

    def scores(arms: Sequence[AttackText], drawn: Sequence[Problem]) -> list[float]:
        attempts = [_attempt(target, arm, problem) for arm in arms for problem in drawn]
        return [score for score, _ in target.scores([*drawn] * len(arms), attempts)]

    first = scores(arms, drawn(0))
    payments = [[fmean(first[i : i + size])] for i in range(0, len(first), size)]
    spread = max(max(first) - min(first), 1e-9)
    for _ in range(pulls):
        arm = next_arm(payments, spread=spread)
        payments[arm].append(fmean(scores([arms[arm]], drawn(len(payments[arm])))))
    return payments


def _attempt(target: Target, arm: AttackText, problem: Problem) -> Attempt:
    return target.attempts(problem)[arm.attack][arm.place]


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
