"""Episodes of one call of a sampler: what each row has sampled and observed, and whether and how it continues.

No engine is in here. A sampler is given prompts, hands in a turn when it has ended, and asks what stands behind it. The
n-th sampled token of a row draws the n-th uniform number of its key, and an environment is asked with seeds of (key,
uid, sample, turn): a row is a function of (weights, problem, key, uid, g, what the environment answered).

    failure   what the environment failed with
    called    whether the turn called a tool
    returns   the answer that the episode gets
"""

import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from grpo_fn.core import prng
from grpo_fn.core.checksums import tape_digest
from grpo_fn.core.environment import Message, PlainData
from grpo_fn.core.json_lines import Row, json_rows
from grpo_fn.core.problem import Completion, Problem, Turn
from grpo_fn.shell.episodes.answers import FAILURE, Answer, read_entry
from grpo_fn.shell.episodes.chat_format import ChatFormat

# -- The tape: what environments answered in steps that were recorded, by problem and sample.
#
# A row's entries form a hash chain (`checksums.tape_digest`), which is stored with them and is part of the step's
# checksums. Where a step is taken again, environments that are not pure are read from the tape, and others are
# compared.


FIELDS = ("uid", "g", "tokens", "mask", "turns", "tape")  # of a stored row


class TapeDiffers(RuntimeError):
    """An episode that is taken again goes another way than on the tape."""


class Taped(NamedTuple):
    """An episode on the tape: its first tokens, and its turns."""

    opening: tuple[int, ...]
    turns: tuple[Turn, ...]


@dataclass
class Tape:
    """Episodes of recorded steps. Empty in a run that does nothing again.

    `strict`, as replay has it, ends where an episode goes another way; otherwise its environment has failed there.
    """

    strict: bool = False
    episodes: dict[tuple[int, int], Taped] = field(default_factory=dict)

    def of(self, uid: int, g: int) -> Taped | None:
        return self.episodes.get((uid, g))

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take in the stored rows of a step. Raises ValueError for a row whose hash chain is broken."""
        for row in rows:
            if "turns" not in row:
                continue
            turns = tuple(Turn(**turn) for turn in row["turns"])
            if (got := tape_digest(turns)) != row["tape"]:
                raise ValueError(
                    f"tape of problem {row['uid']}, sample {row['g']}: got turns with the digest {got}, expected "
                    f"{row['tape']}: the rollout was changed"
                )
            opening = tuple(row["tokens"][: row["mask"].index(1)])
            self.episodes[row["uid"], row["g"]] = Taped(opening, turns)


def recorded_episodes(folder: Path, *, after: int) -> list[list[dict[str, Any]]]:
    """What `Tape.add` reads of the rows, for every step after this one that `folder` holds. A torn file ends it.

    Raises ValueError, naming file and line, for a row that is none.
    """
    steps: list[list[dict[str, Any]]] = []
    for path in sorted(folder.glob("step_*.jsonl.gz")):
        if int(path.name[5:].partition(".")[0]) <= after:
            continue
        try:
            rows = list(json_rows(path, expected="an object"))
        except (OSError, EOFError, zlib.error):
            break
        steps.append([_taped_row(row) for row in rows if "turns" in row.value])
    return steps


def _taped_row(row: Row) -> dict[str, Any]:
    try:
        taped = {name: row.value[name] for name in FIELDS}
        taped["mask"].index(1)
        tape_digest([Turn(**turn) for turn in taped["turns"]])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        got = f"{type(error).__name__}: {error}"
        raise ValueError(f"{row.where}: got {got}, expected an episode with {', '.join(FIELDS)}") from error
    return taped


ENVIRONMENT = 2**63 + 1  # what is folded into a sampling key for environments: no uid is as large
START = 2**62  # in the place of a sample: an episode's beginning is the same for all samples of a problem


# (what an environment failed with, whether the turn called tools) -> the answer that the episode gets
OnFailure = Callable[[Answer, bool], Answer]


COMPLAINTS = 8  # kept until they are logged
UNSCORABLE_ROWS = "unscorable, as its worker was killed or late twice"


class EnvironmentFailed(RuntimeError):
    """An environment gave no beginning of an episode."""


@runtime_checkable
class EnvironmentCaller(Protocol):
    """Calls an environment, somewhere and in any order: `reward_workers.worker_pool.EnvironmentPool`."""

    def start(self, problem: Problem, key: int) -> Future[Answer]: ...

    def step(self, state: PlainData, message: Message, key: int) -> Future[Answer]: ...

    def count(self, name: str, amount: float) -> None: ...

    def figures(self) -> dict[str, float]: ...


class GoesOn(NamedTuple):
    """The observation after a turn, and the next turn: its start among the row's sampled tokens, its most tokens."""

    observed: list[int]
    sampled: int
    most: int


