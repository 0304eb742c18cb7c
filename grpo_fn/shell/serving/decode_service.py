"""One model for many that ask at once: a thread that decodes and scores, and the queue in front of it.

Rows are taken in the order in which they came. A row that cannot join the session that is going on, as it chooses its
tokens in another way or is longer than its buffers, waits until that has ended, and so do all behind it: none is passed
over for ever. Texts are scored between two steps of decoding.
"""

import copy
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from threading import Condition

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from grpo_fn.shell.background_worker import BackgroundWorker
from grpo_fn.shell.model.hf import stop_ids
from grpo_fn.shell.model.logprob_model import has_linear_head
from grpo_fn.shell.model.token_scores import ScoredText, TokenScores, score_texts
from grpo_fn.shell.sampler.interface import positions
from grpo_fn.shell.sampler.local import hf_cache_decode
from grpo_fn.shell.sampler.local.continuous_batching import Ends
from grpo_fn.shell.sampler.local.decode_step import Stops
from grpo_fn.shell.sampler.local.local_sampler import SharedDecoder
from grpo_fn.shell.serving.decode_session import DecodeSession, DrawnRow, QueuedRow, random_numbers

SCORED_TOKENS = 8192  # that go through the model at once, if there is more than one text
SESSION_ROWS = 4096  # of one session: what it has handed over stays with it until it ends


class QueueFull(RuntimeError):
    """More waits than is allowed."""


class ServiceClosed(RuntimeError):
    """The service has ended, or is about to."""


@dataclass(frozen=True, eq=False)
class QueuedText:
    """A text that is to be scored."""

    text: ScoredText
    temperature: float
    top: int
    future: "Future[TokenScores]" = field(default_factory=Future)


