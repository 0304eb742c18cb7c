"""Episodes from an inference engine: token ids in and out for each turn, and a seed of (key, uid, sample, turn).

Every turn is a request whose prompt is the row so far; the engine's prefix cache holds all of it but the observation.
Where any thread may ask the engine (servers), every row goes its own way. One in this process is asked in rounds: all
rows that go on draw their next turns together, environments answer as soon as each has ended, and the round ends with
the last of them.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any

from jaxtyping import Int
from torch import Tensor

from grpo_fn.core import prng
from grpo_fn.shell.episodes.episode_rows import EpisodeRows
from grpo_fn.shell.sampler.interface import EngineCompletion, GenerationRequest, InferenceEngine
from grpo_fn.shell.vllm.options import SEEDS


class EngineEpisodes:
    """The episodes of a call. `tokens` are those behind each opening, `logp` that of the sampled ones."""

    def __init__(
        self,
        engine: InferenceEngine,
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
        self._taken = Lock()

    def run(self, width: int) -> None:
        """Until all are over; `width` rows at once, where each is asked for by a thread of its own."""
        everyone = range(len(self.rows.rows))
        if not self.engine.overlaps:
            self.play(everyone)
            return
        with ThreadPoolExecutor(min(width, len(everyone)), thread_name_prefix="episode") as threads:
            for played in [threads.submit(self.play, [b]) for b in everyone]:
                played.result()

    def play(self, going: Sequence[int]) -> None:
        """These rows, turn by turn."""
        while going:
            asks = [self.ask(b) for b in going]
            asked: set[int] = set()
            take = partial(self.take, going, asked)
            for i, (answer,) in enumerate(self.engine.generate(asks, how=self.how, on_answer=take)):
                take(i, 0, answer)  # an engine may have called back already
            on = [b for b in going if b in asked and self.observe(b)]
            for b in going:
                if b not in on:
                    self.ended(b)
            going = on

    def ask(self, b: int) -> GenerationRequest:
        """The row so far, as a prompt."""
        key = prng.fold_in(self.keys[b], len(self.rows.rows[b].turns))
        prompt = (*self.rows.prompts[b // self.group], *self.tokens[b])
        return GenerationRequest(prompt, (int(prng.randint(key, low=0, high=SEEDS)),), self.most[b])

    def take(self, going: Sequence[int], asked: set[int], ask: int, _: int, answer: EngineCompletion) -> None:
        """A turn has ended. Of two calls about one turn the first counts."""
        b = going[ask]
        with self._taken:
            turns = len(self.rows.rows[b].turns)
            if turns > self.turns_of(b):
                return
            self.tokens[b] += answer.tokens
            self.logp[b] += answer.logp
            if self.rows.end_turn(b, answer.tokens, stopped=answer.stopped):
                asked.add(b)

    def turns_of(self, b: int) -> int:
        """Turns of the row that are over, their observations read."""
        return len(self.rows.rows[b].observed)

    def observe(self, b: int) -> bool:
        """Wait for the environment; whether the row goes on."""
        more = self.rows.go_on(b)
        if more is None:
            return False
        self.tokens[b] += more.observed
        self.most[b] = more.most
        return True
