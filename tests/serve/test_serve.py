"""`python -m grpo_fn.serve` answers what `grpo_fn.eval` samples, in OpenAI's shape, and refuses what it has not."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from e2e.running import SERVER as FORKS
from e2e.running import serve as forks_are_ready
from fakes import VOCABULARY, tokenizer
from served import SECONDS, Client, served, service

from grpo_fn.config import load_config
from grpo_fn.eval import __main__ as evaluation
from grpo_fn.serve import __main__ as command
from grpo_fn.serve.endpoint import Endpoint, Served
from grpo_fn.serve.service import load_service
from grpo_fn.shell.model import hf
from grpo_fn.shell.model.logprob_model import LogprobModel
from grpo_fn.shell.model.packed_input import pack_shared_prompts
from grpo_fn.shell.serving import http_endpoint
from grpo_fn.shell.serving.http_endpoint import JsonServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def tiny() -> Iterator[Client]:
    """A server over a model of `fakes`; requests stop at nothing of its own."""
    with served(service()) as client:
        yield client


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def texts(answer: dict) -> list[str]:
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in answer["choices"]]


# -- the same bytes as an evaluation


@pytest.mark.parametrize("what", ["", "model", "checkpoints/step_4"])
def test_it_answers_what_an_evaluation_samples(whole: Path, tmp_path: Path, what: str) -> None:
    """Of a run, its last model and a checkpoint of it; seed, number of the problem and temperature given."""
    config = str(whole / "config.gin")
    params = ["sections.Evaluation.samples=2", "sections.Evaluation.ks=(1, 2)", "sections.Evaluation.problems=5"]
    flags = [part for one in params for part in ("--gin_param", one)]
    out = tmp_path / "out"
    assert evaluation.main(["--model", str(whole / what), "--gin_file", config, "--out", str(out), *flags]) == 0
    rows = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    seed = json.loads((out / "results.json").read_text())["seed"]

    kwargs = load_config([config], [], taker="grpo_fn.serve.service.serve").kwargs()
    how = {"compute": kwargs["compute"], "sampling": kwargs["sampling"]}
    temperature = kwargs["sampling"].temperature
    with ExitStack() as stack:
        loaded = load_service(str(whole / what), **how, max_rows=3, max_tokens=None, max_waiting=64)
        stack.enter_context(closing(loaded.service))
        server = stack.enter_context(closing(JsonServer("127.0.0.1", 0)))
        kept = Served(loaded.service, loaded.tokenizer, kwargs["data"].encode_prompt, (), "run", SECONDS)
        server.start(Endpoint(kept).routes())
        client = Client(server.url)
        for row in rows:
            asked = {"messages": user(row["prompt"]), "seed": seed, "uid": row["uid"]}
            greedy = client.ask(CHAT, **asked, temperature=0)
            assert texts(greedy) == [row["text"]]
            assert greedy["usage"]["completion_tokens"] == row["length"]
            assert greedy["choices"][0]["finish_reason"] == ("length" if row["truncated"] else "stop")
            sampled = client.ask(CHAT, **asked, temperature=temperature, n=2)
            assert texts(sampled) == [one["text"] for one in row["samples"]]
            assert texts(client.ask(COMPLETIONS, prompt=row["prompt"], temperature=0)) == [row["text"]]
    assert len({one["text"] for row in rows for one in row["samples"]}) > 5


# -- log-probs


def trainer_logp(model: torch.nn.Module, ids: list[int], temperature: float) -> list[float]:
    """Of every token but the first, by the module that is trained."""
    packing, elements = pack_shared_prompts, 10**4
    of = LogprobModel(model, temperature=temperature, logits_chunk_elements=elements, input_packing=packing)
    mask = torch.ones(1, len(ids), dtype=torch.bool)
    mask[0, 0] = False
    with torch.no_grad():
        return of(torch.tensor([ids]), mask)[0][0, 1:].tolist()


@pytest.mark.parametrize("temperature", [0, 0.6, 1.0])
def test_log_probs_are_the_trainers(temperature: float) -> None:
    """Those of a prompt, of what is drawn, and of the likeliest in each place."""
    made = service()
    asked = {"prompt": "Tom has 12", "seed": 3, "temperature": temperature, "max_tokens": 9, "return_token_ids": True}
    with served(made) as client:
        (one,) = client.ask(COMPLETIONS, **asked, echo=True, logprobs=3)["choices"]
        (bare,) = client.ask(COMPLETIONS, **asked, logprobs=0)["choices"]
    ids = [*one["prompt_token_ids"], *one["token_ids"]]
    found = one["logprobs"]
    wanted = trainer_logp(made.model, ids, temperature or 1.0)
    assert found["token_logprobs"][0] is None
    assert found["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-5)
    assert found["tokens"] == [tokenizer().decode([i]) for i in ids]
    assert found["text_offset"] == [sum(map(len, found["tokens"][:i])) for i in range(len(ids))]
    assert found["top_logprobs"][0] is None
    for text, logp, top in zip(found["tokens"][1:], wanted, found["top_logprobs"][1:], strict=True):
        assert 1 <= len(top) <= 4
        assert [*top.values()] == sorted(top.values(), reverse=True)
        assert logp <= max(top.values()) + 1e-5
        assert text in top
    drawn = len(one["token_ids"])
    assert bare["token_ids"] == one["token_ids"]
    assert bare["logprobs"]["token_logprobs"] == pytest.approx(wanted[-drawn:], abs=1e-5)
    assert all(len(top) == 1 for top in bare["logprobs"]["top_logprobs"])
    assert one["text"] == "Tom has 12" + bare["text"]


def test_a_text_alone_is_scored_and_nothing_drawn(tiny: Client) -> None:
    asked = {"prompt": [[40, 41, 42, 43], [50, 51]], "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
    answer = tiny.ask(COMPLETIONS, **asked)
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 0, "total_tokens": 6}
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [4, 2]
    longer = tiny.ask(COMPLETIONS, **{**asked, "max_tokens": 1})
    for short, long in zip(answer["choices"], longer["choices"], strict=True):
        values = short["logprobs"]["token_logprobs"]
        assert long["logprobs"]["token_logprobs"][1 : len(values)] == pytest.approx(values[1:], abs=1e-5)
        assert len(long["logprobs"]["tokens"]) == len(values) + 1


def test_chat_log_probs(tiny: Client) -> None:
    asked = {"messages": user("Tom has"), "seed": 5, "max_tokens": 6, "logprobs": True, "return_token_ids": True}
    (plain,) = tiny.ask(CHAT, **asked)["choices"]
    (named,) = tiny.ask(CHAT, **asked, top_logprobs=2)["choices"]
    for one, other, token in zip(
        plain["logprobs"]["content"], named["logprobs"]["content"], plain["token_ids"], strict=True
    ):
        assert one["token"] == other["token"] == tokenizer().decode([token])
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-6)
        assert one["bytes"] is None or bytes(one["bytes"]).decode() == one["token"]
        assert one["top_logprobs"] == []
        assert other["top_logprobs"][0]["logprob"] >= other["logprob"] - 1e-5
        assert len(other["top_logprobs"]) == 2


# -- requests


def test_a_request_is_the_same_alone_and_in_a_crowd(tiny: Client) -> None:
    """Over HTTP, with all kinds of knobs at once."""
    asked = [
        {
            "prompt": "Tom has"[: 1 + i % 7],
            "seed": i,
            "temperature": [0, 0.5, 1.0][i % 3],
            "max_tokens": 1 + i % 12,
            "n": 1 + i % 2,
            **({"stop": ["e", "1"]} if i % 4 == 0 else {}),
            **({"top_p": 0.8} if i % 5 == 0 else {"logprobs": 1, "echo": True}),
        }
        for i in range(16)
    ]

    def shown(body: dict) -> list:
        return [(one["text"], one["finish_reason"]) for one in tiny.ask(COMPLETIONS, **body)["choices"]]

    alone = [shown(body) for body in asked]
    with ThreadPoolExecutor(16) as pool:
        assert [*pool.map(shown, asked)] == alone


def test_seeds_choices_and_prompts(tiny: Client) -> None:
    asked = {"prompt": "Tom", "max_tokens": 8}
    one, again, other = (tiny.ask(COMPLETIONS, **asked, seed=seed, n=3) for seed in (1, 1, 2))
    assert texts(one) == texts(again)
    assert len({*texts(one), *texts(other)}) == 6
    assert texts(tiny.ask(COMPLETIONS, **asked, seed=1, n=2)) == texts(one)[:2]
    free = [tiny.ask(COMPLETIONS, **asked) for _ in range(2)]
    assert texts(free[0]) != texts(free[1])
    assert texts(tiny.ask(COMPLETIONS, **asked, seed=free[0]["seed"])) == texts(free[0])
    both = tiny.ask(COMPLETIONS, prompt=["Tom", "has"], max_tokens=8, seed=1, n=2)
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert texts(both)[:2] == texts(one)[:2]
    assert texts(both)[2:] == texts(tiny.ask(COMPLETIONS, prompt="has", max_tokens=8, seed=1, n=2))
    ids = tokenizer()("Tom")["input_ids"]
    assert texts(tiny.ask(COMPLETIONS, prompt=ids, max_tokens=8, seed=1, n=3)) == texts(one)
    numbered = tiny.ask(COMPLETIONS, prompt=["Tom", "Tom"], max_tokens=8, seed=1, uid=[7, 0])
    assert texts(numbered)[1] == texts(one)[0] != texts(numbered)[0]


def test_stop_strings_are_cut_off_unless_they_are_wanted() -> None:
    with served(service(), stop=()) as client:
        asked = {"prompt": "Tom has", "seed": 1, "max_tokens": 12}
        (free,) = texts(client.ask(COMPLETIONS, **asked, n=1))
        stop = free[4]
        at = free.index(stop)
        (cut,) = client.ask(COMPLETIONS, **asked, stop=stop)["choices"]
        assert (cut["text"], cut["finish_reason"]) == (free[:at], "stop")
        (kept,) = texts(client.ask(COMPLETIONS, **asked, stop=[stop, "zzz"], include_stop_str_in_output=True))
        assert kept.startswith(free[: at + 1])
        assert len(kept) < len(free)
    with served(service(), stop=(stop,)) as client:  # of the configuration
        assert texts(client.ask(COMPLETIONS, **asked)) == [free[:at]]
        assert texts(client.ask(COMPLETIONS, **asked, stop=[])) == [free]


def test_what_is_neutral_is_taken(tiny: Client) -> None:
    neutral = {"stream": False, "presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}, "user": "me"}
    chat = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "top_logprobs": None}
    asked = {"max_tokens": 3, "seed": 1, "model": "tiny", "top_k": -1, "top_p": 1}
    assert texts(tiny.ask(CHAT, messages=user("a"), **asked, **neutral, **chat)) == texts(
        tiny.ask(CHAT, messages=user("a"), max_completion_tokens=3, seed=1)
    )


def test_models_and_health(tiny: Client) -> None:
    assert tiny.send("GET", "/health") == (200, {"status": "ok"})
    status, answer = tiny.send("GET", "/v1/models")
    assert (status, [one["id"] for one in answer["data"]]) == (200, ["tiny"])
    assert answer["data"][0]["max_model_len"] == 64


# -- what is refused

WRONG = [
    (COMPLETIONS, {}, "prompt: got null, wanted text"),
    (COMPLETIONS, {"prompt": []}, "prompt: got []"),
    (COMPLETIONS, {"prompt": ["a", 3]}, "prompt: got 3"),
    (COMPLETIONS, {"prompt": [True]}, "prompt: got true"),
    (COMPLETIONS, {"prompt": ""}, "prompt: got one of no tokens"),
    (COMPLETIONS, {"prompt": [5, VOCABULARY]}, f"got token {VOCABULARY}, wanted ids from 0 to {VOCABULARY - 1}"),
    (COMPLETIONS, {"prompt": "\ud800"}, "wanted Unicode text"),
    (COMPLETIONS, {"prompt": "a", "stream": 1}, "stream: got 1, wanted true or false"),
    (COMPLETIONS, {"prompt": "a", "stream": True, "echo": True}, "echo: got true, wanted no echo and no likeliest"),
    (COMPLETIONS, {"prompt": "a", "stream": True, "logprobs": 1}, "logprobs: got 1, wanted no echo and no likeliest"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options: got"),
    (COMPLETIONS, {"prompt": "a", "stream": True, "stream_options": {"usage": True}}, "stream_options: got"),
    (COMPLETIONS, {"prompt": "a", "stream": True, "stream_options": {"include_usage": 1}}, "include_usage: got 1"),
    (COMPLETIONS, {"prompt": "a", "frequency_penalty": 0.5}, "frequency_penalty: got 0.5, wanted 0"),
    (COMPLETIONS, {"prompt": "a", "presence_penalty": False}, "presence_penalty: got false, wanted 0"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias: got"),
    (COMPLETIONS, {"prompt": "a", "best_of": 4}, "best_of: got 4, wanted n, 1"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, 'suffix: got "b"'),
    (COMPLETIONS, {"prompt": "a", "temprature": 1}, "temprature: got 1, wanted no such field; known here"),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature: got -1, wanted a number from 0 on"),
    (COMPLETIONS, {"prompt": "a", "temperature": True}, "temperature: got true"),
    (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p: got 0, wanted a number above 0 to 1"),
    (COMPLETIONS, {"prompt": "a", "top_k": 1.5}, "top_k: got 1.5"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, "n: got 0, wanted an integer from 1 to 1024"),
    (COMPLETIONS, {"prompt": ["a"] * 3, "n": 500}, "n: got 500, wanted at most 1024 completions"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens: got 0, wanted an integer from 1 on"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 13}, "max_tokens: got 13, wanted at most 12"),
    (COMPLETIONS, {"prompt": [5] * 60, "max_tokens": 5}, "got 60 prompt tokens and 5 to be drawn, wanted at most 64"),
    (COMPLETIONS, {"prompt": [5] * 64}, "got 64 prompt tokens and 1"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs: got 21, wanted an integer from 0 to 20"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 1, "top_p": 0.5}, "logprobs: got 1, wanted top_p 1"),
    (COMPLETIONS, {"prompt": "a", "stop": [""]}, "stop: got"),
    (COMPLETIONS, {"prompt": "a", "stop": 3}, "stop: got 3"),
    (COMPLETIONS, {"prompt": "a", "seed": -1}, "seed: got -1"),
    (COMPLETIONS, {"prompt": "a", "uid": [1, 2]}, "uid: got [1, 2]"),
    (COMPLETIONS, {"prompt": "a", "echo": 1}, "echo: got 1, wanted true or false"),
    (COMPLETIONS, {"prompt": "a", "messages": user("a")}, "messages: got"),
    (CHAT, {}, "messages: got null"),
    (CHAT, {"messages": []}, "messages: last message: got"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages: message 0: got the keys role"),
    (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, "the role 'tool', wanted one of"),
    (CHAT, {"messages": [*user("a"), {"role": "assistant", "content": "b"}]}, "wanted one of 'user'"),
    (CHAT, {"messages": [{"role": "system", "content": "b"}, *user("a")]}, "without a chat template"),
    (CHAT, {"messages": user("a"), "tools": [{"type": "function"}]}, "tools[0]: got"),
    (CHAT, {"messages": user("a"), "response_format": {"type": "json_object"}}, "response_format: got"),
    (CHAT, {"messages": user("a"), "logprobs": 2}, "logprobs: got 2, wanted true or false"),
    (CHAT, {"messages": user("a"), "top_logprobs": 2}, "top_logprobs: got 2, wanted logprobs true"),
    (CHAT, {"messages": user("a"), "max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens: got 3"),
    (CHAT, {"messages": user("a"), "echo": True}, "echo: got true, wanted no such field"),
]


@pytest.mark.parametrize(("path", "body", "said"), WRONG)
def test_a_wrong_request_is_refused_with_got_and_wanted(tiny: Client, path: str, body: dict, said: str) -> None:
    status, error = tiny.error(path, **body)
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert said in error["message"]
    assert error["param"] is None or error["param"] in error["message"] or error["param"] == "max_tokens"


def test_another_model_is_not_found(tiny: Client) -> None:
    status, error = tiny.error(COMPLETIONS, prompt="a", model="gpt")
    assert (status, error["code"], error["message"]) == (404, "model_not_found", "model: got 'gpt', wanted 'tiny'")


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "said"),
    [
        ("GET", "/v2", None, {}, 404, "got the path /v2, wanted one of /health, /v1/chat/completions"),
        ("GET", COMPLETIONS, None, {}, 405, "got GET /v1/completions, wanted POST"),
        ("POST", "/health", b"{}", {}, 405, "wanted GET"),
        ("POST", COMPLETIONS, b"{", {}, 400, "got a body that is no JSON"),
        ("POST", COMPLETIONS, b'{"temperature": NaN}', {}, 400, "NaN is no JSON number"),
        ("POST", COMPLETIONS, b"[" * 10**5, {}, 400, "got a body that is no JSON"),
        ("POST", COMPLETIONS, b"[]", {}, 400, "got a JSON list as the body"),
        ("POST", COMPLETIONS, b"\xff", {}, 400, "got a body that is no JSON"),
        ("POST", COMPLETIONS, b"", {"Content-Length": "x"}, 411, "without Content-Length"),
        ("POST", COMPLETIONS, b"", {"Content-Length": "99999999999"}, 413, "wanted at most"),
    ],
)
def test_what_is_no_request_is_refused(
    tiny: Client, method: str, path: str, body: bytes | None, headers: dict, status: int, said: str
) -> None:
    got, answer = tiny.send(method, path, body, **headers)
    assert (got, said in answer["error"]["message"]) == (status, True), answer
    assert tiny.send("GET", "/health")[0] == 200


def test_a_queue_that_is_full_and_a_late_answer() -> None:
    one = service(max_waiting=2)
    with served(one, timeout=0.3) as client:
        assert client.error(COMPLETIONS, prompt="a", n=3)[0] == 429
        between = one._between_steps

        def slow() -> None:
            time.sleep(0.1)
            between()

        one._between_steps = slow
        status, error = client.error(COMPLETIONS, prompt="a", n=2, seed=1, max_tokens=12)
        assert (status, error["type"]) == (504, "timeout_error")
        assert "within 0.3 s" in error["message"]


def test_an_end_while_a_completion_is_drawn() -> None:
    one, begun, closing_now = service(), threading.Event(), threading.Event()
    with served(one) as client, ThreadPoolExecutor(1) as pool:
        between = one._between_steps

        def held() -> None:
            begun.set()
            closing_now.wait(SECONDS)
            between()

        one._between_steps = held
        late = pool.submit(client.error, COMPLETIONS, prompt="a")
        assert begun.wait(SECONDS)
        threading.Timer(0.1, closing_now.set).start()  # the step goes on while `close` waits for it
        one.close()
        assert late.result(SECONDS)[0] == 503
        assert client.send("GET", "/health")[0] == 503
        assert client.error(COMPLETIONS, prompt="a")[0] == 503


def test_an_error_of_ours_is_an_answer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    one = service()
    with served(one) as client:
        monkeypatch.setattr(one, "_between_steps", lambda: 1 // 0)
        status, error = client.error(COMPLETIONS, prompt="a")
    assert (status, error["type"]) == (500, "server_error")
    assert "ZeroDivisionError" in error["message"]
    assert "ZeroDivisionError" in capsys.readouterr().err


# -- the command


def run_command(argv: list[str], out: str) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(out, "a") as file, redirect_stdout(file), redirect_stderr(file):
        code = command.main(argv)
    sys.exit(code)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_until_a_signal_comes(whole: Path, tmp_path: Path, number: int) -> None:
    forks_are_ready()
    out = tmp_path / "out"
    argv = ["--model", str(whole), "--port", "0", "--name", "mine", "--max_tokens", "5"]
    process = FORKS.Process(target=run_command, args=(argv, str(out)))
    process.start()
    end = time.monotonic() + 60
    while not (out.exists() and "serving" in out.read_text()):
        assert time.monotonic() < end, out.read_text()
        assert process.exitcode is None, out.read_text()
        time.sleep(0.05)
    line = out.read_text()
    assert f"serving {whole}/" in line
    assert " as mine at http://127.0.0.1:" in line
    client = Client(line.split(" at ")[1].strip().removesuffix("/v1"))
    assert len(client.ask(COMPLETIONS, prompt="Tom", model="mine", seed=1, n=2)["choices"]) == 2
    assert client.error(COMPLETIONS, prompt="Tom", max_tokens=6)[0] == 400
    os.kill(process.pid, number)
    process.join(30)
    assert process.exitcode == 0, out.read_text()
    assert "Traceback" not in out.read_text()
    with pytest.raises(ConnectionError):
        client.send("GET", "/health")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model", "no/such/folder"], "wanted a Hugging Face model folder or a hub name"),
        (["--max_rows", "0"], "max_rows: got 0, wanted at least 1"),
        (["--max_tokens", "0"], "max_tokens: got 0, wanted at least 1"),
        (["--timeout", "0"], "--timeout: got 0, wanted seconds above 0"),
        (["--timeout", "nan"], "--timeout: got nan"),
        (["--port", "99999"], "got 127.0.0.1:99999, wanted an address to listen at"),
        (["--gin_param", "sections.Compute.dtype='int8'"], "got dtype 'int8'"),
    ],
)
def test_bad_input_is_said_before_weights_are_loaded(
    whole: Path, flags: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "load_model", lambda *_, **__: pytest.fail("weights were loaded"))
    assert command.main(["--port", "0", "--model", str(whole / "model"), *flags]) == 2
    assert said in capsys.readouterr().err


def test_a_port_that_is_taken_is_said(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert command.main(["--port", port, "--model", str(whole / "model")]) == 2
    assert f"got 127.0.0.1:{port}, wanted an address to listen at" in capsys.readouterr().err


def test_a_model_of_no_run_has_a_configuration_of_its_own(whole: Path) -> None:
    assert command.serve_files(str(whole)) == [str(whole / "config.gin")]
    assert command.serve_files(str(whole / "model")) == [command.OF_NO_RUN]
    kwargs = load_config([command.OF_NO_RUN], [], taker="grpo_fn.serve.service.serve").kwargs()
    assert kwargs["sampling"].max_new_tokens == 512
    assert kwargs["data"].task().test == ()


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from grpo_fn.serve import __main__ as m; m.flags().format_help(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_connections_are_kept_and_closed_ones_are_no_error(tiny: Client, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_connection(tiny.url.removeprefix("http://").split(":"), timeout=SECONDS) as connection:
        for _ in range(2):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):  # the head and the body may come one by one
                piece = connection.recv(4096)
                assert piece, answer
                answer += piece
            assert answer.startswith(b"HTTP/1.1 200")
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    time.sleep(0.2)
    assert tiny.send("GET", "/health")[0] == 200
    assert "Traceback" not in capsys.readouterr().err
    assert http_endpoint.IDLE > 0
