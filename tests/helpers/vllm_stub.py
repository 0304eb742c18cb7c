"""A server that speaks vLLM's HTTP on a thread, with weights, versions and pauses, and with faults on demand.

What it draws is a function of (weights, prompt, seed), so an answer shows which weights it was drawn with.
"""

import hashlib
import json
import socket
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import torch
from safetensors.torch import load

from grpo_fn.shell.vllm.fingerprint import NOTHING, weight_fingerprint

WELL = {"backend": "grpo_file", "logprobs_mode": "processed_logprobs", "dtype": "float32"}


def drawn(weights, prompt, seed, length):
    """The tokens of a completion."""
    said = json.dumps([list(weights), list(prompt), seed]).encode()
    return [int(x) % 50 for x in hashlib.sha256(said).digest()[:length]]


def checksum(tensors):
    """Of weights, as a worker sees them."""
    total = NOTHING
    for tensor in tensors:
        total += weight_fingerprint(tensor)
    return total


class Stub:
    """`faults` maps a path to what goes wrong there: a status, "drop", "hang", or "die" (it is killed at that moment),
    or to what is called then. A fault happens once, unless it is in `stuck`, too.
    """

    def __init__(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.described = dict(WELL, repeatable=True)
        self.faults, self.stuck, self.calls, self.seconds = {}, False, [], 0.0
        self.key = None
        self.tokenizer, self.vocabulary, self.unknown = None, 10**6, None  # of /detokenize and prompt_logprobs
        self.resting = threading.Event()
        self.lock = threading.Lock()
        self.between = threading.Lock()  # no pause begins while a completion looks at weights and label
        self.server, self.supervised = None, False  # whether it is started again when it dies of a fault
        self.start()

    def start(self):
        """As the process does: with the weights of the model folder. Nothing where it runs."""
        with self.lock:
            if self.server is None:
                self.weights, self.label, self.coming, self.folder = checksum([torch.zeros(3)]), "default", None, None
                self.opened, self.corrupt, self.torn = self.weights, False, False
                self.resting.set()
                self.connections = set()
                self.server = self.listening()
                threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def listening(self):
        """At its port, once the server before it is quite gone."""
        end = time.monotonic() + 2
        while True:
            try:
                return Listening(("127.0.0.1", self.port), type("Handler", (Handler,), {"stub": self}))
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.005)

    def version(self):
        """Weights and label of one moment, at which it does not rest."""
        while True:
            assert self.resting.wait(20), "the pause does not end"
            with self.between:
                if self.resting.is_set():
                    return ("torn",) if self.torn else self.weights, self.label

    def kill(self):
        """As SIGKILL does: nothing is said to anybody. Nothing where it does not run."""
        with self.lock:
            server, self.server = self.server, None
            if server is None:
                return
            server.socket.close()
            self.resting.set()
            for connection in list(self.connections):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            threading.Thread(target=server.shutdown, daemon=True).start()


