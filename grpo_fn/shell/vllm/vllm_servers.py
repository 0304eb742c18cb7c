"""vLLM servers elsewhere as an engine: requests go to those that are well, weights to all of them."""

import asyncio
import os
import secrets
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from grpo_fn.shell.background_worker import BackgroundWorker
from grpo_fn.shell.sampler.fingerprint import NOTHING, Fingerprint, weight_fingerprint
from grpo_fn.shell.sampler.interface import (
    EngineCompletion,
    GenerationRequest,
    OnAnswer,
    StaleEngine,
    WeightReceipt,
    ignore_completion,
)
from grpo_fn.shell.vllm.client import (
    RequestRefused,
    Server,
    ServerCompletion,
    Unreachable,
    check_sampling_fields,
)
from grpo_fn.shell.vllm.vllm_transfer import CHUNK_BYTES, Transfer, chunks
from grpo_fn.shell.world import World

# -- requests, to servers that are well


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
                    self.drop_server(member, error)
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

    def drop_server(self, member: ServerState, why: Exception | str) -> None:
        """It is out, from now on."""
        member.trouble, member.met = str(why), False
        if member.live:
            member.live = False
            self.counts["servers_lost"] += 1
            self._complain(f"vLLM server {member.server.url} is out: {why}")

    def add_server(self, member: ServerState) -> None:
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
                self.add_server(member)
            else:
                self.drop_server(member, member.trouble or "has not been given the newest weights")
        self.proven = True

    def _complain(self, text: str) -> None:
        if len(self.complaints) < COMPLAINTS and text not in self.complaints:
            self.complaints.append(text)


# -- new weights: to all servers at once in a push, or to one that comes back


PARTIAL_LABEL = "torn"  # label of weights of which only a part was loaded
CHECK_SECONDS = 5.0  # between two looks at servers that are out
READY_POLL = 1.0  # seconds between two looks at servers that a push waits for


