"""vLLM servers elsewhere as an engine: requests go to those that answer, weights to all of them.

A server is in (`Router.add_server`) while it answers and has the newest weights, and out (`Router.drop_server`) from
the first failure on. Weights go in by `WeightUpdater`: open, chunks, finish, `verify_weights`, for all servers at once
in `DedicatedEngine.push_weights`, for one that comes back in `recover_servers`.
"""

import asyncio
import secrets
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from grpo_fn.shell.background_worker import BackgroundWorker
from grpo_fn.shell.vllm.client import RequestRefused, Server, ServerCompletion, Unreachable
from grpo_fn.shell.vllm.engine import EngineCompletion, GenerationRequest, OnAnswer, SamplingParams, StaleEngine
from grpo_fn.shell.vllm.fingerprint import NOTHING, Fingerprint, weight_fingerprint
from grpo_fn.shell.vllm.vllm_transfer import CHUNK_BYTES, Transfer, chunks
from grpo_fn.shell.world import World

T = TypeVar("T")

# -- requests, to servers that answer


COMPLAINTS = 16  # kept until they are logged
AFFINITY_SLACK = 8  # a prompt stays with the server that has read it up to so many requests above twice the least


class PushedWeights(NamedTuple):
    """Weights that were pushed, as the rank that sends them announces them to the others."""

    run: str  # another run's weights may have the same version
    version: int
    sent: Fingerprint

    @property
    def label(self) -> str:
        """Their name on servers."""
        return f"{self.run}-{self.version}"


class RoutedServer(Server):
    """A server, and what is known of it."""

    live = False  # it answers, and has the newest weights
    joined = False  # it knows where the trainer's weights come from, since it was started last
    busy = 0  # this run's requests that it works on
    trouble = "has not been asked yet"


class Router:
    """All servers, and the requests to them."""

    def __init__(self, servers: Sequence[RoutedServer], *, deadline: float, max_requests: int) -> None:
        self.servers, self.deadline = servers, deadline
        self.slots = asyncio.Semaphore(max_requests)
        self.newest: PushedWeights | None = None
        self.pushed = False  # whether servers have been given weights once
        self.complaints: list[str] = []
        self.counts = Counter[str]()
        self.changed = asyncio.Event()

    @property
    def live(self) -> list[RoutedServer]:
        """Those that have the newest weights and answer."""
        return [server for server in self.servers if server.live]

    # Completions

    async def generate(
        self, requests: Sequence[GenerationRequest], params: SamplingParams, on_answer: OnAnswer | None
    ) -> list[list[EngineCompletion]]:
        """For every request an answer to each of its seeds; when one fails the others are called off."""
        label = f"{sum(len(request.seeds) for request in requests)} completions of {len(requests)} prompts"

        async def draw(i: int, j: int) -> EngineCompletion:
            answer = await self._draw(requests[i], requests[i].seeds[j], params, label)
            if on_answer is not None:
                on_answer(i, j, answer)
            return answer

        groups = [
            [asyncio.create_task(draw(i, j)) for j in range(len(request.seeds))] for i, request in enumerate(requests)
        ]
        tasks = [task for group in groups for task in group]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return [[task.result() for task in group] for group in groups]

    async def _draw(
        self, request: GenerationRequest, seed: int, params: SamplingParams, label: str
    ) -> EngineCompletion:
        """One completion, from whichever server: weights, prompt and seed decide it."""
        async with self.slots:
            until: float | None = None  # the time it has from its first failure on
            while True:
                await self.wait_live(label)
                server = self._choose(request.prefix)
                server.busy += 1
                weights = self.newest.label
                try:
                    answer = await server.generate(request.prompt, seed, {**params, "max_tokens": request.max_tokens})
                    oldest = self._oldest(server, answer, weights)
                    return EngineCompletion(answer.tokens, answer.logp, answer.stopped, oldest)
                except Unreachable as error:
                    self.drop_server(server, error)
                    self.counts["requests_retried"] += 1
                    until = until or time.monotonic() + self.deadline
                    if time.monotonic() > until:
                        raise self.no_server_error(label) from error
                finally:
                    server.busy -= 1

    def _choose(self, prefix: int | None) -> RoutedServer:
        """The least busy, or the one that holds what such requests begin with, unless that has far more to do."""
        least = min(self.live, key=lambda server: server.busy)
        if prefix is None:
            return least
        home = self.servers[prefix % len(self.servers)]
        return home if home.live and home.busy <= 2 * least.busy + AFFINITY_SLACK else least

    def _oldest(self, server: Server, answer: ServerCompletion, label: str) -> int:
        """Version of the oldest token; `label` is of the weights that the server had before, if it names none."""
        versions = [name.removeprefix(f"{self.newest.run}-") for name in answer.versions or [label]]
        if strange := [version for version in versions if not version.isdigit()]:
            raise Unreachable(f"{server.url}: drew with weights {strange}, which are not this run's")
        return min(map(int, versions))

    async def wait_live(self, label: str) -> None:
        """Until there is a server, at most `deadline` seconds."""
        until = time.monotonic() + self.deadline
        while not self.live:
            self.changed.clear()
            try:
                await asyncio.wait_for(self.changed.wait(), until - time.monotonic())
            except TimeoutError:
                raise self.no_server_error(label) from None

    def no_server_error(self, label: str) -> RuntimeError:
        """The exception at the deadline."""
        return RuntimeError(
            f"vLLM servers: got none for {self.deadline:g} s while {label} waited, expected one: {self.troubles()}"
        )

    def troubles(self) -> str:
        """The last error of each."""
        return "; ".join(f"{server.url}: {server.trouble}" for server in self.servers if server.trouble)

    # Which servers are in

    def add_server(self, server: RoutedServer) -> None:
        """It has the newest weights, and is in."""
        if not server.live and self.pushed:
            self.counts["servers_recovered"] += 1
            self._complain(f"vLLM server {server.url} is back")
        server.live, server.trouble = True, ""
        self.changed.set()

    def drop_server(self, server: RoutedServer, reason: Exception | str) -> None:
        """It is out, from now on."""
        server.trouble, server.joined = str(reason), False
        if server.live:
            server.live = False
            self.counts["servers_lost"] += 1
            self._complain(f"vLLM server {server.url} is out: {reason}")

    async def mark_updated(self, newest: PushedWeights, urls: Sequence[str]) -> None:
        """The servers at these addresses have been given the newest weights, by this rank or by another."""
        self.newest = newest
        for server in self.servers:
            if server.url in urls:
                self.add_server(server)
            else:
                self.drop_server(server, server.trouble or "has not been given the newest weights")
        self.pushed = True

    async def take_counts(self) -> Counter[str]:
        """The counts since the last call."""
        counts, self.counts = self.counts, Counter()
        return counts

    def _complain(self, text: str) -> None:
        if len(self.complaints) < COMPLAINTS and text not in self.complaints:
            self.complaints.append(text)


