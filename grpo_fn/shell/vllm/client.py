"""One vLLM server over HTTP: completions of token ids, and the routes with which a trainer changes its weights.

A call ends in an answer, in `Unreachable` (no server, the time is up, the server broke: others may be asked) or in
`RequestRefused` (the request is wrong, or the way the server was started: asking again would not help).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import httpx2

CONNECT = 5.0  # seconds until a host counts as gone
CONTROL = 30.0  # seconds for a short question
KEEP_ALIVE = 2.0  # seconds; the server hangs up after 5, and a request sent at that moment would be lost
NO_LOGP = -9999.0  # what the server sends for a log-prob that is missing, NaN or minus infinity
ENDED = {"stop": True, "length": False}  # finish_reason -> by itself
# Fields of vLLM's SamplingParams that go over the wire. One that it does not know the server ignores without a word.
FIELDS = {
    *("n", "seed", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "stop", "stop_token_ids"),
    *("ignore_eos", "include_stop_str_in_output", "bad_words", "logit_bias", "allowed_token_ids", "detokenize"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "repetition_detection", "skip_special_tokens"),
    *("spaces_between_special_tokens", "logprobs", "watermarking", "thinking_token_budget", "structured_outputs"),
    *("extra_args", "skip_reading_prefix_cache", "skip_clone"),
}
SHOWN = 500  # characters of a server's complaint
WANTED = {  # by the status of a refusal
    401: ", wanted the server's key in VLLM_API_KEY",
    **dict.fromkeys((403, 404), ", wanted a vLLM server started as tools/launch/vllm_server.sh does"),
}


class Unreachable(RuntimeError):
    """No answer, or one that says that the server cannot go on."""


class RequestRefused(RuntimeError):
    """The server is well and will not do this."""


class ServerCompletion(NamedTuple):
    """What one request was answered with."""

    tokens: list[int]
    logp: list[float]
    stopped: bool
    versions: list[str]  # labels of the weights that drew the tokens, in their order


class Server:
    """A server at `url`. For one event loop; many calls may be under way at once.

    `seconds` is how long a completion may take, with its wait in the server's queue and through a swap of weights, and
    how long a step of a swap.
    """

    def __init__(self, url: str, *, seconds: float, connections: int, api_key: str | None) -> None:
        """Raise ValueError for an address that is none. Nothing is sent yet."""
        if not url.startswith(("http://", "https://")) or not httpx2.URL(url).host:
            raise ValueError(f"server: got {url!r}, wanted an address like http://host:8000")
        self.url = url.rstrip("/")
        self._seconds = seconds
        # Proxies of the environment are for the world outside; weights and rollouts stay inside.
        self._client = httpx2.AsyncClient(
            base_url=self.url,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            limits=httpx2.Limits(max_connections=connections, keepalive_expiry=KEEP_ALIVE),
            trust_env=False,
            verify=self.url.startswith("https"),  # reading the certificates takes its time
        )

    async def close(self) -> None:
        """Hang up; the server drops requests of ours that still wait."""
        await self._client.aclose()

    async def generate(self, prompt: tuple[int, ...], seed: int, how: Mapping[str, Any]) -> ServerCompletion:
        """One completion; `how` are fields of vLLM's SamplingParams.

        One request for each seed: of several samples in one request vLLM gives sample i the seed plus i.
        """
        params = {**how, "seed": seed, "n": 1, "logprobs": 0}
        sent = {"token_ids": list(prompt), "sampling_params": params}
        answer = await self._call("POST", "/inference/v1/generate", self._seconds, json=sent)
        choice = answer["choices"][0]
        if choice["finish_reason"] not in ENDED:
            raise Unreachable(f"{self.url}: got a completion that ended with {choice['finish_reason']!r}")
        logp = [one["logprob"] for one in choice["logprobs"]["content"]]
        if len(logp) != len(choice["token_ids"]) or NO_LOGP in logp:
            raise RequestRefused(
                f"{self.url}: got {len(logp)} log-probs for {len(choice['token_ids'])} tokens, {logp.count(NO_LOGP)} "
                "of them missing or no number, wanted one for each: is there a NaN among the weights?"
            )
        spans = choice.get("weight_versions") or []
        versions = [span["version"] for span in spans]
        return ServerCompletion(choice["token_ids"], logp, ENDED[choice["finish_reason"]], versions)

    async def prompt_logp(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs of given tokens but the first, each after those before it, in nats, at temperature 1 whatever is
        sent: the server does not divide the logits of a prompt."""
        sent = {"prompt": [*tokens], "prompt_logprobs": 0, "max_tokens": 1, "temperature": 0.0}
        answer = await self._call("POST", "/v1/completions", self._seconds, json=sent)
        entries = (answer["choices"][0].get("prompt_logprobs") or [None])[1:]
        logp = [(one or {}).get(str(token), {}).get("logprob") for token, one in zip(tokens[1:], entries, strict=False)]
        if len(logp) != len(tokens) - 1 or not all(isinstance(x, float) and NO_LOGP < x <= 0.0 for x in logp):
            raise RequestRefused(
                f"{self.url}: got prompt_logprobs {str(entries)[:SHOWN]} for the tokens {str([*tokens])[:SHOWN]}, "
                "wanted a log-prob of each but the first"
            )
        return logp

    async def max_model_len(self) -> int:
        """Most tokens that it reads, the one that it draws behind them included."""
        return (await self._call("GET", "/v1/models", CONTROL))["data"][0]["max_model_len"]

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of tokens, by its own tokenizer."""
        return (await self._call("POST", "/detokenize", CONTROL, json={"tokens": [*tokens]}))["prompt"]

    async def check_health(self) -> None:
        """Raise Unreachable unless it says that it is well."""
        await self._call("GET", "/health", CONTROL)

    async def version(self) -> str:
        """The label of the weights that it has."""
        return (await self._call("GET", "/weight_info", CONTROL))["weight_version"]

    async def workers(self) -> int:
        """How many processes hold its weights."""
        return (await self._call("GET", "/get_world_size", CONTROL))["world_size"]

    async def ask_workers(self, method: str) -> list[dict[str, Any]]:
        """What a method of the worker extension says on each worker."""
        return (await self._call("POST", "/collective_rpc", self._seconds, json={"method": method}))["results"]

    async def pause(self, mode: str) -> None:
        """Draw no more tokens, once the requests that are at work are done ("wait") or right away ("keep")."""
        await self._call("POST", "/pause", self._seconds, params={"mode": mode, "clear_cache": True})

    async def resume(self) -> None:
        """Go on."""
        await self._call("POST", "/resume", CONTROL)

    async def forget(self) -> None:
        """Drop what was computed of prompts and of requests at work: with new weights it is wrong."""
        how = {"reset_running_requests": True}
        done = await self._call("POST", "/reset_prefix_cache", CONTROL, params=how)
        if not done.get("success", True):
            raise Unreachable(f"{self.url}: got its cache of prefixes held, wanted it dropped")

    async def abort(self) -> None:
        """End every request that is at work or waits."""
        await self._call("POST", "/abort_requests", CONTROL, json={})

    async def join(self, init_info: dict[str, Any]) -> None:
        """Meet the trainer for the transfers to come."""
        await self._call("POST", "/init_weight_transfer_engine", self._seconds, json={"init_info": init_info})

    async def begin(self) -> None:
        """Weights are about to come."""
        await self._call("POST", "/start_weight_update", self._seconds)

    async def take(self, update_info: dict[str, Any]) -> None:
        """Load these."""
        await self._call("POST", "/update_weights", self._seconds, json={"update_info": update_info})

    async def finish(self) -> None:
        """That was all of them."""
        await self._call("POST", "/finish_weight_update", self._seconds)

    async def relabel(self, label: str) -> None:
        """From now on the weights are called this."""
        await self._call("POST", "/update_weight_version", CONTROL, json={"new_version": label})

    async def _call(self, verb: str, path: str, seconds: float, **sent: Any) -> dict[str, Any]:
        timeout = httpx2.Timeout(seconds, connect=CONNECT)
        try:
            answer = await self._client.request(verb, path, timeout=timeout, **sent)
        except httpx2.TimeoutException as error:
            raise Unreachable(f"{self.url}{path}: got no answer ({type(error).__name__}) within {timeout}") from error
        except (httpx2.HTTPError, RuntimeError) as error:  # RuntimeError: closed meanwhile
            raise Unreachable(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        text = answer.text[:SHOWN]
        if answer.status_code >= 500:
            raise Unreachable(f"{self.url}{path}: got status {answer.status_code}: {text}")
        if answer.status_code >= 400:
            advice = WANTED.get(answer.status_code, "")
            raise RequestRefused(f"{self.url}{path}: got status {answer.status_code}{advice}: {text}")
        try:
            return answer.json() if answer.content else {}
        except ValueError as error:
            raise Unreachable(f"{self.url}{path}: got {text!r}, wanted JSON") from error


def check_sampling_fields(how: Mapping[str, Any]) -> None:
    """Raise ValueError for a field of SamplingParams that is none."""
    if unknown := sorted(set(how) - FIELDS):
        raise ValueError(
            f"sampling: got {', '.join(unknown)}, wanted fields of vLLM's SamplingParams: {sorted(FIELDS)}"
        )