@dataclass(eq=False)
class WeightUpdater:
    """Gives the servers new weights. `expected` is how servers have to have been started: what their workers say."""

    router: Router
    transfer: Transfer
    expected: Mapping[str, Any]
    pause: str
    sends_weights: bool  # whether this rank is the one that gives weights
    repeatable: bool = False  # whether the servers draw the same again
    unreadable: set[str] = field(default_factory=set)  # servers whose layout does not show what they hold
    swapping: asyncio.Lock = field(default_factory=asyncio.Lock)

    # Who is well

    async def ready_servers(self) -> list[ServerState]:
        """All that answer and were started as they have to be; before the first push the rest are waited for.

        Raises RequestRefused for one that was started otherwise then, and RuntimeError when no server answers in time.
        """
        until = time.monotonic() + self.router.deadline
        while True:
            well = await self.each(self.router.members, self._examine, strict=not self.router.proven)
            if len(well) == len(self.router.members) or (well and (self.router.proven or time.monotonic() > until)):
                return well
            if time.monotonic() > until:
                raise self.router.given_up("new weights")
            await asyncio.sleep(min(READY_POLL, CHECK_SECONDS))

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
        if not (await member.server.version()).startswith(f"{self.router.newest.run}-" if self.router.newest else "\0"):
            member.met = False
        return described["updating"]

    async def recover_servers(self) -> None:
        """For ever: take back those that are out, once they are well and have the newest weights.

        The rank that gives weights looks at the others, too: it may have no work there that would fail.
        """
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            if self.router.newest is not None and not self.swapping.locked():
                await asyncio.gather(
                    *(self._recover(one) for one in self.router.members if self.sends_weights or not one.live)
                )

    async def _recover(self, member: ServerState) -> None:
        try:
            await self._examine(member)  # a server that hangs does so here, where no push waits for it
            async with self.swapping:
                await self._bring_up_to_date(member)
        except Exception as error:  # whatever answers at that address: looking after the others goes on
            self.router.drop_server(member, error)

    async def _bring_up_to_date(self, member: ServerState) -> None:
        updating = await self._examine(member)
        if updating or await member.server.version() != self.router.newest.label:
            chunks = self.transfer.again() if self.sends_weights else None
            self.router.drop_server(
                member, f"{member.server.url}: has other weights, and gets the newest with the next push"
            )
            if chunks is None:
                return
            try:
                await self.open(member)
                for info in chunks:
                    await member.server.take(info)
                await self.finish(member, self.router.newest)
            except BaseException:
                await self.discard_update(member)
                raise
        elif self.sends_weights and not member.live:
            await member.server.resume()  # it may have been lost with its last call of a swap
        self.router.add_server(member)

    # The steps of a swap

    async def swap(
        self, members: Sequence[ServerState], step: Callable[[ServerState], Awaitable[Any]]
    ) -> list[ServerState]:
        """A step of it with all of them at once; those that it worked with. The others are out, and left in order."""
        done = await self.each(members, step)
        await self.each([member for member in members if member not in done], self.discard_update)
        return done

    async def each(
        self, members: Sequence[ServerState], do: Callable[[ServerState], Awaitable[Any]], *, strict: bool = False
    ) -> list[ServerState]:
        """Do it with all of them at once; those that it worked with. The others are out."""
        ended = await asyncio.gather(*(do(member) for member in members), return_exceptions=True)
        done = []
        for member, end in zip(members, ended, strict=True):
            if isinstance(end, Unreachable) or (isinstance(end, RequestRefused) and not strict):
                self.router.drop_server(member, end)
            elif isinstance(end, BaseException):
                raise end
            else:
                done.append(member)
        return done

    async def without(self, members: Sequence[ServerState], failed: Mapping[str, str]) -> list[ServerState]:
        """All but those at these addresses, which the trainer could not send to."""
        lost = [member for member in members if member.server.url in failed]
        for member in lost:
            self.router.drop_server(member, failed[member.server.url])
        await self.each(lost, self.discard_update)
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
        await self.verify_weights(member, newest)
        await member.server.forget()
        await member.server.relabel(newest.label)  # last: with this label it counts as well
        await member.server.resume()

    async def verify_weights(self, member: ServerState, newest: NewestWeights) -> None:
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
            self.unreadable.add(server.url)  # nor could what it was opened with be recognised

    async def discard_update(self, member: ServerState) -> None:
        """It may hold half of an update: nothing it draws counts, and it may begin anew."""
        self.router.drop_server(member, member.trouble or "a push of weights broke off")
        server = member.server
        with suppress(Unreachable, RequestRefused):
            await server.abort()
            await server.relabel(PARTIAL_LABEL)
            await server.ask_workers("grpo_abandoned")
            await server.resume()


def _whole(receipts: Sequence[Mapping[str, Any]]) -> list[Fingerprint]:
    """What each replica holds: its workers' shares together."""
    replicas: dict[int, Fingerprint] = {}
    for one in receipts:
        replicas[one["replica"]] = replicas.get(one["replica"], NOTHING) + Fingerprint(*one["held"])
    return list(replicas.values())


T = TypeVar("T")

PAUSES = ("wait", "keep")


class UpdatedServer(NamedTuple):
    """What the rank that gives weights sends to the others."""

    newest: NewestWeights
    receipt: WeightReceipt
    urls: list[str]


