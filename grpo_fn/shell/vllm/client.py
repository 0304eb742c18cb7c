"""One vLLM server over HTTP: completions of token ids, and the routes with which a trainer changes its weights.

A call ends in an answer, in `Unreachable` (no server, the time is up, the server broke: others may answer) or in
`RequestRefused` (the request is wrong, or the way the server was started: a second try would not help).
"""

import os
from collections.abc import Mapping, Sequence
from functools import partialmethod
from typing import Any, NamedTuple

import httpx2

CONNECT = 5.0  # seconds until a host counts as gone
CONTROL = 30.0  # seconds for a short question
KEEP_ALIVE = 2.0  # seconds; the server hangs up after 5, and a request sent at that moment would be lost
NO_LOGP = -9999.0  # what the server sends for a log-prob that is missing, NaN or minus infinity
STOPPED = {"stop": True, "length": False}  # by finish_reason
EXCERPT = 500  # characters of a server's complaint
ADVICE = {  # by the status of a refusal
    401: ", expected the server's key in VLLM_API_KEY",
    **dict.fromkeys((403, 404), ", expected a vLLM server started as tools/launch/vllm_server.sh does"),
}


class Unreachable(RuntimeError):
    """No answer, or one that says that the server cannot go on."""


class RequestRefused(RuntimeError):
    """The server is well and will not do this."""


class ServerCompletion(NamedTuple):
    """The answer to one request."""

    tokens: list[int]
    logp: list[float]
    stopped: bool
    versions: list[str]  # labels of the weights that drew the tokens, in their order


class Server:
    """A server at `url`. For one event loop; many calls may be under way at once.

    `seconds` is how long a completion may take, with its wait in the server's queue and through a swap of weights, and
    how long a step of a swap. The key of a server that needs one comes from the environment (VLLM_API_KEY): no file of
    the run holds it.
    """

    def __init__(self, url: str, *, seconds: float, connections: int) -> None:
        """Raise ValueError for an address that is none. Nothing is sent yet."""
        if not url.startswith(("http://", "https://")) or not httpx2.URL(url).host:
            raise ValueError(f"server: got {url!r}, expected an address like http://host:8000")
        self.url = url.rstrip("/")
        self.seconds = seconds
        key = os.environ.get("VLLM_API_KEY")
        # Proxies of the environment are for the world outside; weights and rollouts stay inside.
        self._client = httpx2.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx2.Limits(max_connections=connections, keepalive_expiry=KEEP_ALIVE),
            trust_env=False,
            verify=self.url.startswith("https"),  # reading the certificates takes its time
        )

    async def close(self) -> None:
        """Hang up; the server drops this client's requests that still wait."""
        await self._client.aclose()

    async def generate(self, prompt: tuple[int, ...], seed: int, params: Mapping[str, Any]) -> ServerCompletion:
        """One completion; `params` are fields of vLLM's SamplingParams.

        One request for each seed: of several samples in one request vLLM gives sample i the seed plus i.
        """
        request = {"token_ids": [*prompt], "sampling_params": {**params, "seed": seed, "n": 1, "logprobs": 0}}
        answer = await self.post("/inference/v1/generate", json=request, seconds=self.seconds)
        choice = answer["choices"][0]
        if choice["finish_reason"] not in STOPPED:
            raise Unreachable(f"{self.url}: got a completion that ended with {choice['finish_reason']!r}")
        logp = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        if len(logp) != len(choice["token_ids"]) or NO_LOGP in logp:
            raise RequestRefused(
                f"{self.url}: got {len(logp)} log-probs for {len(choice['token_ids'])} tokens, {logp.count(NO_LOGP)} "
                "of them missing or no number, expected one for each: is there a NaN among the weights?"
            )
        versions = [span["version"] for span in choice.get("weight_versions") or []]
        return ServerCompletion(choice["token_ids"], logp, STOPPED[choice["finish_reason"]], versions)

    async def prompt_logp(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs of given tokens but the first, each after those before it, in nats, at temperature 1 whatever is
        sent: the server does not divide the logits of a prompt."""
        request = {"prompt": [*tokens], "prompt_logprobs": 0, "max_tokens": 1, "temperature": 0.0}
        answer = await self.post("/v1/completions", json=request, seconds=self.seconds)
        entries = (answer["choices"][0].get("prompt_logprobs") or [None])[1:]
        by_token = zip(tokens[1:], entries, strict=False)
        logp = [(entry or {}).get(str(token), {}).get("logprob") for token, entry in by_token]
        if len(logp) != len(tokens) - 1 or not all(isinstance(x, float) and NO_LOGP < x <= 0.0 for x in logp):
            raise RequestRefused(
                f"{self.url}: got prompt_logprobs {str(entries)[:EXCERPT]} for the tokens {str([*tokens])[:EXCERPT]}, "
                "expected a log-prob of each but the first"
            )
        return logp

    async def rpc(self, method: str) -> list[dict[str, Any]]:
        """The values of a method of `worker_extension.Extension` on all workers."""
        return (await self.post("/collective_rpc", json={"method": method}, seconds=self.seconds))["results"]

    async def version(self) -> str:
        """The label of the weights that it has."""
        return (await self.get("/weight_info"))["weight_version"]

    async def _call(
        self,
        verb: str,
        path: str,
        *,
        json: dict[str, Any] | None = None,
        params: dict[str, Any] | None = None,
        seconds: float = CONTROL,
    ) -> dict[str, Any]:
        """The answer to a request with this body and this query; {} if it is empty."""
        timeout = httpx2.Timeout(seconds, connect=CONNECT)
        try:
            answer = await self._client.request(verb, path, timeout=timeout, json=json, params=params)
        except httpx2.TimeoutException as error:
            raise Unreachable(f"{self.url}{path}: got no answer ({type(error).__name__}) within {timeout}") from error
        except (httpx2.HTTPError, RuntimeError) as error:  # RuntimeError: closed meanwhile
            raise Unreachable(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        text = answer.text[:EXCERPT]
        if answer.status_code >= 500:
            raise Unreachable(f"{self.url}{path}: got status {answer.status_code}: {text}")
        if answer.status_code >= 400:
            advice = ADVICE.get(answer.status_code, "")
            raise RequestRefused(f"{self.url}{path}: got status {answer.status_code}{advice}: {text}")
        try:
            return answer.json() if answer.content else {}
        except ValueError as error:
            raise Unreachable(f"{self.url}{path}: got {text!r}, expected JSON") from error

    get, post = partialmethod(_call, "GET"), partialmethod(_call, "POST")
