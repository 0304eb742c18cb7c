"""Episodes from an inference engine: token ids in and out for each turn, and a seed of (key, uid, sample, turn).

Every turn is a request whose prompt is the row so far; the engine's prefix cache holds what it has read of it. An
engine is never asked in rounds: while environments work on some rows, others are decoded, and a row comes back by
itself. Where any thread may ask (servers), that is as soon as its environment has answered. An engine in this process
is stepped from here. There a row goes on after a counted number of the engine's steps, as in the local sampler, so that
what is computed together does not depend on how fast environments are; or as answers come, where that changes nothing
(batch-invariant kernels), where the engine repeats nothing anyway, or where `answer_steps` is None.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any

from jaxtyping import Int
from torch import Tensor

from grpo_fn.core import prng
from grpo_fn.shell.episodes.episode_rows import EpisodeRows
from grpo_fn.shell.sampler.interface import (
    EngineCompletion,
    GenerationRequest,
    InferenceEngine,
    SteppedEngine,
    ignore_completion,
)
from grpo_fn.shell.vllm.options import SEEDS


def counts_steps(engine: InferenceEngine | SteppedEngine) -> bool:
    """Whether a row goes on after a counted number of steps of the engine, so that its bits are the same again."""
    if engine.ranks > 1:  # they have to ask for the same
        return True
    return not engine.overlaps and engine.repeatable and not engine.batch_invariant


class EngineEpisodes:
    """The episodes of a call. `tokens` are those behind each opening, `logp` that of the sampled ones.

    `waited` is the seconds in which no turn was drawn, as answers were waited for.
    """

    def __init__(
        self,
        engine: InferenceEngine | SteppedEngine,
        rows: EpisodeRows,
        keys: Int[Tensor, "B 2"],
        *,
        how: Mapping[str, Any],
        ended: Callable[[int], None],
    ) -> None:
        self.engine, self.rows, self.how, self.ended = engine, rows, how, ended
        self.keys = keys.cpu()
        self.group = len(rows.rows) // len(rows.prompts)
        self.tokens: list[list[int]] = [[] for _ in rows.rows]
        self.logp: list[list[float]] = [[] for _ in rows.rows]
        self.most = [rows.most(b) for b in range(len(rows.rows))]
        self.waited = 0.0
        # After so many steps a row's answer is waited for; None: it goes on when it has one.
        self.answer_steps = rows.of.answer_steps if counts_steps(engine) else None
        self._due: dict[int, int] = {}  # rows whose environments work, and the engine's step at which they go on
        self._opened = False
        self._seeds: dict[int, list[int]] = {}  # of every row, by turn
        self._lock, self._drawing, self._idle_since = threading.Lock(), 0, None

    def run(self, width: int) -> None:
        """Until all are over; `width` turns at once, where each is asked for by a thread of its own."""
        if self.engine.overlaps:
            self.run_apart(width)
        else:
            self.engine.generate_turns(self.due, how=self.how, on_turn=self.turn_ended)

    def ask(self, b: int) -> GenerationRequest:
        """The row so far, as a prompt."""
        n = len(self.rows.rows[b].turns)
        if n not in self._seeds:
            self._seeds[n] = prng.randint(prng.fold_in(self.keys, n), low=0, high=SEEDS).tolist()
        prompt = (*self.rows.prompts[b // self.group], *self.tokens[b])
        return GenerationRequest(prompt, (self._seeds[n][b],), self.most[b], near=b // self.group)

    def take(self, b: int, answer: EngineCompletion) -> bool:
        """A turn has ended; whether its environment is asked. If not, the episode is over."""
        self.tokens[b] += answer.tokens
        self.logp[b] += answer.logp
        if self.rows.end_turn(b, answer.tokens, stopped=answer.stopped):
            return True
        self.ended(b)
        return False

    def observe(self, b: int) -> bool:
        """Wait for the environment; whether the row goes on. If not, the episode is over."""
        more = self.rows.go_on(b)
        if more is None:
            self.ended(b)
            return False
        self.tokens[b] += more.observed
        self.most[b] = more.most
        return True

    # -- an engine in this process

    def due(self, steps: int, running: bool) -> list[tuple[int, GenerationRequest]]:
        """The rows whose next turns begin after so many steps; waits for some where no turn is `running`."""
        if not self._opened:
            self._opened = True
            return [(b, self.ask(b)) for b in range(len(self.rows.rows))]
        going: list[tuple[int, GenerationRequest]] = []
        while self._due and not going:
            begun = time.perf_counter()
            for b in self.ready(steps, running):
                del self._due[b]
                if self.observe(b):
                    going.append((b, self.ask(b)))
            self.waited += time.perf_counter() - begun
            if running:
                break
        return going

    def ready(self, steps: int, running: bool) -> list[int]:
        """Rows that go on now: whose answer is due, or there; where nothing is running, any row that waits."""
        if self.answer_steps is not None:
            return [b for b, step in self._due.items() if step <= steps or not running]
        return self.rows.rows_with_answers([*self._due], some=not running)

    def turn_ended(self, b: int, steps: int, answer: EngineCompletion) -> None:
        """The engine has drawn a row's turn, in its step with that number."""
        if self.take(b, answer):
            self._due[b] = steps + (self.answer_steps or 0)

    # -- servers

    def run_apart(self, width: int) -> None:
        """Every row by itself. A thread is taken by a turn that is drawn, by none whose environment works."""
        over: SimpleQueue[BaseException | None] = SimpleQueue()
        threads = ThreadPoolExecutor(min(width, len(self.rows.rows)), thread_name_prefix="episode")

        def turn(b: int, first: bool) -> None:
            try:
                if (first or self.observe(b)) and self.draw(b):
                    self.rows.rows[b].asked.add_done_callback(lambda _: go_on(b))
                    return
                over.put(None)
            except BaseException as error:
                over.put(error)

        def go_on(b: int) -> None:
            with suppress(RuntimeError):  # another row has failed, and the threads take nothing more
                threads.submit(turn, b, False)

        try:
            for b in range(len(self.rows.rows)):
                threads.submit(turn, b, True)
            for _ in self.rows.rows:
                if (error := over.get()) is not None:
                    raise error
        finally:
            threads.shutdown(wait=True, cancel_futures=True)

    def draw(self, b: int) -> bool:
        """A row's next turn; whether its environment is asked."""
        with self.drawing():
            ((answer,),) = self.engine.generate([self.ask(b)], how=self.how, on_answer=ignore_completion)
        return self.take(b, answer)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """A turn is drawn meanwhile: what lies between two such times, of whatever rows, has been waited."""
        with self._lock:
            if not self._drawing and self._idle_since is not None:
                self.waited += time.perf_counter() - self._idle_since
            self._drawing += 1
        try:
            yield
        finally:
            with self._lock:
                self._drawing -= 1
                self._idle_since = time.perf_counter()
