"""Sampling from the policy's own module: every prompt read once, rows decoded in slots that are filled again.

Rows that end free a slot, rows that wait take it. A prompt goes through the model once, when its first row gets a slot,
and stays until its last row has ended. What has ended is looked at on the host every so many steps: until then a row
that has ended continues without effect.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import ClassVar, NamedTuple

import torch
from einops import repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from grpo_fn.core import prng, sampling
from grpo_fn.core.batch import sample_keys
from grpo_fn.core.problem import Completion, Problem
from grpo_fn.core.types import Rollout
from grpo_fn.shell.episodes.episode_rows import EpisodeRows, GoesOn, PendingAnswers
from grpo_fn.shell.model.hf import stop_ids
from grpo_fn.shell.policy.fsdp import FSDPPolicy
from grpo_fn.shell.sampler.interface import (
    FixedWeights,
    OnCompletions,
    SamplerContext,
    SamplerOptions,
    TokenSampler,
    assemble,
    assemble_episodes,
    completion_limits,
    completion_of_row,
    never_stop,
    positions,
    smallest_limit,
)
from grpo_fn.shell.sampler.local import hf_cache_decode
from grpo_fn.shell.sampler.local.cuda_steps import build_engine
from grpo_fn.shell.sampler.local.decode_step import (
    ChunkAttention,
    DecodedRows,
    DecodeEngine,
    DecodeOptions,
    DecodeShape,
    GroupedRows,
    Live,
    LongRows,
    Marks,
    OnEnded,
    Stops,
    decoding_unsupported_reason,
    draw,
    empty_rows,
    forward_step,
    group_rows,
    prefill_prompts,
    shorter_columns,
    token_table,
)

PREFILL = 8192  # prompt tokens that go through the model at once, if there is more than one prompt
REFILL = 4  # one slot in so many is free before others are filled: a prompt alone is read at the price of several
PADDING = 256  # tokens of padding that cost about as much as another pass through the model


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
        engine.ready(
            marks,
            rows=self.max_rows,
            prompts=slots_of_prompts,
            prompt_tokens=max(map(len, prompts)),
            new_tokens=u.shape[1],
        )
        # The host's view of every slot; the device's is `engine.live`, which the host reads in `look` alone.
        count = engine.drawn.count
        self.busy, self.paused = (torch.zeros(count, dtype=torch.bool) for _ in range(2))  # a row that waits is paused
        self.row, self.prompt_slot = (torch.zeros(count, dtype=torch.long) for _ in range(2))
        # Tokens of its prompt, of prompt and completion, and of the completion, when it was last looked at.
        self.start, self.length, self.drawn = (torch.zeros(count, dtype=torch.long) for _ in range(3))
        self.begun = torch.zeros(count, dtype=torch.long)  # where the row's turn begins in its completion
        rows, sizes = (self.busy, self.paused, self.row, self.prompt_slot), (self.start, self.length, self.drawn)
        self.by_slot = (*rows, *sizes, self.begun)  # what moves with a row
        self.unfinished = torch.zeros(engine.prompts.count, dtype=torch.long)  # rows of the prompt in each slot
        self.steps = 0  # taken in this call
        self.shape: DecodeShape | None = None  # None when rows have come, gone or moved
        self.grouped: GroupedRows | None = None  # of that shape

    def run(self) -> DecodedRows:
        while self.next_row < len(self.u) or bool(self.busy.any()):
            if self.has_free_slot():
                self.admit()
                self.look()
            if bool(self.busy.any()):
                if not self.resume_paused():
                    self.advance()
                self.look()
        return self.out

    def resume_paused(self) -> bool:
        """Whether rows that were paused go on, which are then looked at before others decode: none ever pauses."""
        return False

    # -- rows in

    def has_free_slot(self) -> bool:
        """Whether it is worth while to fill slots now."""
        free, waiting = self.max_rows - int(self.busy.sum()), len(self.u) - self.next_row
        return waiting > 0 and free >= min(waiting, -(-self.max_rows // REFILL))

    def admit(self) -> None:
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
        slot = (self.unfinished == 0).nonzero()[: len(batch), 0]  # of prompts that no row reads any more
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
        self.start[slot], self.drawn[slot], self.begun[slot] = prefilled.length[prompt], 0, 0
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
        # Exact sizes cost what the longest row asks for: a few long rows are computed apart if that is less.
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
        # A step computes the first so many slots, whichever rows are there: without moves, gaps would be computed too.
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
        unseen = (drawn[slot] - self.drawn[slot]).tolist()
        lengths = self.options.stops.stop_lengths([row[:n] for row, n in rows], unseen)
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


# -- episodes: a row whose turn has ended keeps a slot until its environment has answered
#
# Its keys and values stay, decode steps of other rows leave it out, and the observation is read in one go. When a row
# goes on is a matter of `PendingAnswers`.


def split_by_width(widths: Sequence[int], *, most: int, padding: int) -> Iterator[slice]:
    """Rows that go through the model together, padded to the widest."""
    first, tokens = 0, 0
    for i, width in enumerate(widths):
        whole = width * (i - first + 1)
        if i > first and (whole > most or whole - tokens - width > padding):
            yield slice(first, i)
            first, tokens = i, 0
        tokens += width
    if widths:
        yield slice(first, len(widths))


class TurnBatching(ContinuousBatching):
    """One call: the episodes `rows`. `u` is as wide as a slot: where a row observes, its next numbers move behind."""

    def __init__(
        self,
        engine: DecodeEngine,
        prompts: Sequence[list[int]],
        u: Float[Tensor, "R N"],
        limit: Int[Tensor, "R"],
        options: DecodeOptions,
        rows: EpisodeRows,
    ) -> None:
        super().__init__(engine, prompts, u, limit, options)
        self.rows, self.pending = rows, PendingAnswers(rows, rows.of.answer_steps)

    def resume_paused(self) -> bool:
        """Whether rows go on now: their answers are due, or no other row decodes."""
        ready = self.pending.ready(self.steps, idle=not bool(self.active.any()))
        slots = self.paused.nonzero()[:, 0]
        due = slots[torch.isin(self.row[slots], torch.tensor(ready, dtype=torch.long))]
        if len(due):
            self.go_on(due)
        return len(due) > 0

    def leave(self, slot: Int[Tensor, "m"], drawn: Tensor, stopped: Tensor) -> None:
        """A turn of these rows has ended: some wait for their environment, the others' episodes are over."""
        tokens = self.engine.live.tokens[slot.to(self.u.device)].tolist()
        fields = (x[slot].tolist() for x in (self.row, self.begun, drawn, stopped))
        answering = torch.zeros(len(slot), dtype=torch.bool)
        for i, (b, first, end, by_itself, row) in enumerate(zip(*fields, tokens, strict=True)):
            answering[i] = self.rows.end_turn(b, row[first:end], stopped=by_itself)
            if answering[i]:
                self.pending.add(b, self.steps)
        self.paused[slot[answering]] = True
        self.shape = None
        if len(over := slot[~answering]):
            super().leave(over, drawn, stopped)

    def go_on(self, slot: Int[Tensor, "m"]) -> None:
        """These rows' answers, waited for where they are not there: observations are read, and next turns begin."""
        answers = []
        for b in self.row[slot].tolist():
            self.options.check()
            answers.append(self.pending.take(b))
        self.paused[slot], self.shape = False, None
        goes_on = torch.tensor([answer is not None for answer in answers])
        if len(over := slot[~goes_on]):
            super().leave(over, self.drawn, torch.ones(len(self.drawn), dtype=torch.bool))
        going = [(s, answer) for s, answer in zip(slot.tolist(), answers, strict=True) if answer is not None]
        going.sort(key=lambda pair: len(pair[1].observed))  # rows of about one length go through the model together
        widths = [len(answer.observed) + 1 for _, answer in going]
        for some in split_by_width(widths, most=PREFILL, padding=PADDING):
            chunk = going[some]
            self.observe(torch.tensor([s for s, _ in chunk]), [answer for _, answer in chunk])

    def observe(self, slot: Int[Tensor, "m"], answers: Sequence[GoesOn]) -> None:
        """Observations into these rows, behind what they have; then the first token of their next turn is drawn."""
        device, live, width = self.u.device, self.engine.live, self.u.shape[1]
        new = torch.tensor([len(answer.observed) for answer in answers])
        there, drawn, prompt_slot = (x.to(device) for x in (slot, self.drawn[slot], self.prompt_slot[slot]))
        start, columns = live.start[there], (self.drawn[slot] + new).to(device)
        # The token that ended the turn was drawn and not read yet.
        last = live.tokens[there, drawn - 1].tolist()
        chunks = [[token, *answer.observed] for token, answer in zip(last, answers, strict=True)]
        context = ChunkAttention(
            self.engine.prompts, self.engine.drawn, there, prompt_slot, start, drawn - 1, (new + 1).to(device)
        )
        widest = max(map(len, chunks))
        ids = torch.tensor([[0] * (widest - len(chunk)) + chunk for chunk in chunks], device=device)
        logits = forward_step(self.engine.model, ids, context.position, context, 1)[:, -1]

        column = torch.arange(width, device=device)
        sampled = torch.tensor([answer.sampled for answer in answers], device=device)
        row = self.row[slot].to(device)
        moved = (column - columns[:, None] + sampled[:, None]).clamp(min=0)  # the n-th sampled token draws u[n]
        u = self.u[row].gather(1, moved)
        tokens, logp = live.tokens[there], live.logp[there]
        place = torch.arange(tokens.shape[1], device=device)
        observed_place = (place >= drawn[:, None]) & (place < columns[:, None])
        observed = torch.tensor([token for answer in answers for token in answer.observed], dtype=torch.long)
        tokens.masked_scatter_(observed_place, observed.to(device))
        logp.masked_fill_(observed_place, 0.0)
        limit = columns + torch.tensor([answer.most for answer in answers], device=device)
        false = torch.zeros(len(slot), dtype=torch.bool, device=device)
        next_turn = Live(
            token=columns.clone(),  # any number: `draw` replaces it
            start=start,
            length=start + columns,
            drawn=columns.clone(),
            limit=limit,
            ended=false,
            stopped=false.clone(),
            suspect=false.clone(),
            u=u,
            tokens=tokens,
            logp=logp,
        )
        draw(next_turn, logits, self.options.token_sampler, self.engine.marks)
        for x, value in zip(live, next_turn, strict=True):
            x[there] = value
        self.begun[slot] = columns.cpu()


