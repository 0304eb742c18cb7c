"""The answers of environments, checked and as JSON, as workers return them and the tape stores them.

No torch in here: worker processes import this module. Every state goes through JSON, so an environment finds lists
where it put tuples, whether its last step was in this process or in another.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple

from grpo_fn.core.environment import Environment, Message, PlainData, Start, Step

FAILURE = '{"failure":'  # how the entry of a failure begins
OBSERVED = ("system", "user", "tool")  # roles of messages that an environment writes


class Answer(NamedTuple):
    """A start or a step, as it came back: `failure` says why there is none."""

    state: PlainData = None
    messages: tuple[Message, ...] = ()
    reward: float | None = 0.0
    done: bool = False
    failure: str = ""
    state_hash: str = ""  # of `state`, which the tape does not hold
    lost: bool = False  # the worker was killed or late, twice

    def entry(self) -> str:
        if self.failure:
            return canonical({"failure": self.failure} | ({"lost": True} if self.lost else {}))
        said = [[m.role, m.content, m.name] for m in self.messages]
        return canonical({"messages": said, "reward": self.reward, "done": self.done, "state": self.state_hash})


@dataclass(frozen=True)
class EnvironmentCall:
    """An environment as worker processes call it: `("start", problem, key)` or `("step", state, message, key)`."""

    environment: Environment

    def __call__(self, kind: str, *given: Any) -> str:
        """The answer as JSON. Raises ValueError for one of another type, and for a state that is not plain data."""
        found = getattr(self.environment, kind)(*given)
        expected = {"start": Start, "step": Step}[kind]
        if not isinstance(found, expected):
            raise ValueError(f"{kind}: got {type(found).__name__} from the environment, expected a {expected.__name__}")
        if not isinstance(found.messages, tuple | list) or isinstance(found.messages, Message):
            raise ValueError(f"messages: got {type(found.messages).__name__}, expected a tuple of Message")
        messages = [check_message(message) for message in found.messages]
        reward, done = (found.reward, found.done) if kind == "step" else (0.0, False)
        if not (reward is None or (isinstance(reward, int | float) and math.isfinite(reward))):
            raise ValueError(
                f"reward: got {type(reward).__name__} {str(reward)[:80]}, expected a finite number or None"
            )
        if type(done) is not bool:
            raise ValueError(f"done: got {type(done).__name__}, expected True or False")
        reward = None if reward is None else float(reward)
        return json.dumps([check_plain(found.state, "state"), messages, reward, done])

    @staticmethod
    def check_value(value: str) -> str:
        return value


def decode_answer(text: str) -> Answer:
    """The answer that a worker sent. Raises ValueError where it is none."""
    state, messages, reward, done = json.loads(text)
    said = tuple(Message(role, content, name) for role, content, name in messages)
    return Answer(state, said, reward, done, "", state_digest(state))


def read_entry(entry: str) -> Answer:
    """The answer that stands on a tape, without the state."""
    found = json.loads(entry)
    if "failure" in found:
        return Answer(failure=found["failure"], lost=found.get("lost", False))
    messages = tuple(Message(*said) for said in found["messages"])
    return Answer(None, messages, found["reward"], found["done"], "", found["state"])


def state_digest(state: PlainData) -> str:
    """Sixteen hex digits of the SHA-256 of a state; states that are equal have the same."""
    return sha256(canonical(state).encode()).hexdigest()[:16]


def canonical(value: Any) -> str:
    """JSON of which equal values have the same."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def check_plain(value: Any, where: str) -> Any:
    """The value as JSON holds it. Raises ValueError, saying where, for anything that is not plain data."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, Mapping):
        odd = [key for key in value if type(key) is not str]
        if odd:
            raise ValueError(f"{where}: got the key {odd[0]!r}, expected text")
        return {key: check_plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | str):
        return [check_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise ValueError(
        f"{where}: got {type(value).__name__} {str(value)[:80]}, expected plain data: None, bool, int, finite float, "
        "str, and lists and mappings of them"
    )


def check_message(message: Any) -> list[str]:
    """The message's role, content and name. Raises ValueError for what is none, or not one that is observed."""
    if not isinstance(message, Message):
        raise ValueError(f"messages: got {type(message).__name__}, expected Message")
    if message.role not in OBSERVED or not isinstance(message.content, str) or not isinstance(message.name, str):
        raise ValueError(
            f"messages: got role {message.role!r} and content of type {type(message.content).__name__}, expected one "
            f"of {', '.join(OBSERVED)}, and text"
        )
    return [message.role, str(message.content), message.name]