class DecodeService:
    """Draws completions and scores texts for threads that ask.

    Args:
        model: a whole module in evaluation mode; nothing else may use it meanwhile.
        tokenizer: of the model.
        max_rows: rows decoded at once; bounds the KV cache.
        max_tokens: most tokens of a completion.
        max_waiting: rows and texts that may wait.
        logits_chunk_elements: logits that live at once where texts are scored, about.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_rows: int,
        max_tokens: int,
        max_waiting: int,
        logits_chunk_elements: int,
    ) -> None:
        self.model, self.tokenizer = model, copy.deepcopy(tokenizer)  # a tokenizer is not made for two threads
        self.max_rows, self.max_tokens, self.max_waiting = max_rows, max_tokens, max_waiting
        self.logits_chunk_elements = logits_chunk_elements
        self.device = next(model.parameters()).device
        self.positions = positions(model.config)
        self.shared = SharedDecoder()
        self.rows: deque[QueuedRow] = deque()
        self.texts: deque[QueuedText] = deque()
        self.changed, self.closed = Condition(), False
        self.linear: bool | None = None  # asked in the thread: only there the model is used
        self.stops = lru_cache(maxsize=32)(self._stops)
        self.worker = BackgroundWorker("decoding", timeout=None)
        self.ended = self.worker.submit(self._work, what="decoding")

    # -- what others ask

    def draw(self, rows: Sequence[QueuedRow]) -> None:
        """Put rows into the queue. Raises QueueFull or ServiceClosed: then none of them is in it."""
        self._enqueue(self.rows, rows)

    def score(self, texts: Sequence[QueuedText]) -> None:
        """Put texts into the queue. Raises QueueFull or ServiceClosed: then none of them is in it."""
        self._enqueue(self.texts, texts)

    def alive(self) -> bool:
        """Whether the thread is there to answer."""
        return not self.closed and not self.ended.done()

    def close(self) -> None:
        """End: what waits and what is being decoded gets ServiceClosed."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self.worker.shutdown(cancel_futures=True)

    def _enqueue(self, queue: deque, asked: Sequence[QueuedRow | QueuedText]) -> None:
        with self.changed:
            if not self.alive():
                raise ServiceClosed("got a request after the end of the service, wanted it before")
            waiting = sum(not one.future.cancelled() for one in chain(self.rows, self.texts))
            if waiting + len(asked) > self.max_waiting:
                raise QueueFull(
                    f"got {len(asked)} rows where {waiting} wait, wanted at most {self.max_waiting} together"
                )
            queue.extend(asked)
            self.changed.notify_all()

    # -- the thread

    @torch.no_grad()
    def _work(self) -> None:
        try:
            while True:
                with self.changed:
                    self.changed.wait_for(lambda: self.closed or self.rows or self.texts)
                    if self.closed:
                        return
                self._score_waiting()
                if rows := self._take(lambda row: True, self.max_rows):
                    self._decode(rows)
        finally:
            with self.changed:
                self.closed = True
                left = [one.future for one in chain(self.rows, self.texts)]
                self.rows.clear()
                self.texts.clear()
            _refuse(left, ServiceClosed("the service has ended"))

    def _take(self, joins: Callable[[QueuedRow], bool], most: int) -> list[QueuedRow]:
        """The first rows of the queue, as many as agree with the first and can join; cancelled ones are dropped."""
        taken: list[QueuedRow] = []
        with self.changed:
            while self.rows and len(taken) < most:
                row = self.rows[0]
                if row.future.cancelled():
                    self.rows.popleft()
                elif joins(row) and (not taken or row.knobs == taken[0].knobs):
                    taken.append(self.rows.popleft())
                else:
                    break
        return taken

    def _decode(self, rows: list[QueuedRow]) -> None:
        """One session. What goes wrong in it is the error of its rows, and of no others."""
        begun = [*rows]
        knobs, engine = rows[0].knobs, self.shared.decoder(self.model, self.device)
        ends = Ends(stop_ids(self.tokenizer, self.model), self.stops(knobs.stop))

        def arrivals(longest: int, free: int) -> list[QueuedRow]:
            most = min(free, SESSION_ROWS - len(begun))
            new = self._take(lambda row: row.knobs == knobs and len(row.prompt) <= longest, most)
            begun.extend(new)
            return new

        try:
            if engine is None:
                self._decode_with_cache(rows, ends)
            else:
                with self.changed:
                    longest = max(len(row.prompt) for row in chain(rows, self.rows))
                how = {"slots": self.max_rows, "width": self.max_tokens, "longest": longest, "ends": ends}
                more = {"pad": self.tokenizer.eos_token_id, "check": self._between_steps, "device": self.device}
                DecodeSession(engine, rows, arrivals=arrivals, **how, **more).run()
        except Exception as error:
            _refuse([row.future for row in begun], error)
            if engine is not None:
                engine.drop()

    def _decode_with_cache(self, rows: list[QueuedRow], ends: Ends) -> None:
        """Rows of a model that is not decoded in slots: together, until all have ended."""
        u, limit = random_numbers(rows, self.max_tokens, self.device)
        how = {"ends": ends, "slots": self.max_rows, "pad": self.tokenizer.eos_token_id, "ended": None}
        drawn = hf_cache_decode.decode(
            self.model,
            [row.prompt for row in rows],
            u,
            limit,
            token_sampler=rows[0].knobs.token_sampler(),
            check=self._between_steps,
            **how,
        )
        for row, tokens, logp, n, stopped in zip(rows, *(column.tolist() for column in drawn), strict=True):
            row.answer(DrawnRow(tokens[:n], logp[:n], stopped))

    def _between_steps(self) -> None:
        if self.closed:
            raise ServiceClosed("the service has ended")
        if self.texts:
            self._score_waiting()

    def _score_waiting(self) -> None:
        """All texts that wait, as many at once as agree and are not too long together."""
        while True:
            some: list[QueuedText] = []
            with self.changed:
                while self.texts:
                    one = self.texts[0]
                    if some and not _scored_together([*some, one]):
                        break
                    some.append(self.texts.popleft())
            some = [one for one in some if one.future.set_running_or_notify_cancel()]
            if not some:
                return
            try:
                self._score(some)
            except Exception as error:
                for one in some:
                    if not one.future.done():
                        one.future.set_exception(error)

    def _score(self, some: list[QueuedText]) -> None:
        if self.linear is None:
            self.linear = has_linear_head(self.model)
        how = {"temperature": some[0].temperature, "top": some[0].top}
        texts = [one.text for one in some]
        scores = score_texts(self.model, texts, **how, elements=self.logits_chunk_elements, linear=self.linear)
        for one, scored in zip(some, scores, strict=True):
            one.future.set_result(scored)

    def _stops(self, stop: tuple[str, ...]) -> Stops:
        return Stops(self.tokenizer, stop, self.model.config.get_text_config().vocab_size)


def _scored_together(some: Sequence[QueuedText]) -> bool:
    alike = {(one.temperature, one.top) for one in some}
    return len(alike) == 1 and len(some) * max(len(one.text.ids) for one in some) <= SCORED_TOKENS


def _refuse(futures: Sequence[Future], error: Exception) -> None:
    """Those that have no answer yet get this error."""
    for future in futures:
        if not future.done() and future.set_running_or_notify_cancel():
            future.set_exception(error)