@dataclass(frozen=True)
class Environments:
    """A run's environment as samplers use it."""

    name: str
    pure: bool
    caller: EnvironmentCaller
    chat: ChatFormat
    max_turns: int
    max_turn_tokens: int
    fails: OnFailure
    answer_steps: int | None  # decode steps of other rows before an answer is waited for; None: it never is
    tape: Tape
    complaints: list[str] = field(default_factory=list)  # of rows that lost workers have cost; cleared once logged

    def begin(
        self, problems: Sequence[Problem], group_size: int, *, key: Tensor, max_tokens: int, context: int | None
    ) -> "EpisodeRows":
        """The episodes of a call, with their openings. Raises EnvironmentFailed where there is none."""
        base = prng.fold_in(key.cpu(), ENVIRONMENT)
        seeds = environment_seeds(base, torch.tensor([p.uid for p in problems]), START)
        # One that is not pure does not begin again what is on the tape.
        taped = [None if self.pure else self.tape.of(problem.uid, 0) for problem in problems]
        started = [
            None if episode else self.caller.start(problem, seed)
            for problem, seed, episode in zip(problems, seeds, taped, strict=True)
        ]
        begun = [
            future.result() if future else Answer(state_hash=episode.turns[0].state)
            for future, episode in zip(started, taped, strict=True)
        ]
        openings = [
            (self._opening(problem, answer) if future else [*episode.opening], answer)
            for problem, future, episode, answer in zip(problems, started, taped, begun, strict=True)
        ]
        rows = [
            EpisodeRow(problem, g, answer.state, answer.state_hash, len(prompt), answer if answer.lost else None)
            for problem, (prompt, answer) in zip(problems, openings, strict=True)
            for g in range(group_size)
        ]
        return EpisodeRows(self, [prompt for prompt, *_ in openings], rows, base, max_tokens, context)

    def without_tape(self) -> "Environments":
        """The same, for an evaluation, whose problems are others."""
        return replace(self, tape=Tape())

    def complain(self, text: str) -> None:
        if len(self.complaints) < COMPLAINTS:
            self.complaints.append(text)

    def _opening(self, problem: Problem, found: Answer) -> list[int]:
        if found.lost:  # there has to be something to sample behind
            self.complain(f"{self.name}, problem {problem.uid}: {UNSCORABLE_ROWS}: no beginning: {found.failure}")
            return self.chat.open((Message("user", problem.prompt),))
        if found.failure:
            raise EnvironmentFailed(f"{self.name}, problem {problem.uid}: got no beginning: {found.failure}")
        return self.chat.open(found.messages)


def environment_seeds(key: Tensor, *data: int | Tensor) -> list[int]:
    """Seeds below 2^63 that an environment is asked with, of data `[B]`; many at once, as one costs as much."""
    return (prng.fold_in(key, *data)[..., 0] & (2**63 - 1)).tolist()


@dataclass
class EpisodeRow:
    """An episode under way."""

    problem: Problem
    g: int
    state: PlainData
    state_hash: str
    prompt: int  # tokens of its opening
    lost: Answer | None = None  # why the environment gave no beginning: the row is unscorable
    turns: list[Turn] = field(default_factory=list)
    observed: list[int] = field(default_factory=list)  # tokens behind each turn but the last
    asked: Future[Answer] | None = None
    message: Message | None = None  # that the environment is asked about
    text: str = ""  # of the last turn
    closing: tuple[int, ...] = ()  # the end token, where the last turn ended with another one

    @property
    def sampled(self) -> int:
        return sum(turn.length for turn in self.turns)

    @property
    def columns(self) -> int:
        """Tokens behind the opening."""
        return self.sampled + sum(self.observed)

    def completion(self) -> Completion:
        """As a reward sees it; truncated where a limit ended it."""
        return Completion(self.text, self.sampled, bool(self.turns[-1].limit), tuple(self.turns))

    def mask(self) -> Iterator[bool]:
        """Of every token behind the opening, whether the policy sampled it."""
        for turn, observed in zip(self.turns, [*self.observed, 0], strict=True):
            yield from [True] * turn.length
            yield from [False] * observed