# -- new weights: to all servers at once in a push, or to one that comes back


PARTIAL_LABEL = "torn"  # label of weights of which only a part was loaded
CHECK_SECONDS = 5.0  # between two looks at servers that are out
READY_POLL = 1.0  # seconds between two looks at servers that a push waits for


class WeightUpdater:
    """Gives the servers new weights. `expected` is how they have to have been started: `Extension.grpo_described`."""

    def __init__(
        self, router: Router, transfer: Transfer, *, expected: Mapping[str, str], pause: str, sends_weights: bool
    ) -> None:
        self.router, self.transfer, self.expected, self.pause = router, transfer, expected, pause
        self.sends_weights = sends_weights  # whether this rank is the one that gives weights
        self.repeatable = False  # whether the servers draw the same again; the first push shows it
        self.unreadable: set[str] = set()  # servers whose layout does not show what they hold
        self.swapping = asyncio.Lock()

    # Which servers are ready

    async def ready_servers(self) -> list[RoutedServer]:
        """All that answer and were started as they have to be; before the first push the rest are waited for.

        Raises RequestRefused for one that was started otherwise then, and RuntimeError when no server answers in time.
        """
        until = time.monotonic() + self.router.deadline
        while True:
            ready = await self.each(self.router.servers, self._check_server, strict=not self.router.pushed)
            if len(ready) == len(self.router.servers) or (ready and (self.router.pushed or time.monotonic() > until)):
                return ready
            if time.monotonic() > until:
                raise self.router.no_server_error("new weights")
            await asyncio.sleep(min(READY_POLL, CHECK_SECONDS))

    async def _check_server(self, server: RoutedServer) -> bool:
        """Check that it answers and how it was started; return whether an update was left unfinished.

        Raises RequestRefused if it was started with other settings than the run needs.
        """
        await server.get("/health")
        workers = await server.rpc("grpo_described")
        for described in workers:
            odd = {name: described.get(name) for name in self.expected if described.get(name) != self.expected[name]}
            if odd:
                raise RequestRefused(
                    f"{server.url}: got {odd}, expected {dict(self.expected)}; start it with "
                    "tools/launch/vllm_server.sh"
                )
        self.repeatable = all(described["repeatable"] for described in workers)
        newest = self.router.newest
        if newest is None or not (await server.version()).startswith(f"{newest.run}-"):
            server.joined = False  # it was started again, or another trainer has it
        return any(described["updating"] for described in workers)

    async def recover_servers(self) -> None:
        """For ever: take back servers that were dropped, once they answer and have the newest weights.

        The rank that sends weights checks the others, too: it may have no request there whose failure would show it.
        """
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            if self.router.newest is not None and not self.swapping.locked():
                servers = [server for server in self.router.servers if self.sends_weights or not server.live]
                await asyncio.gather(*map(self._recover, servers))

    async def _recover(self, server: RoutedServer) -> None:
        try:
            await self._check_server(server)  # before the lock: no push waits for a server that hangs
            async with self.swapping:
                await self._bring_up_to_date(server)
        except Exception as error:  # whatever answers at that address: looking after the others continues
            self.router.drop_server(server, error)

    async def _bring_up_to_date(self, server: RoutedServer) -> None:
        updating = await self._check_server(server)
        if updating or await server.version() != self.router.newest.label:
            kept = self.transfer.again() if self.sends_weights else None
            self.router.drop_server(server, f"{server.url}: does not have the newest weights")
            if kept is None:
                return
            try:
                await self.open(server)
                for info in kept:
                    await self.take(server, info)
                await self.finish(server, self.router.newest)
            except BaseException:
                await self.discard_update(server)
                raise
        elif self.sends_weights and not server.live:
            await server.post("/resume")  # it may have been lost with its last call of a swap
        self.router.add_server(server)

    # The steps of a swap

    async def swap(
        self, servers: Sequence[RoutedServer], step: Callable[[RoutedServer], Awaitable[Any]]
    ) -> list[RoutedServer]:
        """Take a step of the swap on all servers; return those that took it. The others discard their update."""
        done = await self.each(servers, step)
        await self.each([server for server in servers if server not in done], self.discard_update)
        return done

    async def each(
        self, servers: Sequence[RoutedServer], step: Callable[[RoutedServer], Awaitable[Any]], *, strict: bool = False
    ) -> list[RoutedServer]:
        """Take a step on all servers at once; return those that took it. The others are dropped."""
        results = await asyncio.gather(*map(step, servers), return_exceptions=True)
        done = []
        for server, result in zip(servers, results, strict=True):
            if isinstance(result, Unreachable) or (isinstance(result, RequestRefused) and not strict):
                self.router.drop_server(server, result)
            elif isinstance(result, BaseException):
                raise result
            else:
                done.append(server)
        return done

    async def open(self, server: RoutedServer) -> None:
        """Meet the trainer if need be, stop drawing, and expect weights."""
        if await self._check_server(server):
            await server.rpc("grpo_abandoned")
        if not server.joined:
            workers = (await server.get("/get_world_size"))["world_size"]
            info, meet = self.transfer.meeting(server.url, workers)
            joining = server.post("/init_weight_transfer_engine", json={"init_info": info}, seconds=server.seconds)
            await asyncio.gather(joining, asyncio.to_thread(meet))
            server.joined = True
        # "wait": requests at work end first; "keep": they stop at once, and go on with the new weights.
        await server.post("/pause", params={"mode": self.pause, "clear_cache": True}, seconds=server.seconds)
        await server.post("/start_weight_update", seconds=server.seconds)

    async def take(self, server: RoutedServer, info: Mapping[str, Any]) -> None:
        """Load a chunk that the transfer offers."""
        await server.post("/update_weights", json={"update_info": info}, seconds=server.seconds)

    async def finish(self, server: RoutedServer, newest: PushedWeights) -> None:
        """That was all; go on drawing. Raises StaleEngine if it now holds other weights than were sent."""
        await server.post("/finish_weight_update", seconds=server.seconds)
        await self.verify_weights(server, newest)
        # What was computed of prompts and of requests at work is wrong with the new weights.
        reset = await server.post("/reset_prefix_cache", params={"reset_running_requests": True})
        if not reset.get("success", True):
            raise Unreachable(f"{server.url}: got a prefix cache of the old weights, expected it to be reset")
        await self._relabel(server, newest.label)  # last: with this label it counts as well
        await server.post("/resume")

    async def verify_weights(self, server: RoutedServer, newest: PushedWeights) -> None:
        """Raise StaleEngine unless each worker received, and each replica holds, what was sent."""
        receipts = await server.rpc("grpo_receipt")
        received = [Fingerprint(*receipt["received"]) for receipt in receipts]
        if wrong := [fingerprint for fingerprint in received if fingerprint != newest.sent]:
            raise StaleEngine(f"{server.url}: got weights {wrong[0]}, expected {newest.sent} as sent")
        if stale := [held for held in held_by_replica(receipts) if held != newest.sent]:
            opened = await server.rpc("grpo_opened")
            if all(held == Fingerprint(*opened[0]["received"]) for held in held_by_replica(opened)):
                raise StaleEngine(
                    f"{server.url}: holds weights {stale[0]} after {newest.sent} was sent, expected the same"
                )
            self.unreadable.add(server.url)  # nor could what it was opened with be recognised

    async def discard_update(self, server: RoutedServer) -> None:
        """It may hold half of an update: nothing it draws counts, and it may begin anew."""
        self.router.drop_server(server, server.trouble or "a push of weights broke off")
        with suppress(Unreachable, RequestRefused):
            await server.post("/abort_requests", json={})
            await self._relabel(server, PARTIAL_LABEL)
            await server.rpc("grpo_abandoned")
            await server.post("/resume")

    async def _relabel(self, server: RoutedServer, label: str) -> None:
        await server.post("/update_weight_version", json={"new_version": label})


