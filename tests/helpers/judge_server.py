"""An OpenAI-compatible server on this machine that answers as a script says, late and refusals included."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

# What vLLM 0.28 answered to a chat completion request, texts and identities aside.
ANSWER = {
    "id": "chatcmpl-9d5d8b3c6f2f4f1e",
    "object": "chat.completion",
    "created": 1764000000,
    "model": "judge-1",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "", "refusal": None, "tool_calls": []},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ],
    "usage": {"prompt_tokens": 50, "total_tokens": 57, "completion_tokens": 7, "prompt_tokens_details": None},
}


class Reply(NamedTuple):
    """What a request is answered with."""

    body: Any  # JSON, or bytes as they are
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    seconds: float = 0.0  # before it


Script = Callable[[str, int], Reply]  # (text of the user's message, how often it was asked before) -> reply


def said(text: str) -> Reply:
    """A chat completion with this text."""
    choice = ANSWER["choices"][0]
    message = {**choice["message"], "content": text}
    return Reply({**ANSWER, "choices": [{**choice, "message": message}]})


def mark_in(question: str) -> str:
    """The mark of a question."""
    return re.search(r"verdict-[a-p]{12}", question)[0]


@dataclass
class JudgeServer:
    """A server that is up, and what it was asked."""

    url: str
    questions: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Server(ThreadingHTTPServer):
    """Takes many connections at a time."""

    request_queue_size = 256
    daemon_threads = True


@contextmanager
def judge_server(script: Script, *, models: tuple[str, ...] = ("judge-1",)) -> Iterator[JudgeServer]:
    """A server on its own port, until the context is left."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            found = {"object": "list", "data": [{"id": name, "object": "model"} for name in models]}
            self.answer(Reply(found) if self.path == "/v1/models" else Reply({"detail": "Not Found"}, 404))

        def do_POST(self) -> None:
            body = self.rfile.read(size := int(self.headers["Content-Length"]))
            if len(body) < size:  # the client has hung up
                self.close_connection = True
                return
            sent = json.loads(body)
            if self.path != "/v1/chat/completions":
                self.answer(Reply({"detail": "Not Found"}, 404))
                return
            question = sent["messages"][-1]["content"]
            with up.lock:
                before = up.questions.count(question)
                up.questions.append(question)
                up.bodies.append(sent)
                up.headers.append({name.lower(): value for name, value in self.headers.items()})
                up.under_way += 1
                up.most_under_way = max(up.most_under_way, up.under_way)
            reply = script(question, before)
            time.sleep(reply.seconds)
            with up.lock:
                up.under_way -= 1
            self.answer(reply)

        def answer(self, reply: Reply) -> None:
            body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
            try:
                self.send_response(reply.status)
                for name, value in (*reply.headers, ("Content-Length", str(len(body)))):
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    up = JudgeServer(f"http://127.0.0.1:{server.server_address[1]}/v1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield up
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
