"""vLLM servers elsewhere as an engine: requests go to those that are well, weights to all of them."""

import asyncio
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from grpo_fn.shell.background_worker import BackgroundWorker
from grpo_fn.shell.sampler.fingerprint import NOTHING, weight_fingerprint
from grpo_fn.shell.sampler.interface import (
    EngineCompletion,
    GenerationRequest,
    OnAnswer,
    WeightReceipt,
    ignore_completion,
)
from grpo_fn.shell.vllm.client import Patience, Server, check_sampling_fields
from grpo_fn.shell.vllm.router import NewestWeights, Router, ServerState
from grpo_fn.shell.vllm.vllm_transfer import Transfer, chunks
from grpo_fn.shell.vllm.weight_update import WeightUpdater
from grpo_fn.shell.world import World

T = TypeVar("T")

CONNECT = 5.0  # seconds until a host counts as gone
CONTROL = 30.0  # seconds for a short question
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
        request_seconds: longest wait for a completion, the server's queue and a swap included, seconds.
        swap_seconds: longest step of a swap, seconds; with "wait" one step lasts until the longest completion ends.
        check_seconds: interval between two looks at servers that are out, seconds.
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
        swap_seconds: float,
        check_seconds: float,
        server_timeout: float,
    ) -> None:
        """Raise ValueError for knobs that make no sense. No server is asked anything before the first push."""
        _check_knobs(servers, pause, max_requests, (request_seconds, swap_seconds, check_seconds, server_timeout))
        self._world, self._run, self._seconds, self._closed = world, secrets.token_hex(4), 0.0, False
        self._transfer = transfer()
        patience = Patience(connect=CONNECT, control=CONTROL, generate=request_seconds, swap=swap_seconds)
        key = os.environ.get("VLLM_API_KEY") or None
        made = [Server(url, patience=patience, connections=max_requests + 2, api_key=key) for url in servers]
        self._fleet = Router([ServerState(server) for server in made], server_timeout, asyncio.Semaphore(max_requests))
        expected = {
            "backend": self._transfer.backend,
            "logprobs_mode": "processed_logprobs",
            "dtype": str(dtype).removeprefix("torch."),
        }
        self._swapper = WeightUpdater(self._fleet, self._transfer, expected, pause, check_seconds, world.main)
        self._loop = asyncio.new_event_loop()
        self._worker = BackgroundWorker("vllm servers", timeout=None)
        self._worker.submit(self._loop.run_forever, what="the event loop of the vLLM servers")
        self._start(self._swapper.look_after())

    @property
    def repeatable(self) -> bool:
        """Whether the same requests bring the same tokens again, whatever else is asked; the first push shows it."""
        return self._swapper.repeatable

    @property
    def mixes(self) -> bool:
        """Whether completions that are at work when new weights come go on with them."""
        return self._swapper.pause == "keep"

    @property
    def complaints(self) -> list[str]:
        """Which servers were lost, and which came back."""
        return self._fleet.complaints

    def generate(
        self, asks: Sequence[GenerationRequest], *, how: Mapping[str, Any], on_answer: OnAnswer = ignore_completion
    ) -> list[list[EngineCompletion]]:
        """For every ask an answer to each of its seeds. Any thread may ask, also while weights are pushed.

        `on_answer` is called with every answer in the thread of the event loop, which waits for it.

        Raises ValueError for fields of `how` that vLLM does not know, and RuntimeError before the first push and when
        no server answers in time.
        """
        check_sampling_fields(how)
        if self._fleet.newest is None:
            raise RuntimeError("vLLM servers: got asked for completions before the first push, wanted weights first")
        return self._do(self._fleet.generate(asks, how, on_answer))

    def push(self, weights: Iterator[tuple[str, Tensor]], *, version: int) -> WeightReceipt:
        """Give these weights to every server. All ranks call it and go through all of them; the main one sends.

        Raises StaleEngine when a server has others afterwards, and RuntimeError when none has them in the end.
        """
        began = time.monotonic()
        if not self._world.main:
            deque(weights, maxlen=0)  # goes through all of them
        fed = self._world.agree(partial(self._send, weights, version), what="handing weights to the vLLM servers")
        self._do(_called(self._fleet.mark_updated, fed.newest, fed.urls))
        if not fed.urls:
            self._do(self._fleet.wait_live(f"version {version} of the weights"))
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
            "engine/servers": float(len(self._fleet.live)),
            "engine/push_seconds": seconds,
            **{f"engine/{name}": float(counts[name]) for name in counted},
        }

    def close(self) -> None:
        """Hang up and delete what is left of weights; requests still under way fail. The servers go on."""
        if self._closed:
            return
        self._closed = True
        self._do(self._hang_up())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._worker.shutdown()
        self._loop.close()
        self._transfer.close()

    async def _hang_up(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for member in self._fleet.members:
            await member.server.close()

    def _take_counts(self) -> dict[str, int]:
        counts = self._fleet.counts.copy()
        self._fleet.counts.clear()
        return counts

    def _send(self, weights: Iterator[tuple[str, Tensor]], version: int) -> UpdatedServer:
        """On the rank that sends. Whatever happens it goes through all weights, as the other ranks do."""
        self._do(self._swapper.swapping.acquire())
        taking: list[ServerState] = []
        try:
            taking = self._do(self._swapper.muster())
            self._transfer.begin()
            return self._feed(taking, weights, version)
        except BaseException:
            self._do(self._swapper.each(taking, self._swapper.tear))
            raise
        finally:
            deque(weights, maxlen=0)  # goes through all of them
            self._do(_called(self._swapper.swapping.release))

    def _feed(self, taking: list[ServerState], weights: Iterator[tuple[str, Tensor]], version: int) -> UpdatedServer:
        swapper, sent = self._swapper, NOTHING
        taking = self._do(swapper.swap(taking, swapper.open))
        for chunk in chunks(weights, self._transfer.chunk_bytes):
            for _, tensor in chunk:
                sent += weight_fingerprint(tensor)
            info = self._transfer.offer(chunk)
            under_way = self._start(swapper.swap(taking, lambda member, info=info: member.server.take(info)))
            failed = self._transfer.carry(chunk, [member.server.url for member in taking])
            taking = self._do(swapper.without(_result(under_way), failed))
            self._transfer.chunk_received()
        self._transfer.end()
        newest = NewestWeights(self._run, version, sent)
        taking = self._do(swapper.swap(taking, partial(swapper.finish, newest=newest)))
        urls = [member.server.url for member in taking]
        if not urls and self._transfer.again() is None:
            raise RuntimeError(
                f"vLLM servers: got version {version} to none of them, wanted one: {self._fleet.troubles()}"
            )
        held = None if swapper.hidden.intersection(urls) else sent
        return UpdatedServer(newest, WeightReceipt(version, sent, held), urls)

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
            f"servers: got max_requests {max_requests} and (request_seconds, swap_seconds, check_seconds, "
            f"server_timeout) {tuple(seconds)}, wanted at least 1 and more than 0"
        )
