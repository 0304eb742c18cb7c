"""Continuous batching for requests: rows that come while others are decoded take slots that are free.

The rows of a session choose their tokens in one way and have one list of stop strings; prompt, length and random
numbers are each row's own, so its tokens are what they are alone. Rows one behind the other that hold the same list as
their prompt share what was read of it.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fn.core import prng
from grpo_fn.core import sampling as token_samplers
from grpo_fn.shell.sampler.local.continuous_batching import (
    PREFILL,
    ContinuousBatching,
    DecodedRows,
    Ends,
    Shelf,
    compaction_moves,
    empty_rows,
)
from grpo_fn.shell.sampler.local.decode_step import DecodeEngine, Need, TokenSampler, prefill_prompts


class DecodeKnobs(NamedTuple):
    """How tokens are chosen, and the texts that end a row; rows that agree in this are decoded together."""

    temperature: float  # 0: greedy
    top_p: float
    top_k: int  # 0: all
    stop: tuple[str, ...]

    def token_sampler(self) -> TokenSampler:
        """What chooses the tokens: the functions that an evaluation chooses with."""
        return _token_sampler(self.temperature, self.top_p, self.top_k)


@lru_cache(maxsize=64)  # one object for equal knobs: what is captured or compiled for it is found again
def _token_sampler(temperature: float, top_p: float, top_k: int) -> TokenSampler:
    if temperature == 0:
        return token_samplers.greedy
    if top_p == 1 and top_k == 0:
        return partial(token_samplers.categorical, temperature=temperature)
    return partial(token_samplers.nucleus, temperature=temperature, top_k=top_k, top_p=top_p)


class DrawnRow(NamedTuple):
    """A completion. The token that ended it is part of it."""

    tokens: list[int]
    logp: list[float]  # nats, under the distribution each token was drawn from
    stopped: bool  # by itself; otherwise it ran into its limit


# (tokens drawn since the last time, their log-probs): called in the decoding thread, for a row that goes on.
ReportTokens = Callable[[list[int], list[float]], None]


@dataclass(frozen=True, eq=False)
class QueuedRow:
    """A row that is asked for. Cancelling its future ends it."""

    prompt: list[int]
    key: Tensor  # [2]: all that its random numbers depend on
    limit: int  # most tokens
    knobs: DecodeKnobs
    progress: ReportTokens | None = None
    future: "Future[DrawnRow]" = field(default_factory=Future)

    def answer(self, drawn: DrawnRow) -> None:
        """Hand the completion over, unless it was cancelled."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(drawn)


