"""Continuous batching of episodes: a row whose turn has ended keeps a slot until its environment has answered.

Its keys and values stay, decode steps of other rows leave it out, and the observation is read in one go. When a row
goes on is a matter of `PendingAnswers`.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_fn.shell.episodes.episode_rows import EpisodeRows, GoesOn, PendingAnswers
from grpo_fn.shell.sampler.local.continuous_batching import PREFILL, ContinuousBatching, DecodedRows, DecodeOptions
from grpo_fn.shell.sampler.local.decode_step import DecodeEngine, Live, draw, forward_step
from grpo_fn.shell.sampler.local.kv_cache import ChunkAttention

PADDING = 256  # tokens of padding that cost about as much as another pass through the model


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
        self.begun = torch.zeros(len(self.busy), dtype=torch.long)  # where the turn of the row in each slot begins
        self.by_slot.append(self.begun)

    def run(self) -> DecodedRows:
        """Until all episodes are over."""
        while self.next_row < len(self.u) or bool(self.busy.any()):
            if self.has_free_slot():
                self.admit()
                self.look()
            if len(due := self.due_slots()):
                self.go_on(due)
                self.look()
            elif bool(self.busy.any()):
                self.advance()
                self.look()
        return self.out

    def begin(self, slot: Int[Tensor, "m"], row: Int[Tensor, "m"], length: Int[Tensor, "m"], logits: Tensor) -> None:
        """As without turns; each begins its first."""
        super().begin(slot, row, length, logits)
        self.begun[slot.cpu()] = 0

    def due_slots(self) -> Int[Tensor, "m"]:
        """Slots whose rows go on now."""
        ready = self.pending.ready(self.steps, idle=not bool(self.active.any()))
        slots = self.paused.nonzero()[:, 0]
        return slots[torch.isin(self.row[slots], torch.tensor(ready, dtype=torch.long))]

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
