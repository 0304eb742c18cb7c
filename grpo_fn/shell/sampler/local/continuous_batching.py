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
    Capacity,
    DecodeEngine,
    DecodeShape,
    Live,
    Marks,
    Stops,
    draw,
    prefill_prompts,
    token_table,
)
from grpo_fn.shell.sampler.local.kv_cache import GroupedRows, LongRows, group_rows, shorter_columns

PREFILL = 8192  # prompt tokens that go through the model at once, if there is more than one prompt
REFILL = 4  # one slot in so many is free before others are filled: a prompt alone is read at the price of several

# (rows that have ended, the tokens of each, whether each ended by itself)
OnEnded = Callable[[Sequence[int], Sequence[list[int]], Sequence[bool]], None]


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
    on_ended: OnEnded | None  # called with rows as soon as they have ended
    check: Callable[[], None]  # called every few decode steps; what it raises ends them


def empty_rows(u: Float[Tensor, "R N"], pad: int) -> DecodedRows:
    """No row has a token yet."""
    return DecodedRows(
        torch.full(u.shape, pad, device=u.device),
        torch.zeros(u.shape, device=u.device),
        torch.zeros(len(u), dtype=torch.long, device=u.device),
        torch.zeros(len(u), dtype=torch.bool, device=u.device),
    )


