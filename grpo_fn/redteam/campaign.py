"""Attacks on a reward: a bandit looks for the text that pays best on some problems, and others say what it gets.

What is reported is measured on problems that the search has not seen, so that the best of many texts does not owe its
score to luck. Scores of one text on one problem are the reward's; a row that cannot be scored counts as 0.
"""

import re
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from grpo_fn.analysis.attacks import ATTACKS
from grpo_fn.analysis.bandit import Arms, fresh_arms, mean_paid, next_arm, record_pull
from grpo_fn.config.function_knobs import bind_function, knob_names
from grpo_fn.core.display_text import escape_control
from grpo_fn.core.problem import Completion, Problem, RewardFn
from grpo_fn.score.reward_spec import RewardSpec, known_reward, reward_of
from grpo_fn.shell.reward_workers.reward_pool import RewardError, RewardPool
from grpo_fn.tasks.task import Task

ROWS = 4  # problems of one pull
MEMORY_MB = 1024
LONGEST_TEXT = 100  # characters of a text that are printed
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
SUBJECTS = ("Algebra", "Counting & Probability", "Geometry", "Intermediate Algebra", "Number Theory", "Prealgebra")
TASKS = {
    "arithmetic": ("grpo_fn.tasks.arithmetic.task", {"max_value": 5, "operations": 3, "test_size": 128}),
    "gsm8k": ("grpo_fn.tasks.gsm8k.task", {"test_size": 0, "template": "{question}" + BOXED}),
    "math": (
        "grpo_fn.tasks.math.task",
        {
            **{"train": ["train.jsonl"], "test": "math500.jsonl", "test_size": 0, "template": "{problem}" + BOXED},
            **{"levels": [1, 2, 3, 4, 5], "subjects": [*SUBJECTS, "Precalculus"]},
        },
    ),
    "mbpp": (
        "grpo_fn.tasks.mbpp.task",
        {
            **{"file": "mbpp.jsonl", "train": ["train"], "test": ["test"], "shown_tests": 3, "test_size": 0},
            "template": "{text}\nYour code should pass these tests:\n{tests}",
        },
    ),
}

Scores = Callable[[Sequence[Problem], Sequence[str]], list[float]]


class AttackText(NamedTuple):
    """A text of an attack: its place among the texts that the attack makes of a prompt."""

    attack: str
    place: int


class Found(NamedTuple):
    """The best text of an attack, its mean score on fresh problems, and its text for the first of them."""

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
        raise ValueError(f"--weight: got {len(weights)} for {len(rewards)} rewards, wanted one for each, or none")
    if problems < 2 or pulls < 0:
        raise ValueError(f"got --problems {problems} and --pulls {pulls}, wanted at least 2 and at least 0")
    factors = list(weights) or [1.0] * len(rewards)
    named = [known_reward(name) for name in rewards]
    parts = [reward_of(spec, knobs) for spec, knobs in zip(named, _shared_knobs(named, reward_knobs), strict=True)]
    held_out = list(islice(_task(task, task_knobs).test, problems))
    if len(held_out) < 2:
        raise ValueError(f"--task {task}: got {len(held_out)} held-out problems, wanted at least 2")
    words = " + ".join(
        name if weight == 1 else f"{weight:g} * {name}" for weight, name in zip(factors, rewards, strict=True)
    )
    seconds = max(spec.deadline for spec in named)
    try:
        with RewardPool(
            workers=workers, timeout_per_completion=seconds, memory_mb=MEMORY_MB, stop_on_error=True
        ) as pool:
            return attack_problems(held_out, _scores(pool, parts, factors), pulls=pulls)._replace(
                task=task, reward=words
            )
    except RewardError as error:
        raise ValueError(error) from error