@dataclass(frozen=True)
class EpisodeRows:
    """The episodes of a call, row b = p * G + g."""

    of: Environments
    prompts: list[list[int]]  # of each problem
    rows: list[EpisodeRow]
    key: Tensor  # of environments
    max_tokens: int  # sampled in an episode, at most
    context: int | None  # tokens of a row, at most
    seeds: dict[int, list[int]] = field(default_factory=dict)  # of turns: what environments of all rows are asked with

    def most(self, b: int) -> int:
        """Tokens that the row's next turn may have."""
        row, at_most = self.rows[b], [self.of.max_turn_tokens]
        at_most.append(self.max_tokens - row.sampled)
        if self.context is not None:
            at_most.append(self.context - row.prompt - row.columns)
        return min(at_most)

    def end_turn(self, b: int, tokens: Sequence[int], *, stopped: bool) -> bool:
        """Take in a turn; whether the environment is asked about it, and `go_on` says more. If not, all is over."""
        row, chat = self.rows[b], self.of.chat
        message = chat.parse(tokens)
        row.text, row.message = message.content, message
        row.closing = () if tokens[-1] == chat.end else (chat.end,)
        if not stopped:
            self._note(row, tokens, None if row.lost else 0.0, limit=self._cut_by(row, len(tokens)))
            return False
        self._note(row, tokens, None)
        n = len(row.turns) - 1
        taped = self.of.tape.of(row.problem.uid, row.g)
        if row.lost:
            row.asked = Future()
            row.asked.set_result(row.lost)
        elif taped is not None and (not self.of.pure or self._failed_before(row, taped, n)):
            row.asked = Future()
            row.asked.set_result(self._from_tape(row, taped, n))
        else:
            row.asked = self.of.caller.step(row.state, message, self._seeds(n)[b])
        return True

    def go_on(self, b: int) -> GoesOn | None:
        """The observation after the row's last turn, once the environment has answered; None: the episode is over."""
        row = self.rows[b]
        found, row.asked = row.asked.result(), None
        self._compare(row, found)
        fails = as_unscorable if found.lost else self.of.fails
        if found.lost and not row.lost:
            self.of.complain(f"{self._place(row, len(row.turns) - 1)}: {UNSCORABLE_ROWS}: {found.failure}")
        answer = fails(found, bool(row.message.calls)) if found.failure else found
        begun = row.turns[-1]
        row.turns[-1] = begun._replace(
            observation="\n".join(message.content for message in answer.messages),
            reward=answer.reward,
            error=begun.error or found.failure,
            answer=found.entry(),
        )
        if not found.failure:
            row.state, row.state_hash = answer.state, answer.state_hash
        if answer.done:
            return None
        observed = [] if len(row.turns) == self.of.max_turns else self._observe(row, answer.messages)
        limit = self._limit(row, len(observed))
        if limit:
            row.turns[-1] = row.turns[-1]._replace(limit=limit)
            return None
        row.observed.append(len(observed))
        return GoesOn(observed, row.sampled, self.most(b))

    def completion(self, b: int) -> Completion:
        return self.rows[b].completion()

    def completions(self) -> list[Completion]:
        return [row.completion() for row in self.rows]

    def _seeds(self, n: int) -> list[int]:
        """Of every row's turn n."""
        if n not in self.seeds:
            uid, g = (torch.tensor([*of]) for of in zip(*((r.problem.uid, r.g) for r in self.rows), strict=True))
            self.seeds[n] = environment_seeds(self.key, uid, g, n)
        return self.seeds[n]

    # -- one row

    def _note(self, row: EpisodeRow, tokens: Sequence[int], reward: float | None, limit: str = "") -> None:
        message, written = row.message, self.of.chat.read(tokens)
        row.turns.append(
            Turn(written, len(tokens), "", reward, row.state_hash, len(message.calls), message.malformed, limit)
        )

    def _cut_by(self, row: EpisodeRow, length: int) -> str:
        """The limit that a turn of so many tokens ran into."""
        if row.sampled + length >= self.max_tokens:
            return "tokens"
        return "turn_tokens" if length >= self.of.max_turn_tokens else "context"

    def _limit(self, row: EpisodeRow, observed: int) -> str:
        """The limit that leaves no next turn; "" where there can be one."""
        if len(row.turns) >= self.of.max_turns:
            return "turns"
        if row.sampled >= self.max_tokens:
            return "tokens"
        full = self.context is not None and row.prompt + row.columns + observed >= self.context
        return "context" if full else ""

    def _observe(self, row: EpisodeRow, messages: Sequence[Message]) -> list[int]:
        try:
            return [*row.closing, *self.of.chat.extend(messages)]
        except ValueError as error:
            raise ValueError(f"{self._place(row, len(row.turns) - 1)}: {error}") from error

    def _place(self, row: EpisodeRow, n: int) -> str:
        return f"{self.of.name}, problem {row.problem.uid}, sample {row.g}, turn {n + 1}"

    def _from_tape(self, row: EpisodeRow, taped: Taped, n: int) -> Answer:
        """The recorded answer of the environment. If the question differs, a failure, or TapeDiffers."""
        was, written = taped.turns[n] if n < len(taped.turns) else None, row.turns[n].text
        if was is None or was.text != written or not was.answer:
            got = "the end of the tape" if was is None else f"a turn that began {was.text[:80]!r}"
            text = (
                f"{self._place(row, n)}: got {got}, expected what was answered to {written[:80]!r}: the "
                "policy wrote something else than when the tape was made"
            )
            if self.of.tape.strict:
                raise TapeDiffers(text)
            return Answer(failure=text)
        return read_entry(was.answer)

    def _failed_before(self, row: EpisodeRow, taped: Taped, n: int) -> bool:
        """Whether the environment failed there: it may have been late, which it may not be again."""
        was = taped.turns[n] if n < len(taped.turns) else None
        return was is not None and was.text == row.turns[n].text and was.answer.startswith(FAILURE)

    def _compare(self, row: EpisodeRow, found: Answer) -> None:
        """Raise TapeDiffers where a pure environment answers the same message otherwise than before."""
        n, taped = len(row.turns) - 1, self.of.tape.of(row.problem.uid, row.g)
        was = taped.turns[n] if taped is not None and n < len(taped.turns) else None
        if was is None or not self.of.pure or not was.answer or was.text != row.turns[-1].text:
            return
        if (was.state, was.answer) != (row.state_hash, found.entry()):
            raise TapeDiffers(
                f"{self._place(row, n)}: got {found.entry()[:200]} in state {row.state_hash}, expected what it "
                f"answered before, {was.answer[:200]} in state {was.state}: the environment says that it is pure, "
                "and is not, or its code has changed since (a run resumes without the tape with --force)"
            )