class DedicatedEngine:
    """An engine of vLLM servers, each started with tools/launch/vllm_server.sh. Every rank has one.

    A server draws nothing while it takes weights in; `pause` says what becomes of requests at work there. "wait": they
    end first, so each comes from one version of the weights, and a run can be repeated. "keep": they go on with the new
    weights where they stopped, which is faster, and mixes versions (`EngineCompletion.oldest`). Servers queue what they
    cannot hold. Before the first push all servers are waited for. Without any server for too long a RuntimeError names
    all of them.

    `complaints` are warnings for the log; clear it once logged. The key that servers want comes from the environment
    (VLLM_API_KEY): no file of the run holds it.

    Args:
        world: the ranks of the run.
        dtype: of the computation; the servers have to compute in it.
        servers: addresses of the servers, all different.
        transfer: makes the carrier of the weights.
        pause: "wait": requests at work end before new weights; "keep": they go on with them.
        max_requests: requests under way from one rank, each one completion.
        request_seconds: longest wait for a completion, the server's queue and a swap included, and longest step of a
            swap, which with "wait" lasts until the longest completion ends; seconds.
        server_timeout: longest time without any server, and wait for all before the first push, seconds.

    Raises:
        ValueError: for knobs that make no sense.
    """

    ranks = 1
    overlaps = True

    def __init__(
        self,
        world: World,
        dtype: torch.dtype,
        *,
        servers: Sequence[str],
        transfer: Callable[[], Transfer],
        pause: str,
        max_requests: int,
        request_seconds: float,
        server_timeout: float,
    ) -> None:
        """Raise ValueError for knobs that make no sense. No server is asked anything before the first push."""
        _check_knobs(servers, pause, max_requests, (request_seconds, server_timeout))
        self._world, self._run, self._seconds, self._closed = world, secrets.token_hex(4), 0.0, False
        self._transfer = transfer()
        # Two connections more than requests: looking at servers and swaps do not wait behind completions.
        limits = {"seconds": request_seconds, "connections": max_requests + 2}
        key = os.environ.get("VLLM_API_KEY") or None
        members = [ServerState(Server(url, **limits, api_key=key)) for url in servers]
        self._router = Router(members, server_timeout, asyncio.Semaphore(max_requests))
        expected = {
            "backend": self._transfer.backend,
            "logprobs_mode": "processed_logprobs",
            "dtype": str(dtype).removeprefix("torch."),
        }
        self._updater = WeightUpdater(self._router, self._transfer, expected, pause, world.main)
        self._loop = asyncio.new_event_loop()
        self._worker = BackgroundWorker("vllm servers", timeout=None)
        self._worker.submit(self._loop.run_forever, what="the event loop of the vLLM servers")
        self._start(self._updater.recover_servers())

    @property
    def repeatable(self) -> bool:
        """Whether the same requests bring the same tokens again, whatever else is asked; the first push shows it."""
        return self._updater.repeatable

    @property
    def mixes(self) -> bool:
        """Whether completions that are at work when new weights come go on with them."""
        return self._updater.pause == "keep"

    @property
    def complaints(self) -> list[str]:
        """Which servers were lost, and which came back."""
        return self._router.complaints

    def generate(
        self, asks: Sequence[GenerationRequest], *, how: Mapping[str, Any], on_answer: OnAnswer = ignore_completion
    ) -> list[list[EngineCompletion]]:
        """For every ask an answer to each of its seeds. Any thread may ask, also while weights are pushed.

        `on_answer` is called with every answer in the thread of the event loop, which waits for it.

        Raises ValueError for fields of `how` that vLLM does not know, and RuntimeError before the first push and when
        no server answers in time.
        """
        check_sampling_fields(how)
        if self._router.newest is None:
            raise RuntimeError("vLLM servers: got asked for completions before the first push, wanted weights first")
        return self._do(self._router.generate(asks, how, on_answer))

    def push(self, weights: Iterator[tuple[str, Tensor]], *, version: int) -> WeightReceipt:
        """Give these weights to every server. All ranks call it and go through all of them; the main one sends.

        Raises StaleEngine when a server has others afterwards, and RuntimeError when none has them in the end.
        """
        began = time.monotonic()
        if not self._world.main:
            deque(weights, maxlen=0)  # goes through all of them
        fed = self._world.agree(partial(self._send, weights, version), what="handing weights to the vLLM servers")
        self._do(_called(self._router.mark_updated, fed.newest, fed.urls))
        if not fed.urls:
            self._do(self._router.wait_live(f"version {version} of the weights"))
        self._seconds += time.monotonic() - began
        return fed.receipt

    def rest(self) -> None:
        """Nothing of ours is on the trainer's device."""

    def figures(self) -> dict[str, float]:
        """Servers that are in; since last asked: seconds of pushing, requests asked again, comings and goings."""
        counts, seconds = self._do(_called(self._take_counts)), self._seconds
        self._seconds = 0.0
        counted = ("requests_retried", "servers_lost", "servers_recovered")
        return {
            "engine/servers": float(len(self._router.live)),
            "engine/push_seconds": seconds,
            **{f"engine/{name}": float(counts[name]) for name in counted},
        }

    def close(self) -> None:
        """Hang up and delete what is left of weights; requests still under way fail. The servers go on."""
        if self._closed:
            return
        self._closed = True
        self._do(self._disconnect())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._worker.shutdown()
        self._loop.close()
        self._transfer.close()

    async def _disconnect(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for member in self._router.members:
            await member.server.close()

    def _take_counts(self) -> dict[str, int]:
        counts = self._router.counts.copy()
        self._router.counts.clear()
        return counts

    def _send(self, weights: Iterator[tuple[str, Tensor]], version: int) -> UpdatedServer:
        """On the rank that sends. Whatever happens it goes through all weights, as the other ranks do."""
        self._do(self._updater.swapping.acquire())
        taking: list[ServerState] = []
        try:
            taking = self._do(self._updater.ready_servers())
            self._transfer.begin()
            return self._push_weights(taking, weights, version)
        except BaseException:
            self._do(self._updater.each(taking, self._updater.discard_update))
            raise
        finally:
            deque(weights, maxlen=0)  # goes through all of them
            self._do(_called(self._updater.swapping.release))

    def _push_weights(
        self, taking: list[ServerState], weights: Iterator[tuple[str, Tensor]], version: int
    ) -> UpdatedServer:
        updater, sent = self._updater, NOTHING
        taking = self._do(updater.swap(taking, updater.open))
        for chunk in chunks(weights, CHUNK_BYTES):
            for _, tensor in chunk:
                sent += weight_fingerprint(tensor)
            info = self._transfer.offer(chunk)
            under_way = self._start(updater.swap(taking, lambda member, info=info: member.server.take(info)))
            failed = self._transfer.carry(chunk, [member.server.url for member in taking])
            taking = self._do(updater.without(_result(under_way), failed))
            self._transfer.chunk_received()
        self._transfer.end()
        newest = NewestWeights(self._run, version, sent)
        taking = self._do(updater.swap(taking, partial(updater.finish, newest=newest)))
        urls = [member.server.url for member in taking]
        if not urls and self._transfer.again() is None:
            raise RuntimeError(
                f"vLLM servers: got version {version} to none of them, wanted one: {self._router.troubles()}"
            )
        stored = None if updater.unreadable.intersection(urls) else sent
        return UpdatedServer(newest, WeightReceipt(version, sent, stored), urls)

    def _start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return _result(self._start(work))


def _result(under_way: Future[T]) -> T:
    """What it comes to; where this thread is interrupted, it is called off."""
    try:
        return under_way.result()
    except BaseException:
        under_way.cancel()
        raise


async def _called(f: Callable[..., T], *args: Any) -> T:
    """For a plain function that has to run in the event loop."""
    return f(*args)


def _check_knobs(servers: Sequence[str], pause: str, max_requests: int, seconds: Sequence[float]) -> None:
    if isinstance(servers, str) or not servers or len({*servers}) < len(servers):
        raise ValueError(f"servers: got {servers!r}, wanted a list of different addresses, as in ('http://host:8000',)")
    if pause not in PAUSES:
        raise ValueError(f"pause: got {pause!r}, wanted 'wait' or 'keep'")
    if max_requests < 1 or not all(one > 0 for one in seconds):
        raise ValueError(
            f"servers: got max_requests {max_requests} and (request_seconds, server_timeout) {tuple(seconds)}, "
            "wanted at least 1 and more than 0"
        )
