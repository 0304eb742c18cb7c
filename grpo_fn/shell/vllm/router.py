"""Which vLLM servers are well, and who draws what.

Everything here runs in one event loop, so the state needs no locks. A server that fails is out, by name, and its work
goes to another one; `weight_update` takes it back when it answers and has the newest weights.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from grpo_fn.shell.sampler.fingerprint import Fingerprint
from grpo_fn.shell.sampler.interface import EngineCompletion, GenerationRequest, OnAnswer
from grpo_fn.shell.vllm.client import Server, ServerCompletion, Unreachable

COMPLAINTS = 16  # kept until they are logged
AHEAD = 8  # requests that a server may have more than twice those of another, and be asked for what it has read


class NewestWeights(NamedTuple):
    """The weights that were pushed last."""

    run: str  # another run's weights may have the same version
    version: int
    sent: Fingerprint

    @property
    def label(self) -> str:
        """What servers call them."""
        return f"{self.run}-{self.version}"


@dataclass(eq=False)
class ServerState:
    """A server and what is known of it."""

    server: Server
    live: bool = False
    met: bool = False  # the trainer, in this life
    busy: int = 0  # requests of ours
    trouble: str = "has not been asked yet"


@dataclass(eq=False)
class Router:
    """All servers, and the requests to them."""

    members: list[ServerState]
    deadline: float
    slots: asyncio.Semaphore
    newest: NewestWeights | None = None
    proven: bool = False  # weights have been pushed once
    complaints: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def live(self) -> list[ServerState]:
        """Those that have the newest weights and answer."""
        return [member for member in self.members if member.live]

    # Completions

    async def generate(
        self, asks: Sequence[GenerationRequest], how: Mapping[str, Any], on_answer: OnAnswer
    ) -> list[list[EngineCompletion]]:
        """For every ask an answer to each of its seeds; when one fails the others are called off."""
        what = f"{sum(len(ask.seeds) for ask in asks)} completions of {len(asks)} prompts"

        async def draw(i: int, j: int) -> EngineCompletion:
            answer = await self._draw(asks[i], asks[i].seeds[j], asks[i].fields(how), what)
            on_answer(i, j, answer)
            return answer

        tasks = [[asyncio.create_task(draw(i, j)) for j in range(len(ask.seeds))] for i, ask in enumerate(asks)]
        every = [task for row in tasks for task in row]
        try:
            await asyncio.gather(*every)
        except BaseException:
            for task in every:
                task.cancel()
            await asyncio.gather(*every, return_exceptions=True)
            raise
        return [[task.result() for task in row] for row in tasks]

    async def _draw(self, ask: GenerationRequest, seed: int, how: Mapping[str, Any], what: str) -> EngineCompletion:
        """One completion, from whichever server: weights, prompt and seed decide it."""
        async with self.slots:
            until: float | None = None  # the time it has from its first failure on
            while True:
                await self.wait_live(what)
                member = self._choose(ask.near)
                member.busy += 1
                had = self.newest.label
                try:
                    found = await member.server.generate(ask.prompt, seed, how)
                    return EngineCompletion(found.tokens, found.logp, found.stopped, self._oldest(member, found, had))
                except Unreachable as error:
                    self.lose(member, error)
                    self.counts["requests_retried"] += 1
                    until = until or time.monotonic() + self.deadline
                    if time.monotonic() > until:
                        raise self.given_up(what) from error
                finally:
                    member.busy -= 1

    def _choose(self, near: int | None) -> ServerState:
        """The least busy, or the one that holds what such requests begin with, unless that has far more to do."""
        least = min(self.live, key=lambda member: member.busy)
        if near is None:
            return least
        home = self.members[near % len(self.members)]
        return home if home.live and home.busy <= 2 * least.busy + AHEAD else least

    def _oldest(self, member: ServerState, found: ServerCompletion, had: str) -> int:
        """Version of the oldest token; `had` is what the server had when it was asked, for one that does not say it."""
        versions = [label.removeprefix(f"{self.newest.run}-") for label in found.versions or [had]]
        if strange := [one for one in versions if not one.isdigit()]:
            raise Unreachable(f"{member.server.url}: drew with weights {strange}, which are not this run's")
        return min(int(one) for one in versions)

    async def wait_live(self, what: str) -> None:
        """Until there is a server, at most `deadline` seconds."""
        until = time.monotonic() + self.deadline
        while not self.live:
            self.changed.clear()
            try:
                await asyncio.wait_for(self.changed.wait(), until - time.monotonic())
            except TimeoutError:
                raise self.given_up(what) from None

    def given_up(self, what: str) -> RuntimeError:
        """What is raised when the deadline is over."""
        return RuntimeError(
            f"vLLM servers: got none for {self.deadline:g} s while {what} waited, wanted one: {self.troubles()}"
        )

    def troubles(self) -> str:
        """What was wrong with each, last."""
        return "; ".join(f"{member.server.url}: {member.trouble}" for member in self.members if member.trouble)

    # Who is in

    def lose(self, member: ServerState, why: Exception | str) -> None:
        """It is out, from now on."""
        member.trouble, member.met = str(why), False
        if member.live:
            member.live = False
            self.counts["servers_lost"] += 1
            self._complain(f"vLLM server {member.server.url} is out: {why}")

    def welcome(self, member: ServerState) -> None:
        """It has the newest weights, and is in."""
        if not member.live and self.proven:
            self.counts["servers_recovered"] += 1
            self._complain(f"vLLM server {member.server.url} is back")
        member.live, member.trouble = True, ""
        self.changed.set()

    def mark_updated(self, newest: NewestWeights, fed: Sequence[str]) -> None:
        """These servers have been given the newest weights, by this rank or by another."""
        self.newest = newest
        for member in self.members:
            if member.server.url in fed:
                self.welcome(member)
            else:
                self.lose(member, member.trouble or "has not been given the newest weights")
        self.proven = True

    def _complain(self, text: str) -> None:
        if len(self.complaints) < COMPLAINTS and text not in self.complaints:
            self.complaints.append(text)
