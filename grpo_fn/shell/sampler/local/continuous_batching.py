"""Rows through a fixed number of slots: rows that end free a slot, rows that wait take it.

A prompt goes through the model once, when its first row gets a slot, and stays until its last row has ended. What has
ended is looked at on the host every so many steps: until then a row that has ended goes on without effect.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_fn.shell.sampler.interface import TokenSampler
from grpo_fn.shell.sampler.local.decode_step import (
    DecodeEngine,
    DecodeShape,
    Live,
    Marks,
    Need,
    Stops,
    draw,
    prefill_prompts,
    token_table,
)
from grpo_fn.shell.sampler.local.kv_cache import LongRows, RowSlots, row_slots, shorter_columns

PREFILL = 8192  # prompt tokens that go through the model at once, if there is more than one prompt
REFILL = 4  # one slot in so many is free before others are filled: a prompt alone is read at the price of several

# Rows have ended: (rows, the tokens of each, whether each ended by itself).
Ended = Callable[[Sequence[int], Sequence[list[int]], Sequence[bool]], None]


class DecodedRows(NamedTuple):
    """Completions of some rows, `[R, N]` with N = max_new_tokens; columns past `length` are padding."""

    tokens: Tensor
    logp: Tensor
    length: Tensor
    stopped: Tensor


class DecodeOptions(NamedTuple):
    """How the rows of a call are drawn, what ends them besides their length, and what is called meanwhile."""

    token_sampler: TokenSampler
    end_tokens: Sequence[int]
    stops: Stops
    slots: int  # rows decoded at once, at most
    pad: int  # the token behind a completion
    ended: Ended | None  # called with rows as soon as they have ended
    check: Callable[[], None]  # called every few decode steps; what it raises ends them


def empty_rows(u: Float[Tensor, "R N"], pad: int) -> DecodedRows:
    """No row has a token yet."""
    return DecodedRows(
        torch.full(u.shape, pad, device=u.device),
        torch.zeros(u.shape, device=u.device),
        torch.zeros(len(u), dtype=torch.long, device=u.device),
        torch.zeros(len(u), dtype=torch.bool, device=u.device),
    )


class Shelf(NamedTuple):
    """Prompts that have been read, some rows of which still wait."""

    first: int  # its number among all
    slot: Int[Tensor, "P"]
    length: Int[Tensor, "P"]
    logits: Float[Tensor, "P V"]  # behind the last token


def compaction_moves(occupied: Bool[Tensor, "S"], first: int) -> tuple[Int[Tensor, "m"], Int[Tensor, "m"]]:
    """From which slots to which, so that all that are taken are among the first so many."""
    source = occupied[first:].nonzero()[:, 0] + first
    return source, (~occupied[:first]).nonzero()[: len(source), 0]


class ContinuousBatching:
    """One call: the rows of all prompts, as many at once as there are slots, in order."""

    def __init__(
        self,
        engine: DecodeEngine,
        prompts: Sequence[list[int]],
        u: Float[Tensor, "R N"],
        limit: Int[Tensor, "R"],
        options: DecodeOptions,
    ) -> None:
        self.engine, self.prompts, self.u, self.limit, self.options = engine, prompts, u, limit, options
        self.group = len(u) // len(prompts)
        self.out, self.waiting = empty_rows(u, options.pad), 0  # rows before `waiting` have had a slot
        self.shelf: Shelf | None = None
        self.most = min(options.slots, len(u))  # rows at once
        suspect = options.stops.suspect
        marks = Marks(token_table(options.end_tokens, len(suspect), u.device), suspect.to(u.device))
        engine.ready(Need(self.most, u.shape[1], min(len(prompts), self.most + 1), max(map(len, prompts))), marks)
        # What the host knows: of every slot, whether a row is in it, whether that waits for an environment, which it
        # is, its prompt's slot, tokens drawn when it was last looked at, lengths; of every prompt's slot, how many rows
        # have not ended.
        self.busy, self.paused = (torch.zeros(engine.drawn.count, dtype=torch.bool) for _ in range(2))
        self.row, self.home, self.seen, self.start, self.length = (
            torch.zeros(len(self.busy), dtype=torch.long) for _ in range(5)
        )
        self.by_slot = [self.busy, self.paused, self.row, self.home, self.seen, self.start, self.length]
        self.steps = 0  # taken in this call
        self.owed = torch.zeros(engine.prompts.count, dtype=torch.long)
        self.shape: DecodeShape | None = None  # None when rows have come, gone or moved

    def run(self) -> DecodedRows:
        """Until all rows have ended."""
        while self.waiting < len(self.u) or bool(self.busy.any()):
            if self.has_free_slot():
                self.admit()
                self.look()
            if bool(self.busy.any()):
                self.advance()
                self.look()
        return self.out

    # -- rows in

    def has_free_slot(self) -> bool:
        """Whether it is worth while to fill slots now."""
        free, wait = self.most - int(self.busy.sum()), len(self.u) - self.waiting
        return wait > 0 and free >= min(wait, -(-self.most // REFILL))

    def admit(self) -> None:
        """Rows that wait into slots that are free."""
        while self.waiting < len(self.u) and int(self.busy.sum()) < self.most:
            if self.shelf is None:
                self.shelf = self.prefill()
            self.place(self.shelf)

    def prefill(self) -> Shelf:
        """The next prompts: as many as have rows to place, and not too many tokens."""
        first = self.waiting // self.group
        most = -(-(self.most - int(self.busy.sum())) // self.group)
        batch, tokens = [], 0
        for prompt in self.prompts[first : first + most]:
            tokens += len(prompt)
            if batch and tokens > PREFILL:
                break
            batch.append(prompt)
        prefilled, logits = prefill_prompts(self.engine.model, batch, self.u.device)
        slot = (self.owed == 0).nonzero()[: len(batch), 0]
        self.owed[slot] = self.group
        prefilled.copy(self.engine.prompts, slot.to(self.u.device))
        return Shelf(first, slot, prefilled.spans.end, logits)

    def place(self, shelf: Shelf) -> None:
        """As many of the shelf's rows as there are free slots; then their first token is drawn."""
        upto = (shelf.first + len(shelf.slot)) * self.group
        free = (~self.busy).nonzero()[: self.most - int(self.busy.sum()), 0]
        row = torch.arange(self.waiting, min(upto, self.waiting + len(free)))
        slot, prompt = free[: len(row)], row // self.group - shelf.first
        self.busy[slot], self.row[slot], self.home[slot] = True, row, shelf.slot[prompt]
        self.start[slot], self.seen[slot] = shelf.length[prompt], 0
        there = [x.to(self.u.device) for x in (slot, row, shelf.length[prompt], prompt)]
        self.begin(*there[:3], shelf.logits[there[3]])
        self.waiting, self.shape, self.shelf = self.waiting + len(row), None, None
        if self.waiting < upto:
            last = prompt[-1:]
            logits = shelf.logits[last.to(self.u.device)]
            self.shelf = Shelf(shelf.first + int(last), shelf.slot[last], shelf.length[last], logits)

    def begin(self, slot: Int[Tensor, "m"], row: Int[Tensor, "m"], length: Int[Tensor, "m"], logits: Tensor) -> None:
        """New rows in these slots, behind prompts of `length`, and their first token."""
        none, no = torch.zeros_like(length), torch.zeros(len(slot), dtype=torch.bool, device=slot.device)
        tokens, logp = (x[slot] for x in (self.engine.live.tokens, self.engine.live.logp))
        start, drawn = length.clone(), none.clone()
        flags = (no, no.clone(), no.clone())
        new = Live(none, length, start, drawn, self.limit[row], *flags, self.u[row], tokens, logp)
        draw(new, logits, self.options.token_sampler, self.engine.marks)
        for x, value in zip(self.engine.live, new, strict=True):
            x[slot] = value

    # -- steps

    def advance(self) -> None:
        """Some steps for all that are in the first slots."""
        sizes, limit = self.engine.sizes, self.u.shape[1]
        if self.shape is None:
            self.shape = self.arrange()
        rows = self.active.nonzero()[:, 0]
        steps = min(sizes.steps, limit - int(self.seen[rows].min()))
        # The last token that is drawn is never read.
        drawn = ((self.length - self.start)[rows] + steps).clamp(max=limit - 1)
        columns, long = int(drawn.max()), None
        if sizes.steps > 1:
            columns = min(sizes.columns(columns), limit)
        elif (shorter := shorter_columns(drawn)) < columns:
            columns, long = shorter, self.long_rows(rows[drawn > shorter], columns)
        shape = self.shape._replace(columns=columns)
        self.engine.set_row_slots(shape, self.lanes)
        self.steps += steps
        self.engine.advance(shape, self.options.token_sampler, steps=steps, long=long)

    @property
    def active(self) -> Bool[Tensor, "S"]:
        """Slots whose rows decode: those that wait for an environment are left out of steps."""
        return self.busy & ~self.paused

    def long_rows(self, number: Int[Tensor, "f"], columns: int) -> LongRows:
        """These rows, which see so many columns, as their attention is computed apart."""
        home = self.home[number]
        lanes = row_slots(home, home >= 0, self.shape.prompts, int(torch.bincount(home).max()))
        number, row, lane = (x.to(self.u.device) for x in (number, lanes.row, lanes.lane))
        return LongRows(number, RowSlots(row, lane, lanes.wide), columns)

    def arrange(self) -> DecodeShape:
        """Rows and prompts in the first slots, and rows of one prompt side by side."""
        sizes, prompts = self.engine.sizes, self.engine.prompts
        rows = self.gather_rows(min(sizes.rows(int(self.active.sum())), len(self.busy)))
        many = self.gather_prompts(min(sizes.rows(int((self.owed > 0).sum())), prompts.count))
        home, there = self.home[:rows], self.active[:rows]
        # Where shapes are captured, groups of all sizes are one shape.
        wide = int(torch.bincount(home[there]).max()) if sizes.steps == 1 else min(self.group, self.most)
        reach = min(sizes.columns(int(self.start[self.active].max())), prompts.columns)
        self.lanes = row_slots(home, there, many, wide)
        return DecodeShape(rows, 0, many, reach, wide)

    def gather_rows(self, rows: int) -> int:
        """Rows that decode move into the first so many slots; one that waits in their place takes theirs."""
        source, target = compaction_moves(self.active, rows)
        if len(source):
            swapped = self.busy[target]
            freed = source[~swapped]
            source, target = torch.cat([source, target[swapped]]), torch.cat([target, source[swapped]])
            there = [x.to(self.u.device) for x in (source, target)]
            self.engine.drawn.move(*there, int((self.length - self.start)[source].max()))
            for x in self.by_slot:
                x[target] = x[source]
            for x in self.engine.live:
                x[there[1]] = x[there[0]]
            self.busy[freed], self.paused[freed], self.engine.live.ended[freed.to(self.u.device)] = False, False, True
        return rows

    def gather_prompts(self, prompts: int) -> int:
        """Prompts behind the first so many slots move to free ones among those."""
        source, target = compaction_moves(self.owed > 0, prompts)
        if len(source):
            there = [x.to(self.u.device) for x in (source, target)]
            self.engine.prompts.move(*there, self.engine.prompts.columns)
            now = torch.arange(len(self.owed))
            now[source] = target
            self.home.copy_(now[self.home])
            self.shelf = self.shelf and self.shelf._replace(slot=now[self.shelf.slot])
            self.owed[target], self.owed[source] = self.owed[source], 0
        return prompts

    # -- rows out

    def look(self) -> None:
        """What the device has drawn since: rows that have ended leave."""
        self.options.check()
        live = self.engine.live
        flags = (x.long() for x in (live.ended, live.stopped, live.suspect))
        length, drawn, ended, stopped, suspect = torch.stack([live.length, live.drawn, *flags]).cpu()
        self.length.copy_(length)
        ended, stopped = (ended > 0) & self.busy & ~self.paused, stopped > 0
        if self.options.stops.stop and bool(suspect.any()):
            self.cut_at_stops(((suspect > 0) & self.busy).nonzero()[:, 0], drawn, ended, stopped)
        self.seen.copy_(drawn)
        if bool(ended.any()):
            self.leave(ended.nonzero()[:, 0], drawn, stopped)

    def cut_at_stops(self, slot: Int[Tensor, "m"], drawn: Tensor, ended: Tensor, stopped: Tensor) -> None:
        """Rows end where they have completed a stop string."""
        live, there = self.engine.live, slot.to(self.u.device)
        live.suspect[there] = False
        rows = zip(live.tokens[there].tolist(), drawn[slot].tolist(), strict=True)
        lengths = self.options.stops.first([row[:n] for row, n in rows], (drawn[slot] - self.seen[slot]).tolist())
        hit, at = slot[[n > 0 for n in lengths]], torch.tensor([n for n in lengths if n], dtype=torch.long)
        drawn[hit], ended[hit], stopped[hit] = at, True, True
        live.ended[hit.to(self.u.device)] = True

    def leave(self, slot: Int[Tensor, "m"], drawn: Tensor, stopped: Tensor) -> None:
        """These rows are complete."""
        there, row, length = (x.to(self.u.device) for x in (slot, self.row[slot], drawn[slot]))
        self.busy[slot] = False
        self.owed -= torch.bincount(self.home[slot], minlength=len(self.owed))
        self.shape = None
        live, limit = self.engine.live, self.u.shape[1]
        real = torch.arange(limit, device=self.u.device) < length[:, None]
        self.out.tokens[row] = torch.where(real, live.tokens[there, :limit], self.out.tokens[row])
        self.out.logp[row] = live.logp[there, :limit] * real
        self.out.length[row] = length
        self.out.stopped[row] = stopped[slot].to(self.u.device)
        if self.options.ended is not None:
            tokens = zip(live.tokens[there].tolist(), drawn[slot].tolist(), strict=True)
            self.options.ended(self.row[slot].tolist(), [row[:n] for row, n in tokens], stopped[slot].tolist())