def attack_problems(held_out: Sequence[Problem], scores: Scores, *, pulls: int) -> Campaign:
    """Search on the first half of the problems, measure on the second.

    Every text is tried on `ROWS` problems, then UCB1 says which is tried again, on the next ones; the best text of each
    attack is measured.

    Args:
        held_out: the problems, at least two.
        scores: the reward of each text for its problem.
        pulls: how often a text is tried again.

    Returns:
        The campaign, without names.
    """
    searched, fresh = held_out[: len(held_out) // 2], held_out[len(held_out) // 2 :]
    texts_tried = [
        AttackText(name, place) for name, attack in ATTACKS.items() for place in range(len(attack(searched[0].prompt)))
    ]
    arms = _search(texts_tried, searched, scores, pulls)
    means = mean_paid(arms)
    found = []
    for name in ATTACKS:
        best = max((arm for arm, tried in enumerate(texts_tried) if tried.attack == name), key=means.__getitem__)
        texts = [_text(texts_tried[best], problem) for problem in fresh]
        found.append(Found(texts_tried[best], _mean(scores(fresh, texts)), texts[0]))
    golds = _mean(scores(fresh, [_gold_text(problem) for problem in fresh]))
    return Campaign("", "", len(fresh), golds, tuple(sorted(found, key=lambda one: -one.score)))


def report_attack(campaign: Campaign) -> str:
    """The campaign as a table, best attack first, and what it comes to.

    Args:
        campaign: what was found.

    Returns:
        Lines of Markdown.
    """
    best = campaign.found[0]
    rows = [f"| {one.which.attack} | {one.score:.3f} | {_shown(one.text)} |" for one in campaign.found]
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


def _search(texts_tried: Sequence[AttackText], problems: Sequence[Problem], scores: Scores, pulls: int) -> Arms:
    """The arms after each was pulled once and the bandit `pulls` times."""

    def rows(arm: int, turn: int) -> tuple[list[Problem], list[str]]:
        asked = [problems[(turn * ROWS + row) % len(problems)] for row in range(min(ROWS, len(problems)))]
        return asked, [_text(texts_tried[arm], problem) for problem in asked]

    first = [rows(arm, 0) for arm in range(len(texts_tried))]
    paid = scores([problem for asked, _ in first for problem in asked], [text for _, texts in first for text in texts])
    size = len(first[0][0])
    arms = fresh_arms(len(texts_tried))
    for arm in range(len(texts_tried)):
        arms = record_pull(arms, arm, _mean(paid[arm * size : (arm + 1) * size]))
    for _ in range(pulls):
        arm = next_arm(arms, spread=max(max(paid) - min(paid), 1e-9))
        arms = record_pull(arms, arm, _mean(scores(*rows(arm, arms.pulls[arm]))))
    return arms


def _text(tried: AttackText, problem: Problem) -> str:
    return ATTACKS[tried.attack](problem.prompt)[tried.place]


def _gold_text(problem: Problem) -> str:
    return f"```python\n{problem.answer}\n```" if "tests" in problem.meta else rf"\boxed{{{problem.answer}}}"


def _scores(pool: RewardPool, parts: Sequence[RewardFn], weights: Sequence[float]) -> Scores:
    def weighted(problems: Sequence[Problem], texts: Sequence[str]) -> list[float]:
        completions = [Completion(text, _length(text), False) for text in texts]
        columns = [pool.score(part, problems, completions) for part in parts]
        return [
            sum(weight * (value or 0.0) for weight, value in zip(weights, row, strict=True))
            for row in zip(*columns, strict=True)
        ]

    return weighted


def _length(text: str) -> int:
    """About as many as a tokenizer has tokens: words and signs."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def _task(name: str, knobs: Sequence[str]) -> Task:
    function, given = TASKS.get(name, (name, {}))
    own = [f"{knob}={value!r}" for knob, value in given.items()]
    made = bind_function(function, [*own, *knobs], flag="--task_param", short=tuple(TASKS))()
    if not isinstance(made, Task):
        raise ValueError(f"--task {name}: got {type(made).__name__}, wanted a function that returns a Task")
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
        raise ValueError(f"--reward_param: got {unknown[0]!r}, wanted a knob of one of the rewards")
    return shared


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _shown(text: str) -> str:
    shown = escape_control(text[:LONGEST_TEXT]).replace("\n", r"\n").replace("|", r"\|").replace("`", "'")
    more = f" ... ({len(text)} characters)" if len(text) > LONGEST_TEXT else ""
    return f"`{shown}`{more}" if text else "(empty)"
