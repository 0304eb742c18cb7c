"""A server over a small model in this process, asked over its port."""

import http.client
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from urllib.parse import urlsplit

from fakes import VOCABULARY, qwen2_tied, tokenizer
from torch import nn
from transformers import PreTrainedTokenizerBase

from grpo_fn.serve.endpoint import Endpoint, Served
from grpo_fn.shell.model.hf import Encode, encode_prompt
from grpo_fn.shell.serving.decode_service import DecodeService
from grpo_fn.shell.serving.http_endpoint import JsonServer

SECONDS = 30.0  # that an answer may take in a test


def service(model: nn.Module | None = None, **limits: int) -> DecodeService:
    """Over a model of `fakes`, that has 64 positions."""
    chosen = {"max_rows": 4, "max_tokens": 12, "max_waiting": 64, "logits_chunk_elements": 10**4, **limits}
    return DecodeService(qwen2_tied(VOCABULARY) if model is None else model, tokenizer(), **chosen)


@contextmanager
def served(
    of: DecodeService,
    *,
    stop: tuple[str, ...] = (),
    timeout: float = SECONDS,
    reads: PreTrainedTokenizerBase | None = None,
    encode: Encode = encode_prompt,
) -> Iterator["Client"]:
    """A server over `of`, which is closed with it; `reads` is its tokenizer, None for the tests' own."""
    with closing(JsonServer("127.0.0.1", 0)) as server, closing(of):
        server.start(Endpoint(Served(of, reads or tokenizer(), encode, stop, "tiny", timeout)).routes())
        yield Client(server.url)


class Client:
    """Raw HTTP, a connection for each question."""

    def __init__(self, url: str) -> None:
        self.url = url

    def send(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, dict]:
        """Status and answer."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=SECONDS)
        with closing(connection):
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def ask(self, path: str, **body: object) -> dict:
        """The answer to a question that is right."""
        status, answer = self.send("POST", path, json.dumps(body).encode())
        assert status == 200, answer
        return answer

    def error(self, path: str, **body: object) -> tuple[int, dict]:
        """Status and error of one that is not."""
        status, answer = self.send("POST", path, json.dumps(body).encode())
        assert answer.keys() == {"error"}, answer
        assert answer["error"].keys() == {"message", "type", "param", "code"}
        return status, answer["error"]
