"""A teacher on vLLM servers: log-probs of given tokens over HTTP.

Any vLLM server of the model will do; nothing is sent to it but token ids. It gives the log-probs of a prompt's tokens
at temperature 1 alone (verl #5592).
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo_fn.core.batch import lengths
from grpo_fn.core.partials import check_positive
from grpo_fn.core.types import Rollout
from grpo_fn.shell.vllm.client import RequestRefused, Server, Unreachable

T = TypeVar("T")

RETRY_SECONDS = 0.5  # between two rounds of requests to servers that have all failed
IDS = 512  # token ids in one question about the tokenizer


@dataclass(frozen=True, kw_only=True)
class VllmTeacher:
    """A frozen model that vLLM servers have, all the same one.

    Args:
        servers: their addresses.
        max_model_len: most tokens that each of them reads, one more than a row may have.
        max_requests: requests under way, each one row.
        request_seconds: longest wait for one answer, seconds.
        server_timeout: longest time in which no server answers a request, seconds.

    Raises:
        ValueError: for numbers and addresses that are none.
    """

    servers: Sequence[str]
    max_model_len: int
    max_requests: int
    request_seconds: float
    server_timeout: float

    def __post_init__(self) -> None:
        check_positive(servers=len(self.servers), max_model_len=self.max_model_len, max_requests=self.max_requests)
        for name in ("request_seconds", "server_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"VllmTeacher.{name}: got {getattr(self, name)} s, expected more than 0")
        self._clients()

    def check_temperature(self, temperature: float) -> None:
        """Raise ValueError for a temperature at which a server cannot answer."""
        if temperature != 1.0:
            raise ValueError(
                f"sections.Sampling.temperature: got {temperature} with a teacher on vLLM servers, expected 1.0: they "
                "say the log-probs of given tokens without temperature, and the two would not be comparable"
            )

    def check_server(self, name: str, tokenizer: PreTrainedTokenizerBase, vocabulary: int, longest: int | None) -> None:
        """Raise ValueError unless every server can read what the policy writes; RuntimeError when no answer comes.

        Its length, the text of every token of the policy's tokenizer and the log-prob of the policy's last id are
        compared. Tokens that are the same text to both, as pieces of a character are, are not distinguished.
        """
        if longest is None or longest + 1 > self.max_model_len:
            raise ValueError(
                f"sections.Teacher.models: got {name!r} with VllmTeacher.max_model_len {self.max_model_len}, expected "
                f"at least {'no limit' if longest is None else longest + 1}, or less sections.Sampling.max_total_tokens"
            )
        for i in range(len(self.servers)):
            check = lambda server: _check(server, name, self.max_model_len, tokenizer, vocabulary)  # noqa: E731
            self._answers([check], slice(i, i + 1))

    def logp(self, rollout: Rollout) -> Float[Tensor, "B T"]:
        """Log-probs of a rollout's sampled tokens in nats; 0 where nothing was sampled.

        Raises RuntimeError when no server has answered for `server_timeout` seconds, or one refuses a row.
        """
        rows = [tokens[:n] for tokens, n in zip(rollout.tokens.tolist(), lengths(rollout.mask).tolist(), strict=True)]
        answers = self._answers([lambda server, row=row: server.prompt_logp(row) for row in rows])
        out = torch.zeros(rollout.mask.shape, dtype=rollout.logp_sampled.dtype)
        for b, logp in enumerate(answers):
            out[b, 1 : len(logp) + 1] = torch.tensor(logp)
        return torch.where(rollout.mask, out.to(rollout.mask.device), 0.0)

    def _answers(
        self, requests: Sequence[Callable[[Server], Coroutine[Any, Any, T]]], of: slice = slice(None)
    ) -> list[T]:
        """The answers, in order; each may come from any of these servers."""

        async def gather() -> list[T]:
            clients, slots = self._clients()[of], asyncio.Semaphore(self.max_requests)
            tasks = [
                asyncio.create_task(self._answer(request, clients, i, slots)) for i, request in enumerate(requests)
            ]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                for client in clients:
                    await client.close()

        return asyncio.run(gather())

    async def _answer(
        self,
        request: Callable[[Server], Coroutine[Any, Any, T]],
        servers: list[Server],
        first: int,
        slots: asyncio.Semaphore,
    ) -> T:
        async with slots:
            until, attempt, trouble = None, 0, {}
            while True:
                server = servers[(first + attempt) % len(servers)]
                try:
                    return await request(server)
                except Unreachable as error:
                    trouble[server.url] = str(error)
                    until = until or time.monotonic() + self.server_timeout
                    attempt += 1
                    if time.monotonic() > until:
                        raise RuntimeError(
                            f"the teacher's vLLM servers: got no answer for {self.server_timeout:g} s, expected one: "
                            f"{'; '.join(trouble.values())}"
                        ) from error
                if attempt % len(servers) == 0:
                    await asyncio.sleep(RETRY_SECONDS)

    def _clients(self) -> list[Server]:
        return [Server(url, seconds=self.request_seconds, connections=self.max_requests) for url in self.servers]


async def _check(
    server: Server, name: str, max_model_len: int, tokenizer: PreTrainedTokenizerBase, vocabulary: int
) -> None:
    """Raise ValueError for a server that reads less, or other tokens, than the policy writes."""
    reads = (await server.get("/v1/models"))["data"][0]["max_model_len"]
    if reads < max_model_len:
        raise ValueError(
            f"sections.Teacher.models: got {name!r} ({server.url}), which reads {reads} tokens, expected "
            f"VllmTeacher.max_model_len {max_model_len}"
        )
    try:
        await server.prompt_logp([0, vocabulary - 1])
    except RequestRefused as error:
        raise ValueError(
            f"sections.Teacher.models: got {name!r} ({server.url}), which cannot read id {vocabulary - 1}, expected "
            f"each of the policy's {vocabulary}: {error}"
        ) from error
    ids = sorted(tokenizer.get_vocab().values())
    for i in range(0, len(ids), IDS):
        if (odd := await _first_difference(server, tokenizer, ids[i : i + IDS])) is not None:
            text = await _text(server, [odd])
            raise ValueError(
                f"sections.Teacher.models: got {name!r} ({server.url}) whose tokenizer has {text!r} as token {odd}, "
                f"expected the policy's ({tokenizer.name_or_path}), which has {tokenizer.decode([odd])!r}"
            )


async def _first_difference(server: Server, tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> int | None:
    """The first of these ids that is another text to each; by halving."""
    if await _text(server, ids) == tokenizer.decode(ids):
        return None
    if len(ids) == 1:
        return ids[0]
    half = len(ids) // 2
    first = await _first_difference(server, tokenizer, ids[:half])
    return first if first is not None else await _first_difference(server, tokenizer, ids[half:])


async def _text(server: Server, ids: list[int]) -> str:
    """The text of tokens, by the server's tokenizer."""
    return (await server.post("/detokenize", json={"tokens": ids}))["prompt"]
