"""A language model as a judge: what it is asked about a completion, and how its answer is read. Text in, text out.

What scores rows, a `reward_pool.RewardPool`, sends the question and gets the answer. What the policy wrote is data
to the judge: it stands between two fences, and a verdict counts only behind a mark. Both depend on it by SHA-256, so
that it can hold neither.

    answer    the judge's answer; what comes before its last `</think>` is not read
    mark      the mark of the question, behind which the verdict stands
    returns   the reward; None for an answer that cannot be read
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn
from urllib.parse import urlsplit

from grpo_fn.core.partials import function_and_knobs
from grpo_fn.core.problem import Completion, Problem, transcript
from grpo_fn.rewards.wrappers import with_timeout

ReadVerdict = Callable[[str, str], float | None]  # (answer, mark) -> reward; None: it cannot be read

FIELDS = ("prompt", "answer", "completion", "fence", "mark")
NEEDED = ("completion", "fence", "mark")
# What chat templates mark turns with: a tokenizer reads it as a token wherever it stands.
_CONTROL = re.compile(r"<(?=\||/?s>|/?think>|(?:start|end)_of_turn>|[|｜])|\[(?=/?(?:INST|SYSTEM_PROMPT)\])")
_NUMBER = r"(-?[0-9]+(?:\.[0-9]+)?)(?![\w/]|\.[0-9])"


class JudgeQuestion(NamedTuple):
    """What a judge is asked about one completion."""

    body: Mapping[str, Any]  # of the request
    mark: str  # that the verdict has to stand behind
    digest: str  # hex SHA-256 of the body: equal questions have equal ones


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Judge:
    """A reward: the verdict of a language model behind an OpenAI-compatible endpoint.

    It is a part, a grader, in `wrappers.with_timeout`, or in a table of `wrappers.by_task`; else it is refused.

    Raises:
        ValueError: for an endpoint that is no address or holds a password, no model, a template without its fields, a
            reader that reads a verdict in an empty text, fields of the request that are the judge's own, and numbers
            that are too small.
    """

    name: str  # of the part: `reward/<name>`
    endpoint: str  # address up to the version, `http://host:8000/v1`
    model: str  # the model's name there
    system: str  # text of the system message; empty for none
    template: str  # the question; holds `{completion}`, `{fence}` and `{mark}`, and may hold `{prompt}` and `{answer}`
    read: ReadVerdict  # (the judge's answer, the mark) -> the reward, or None for what cannot be read: `marked_score`
    sampling: Mapping[str, Any]  # more fields of a chat completion request, `{"temperature": 0.0, "max_tokens": 512}`
    concurrency: int  # requests under way at once, of each rank
    retries: int  # how often a request is sent again that was refused for now (429, 5xx), late or not understood
    backoff_seconds: float  # wait before the first of these; each later one waits twice as long, up to a minute
    request_seconds: float  # longest wait for the answer to one request
    batch_seconds: float  # longest time from asking to an answer, with all waiting, for rows asked about together
    max_failures: int  # questions in a row without an answer that end the run
    api_key_variable: str | None  # environment variable with the key; None: the endpoint needs none

    def __post_init__(self) -> None:
        """Raise ValueError for what cannot be a judge."""
        parts = urlsplit(self.endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ValueError(
                f"judge.Judge.endpoint: got {self.endpoint!r}, expected an address like http://host:8000/v1"
            )
        if parts.username or parts.password:
            raise ValueError(
                "judge.Judge.endpoint: got an address with a user or a password, expected it without: the key goes "
                "into the environment variable that judge.Judge.api_key_variable names"
            )
        for knob in ("name", "model"):
            if not getattr(self, knob).strip():
                raise ValueError(f"judge.Judge.{knob}: got {getattr(self, knob)!r}, expected a name")
        for field in NEEDED:
            if f"{{{field}}}" not in self.template:
                raise ValueError(
                    f"judge.Judge.template: got no {{{field}}} in {self.template[:80]!r}, expected it there"
                )
        if taken := sorted({"model", "messages", "n", "stream"} & {*self.sampling}):
            raise ValueError(f"judge.Judge.sampling: got {', '.join(taken)}, expected other fields of the request")
        least = {"concurrency": 1, "retries": 0, "max_failures": 1}
        for knob, value in least.items():
            if getattr(self, knob) < value:
                raise ValueError(f"judge.Judge.{knob}: got {getattr(self, knob)}, expected at least {value}")
        for knob in ("backoff_seconds", "request_seconds", "batch_seconds"):
            if not getattr(self, knob) > 0:
                raise ValueError(f"judge.Judge.{knob}: got {getattr(self, knob)}, expected more than 0")
        if (read := self.read("", "mark")) is not None:
            raise ValueError(f"judge.Judge.read: got {read} of an empty answer, expected None: it cannot be read")

    @property
    def __name__(self) -> str:
        """What the part is called."""
        return self.name

    def __repr__(self) -> str:
        """Short: errors about rows name it."""
        return f"Judge({self.name})"

    def __call__(self, problem: Problem, completion: Completion) -> NoReturn:
        """Raise TypeError: a question takes a request, and who scores rows sends it."""
        raise TypeError(
            f"judge {self.name}: got a call, expected its rows scored by a reward pool, which sends requests"
        )

    def question(self, problem: Problem, completion: Completion) -> JudgeQuestion:
        """What is asked about a completion; of an episode, about all its turns."""
        said = transcript(completion.text, completion.turns)
        fence, mark = (word_of(use, problem.prompt, said) for use in ("text", "verdict"))
        shown = {
            "prompt": without_chat_marks(problem.prompt),
            "answer": without_chat_marks(problem.answer),
            "completion": without_chat_marks(said),
            "fence": fence,
            "mark": mark,
        }
        places = "|".join(re.escape(f"{{{field}}}") for field in FIELDS)
        text = re.sub(places, lambda found: shown[found.group()[1:-1]], self.template)
        messages = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self.model, "messages": [*messages, {"role": "user", "content": text}], **self.sampling}
        return JudgeQuestion(body, mark, hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest())


def word_of(use: str, prompt: str, text: str) -> str:
    """A word of letters that no text can hold of itself: it depends on all of it by SHA-256."""
    digest = hashlib.sha256(json.dumps([use, prompt, text]).encode()).hexdigest()[:12]
    return f"{use}-" + digest.translate(str.maketrans("0123456789abcdef", "abcdefghijklmnop"))


def without_chat_marks(text: str) -> str:
    """The text with a space in every mark of chat templates, so that it ends no turn and begins none."""
    return _CONTROL.sub(lambda found: found.group() + " ", text)


def marked_score(answer: str, mark: str, *, low: float, high: float) -> float | None:
    """(number - low) / (high - low) of the number behind the mark; None for none in [low, high] or different ones.

    Args:
        low: the least number.
        high: the most.

    Raises:
        ValueError: for a low that is not less than high.
    """
    if not low < high:
        raise ValueError(f"judge.marked_score: got low {low} and high {high}, expected low below high")
    found = {float(number) for number in re.findall(_behind(mark) + _NUMBER, _conclusion(answer))}
    number = found.pop() if len(found) == 1 else None
    return None if number is None or not low <= number <= high else (number - low) / (high - low)


def marked_word(answer: str, mark: str, *, values: Mapping[str, float]) -> float | None:
    """The reward of the word behind the mark, in capital letters or not; None for none of them, or different ones.

    Args:
        values: reward of each word, `{"yes": 1.0, "no": 0.0}`.

    Raises:
        ValueError: for no words.
    """
    if not values:
        raise ValueError("judge.marked_word: got no values, expected a reward for each word")
    worth = {word.lower(): float(value) for word, value in values.items()}
    words = {word.lower() for word in re.findall(_behind(mark) + r"([^\W\d_]+)", _conclusion(answer))}
    return worth.get(words.pop()) if len(words) == 1 else None


def judges_of(value: Any) -> Iterator[Judge]:
    """Every judge in the value of a knob, at any depth."""
    if isinstance(value, Judge):
        yield value
    function, knobs = function_and_knobs(value)
    inside: Sequence[Any] = [*value.values()] if isinstance(value, Mapping) else [*knobs.values()]
    for item in value if isinstance(value, list | tuple) else inside:
        if isinstance(item, Judge) and knobs and function is not with_timeout:
            raise ValueError(
                f"judge {item.name}: got it as a knob of {function.__module__}.{function.__name__}, expected it among "
                "the parts of the reward or the graders, in wrappers.with_timeout or in a table of wrappers.by_task"
            )
        yield from judges_of(item)


def _behind(mark: str) -> str:
    """A pattern for the mark and what may stand between it and a verdict."""
    return rf"(?<![\w-]){re.escape(mark)}[*_`\"'\])]*[ \t]*[:=][ \t]*[*_`\"'\[(]*[ \t]*"


def _conclusion(answer: str) -> str:
    """What a model that thinks aloud says at the end."""
    return answer.rpartition("</think>")[2]