class PendingAnswers:
    """Rows whose environments work, and when each continues: counted in decode steps, never in seconds.

    After `answer_steps` steps of other rows, or at once if none decodes, a row's answer is waited for. So what is
    decoded together, and with it every bit of a row, does not depend on how fast environments answer. With None rows
    go on as answers come.
    """

    def __init__(self, rows: EpisodeRows, answer_steps: int | None) -> None:
        self.rows, self.answer_steps = rows, answer_steps
        self.due: dict[int, int] = {}  # row -> the step at which its answer is waited for
        self.waited = 0.0  # seconds in which nothing was decoded

    def add(self, b: int, step: int) -> None:
        """The row's turn has ended in this step."""
        self.due[b] = step + (self.answer_steps or 0)

    def ready(self, step: int, *, idle: bool) -> list[int]:
        """Rows that go on now: those whose answer is due, and if no other row decodes (`idle`) all that wait.

        As answers come: those that have one; if `idle` waits for the first.
        """
        if self.answer_steps is not None:
            return [b for b, due in self.due.items() if idle or due <= step]
        begun = time.perf_counter()
        answers = {b: self.rows.rows[b].asked for b in self.due}
        if idle:
            wait(answers.values(), return_when=FIRST_COMPLETED)
        self.waited += time.perf_counter() - begun
        return [b for b, answer in answers.items() if answer.done()]

    def take(self, b: int) -> GoesOn | None:
        """The observation after the row's last turn, waited for if necessary; None: the episode is over."""
        begun = time.perf_counter()
        del self.due[b]
        answer = self.rows.go_on(b)
        self.waited += time.perf_counter() - begun
        return answer


def as_observation(failure: Answer, called: bool) -> Answer:
    """The failure as an observation worth 0, a tool's message where the turn called one; the state stays as it is."""
    return Answer(messages=(Message("tool" if called else "user", f"error: {failure.failure}"),))


def as_unscorable(failure: Answer, called: bool) -> Answer:
    """The episode ends here and cannot be scored: its row is masked out."""
    return Answer(reward=None, done=True)