def random_numbers(rows: Sequence[QueuedRow], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The uniform numbers of every row, `[R, width]`, as the local sampler holds them, and its limit, `[R]`."""
    keys = torch.stack([row.key for row in rows]).to(device)
    u = prng.uniform(keys, width, low=0.0, high=1.0, dtype=torch.float32).double()
    return u, torch.tensor([row.limit for row in rows], device=device)


# (longest prompt that fits, free slots) -> rows that join a session.
Arrivals = Callable[[int, int], list[QueuedRow]]


class ReadPrompt(NamedTuple):
    """A prompt that has gone through the model."""

    tokens: list[int]
    slot: int
    logits: Tensor  # [V], behind its last token


class DecodeSession(ContinuousBatching):
    """One session: the rows it begins with, and those that `arrivals` brings, until none is left.

    Args:
        engine: the model and its buffers.
        rows: those to begin with, at least one, all with the same knobs.
        arrivals: called after every step; the rows that it returns join.
        slots: rows decoded at once.
        width: most tokens of any completion.
        longest: most tokens of a prompt that may come later.
        ends: what ends a completion.
        pad: a token for where nothing stands.
        check: called after every step; what it raises ends the session.
    """

    def __init__(
        self,
        engine: DecodeEngine,
        rows: Sequence[QueuedRow],
        *,
        arrivals: Arrivals,
        slots: int,
        width: int,
        longest: int,
        ends: Ends,
        pad: int,
        check: Callable[[], None],
        device: torch.device,
    ) -> None:
        self.rows, self.arrivals, self.check_others, self.pad = [*rows], arrivals, check, pad
        self.capacity = Need(slots, width, slots + 1, longest)
        self.kept: ReadPrompt | None = None  # the last one: rows of its request may still come
        self.reported: dict[int, int] = {}  # tokens of rows whose progress is followed
        super().__init__(
            engine,
            [row.prompt for row in rows],
            *random_numbers(rows, width, device),
            token_sampler=rows[0].knobs.token_sampler(),
            ends=ends,
            slots=slots,
            pad=pad,
            ended=self.hand_over,
            check=self.take_arrivals,
        )

    def capacity_for(self, slots: int) -> Need:
        """For rows to come as well."""
        return self.capacity

    def run(self) -> DecodedRows:
        """Until all rows have ended and none has come."""
        while self.waiting < len(self.u) or bool(self.busy.any()):
            super().run()
            self.take_arrivals()
        return self.out

    # -- prompts, each read once for the rows of its request

    def prefill(self) -> Shelf:
        """The next rows, as many as there are free slots; prompts that were not read yet go through the model."""
        known, new, which, tokens = [self.kept] if self.kept is not None else [], [], [], 0
        last = self.kept.tokens if self.kept is not None else None
        for row in self.rows[self.waiting : self.waiting + self.most - int(self.busy.sum())]:
            if row.prompt is not last:
                tokens += len(row.prompt)
                if which and tokens > PREFILL:
                    break
                last = row.prompt
                new.append(last)
            which.append(len(known) + len(new) - 1)
        read, of_row = [*known, *self.read_prompts(new)], torch.tensor(which)
        slot = torch.tensor([one.slot for one in read])[of_row]
        self.owed += torch.bincount(slot, minlength=len(self.owed))
        if new:
            self.keep(read[-1])
        lengths = torch.tensor([len(one.tokens) for one in read])
        logits = torch.stack([one.logits for one in read])
        return Shelf(self.waiting, slot, lengths[of_row], logits[of_row.to(logits.device)])

    def read_prompts(self, prompts: list[list[int]]) -> list[ReadPrompt]:
        """These prompts in slots of their own."""
        if not prompts:
            return []
        prefilled, logits = prefill_prompts(self.engine.model, prompts, self.u.device)
        slot = (self.owed == 0).nonzero()[: len(prompts), 0]
        prefilled.copy(self.engine.prompts, slot.to(self.u.device))
        return [ReadPrompt(*one) for one in zip(prompts, slot.tolist(), logits, strict=True)]

    def keep(self, read: ReadPrompt) -> None:
        """Let this prompt stay where it is instead of the one before."""
        if self.kept is not None:
            self.owed[self.kept.slot] -= 1
        self.kept = read
        self.owed[read.slot] += 1

    def gather_prompts(self, prompts: int) -> int:
        """The prompt that is kept may move, too."""
        source, target = compaction_moves(self.owed > 0, prompts)
        if self.kept is not None and bool((moved := source == self.kept.slot).any()):
            self.kept = self.kept._replace(slot=int(target[moved]))
        return super().gather_prompts(prompts)

    def most_of_a_prompt(self) -> int:
        """As many as there are: requests differ in how many completions they ask for."""
        return int(torch.bincount(self.home[self.busy]).max())

    # -- rows

    def look(self) -> None:
        """As for every batch; then what rows that go on have drawn is reported."""
        super().look()
        live = self.engine.live
        for slot in self.busy.nonzero()[:, 0].tolist():
            number, n = int(self.row[slot]), int(self.seen[slot])
            before = self.reported.get(number, 0)
            if (report := self.rows[number].progress) is not None and n > before:
                report(live.tokens[slot, before:n].tolist(), live.logp[slot, before:n].tolist())
                self.reported[number] = n

    def take_arrivals(self) -> None:
        """Rows that were cancelled end with their next token; rows that have come wait for a slot."""
        self.check_others()
        for slot in self.busy.nonzero()[:, 0].tolist():
            if self.rows[int(self.row[slot])].future.cancelled():
                self.engine.live.limit[slot] = 0
        free = self.most - int(self.busy.sum()) - (len(self.u) - self.waiting)
        new = self.arrivals(self.engine.prompts.columns, free)
        if not new:
            return
        u, limit = random_numbers(new, self.u.shape[1], self.u.device)
        pairs = zip(self.out, empty_rows(u, self.pad), strict=True)
        self.out = type(self.out)(*(torch.cat(pair) for pair in pairs))
        self.u, self.limit = torch.cat([self.u, u]), torch.cat([self.limit, limit])
        self.rows += new

    def hand_over(self, row: int, tokens: list[int], stopped: bool) -> None:
        """The row is complete."""
        self.rows[row].answer(DrawnRow(tokens, self.out.logp[row, : len(tokens)].tolist(), stopped))
