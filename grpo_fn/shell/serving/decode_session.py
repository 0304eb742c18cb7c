"""Continuous batching for requests: rows that come while others are decoded take slots that are free.

The rows of a session choose their tokens in one way and have one list of stop strings; prompt, length and random
numbers are each row's own, so its tokens are what they are alone.
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
from grpo_fn.shell.sampler.local.continuous_batching import ContinuousBatching, Ends, empty_rows
from grpo_fn.shell.sampler.local.decode_step import DecodeEngine, Need, TokenSampler


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


@dataclass(frozen=True, eq=False)
class QueuedRow:
    """A row that is asked for. Cancelling its future ends it."""

    prompt: list[int]
    key: Tensor  # [2]: all that its random numbers depend on
    limit: int  # most tokens
    knobs: DecodeKnobs
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
        self.prompts = [*self.prompts, *(row.prompt for row in new)]

    def hand_over(self, row: int, tokens: list[int], stopped: bool) -> None:
        """The row is complete."""
        self.rows[row].answer(DrawnRow(tokens, self.out.logp[row, : len(tokens)].tolist(), stopped))
