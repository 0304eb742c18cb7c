"""How the servers of a fleet come to have the newest weights: all at once in a push, or one that comes back.

It runs in the fleet's event loop. A server that fails in a swap is out, and left in order: it draws nothing that counts
before it has been given all of the newest weights.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from grpo_fn.shell.sampler.fingerprint import NOTHING, Fingerprint
from grpo_fn.shell.sampler.interface import StaleEngine
from grpo_fn.shell.vllm.client import RequestRefused, Unreachable
from grpo_fn.shell.vllm.router import NewestWeights, Router, ServerState
from grpo_fn.shell.vllm.vllm_transfer import Transfer

TORN = "torn"  # label of weights of which only a part was loaded
MUSTER = 1.0  # seconds between two looks at servers that a push waits for


@dataclass(eq=False)
class WeightUpdater:
    """Changes a fleet's weights. `expected` is how servers have to have been started: what their workers say."""

    fleet: Router
    transfer: Transfer
    expected: Mapping[str, Any]
    pause: str
    check_seconds: float
    feeds: bool  # whether this rank is the one that gives weights
    repeatable: bool = False  # whether the servers draw the same again
    hidden: set[str] = field(default_factory=set)  # servers whose layout does not show what they hold
    swapping: asyncio.Lock = field(default_factory=asyncio.Lock)

    # Who is well

    async def muster(self) -> list[ServerState]:
        """All that answer and were started as they have to be; before the first push the rest are waited for.

        Raises RequestRefused for one that was started otherwise then, and RuntimeError when no server answers in time.
        """
        until = time.monotonic() + self.fleet.deadline
        while True:
            well = await self.each(self.fleet.members, self._examine, strict=not self.fleet.proven)
            if len(well) == len(self.fleet.members) or (well and (self.fleet.proven or time.monotonic() > until)):
                return well
            if time.monotonic() > until:
                raise self.fleet.given_up("new weights")
            await asyncio.sleep(min(MUSTER, self.check_seconds))

    async def _examine(self, member: ServerState) -> bool:
        """Whether its workers are still at an update that was not finished."""
        await member.server.check_health()
        for described in await member.server.ask_workers("grpo_described"):
            odd = {name: described.get(name) for name, want in self.expected.items() if described.get(name) != want}
            if odd:
                raise RequestRefused(
                    f"{member.server.url}: got {odd}, wanted {dict(self.expected)}; start it with "
                    "tools/launch/vllm_server.sh"
                )
        self.repeatable = described["repeatable"]
        if not (await member.server.version()).startswith(f"{self.fleet.newest.run}-" if self.fleet.newest else "\0"):
            member.met = False
        return described["updating"]

    async def look_after(self) -> None:
        """For ever: take back those that are out, once they are well and have the newest weights.

        The rank that gives weights looks at the others, too: it may have no work there that would fail.
        """
        while True:
            await asyncio.sleep(self.check_seconds)
            if self.fleet.newest is not None and not self.swapping.locked():
                await asyncio.gather(*(self._look(one) for one in self.fleet.members if self.feeds or not one.live))

    async def _look(self, member: ServerState) -> None:
        try:
            await self._examine(member)  # a server that hangs does so here, where no push waits for it
            async with self.swapping:
                await self._bring_up(member)
        except Exception as error:  # whatever answers at that address: looking after the others goes on
            self.fleet.lose(member, error)

    async def _bring_up(self, member: ServerState) -> None:
        updating = await self._examine(member)
        if updating or await member.server.version() != self.fleet.newest.label:
            chunks = self.transfer.again() if self.feeds else None
            self.fleet.lose(member, f"{member.server.url}: has other weights, and gets the newest with the next push")
            if chunks is None:
                return
            try:
                await self.open(member)
                for info in chunks:
                    await member.server.take(info)
                await self.finish(member, self.fleet.newest)
            except BaseException:
                await self.tear(member)
                raise
        elif self.feeds and not member.live:
            await member.server.resume()  # it may have been lost with its last call of a swap
        self.fleet.welcome(member)

    # The steps of a swap

    async def swap(
        self, members: Sequence[ServerState], step: Callable[[ServerState], Awaitable[Any]]
    ) -> list[ServerState]:
        """A step of it with all of them at once; those that it worked with. The others are out, and left in order."""
        done = await self.each(members, step)
        await self.each([member for member in members if member not in done], self.tear)
        return done

    async def each(
        self, members: Sequence[ServerState], do: Callable[[ServerState], Awaitable[Any]], *, strict: bool = False
    ) -> list[ServerState]:
        """Do it with all of them at once; those that it worked with. The others are out."""
        ended = await asyncio.gather(*(do(member) for member in members), return_exceptions=True)
        done = []
        for member, end in zip(members, ended, strict=True):
            if isinstance(end, Unreachable) or (isinstance(end, RequestRefused) and not strict):
                self.fleet.lose(member, end)
            elif isinstance(end, BaseException):
                raise end
            else:
                done.append(member)
        return done

    async def without(self, members: Sequence[ServerState], failed: Mapping[str, str]) -> list[ServerState]:
        """All but those at these addresses, which the trainer could not send to."""
        lost = [member for member in members if member.server.url in failed]
        for member in lost:
            self.fleet.lose(member, failed[member.server.url])
        await self.each(lost, self.tear)
        return [member for member in members if member not in lost]

    async def open(self, member: ServerState) -> None:
        """Meet the trainer if need be, stop drawing, and expect weights."""
        server = member.server
        if await self._examine(member):
            await server.ask_workers("grpo_abandoned")
        if not member.met:
            info, meanwhile = self.transfer.meeting(server.url, await server.workers())
            await asyncio.gather(server.join(info), asyncio.to_thread(meanwhile))
            member.met = True
        await server.pause(self.pause)
        await server.begin()

    async def finish(self, member: ServerState, newest: NewestWeights) -> None:
        """That was all; go on drawing. Raises StaleEngine where it now holds other weights than were sent."""
        await member.server.finish()
        await self._verify(member, newest)
        await member.server.forget()
        await member.server.relabel(newest.label)  # last: with this label it counts as well
        await member.server.resume()

    async def _verify(self, member: ServerState, newest: NewestWeights) -> None:
        server = member.server
        receipts = await server.ask_workers("grpo_receipt")
        if wrong := [one["received"] for one in receipts if Fingerprint(*one["received"]) != newest.sent]:
            raise StaleEngine(f"{server.url}: got weights {Fingerprint(*wrong[0])}, wanted {newest.sent} as sent")
        if stale := [held for held in _whole(receipts) if held != newest.sent]:
            opened = await server.ask_workers("grpo_opened")
            if all(held == Fingerprint(*opened[0]["received"]) for held in _whole(opened)):
                raise StaleEngine(
                    f"{server.url}: holds weights {stale[0]} after {newest.sent} was sent, wanted the same"
                )
            self.hidden.add(server.url)  # nor could what it was opened with be recognised

    async def tear(self, member: ServerState) -> None:
        """It may hold half of an update: nothing it draws counts, and it may begin anew."""
        self.fleet.lose(member, member.trouble or "a push of weights broke off")
        server = member.server
        with suppress(Unreachable, RequestRefused):
            await server.abort()
            await server.relabel(TORN)
            await server.ask_workers("grpo_abandoned")
            await server.resume()


def _whole(receipts: Sequence[Mapping[str, Any]]) -> list[Fingerprint]:
    """What each replica holds: its workers' shares together."""
    replicas: dict[int, Fingerprint] = {}
    for one in receipts:
        replicas[one["replica"]] = replicas.get(one["replica"], NOTHING) + Fingerprint(*one["held"])
    return list(replicas.values())
