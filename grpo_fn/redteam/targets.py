"""What a campaign attacks: texts that a reward scores, or scripts that are played against an environment first."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from grpo_fn.analysis.attacks import ATTACKS, token_estimate
from grpo_fn.core.problem import Completion, Problem, RewardFn, transcript
from grpo_fn.redteam.episode_attacks import EPISODE_ATTACKS, Script
from grpo_fn.redteam.episode_play import calls_reader, play_scripts
from grpo_fn.shell.reward_workers.reward_pool import RewardPool
from grpo_fn.trainer.sections import Episodes

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


def episode_target(
    episodes: Episodes,
    weighted: ScoreCompletions,
    stack: ExitStack,
) -> Target:
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
