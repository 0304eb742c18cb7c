"""JSON over HTTP on the standard library's server: routes, limits, errors in OpenAI's shape, and a clean end.

An answer is one JSON value, or server-sent events, each of them one.
"""

import json
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, NamedTuple

from grpo_fn.core.display_text import escape_control

BODY_BYTES = 32 * 2**20  # of a request, at most
IDLE = 60.0  # seconds that a connection may send nothing
CLOSE_SECONDS = 10.0  # for answers that are being written when the server ends
KINDS = {400: "invalid_request_error", 404: "not_found_error", 429: "rate_limit_error", 504: "timeout_error"}

Json = dict[str, Any]


class EventStream(NamedTuple):
    """An answer that comes in pieces."""

    events: Iterator[Json]
    cancel: Callable[[], None]  # called at the end, whether or not the client got it


Route = Callable[[Json], Json | EventStream]  # the request's body, empty for GET, to the answer


class HttpError(Exception):
    """A request that gets an error instead of an answer; `param` names the field that is wrong."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> Json:
        """What the client receives."""
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class JsonServer(ThreadingHTTPServer):
    """A thread for each connection. The port is taken when it is made; connections are accepted from `start` on.

    Args:
        host: name or address to listen at.
        port: 0 for any that is free.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, host: str, port: int) -> None:
        self.routes: Mapping[tuple[str, str], Route] = {}
        self.answering, self.idle = 0, threading.Condition()
        self.thread: threading.Thread | None = None
        super().__init__((host, port), JsonHandler, bind_and_activate=False)
        try:
            self.server_bind()
        except (OSError, OverflowError) as error:
            self.server_close()
            raise ValueError(f"got {host}:{port}, wanted an address to listen at: {error}") from error

    @property
    def url(self) -> str:
        """Where it is."""
        host, port = self.server_address[:2]
        return f"http://{host}:{port}"

    def start(self, routes: Mapping[tuple[str, str], Route]) -> None:
        """Accept connections, in a thread. `routes`: (method, path) -> what answers."""
        self.routes = routes
        self.server_activate()
        self.thread = threading.Thread(target=self.serve_forever, args=(0.05,), name="http", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Accept no more, and let answers that are being made be written, for CLOSE_SECONDS at most."""
        if self.thread is not None:
            self.shutdown()
            self.thread.join(CLOSE_SECONDS)
        with self.idle:
            self.idle.wait_for(lambda: not self.answering, CLOSE_SECONDS)
        self.server_close()

    def handle_error(self, request: socket.socket, client_address: tuple[str, int]) -> None:
        """A client that has gone is no error of ours."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class JsonHandler(BaseHTTPRequestHandler):
    """One connection: a request after the other."""

    protocol_version = "HTTP/1.1"
    timeout: ClassVar[float] = IDLE
    disable_nagle_algorithm = True
    server: JsonServer

    def do_GET(self) -> None:
        """Answer a GET."""
        self.reply("GET")

    def do_POST(self) -> None:
        """Answer a POST."""
        self.reply("POST")

    def reply(self, method: str) -> None:
        """Find the route, read the body, write the answer; whatever goes wrong is an answer, too."""
        with self.server.idle:
            self.server.answering += 1
        try:
            status, answer = self.answer(method)
            if isinstance(answer, EventStream):
                self.write_events(answer)
            else:
                self.write(status, answer)
        finally:
            with self.server.idle:
                self.server.answering -= 1
                self.server.idle.notify_all()

    def answer(self, method: str) -> tuple[int, Json | EventStream]:
        """Status and body."""
        try:
            body = self.read_body() if method == "POST" else {}
            return 200, self.route(method)(body)
        except Exception as error:
            return error_body(error)

    def route(self, method: str) -> Route:
        """What answers. Raises HttpError for a path that there is not."""
        path = self.path.partition("?")[0].rstrip("/")
        known = self.server.routes
        if (found := known.get((method, path))) is not None:
            return found
        methods = sorted(m for m, p in known if p == path)
        if methods:
            raise HttpError(f"got {method} {path}, wanted {' or '.join(methods)}", status=405)
        paths = ", ".join(sorted(p for _, p in known))
        raise HttpError(f"got the path {path or '/'}, wanted one of {paths}", status=404)

    def read_body(self) -> Json:
        """The JSON object that was sent. Raises HttpError for anything else."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            self.close_connection = True
            raise HttpError("got a request without Content-Length, wanted its body's size in bytes", status=411)
        if int(length) > BODY_BYTES:
            self.close_connection = True  # what is not read would be taken for the next request
            raise HttpError(f"got a body of {length} bytes, wanted at most {BODY_BYTES}", status=413)
        try:
            body = json.loads(self.rfile.read(int(length)), parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise HttpError(f"got a body that is no JSON, wanted an object: {error}") from error
        if not isinstance(body, dict):
            raise HttpError(f"got a JSON {type(body).__name__} as the body, wanted an object")
        return body

    def write(self, status: int, body: Json) -> None:
        """Send it."""
        content = json_bytes(body)
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        if status == 429:
            self.send_header("Retry-After", "1")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def write_events(self, stream: EventStream) -> None:
        """Send every event as soon as it is there."""
        chunked = self.request_version != "HTTP/1.0"  # which knows no chunks: there the end of the connection ends it
        self.close_connection |= not chunked
        try:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.send_header("Cache-Control", "no-cache")
            self.send_header(*(("Transfer-Encoding", "chunked") if chunked else ("Connection", "close")))
            self.end_headers()
            for event in event_lines(stream.events):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event) if chunked else event)
            if chunked:
                self.wfile.write(b"0\r\n\r\n")
        finally:
            stream.cancel()

    def log_message(self, format: str, *args: object) -> None:
        """Only what went wrong is said: with clients that ask thousands of times it would drown."""
        if len(args) > 1 and str(args[1])[:1] == "5":
            print(escape_control(f"{self.address_string()} {format % args}"), file=sys.stderr, flush=True)


def event_lines(events: Iterator[Json]) -> Iterator[bytes]:
    """Events as they are sent, and what says that they are all; an error on the way is the last one."""
    try:
        for event in events:
            yield b"data: %b\n\n" % json_bytes(event)
    except Exception as error:
        yield b"data: %b\n\n" % json_bytes(error_body(error)[1])
        return
    yield b"data: [DONE]\n\n"


def error_body(error: Exception) -> tuple[int, Json]:
    """Status and body of what went wrong; an error of ours is printed."""
    if isinstance(error, HttpError):
        return error.status, error.body()
    traceback.print_exception(error)
    return 500, HttpError(f"{type(error).__name__}: {error}", status=500).body()


def json_bytes(value: Json) -> bytes:
    """As it is sent."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