# -- the sampler


class SharedDecoder:
    """What a sampler, and those that differ from it in how they choose tokens, have together from call to call.

    One of them decodes at a time: an evaluation may ask while the next batch is being sampled in another thread.
    """

    def __init__(self) -> None:
        self.alone = Lock()
        self.engine: DecodeEngine | None = None
        self.model: nn.Module | None = None
        self.stops: Stops | None = None

    def decoder(self, model: nn.Module, device: torch.device) -> DecodeEngine | None:
        """The model's engine; None, and once a warning, where it has to be decoded in another way.

        Raises ValueError for a model that cannot be decoded in that way, too.
        """
        if self.model is not model:
            reason = decoding_unsupported_reason(model, device)
            if reason is not None:
                hf_cache_decode.check_decoding(model, device)
            self.model, self.engine = model, build_engine(model) if reason is None else None
            if reason is not None:
                warnings.warn(
                    f"{type(model).__name__} is decoded with a cache that grows, not in slots: {reason}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return self.engine

    def scan_stops(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], size: int) -> Stops:
        now, stops = (tokenizer, tuple(stop), size), self.stops
        if stops is None or (stops.tokenizer, stops.stop, len(stops.suspect)) != now:
            self.stops = Stops(tokenizer, stop, size)
        return self.stops