async def raise_if_send_failed(server: RoutedServer, *, failed: Mapping[str, str]) -> None:
    """Raise Unreachable for one of these addresses, which the trainer could not send to."""
    if server.url in failed:
        raise Unreachable(failed[server.url])


def held_by_replica(receipts: Sequence[Mapping[str, Any]]) -> list[Fingerprint]:
    """The fingerprint of each replica: the sum over its workers' shares."""
    replicas: dict[int, Fingerprint] = {}
    for receipt in receipts:
        share = Fingerprint(*receipt["held"])
        replicas[receipt["replica"]] = replicas.get(receipt["replica"], NOTHING) + share
    return [*replicas.values()]


# -- the engine


PAUSES = ("wait", "keep")


class ServerUpdate(NamedTuple):
    """The announcement of the rank that pushes weights to the others."""

    newest: PushedWeights
    held: Fingerprint | None  # by every server; None if the layout of one hides that
    urls: list[str]  # of servers that have them


class DedicatedEngine:
    """An engine of vLLM servers, each started with tools/launch/vllm_server.sh. Every rank has one.

    A server draws nothing while it takes weights in; `pause` says what becomes of requests at work there. "wait": they
    end first, so each comes from one version of the weights, and a run can be repeated. "keep": they go on with the new
    weights where they stopped, which is faster, and mixes versions (`EngineCompletion.oldest`). Servers queue what they
    cannot hold. Before the first push all servers are waited for. Without any server for too long a RuntimeError names
    all of them.

    `complaints` are warnings for the log; clear it once logged.

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
        if isinstance(servers, str) or not servers or len({*servers}) < len(servers):
            raise ValueError(
                f"servers: got {servers!r}, expected a list of different addresses, as in ('http://host:8000',)"
            )
        if pause not in PAUSES:
            raise ValueError(f"pause: got {pause!r}, expected 'wait' or 'keep'")
        if max_requests < 1 or not (request_seconds > 0 and server_timeout > 0):
            raise ValueError(
                f"servers: got max_requests {max_requests} and (request_seconds, server_timeout) "
                f"{(request_seconds, server_timeout)}, expected at least 1 and more than 0"
            )
        self._world, self._run_id, self._seconds, self._closed = world, secrets.token_hex(4), 0.0, False
        self._transfer = transfer()
        # Two connections more than requests: looking at servers and swaps do not wait behind completions.
        routed = [RoutedServer(url, seconds=request_seconds, connections=max_requests + 2) for url in servers]
        self._router = Router(routed, deadline=server_timeout, max_requests=max_requests)
        expected = {
            "backend": self._transfer.backend,
            "logprobs_mode": "processed_logprobs",
            "dtype": str(dtype).removeprefix("torch."),
        }
        self._updater = WeightUpdater(
            self._router, self._transfer, expected=expected, pause=pause, sends_weights=world.main
        )
        self._loop = asyncio.new_event_loop()
        self._worker = BackgroundWorker("vllm servers", timeout=None)
        self._worker.submit(self._loop.run_forever, what="the event loop of the vLLM servers")
        self._start(self._updater.recover_servers())

    @property
    def repeatable(self) -> bool:
        """Whether the same requests bring the same tokens, whatever others there are; the first push shows it."""
        return self._updater.repeatable

    @property
    def mixes(self) -> bool:
        """Whether completions that are at work when new weights come go on with them."""
        return self._updater.pause == "keep"

    @property
    def complaints(self) -> list[str]:
        """The servers that were lost, and those that recovered."""
        return self._router.complaints

    def generate(
        self, requests: Sequence[GenerationRequest], *, params: SamplingParams, on_answer: OnAnswer | None = None
    ) -> list[list[EngineCompletion]]:
        """For every request an answer to each of its seeds. Any thread may call it, also while weights are pushed.

        `on_answer` is called with every answer in the thread of the event loop, which waits for it.

        Raises RuntimeError before the first push and when no server answers in time.
        """
        if self._router.newest is None:
            raise RuntimeError("vLLM servers: got asked for completions before the first push, expected weights first")
        return self._run(self._router.generate(requests, params, on_answer))

    def push_weights(self, weights: Iterator[tuple[str, Tensor]], *, version: int) -> Fingerprint | None:
        """Give these weights to every server. All ranks call it and go through all of them; the main one sends.

        Returns what every server holds then; None if the layout of one hides that.

        Raises StaleEngine when a server has others afterwards, and RuntimeError when none has them in the end.
        """
        began = time.monotonic()
        if not self._world.main:
            deque(weights, maxlen=0)  # every rank takes part in gathering each of them
        update = self._world.agree(
            partial(self._update_servers, weights, version), what="handing weights to the vLLM servers"
        )
        self._run(self._router.mark_updated(update.newest, update.urls))
        if not update.urls:
            self._run(self._router.wait_live(f"version {version} of the weights"))
        self._seconds += time.monotonic() - began
        return update.held

    def _update_servers(self, weights: Iterator[tuple[str, Tensor]], version: int) -> ServerUpdate:
        """On the rank that sends. Whatever happens it goes through all weights, as the other ranks do."""
        self._run(self._updater.swapping.acquire())
        ready: list[RoutedServer] = []
        try:
            ready = self._run(self._updater.ready_servers())
            self._transfer.begin()
            return self._send_chunks(ready, weights, version)
        except BaseException:
            self._run(self._updater.each(ready, self._updater.discard_update))
            raise
        finally:
            deque(weights, maxlen=0)
            self._loop.call_soon_threadsafe(self._updater.swapping.release)

    def _send_chunks(
        self, servers: list[RoutedServer], weights: Iterator[tuple[str, Tensor]], version: int
    ) -> ServerUpdate:
        """Each chunk to all servers at once; it is loaded everywhere before the next one is gathered."""
        updater, sent = self._updater, NOTHING
        servers = self._run(updater.swap(servers, updater.open))
        for chunk in chunks(weights, CHUNK_BYTES):
            for _, tensor in chunk:
                sent += weight_fingerprint(tensor)
            info = self._transfer.offer(chunk)
            taking = self._start(updater.swap(servers, partial(updater.take, info=info)))
            failed = self._transfer.carry(chunk, [server.url for server in servers])
            servers = self._run(updater.swap(_result(taking), partial(raise_if_send_failed, failed=failed)))
        self._transfer.end()
        newest = PushedWeights(self._run_id, version, sent)
        urls = [server.url for server in self._run(updater.swap(servers, partial(updater.finish, newest=newest)))]
        if not urls and self._transfer.again() is None:
            raise RuntimeError(
                f"vLLM servers: got version {version} to none of them, expected one: {self._router.troubles()}"
            )
        return ServerUpdate(newest, None if updater.unreadable.intersection(urls) else sent, urls)

    def rest(self) -> None:
        """Nothing of grpo_fn is on the trainer's device."""

    def figures(self) -> dict[str, float]:
        """Servers that are in; since the last call: seconds of pushing, requests sent again, comings and goings."""
        counts, seconds = self._run(self._router.take_counts()), self._seconds
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
        self._run(self._disconnect())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._worker.shutdown()
        self._loop.close()
        self._transfer.close()

    async def _disconnect(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for server in self._router.servers:
            await server.close()

    def _start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return _result(self._start(work))


def _result(under_way: Future[T]) -> T:
    """Its result; if this thread is interrupted, it is called off."""
    try:
        return under_way.result()
    except BaseException:
        under_way.cancel()
        raise
