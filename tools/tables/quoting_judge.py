"""A judge on this machine for the red team: an OpenAI-compatible server that quotes the reply it is asked about.

It grades nothing: its answer is the reply, word for word, and then the least grade behind the mark. So what a reply is
paid is what it got past the reader of verdicts by being quoted.
"""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = "quoting"
FENCED = re.compile(r"^(text-[a-p]{12})\n(.*)\n\1$", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"(verdict-[a-p]{12}): N\Z")


@contextmanager
def quoting_judge() -> Iterator[str]:
    """Serve until the context is left; the endpoint, up to the version."""
    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def answer_to(question: str) -> str:
    """What the judge says to a user's message: the reply that it holds, and the mark with 0."""
    return f"The reply was:\n{FENCED.search(question)[2]}\n{MARK.search(question)[1]}: 0"


class Server(ThreadingHTTPServer):
    """Takes many connections at a time."""

    request_queue_size = 256
    daemon_threads = True


class Handler(BaseHTTPRequestHandler):
    """The two routes that a judge asks."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """The models."""
        self.send({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    def do_POST(self) -> None:
        """A chat completion."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = {"role": "assistant", "content": answer_to(asked["messages"][-1]["content"])}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        self.send({"object": "chat.completion", "model": MODEL, "choices": [choice], "usage": usage})

    def send(self, body: dict) -> None:
        """Answer."""
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing is said about requests."""