class Listening(ThreadingHTTPServer):
    """Says nothing of clients that hang up."""

    daemon_threads = True

    def handle_error(self, request, client_address):
        """Nothing."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    wbufsize = 2**16  # head and body at once: two small packets wait 40 ms for each other
    stub: Stub

    def setup(self):
        super().setup()
        self.stub.connections.add(self.request)

    def finish(self):
        self.stub.connections.discard(self.request)
        with suppress(OSError):
            super().finish()

    def log_message(self, *_):
        """Say nothing."""

    def do_GET(self):
        self.do_POST()

    def do_POST(self):
        split = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        sent = json.loads(body) if body else {}
        stub, path = self.stub, split.path + (f":{sent['method']}" if "method" in sent else "")
        stub.calls.append((path, {**sent, **{k: v[0] for k, v in parse_qs(split.query).items()}}))
        if stub.key and self.headers.get("Authorization") != f"Bearer {stub.key}":
            return self.answer(401, {"error": "Unauthorized"})
        fault = stub.faults.get(path) if stub.stuck else stub.faults.pop(path, None)
        if isinstance(fault, int):
            return self.answer(fault, {"error": {"message": f"a fault at {path}"}})
        if fault == "drop":
            return self.drop()
        if callable(fault):
            fault()
        if fault == "die":
            stub.kill()
            return stub.supervised and stub.start()
        if fault == "hang":
            time.sleep(0.6)
            return self.drop()
        if fault == "half":
            self.close_connection = True
            with suppress(OSError):
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{")
            return None
        return self.answer(*answer_to(stub, split.path, sent))

    def drop(self):
        """Hang up."""
        self.close_connection = True
        with suppress(OSError):
            self.request.shutdown(socket.SHUT_RDWR)

    def answer(self, status, said):
        data = json.dumps(said).encode()
        with suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)


def answer_to(stub, path, sent):
    """Status and body."""
    match path:
        case "/inference/v1/generate":
            return 200, generate(stub, sent)
        case "/v1/completions":
            return prompt_logprobs(stub, sent["prompt"])
        case "/collective_rpc":
            return 200, {"results": [ask_workers(stub, sent["method"])]}
        case "/get_world_size":
            return 200, {"world_size": 1}
        case "/weight_info":
            return 200, {"weight_version": stub.label}
        case "/v1/models":
            return 200, {"data": [{"id": "teacher", "max_model_len": 4096}]}
        case "/detokenize":
            return 200, {"prompt": stub.tokenizer.decode(sent["tokens"])}
        case "/pause":
            with stub.between:
                stub.resting.clear()
        case "/resume":
            stub.resting.set()
        case "/init_weight_transfer_engine":
            stub.folder = Path(sent["init_info"]["folder"])
        case "/start_weight_update":
            if stub.coming is not None or stub.folder is None:
                return 500, {"error": "start_weight_update called while an update is active, or before a meeting"}
            stub.coming = []
        case "/update_weights":
            data = (stub.folder / sent["update_info"]["name"]).read_bytes()
            assert hashlib.sha256(data).hexdigest() == sent["update_info"]["sha256"]
            stub.coming.extend(load(data).values())
            stub.torn = True
        case "/finish_weight_update":
            stub.received = stub.weights = checksum(stub.coming)
            stub.coming, stub.torn = None, False
        case "/update_weight_version":
            stub.label = sent["new_version"]
        case "/reset_prefix_cache":
            return 200, {"success": True}
        case "/health" | "/abort_requests":
            pass
        case _:
            raise LookupError(f"got {path}, expected a path of vLLM's server")
    return 200, {}


def generate(stub, sent):
    """A completion; a pause holds it up, and it begins with what is there then."""
    length = sent["sampling_params"]["max_tokens"]
    weights, label = stub.version()
    time.sleep(stub.seconds)
    tokens = drawn(weights, sent["token_ids"], sent["sampling_params"]["seed"], length)
    content = [{"token_id": t, "logprob": -t / 7, "top_logprobs": []} for t in tokens]
    spans = [{"version": label, "start": 0, "end": length}]
    choice = {"index": 0, "finish_reason": "length", "token_ids": tokens}
    return {"choices": [{**choice, "logprobs": {"content": content}, "weight_versions": spans}]}


def ask_workers(stub, method):
    """What the worker extension says."""
    wrong = checksum([torch.ones(2)])
    match method:
        case "grpo_described":
            return {**stub.described, "updating": stub.coming is not None}
        case "grpo_abandoned":
            stub.coming, stub.torn = None, stub.torn or stub.coming is not None
            return {}
        case "grpo_receipt":
            held = stub.weights if stub.corrupt in (False, "received") else wrong
            received = wrong if stub.corrupt == "received" else stub.received
        case "grpo_opened":
            held, received = wrong if stub.corrupt == "hidden" else stub.opened, stub.opened
    return {"received": list(received), "held": list(held), "replica": 0}


def prompt_logprobs(stub, tokens):
    """Log-probs of a prompt's tokens, each a function of it and of the one before; none of the `unknown` one."""
    if (odd := max(tokens)) >= stub.vocabulary:
        return 400, {"error": {"message": f"Token id {odd} is out of vocabulary"}}
    pairs = pairwise(tokens)
    found = [None if b == stub.unknown else {str(b): {"logprob": -1.0 - (a * 31 + b) % 97 / 7}} for a, b in pairs]
    return 200, {"choices": [{"index": 0, "finish_reason": "length", "prompt_logprobs": [None, *found]}]}
