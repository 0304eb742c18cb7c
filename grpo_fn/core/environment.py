"""Environments of episodes: two pure functions, `start` and `step`, over plain data.

No torch in here: environments run in worker processes, which must start fast under a tight memory limit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from grpo_fn.core.problem import Problem

# What a state is made of, at any depth: it is hashed, sent to other processes as JSON, and compares by value. An
# environment finds lists where it put tuples.
PlainData = None | bool | int | float | str | Sequence[Any] | Mapping[str, Any]


class ToolCall(NamedTuple):
    """A call of a tool that the policy wrote: its name and its arguments by name."""

    name: str
    arguments: Mapping[str, PlainData]


class Message(NamedTuple):
    """One message of a conversation, as a chat template takes it.

    `content` is the text without the marks of the chat format. `calls` are an assistant's tool calls; `malformed` says
    what is wrong with one that could not be read ("" where all could).
    """

    role: str  # "system", "user", "assistant" or "tool"
    content: str
    name: str = ""  # of the tool that a "tool" message answers for
    calls: tuple[ToolCall, ...] = ()
    malformed: str = ""


class Start(NamedTuple):
    """The beginning of an episode: the environment's state, and the messages that the policy reads first."""

    state: PlainData
    messages: tuple[Message, ...]


class Step(NamedTuple):
    """An environment's answer to a message of the policy.

    `messages` are observations, which the policy reads before its next turn; none when `done`. `reward` is that of this
    turn; None: the turn, and with it the episode, cannot be scored.
    """

    state: PlainData
    messages: tuple[Message, ...]
    reward: float | None
    done: bool


# A key is a seed below 2^63, for random.Random(key): of the problem's place in the stream, the sample and the turn.
StartEpisode = Callable[[Problem, int], Start]
StepEpisode = Callable[[PlainData, Message, int], Step]


@dataclass(frozen=True, kw_only=True)
class Environment:
    """An environment: how its episodes start and go on, and whether both are pure functions of their arguments."""

    start: StartEpisode  # (problem, key) -> Start
    step: StepEpisode  # (state, message, key) -> Step
    pure: bool  # False: what it answered goes on the tape of the rollout, and replay reads it from there


# -- Episodes in which the policy's messages are known in advance.


def play_script(
    environment: Environment, problem: Problem, messages: Sequence[Message], key: int
) -> tuple[Start, tuple[Step, ...]]:
    """The episode in which the policy writes these messages, up to the last one or the end.

    Turn n has `key + n`, so that a turn that ignores the state still differs.
    """
    start = environment.start(problem, key)
    steps: list[Step] = []
    for turn, message in enumerate(messages, 1):
        steps.append(environment.step(steps[-1].state if steps else start.state, message, key + turn))
        if steps[-1].done:
            break
    return start, tuple(steps)