class PrefilledPrompts(NamedTuple):
    """Prompts that have been read, some rows of which have no slot yet."""

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
        self.out = empty_rows(u, options.pad)
        self.next_row = 0  # rows before it have had a slot
        self.prefilled: PrefilledPrompts | None = None
        self.max_rows = min(options.slots, len(u))  # at once
        suspect = options.stops.suspect
        marks = Marks(token_table(options.end_tokens, len(suspect), u.device), suspect.to(u.device))
        # A prompt of which some rows have no slot yet may stand beside those of all rows that have one.
        slots_of_prompts = min(len(prompts), self.max_rows + 1)
        engine.ready(Capacity(self.max_rows, u.shape[1], slots_of_prompts, max(map(len, prompts))), marks)
        # The host's view of every slot; the device's is `engine.live`, which the host reads in `look` alone.
        count = engine.drawn.count
        self.busy, self.paused = (torch.zeros(count, dtype=torch.bool) for _ in range(2))  # a row that waits is paused
        self.row, self.prompt_slot = (torch.zeros(count, dtype=torch.long) for _ in range(2))
        # Tokens of its prompt, of prompt and completion, and of the completion, when it was last looked at.
        self.start, self.length, self.drawn = (torch.zeros(count, dtype=torch.long) for _ in range(3))
        self.by_slot = [self.busy, self.paused, self.row, self.prompt_slot, self.start, self.length, self.drawn]
        self.unfinished = torch.zeros(engine.prompts.count, dtype=torch.long)  # rows of the prompt in each slot
        self.steps = 0  # taken in this call
        self.shape: DecodeShape | None = None  # None when rows have come, gone or moved
        self.grouped: GroupedRows | None = None  # of that shape

    def run(self) -> DecodedRows:
        """Until all rows have ended."""
        while self.next_row < len(self.u) or bool(self.busy.any()):
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
        free, waiting = self.max_rows - int(self.busy.sum()), len(self.u) - self.next_row
        return waiting > 0 and free >= min(waiting, -(-self.max_rows // REFILL))

    def admit(self) -> None:
        """Rows that wait into slots that are free."""
        while self.next_row < len(self.u) and int(self.busy.sum()) < self.max_rows:
            if self.prefilled is None:
                self.prefilled = self.prefill()
            self.place(self.prefilled)

    def prefill(self) -> PrefilledPrompts:
        """The next prompts: as many as have rows to place, and not too many tokens."""
        first = self.next_row // self.group
        most = -(-(self.max_rows - int(self.busy.sum())) // self.group)
        batch, tokens = [], 0
        for prompt in self.prompts[first : first + most]:
            tokens += len(prompt)
            if batch and tokens > PREFILL:
                break
            batch.append(prompt)
        context, logits = prefill_prompts(self.engine.model, batch, self.u.device)
        slot = (self.unfinished == 0).nonzero()[: len(batch), 0]
        self.unfinished[slot] = self.group
        context.copy(self.engine.prompts, slot.to(self.u.device))
        return PrefilledPrompts(first, slot, context.spans.end, logits)

    def place(self, prefilled: PrefilledPrompts) -> None:
        """As many rows of these prompts as there are free slots; then their first token is drawn."""
        end = (prefilled.first + len(prefilled.slot)) * self.group
        free = (~self.busy).nonzero()[: self.max_rows - int(self.busy.sum()), 0]
        row = torch.arange(self.next_row, min(end, self.next_row + len(free)))
        slot, prompt = free[: len(row)], row // self.group - prefilled.first
        self.busy[slot], self.row[slot], self.prompt_slot[slot] = True, row, prefilled.slot[prompt]
        self.start[slot], self.drawn[slot] = prefilled.length[prompt], 0
        indices = (slot, row, prefilled.length[prompt], prompt)
        slot, row, length, prompt_on_device = (x.to(self.u.device) for x in indices)
        self.begin(slot, row, length, prefilled.logits[prompt_on_device])
        self.next_row, self.shape, self.prefilled = self.next_row + len(row), None, None
        if self.next_row < end:  # all but one of these prompts have all their rows in slots
            last = prompt[-1:]
            fields = prefilled.slot[last], prefilled.length[last], prefilled.logits[last.to(self.u.device)]
            self.prefilled = PrefilledPrompts(prefilled.first + int(last), *fields)

    def begin(self, slot: Int[Tensor, "m"], row: Int[Tensor, "m"], length: Int[Tensor, "m"], logits: Tensor) -> None:
        """New rows in these slots, behind prompts of `length`, and their first token."""
        zero, false = torch.zeros_like(length), torch.zeros(len(slot), dtype=torch.bool, device=slot.device)
        new = Live(
            token=zero,
            start=length,
            length=length.clone(),
            drawn=zero.clone(),  # `draw` writes in place: no field may share memory with another that it writes
            limit=self.limit[row],
            ended=false,
            stopped=false.clone(),
            suspect=false.clone(),
            u=self.u[row],
            tokens=self.engine.live.tokens[slot],
            logp=self.engine.live.logp[slot],
        )
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
        steps = min(sizes.steps, limit - int(self.drawn[rows].min()))
        # The last token that is drawn is never read.
        filled = ((self.length - self.start)[rows] + steps).clamp(max=limit - 1)
        columns, long = int(filled.max()), None
        if sizes.steps > 1:
            columns = min(sizes.columns(columns), limit)
        elif (shorter := shorter_columns(filled)) < columns:
            columns, long = shorter, self.long_rows(rows[filled > shorter], columns)
        shape = self.shape._replace(columns=columns)
        self.engine.set_grouped_rows(shape, self.grouped)
        self.steps += steps
        self.engine.advance(shape, self.options.token_sampler, steps=steps, long=long)

    @property
    def active(self) -> Bool[Tensor, "S"]:
        """Slots whose rows decode: those that wait for an environment are left out of steps."""
        return self.busy & ~self.paused

    def long_rows(self, number: Int[Tensor, "f"], columns: int) -> LongRows:
        """These rows, which see so many columns, as their attention is computed apart."""
        prompt_slot = self.prompt_slot[number]
        width = int(torch.bincount(prompt_slot).max())
        grouped = group_rows(prompt_slot, torch.ones_like(number, dtype=torch.bool), self.shape.prompts, width)
        number, row, place = (x.to(self.u.device) for x in (number, grouped.row, grouped.place))
        return LongRows(number, GroupedRows(row, place, width), columns)

    def arrange(self) -> DecodeShape:
        """Rows and prompts in the first slots, and rows of one prompt side by side."""
        sizes, prompts = self.engine.sizes, self.engine.prompts
        rows = self.gather_rows(min(sizes.rows(int(self.active.sum())), len(self.busy)))
        count = self.gather_prompts(min(sizes.rows(int((self.unfinished > 0).sum())), prompts.count))
        prompt_slot, active = self.prompt_slot[:rows], self.active[:rows]
        # If shapes are captured, groups of all sizes are one shape.
        width = int(torch.bincount(prompt_slot[active]).max()) if sizes.steps == 1 else min(self.group, self.max_rows)
        prompt_columns = min(sizes.columns(int(self.start[self.active].max())), prompts.columns)
        self.grouped = group_rows(prompt_slot, active, count, width)
        return DecodeShape(rows=rows, columns=0, prompts=count, prompt_columns=prompt_columns, width=width)

    def gather_rows(self, rows: int) -> int:
        """Rows that decode move into the first so many slots; one that waits in their place takes theirs."""
        source, target = compaction_moves(self.active, rows)
        if len(source):
            swapped = self.busy[target]
            freed = source[~swapped]
            source, target = torch.cat([source, target[swapped]]), torch.cat([target, source[swapped]])
            source_there, target_there = (x.to(self.u.device) for x in (source, target))
            self.engine.drawn.move(source_there, target_there, int((self.length - self.start)[source].max()))
            for x in self.by_slot:
                x[target] = x[source]
            for x in self.engine.live:
                x[target_there] = x[source_there]
            self.busy[freed], self.paused[freed], self.engine.live.ended[freed.to(self.u.device)] = False, False, True
        return rows

    def gather_prompts(self, prompts: int) -> int:
        """Prompts behind the first so many slots move to free ones among those."""
        source, target = compaction_moves(self.unfinished > 0, prompts)
        if len(source):
            self.engine.prompts.move(*(x.to(self.u.device) for x in (source, target)), self.engine.prompts.columns)
            moved = torch.arange(len(self.unfinished))
            moved[source] = target
            self.prompt_slot.copy_(moved[self.prompt_slot])
            self.prefilled = self.prefilled and self.prefilled._replace(slot=moved[self.prefilled.slot])
            self.unfinished[target], self.unfinished[source] = self.unfinished[source], 0
        return prompts

    # -- rows out

    def look(self) -> None:
        """What the device has drawn since: rows that have ended leave."""
        self.options.check()
        live = self.engine.live
        # One tensor: on CUDA each copy to the host waits for the device.
        flags = (x.long() for x in (live.ended, live.stopped, live.suspect))
        length, drawn, ended, stopped, suspect = torch.stack([live.length, live.drawn, *flags]).cpu()
        self.length.copy_(length)
        ended, stopped = (ended > 0) & self.busy & ~self.paused, stopped > 0
        if self.options.stops.stop and bool(suspect.any()):
            self.cut_at_stops(((suspect > 0) & self.busy).nonzero()[:, 0], drawn, ended, stopped)
        self.drawn.copy_(drawn)
        if bool(ended.any()):
            self.leave(ended.nonzero()[:, 0], drawn, stopped)

    def cut_at_stops(self, slot: Int[Tensor, "m"], drawn: Tensor, ended: Tensor, stopped: Tensor) -> None:
        """Rows end where they have completed a stop string."""
        live, there = self.engine.live, slot.to(self.u.device)
        live.suspect[there] = False
        rows = zip(live.tokens[there].tolist(), drawn[slot].tolist(), strict=True)
        lengths = self.options.stops.first([row[:n] for row, n in rows], (drawn[slot] - self.drawn[slot]).tolist())
        hit, at = slot[[n > 0 for n in lengths]], torch.tensor([n for n in lengths if n], dtype=torch.long)
        drawn[hit], ended[hit], stopped[hit] = at, True, True
        live.ended[hit.to(self.u.device)] = True

    def leave(self, slot: Int[Tensor, "m"], drawn: Tensor, stopped: Tensor) -> None:
        """These rows are complete."""
        there, row, length = (x.to(self.u.device) for x in (slot, self.row[slot], drawn[slot]))
        self.busy[slot] = False
        self.unfinished -= torch.bincount(self.prompt_slot[slot], minlength=len(self.unfinished))
        self.shape = None
        live, limit = self.engine.live, self.u.shape[1]
        real = torch.arange(limit, device=self.u.device) < length[:, None]
        self.out.tokens[row] = torch.where(real, live.tokens[there, :limit], self.out.tokens[row])
        self.out.logp[row] = live.logp[there, :limit] * real
        self.out.length[row] = length
        self.out.stopped[row] = stopped[slot].to(self.u.device)
        if self.options.on_ended is not None:
            tokens = zip(live.tokens[there].tolist(), drawn[slot].tolist(), strict=True)
            self.options.on_ended(self.row[slot].tolist(), [row[:n] for row, n in tokens], stopped[slot].tolist())