def local(context: SamplerContext, options: SamplerOptions) -> "LocalSampler":
    """A sampler from a module in this process: no engine besides torch and transformers.

    Args:
        context: the model that is trained, and its surroundings.
        options: what the run asks of its sampler.

    Returns:
        The sampler.
    """
    return LocalSampler(**vars(options), model=context.full_model())


@dataclass(frozen=True, kw_only=True)
class LocalSampler(SamplerOptions):
    """Samples from `model`: the policy's own module where that is whole and computes in its dtype, else one of ours."""

    model: nn.Module
    check: Callable[[], None] = never_stop  # called every few decode steps; what it raises ends them
    shared: SharedDecoder = field(default_factory=SharedDecoder, repr=False, compare=False)
    ranks: ClassVar[int] = 1  # that have one of it together
    overlaps: ClassVar[bool] = False  # it cannot sample while its device trains
    mixes: ClassVar[bool] = False

    @property
    def repeatable(self) -> bool:
        return self.environments is None or self.environments.answer_steps is not None

    @property
    def complaints(self) -> list[str]:
        return []

    @torch.no_grad()
    def load(self, policy: FSDPPolicy | FixedWeights) -> None:
        """Take the policy's weights, tensor by tensor; nothing to do where the module is shared."""
        if policy.model is self.model:
            return
        own = self.model.state_dict(keep_vars=True)
        for name, weight in policy.weights(trained=True):
            own[name].copy_(weight)

    def prepare(self) -> None:
        """Choose how rows are decoded, by trials on this device, as the first call would; done once."""
        with self.shared.alone:
            self.shared.decoder(self.model, next(self.model.parameters()).device)

    def rest(self) -> None:
        """Nothing is held between two calls but the weights, and on CUDA what captured steps need if it is small."""
        if self.shared.engine is not None:
            self.shared.engine.rest()

    def figures(self) -> dict[str, float]:
        """What environments took and lost since the last call."""
        return {} if self.environments is None else self.environments.caller.figures()

    def close(self) -> None: ...

    def for_evaluation(
        self,
        token_sampler: TokenSampler,
        check: Callable[[], None] = never_stop,
        on_completions: OnCompletions | None = None,
    ) -> "LocalSampler":
        """The same engine, drawing with `token_sampler`; `check` is called every few decode steps."""
        environments = self.environments and self.environments.without_tape()
        changed = {"on_completions": on_completions, "check": check, "environments": environments}
        return replace(self, token_sampler=token_sampler, **changed)

    @torch.no_grad()
    def sample(self, problems: Sequence[Problem], group_size: int, *, key: Tensor) -> Rollout:
        """G completions of every problem. Row p * G + g draws from fold_in(key, uid, g) and from nothing else."""
        if self.environments is not None:
            return self._sample_episodes(problems, group_size, key)
        device = next(self.model.parameters()).device
        prompts = [self.encode(self.tokenizer, problem.prompt) for problem in problems]
        limits = completion_limits(
            problems,
            prompts,
            max_new_tokens=self.max_new_tokens,
            max_total_tokens=self.max_total_tokens,
            positions=positions(self.model.config),
        )
        limit = repeat(torch.tensor(limits, dtype=torch.long, device=device), "p -> (p g)", g=group_size)
        u = self._draws(problems, group_size, key.to(device))

        def completion(row: int, tokens: list[int], stopped: bool) -> Completion:
            return completion_of_row(self.tokenizer, tokens, stopped=stopped)

        with self.shared.alone:
            options = self._options(self.stop, [], self._on_ended(problems, group_size, completion))
            engine = self.shared.decoder(self.model, device)
            if engine is None:
                decoded = hf_cache_decode.decode(self.model, prompts, u, limit, options)
            else:
                decoded = ContinuousBatching(engine, prompts, u, limit, options).run()
        completions = [row[:n] for row, n in zip(decoded.tokens.tolist(), decoded.length.tolist(), strict=True)]
        drawn = torch.arange(self.max_new_tokens, device=device) < decoded.length[:, None]
        return assemble(self.tokenizer, prompts, completions, decoded.logp[drawn], decoded.stopped)

    def _draws(self, problems: Sequence[Problem], group_size: int, key: Tensor) -> Tensor:
        """The uniform numbers of every row, `[P G, max_new_tokens]`, of the token sampler's dtype held in float64."""
        keys, dtype = sample_keys(key, problems, group_size), sampling.uniform_dtype(self.token_sampler)
        return prng.uniform(keys, self.max_new_tokens, low=0.0, high=1.0, dtype=dtype).double()

    def _sample_episodes(self, problems: Sequence[Problem], group_size: int, key: Tensor) -> Rollout:
        """G episodes of every problem, in slots that hold all that stands behind an opening."""
        device = next(self.model.parameters()).device
        context = smallest_limit(self.max_total_tokens, positions(self.model.config))
        if context is None:
            raise ValueError(
                "episodes: got a model without a limit on positions, expected sections.Sampling.max_total_tokens"
            )
        with self.shared.alone:
            engine = self.shared.decoder(self.model, device)
            if engine is None:
                raise ValueError(
                    f"episodes: got {type(self.model).__name__}, which is decoded with a cache that grows, expected a "
                    "model that is decoded in slots (a warning says why this one is not)"
                )
            rows = self.begin_episodes(problems, group_size, key, context)
            u, width = self._draws(problems, group_size, key.to(device)), context - 1
            u = pad(u, (0, max(0, width - u.shape[1])))[:, :width].contiguous()
            limit = torch.tensor([rows.most(b) for b in range(len(u))], device=device)  # of the first turns
            on_ended = self._on_ended(problems, group_size, lambda row, *_: rows.completion(row))
            options = self._options((), [rows.of.chat.end], on_ended)
            batching = TurnBatching(engine, rows.prompts, u, limit, options, rows)
            decoded = batching.run()
        rows.of.caller.count("time/environment_wait", batching.pending.waited)
        tokens = [row[:n] for row, n in zip(decoded.tokens.tolist(), decoded.length.tolist(), strict=True)]
        # All rows at once: on a card a mask of each row's own would be waited for row by row.
        drawn = [b * width + t for b, row in enumerate(rows.rows) for t, sampled in enumerate(row.mask()) if sampled]
        logp = decoded.logp.flatten()[torch.tensor(drawn, device=device)]
        return assemble_episodes(rows, tokens, logp, self.tokenizer)

    def _options(self, stop: Sequence[str], turn_end: list[int], on_ended: OnEnded | None) -> DecodeOptions:
        return DecodeOptions(
            token_sampler=self.token_sampler,
            end_tokens=[*stop_ids(self.tokenizer, self.model), *turn_end],
            stops=self.shared.scan_stops(self.tokenizer, stop, self.model.config.get_text_config().vocab_size),
            slots=self.max_rows,
            pad=self.tokenizer.eos_token_id,
            on_ended=on_ended,
            check=self.check,
        )

    def _on_ended(
        self,
        problems: Sequence[Problem],
        group_size: int,
        completion: Callable[[int, list[int], bool], Completion],
    ) -> OnEnded | None:
        """A function that calls `on_completions` for the rows with these numbers; None without `on_completions`."""
        if self.on_completions is None:
            return None

        def report(rows: Sequence[int], tokens: Sequence[list[int]], stopped: Sequence[bool]) -> None:
            completions = [completion(*row) for row in zip(rows, tokens, stopped, strict=True)]
            self.on_completions([problems[row // group_size] for row in rows], completions)

        return report
