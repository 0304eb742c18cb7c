"""What a campaign attacks: texts that a reward scores, or scripts that are played against an environment first."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from grpo_fn.analysis.attacks import ATTACKS, token_estimate
from grpo_fn.core.environment import Message, PlainData
from grpo_fn.core.partials import function_and_knobs
from grpo_fn.core.problem import Completion, Problem, RewardFn, Turn, transcript
from grpo_fn.redteam.episode_attacks import EPISODE_ATTACKS, Script, Seen
from grpo_fn.shell.episodes.answers import Answer
from grpo_fn.shell.episodes.chat_format import MakeChatFormat
from grpo_fn.shell.episodes.episode_rows import EnvironmentCaller, OnFailure
from grpo_fn.shell.episodes.tool_calls import ReadCalls
from grpo_fn.shell.reward_workers.reward_pool import RewardError, RewardPool
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


# -- scripts played against an environment


def calls_reader(chat_format: MakeChatFormat) -> ReadCalls:
    """How a chat format reads tool calls in the text of a turn; no tokenizer is needed for it.

    Raises ValueError for a format without the knob `read_calls`.
    """
    function, knobs = function_and_knobs(chat_format)
    if "read_calls" not in knobs:
        raise ValueError(
            f"sections.Episodes.chat_format: got {function.__module__}.{function.__name__}, which reads calls from "
            "tokens alone, wanted one with the knob read_calls: chat_template.tokenizer_template or chat_format.text"
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
