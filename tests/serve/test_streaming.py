"""Streams: all events together are the answer in one piece, and a client that goes ends what it asked for."""

import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

import hypothesis.strategies as st
import pytest
from hypothesis import given
from served import SECONDS, Client, served, service

from grpo_fn.serve.response_body import cut_at_stop
from grpo_fn.serve.streaming import settled_text

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOM = {"prompt": "Tom has", "seed": 1, "max_tokens": 12}
USER = {"messages": [{"role": "user", "content": "Tom has"}], "seed": 5, "max_tokens": 9}


@pytest.fixture(scope="module")
def tiny() -> Iterator[Client]:
    with served(service()) as client:
        yield client


def events(client: Client, path: str, **body: object) -> list[dict]:
    """The events of a stream, whose end is said."""
    connection = http.client.HTTPConnection(urlsplit(client.url).netloc, timeout=SECONDS)
    with closing(connection):
        connection.request("POST", path, json.dumps({**body, "stream": True}))
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        assert answer.getheader("Content-Type").startswith("text/event-stream")
        *lines, end, rest = answer.read().decode().split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def joined(found: list[dict], what: str) -> list[str]:
    """The text of every choice, by its index."""
    texts: dict[int, str] = {}
    for event in found:
        for choice in event["choices"]:
            new = choice["text"] if what == "text" else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + new
    return [texts[i] for i in sorted(texts)]


def reasons(found: list[dict]) -> dict[int, str]:
    ends = [choice for event in found for choice in event["choices"] if choice["finish_reason"] is not None]
    assert len({choice["index"] for choice in ends}) == len(ends)
    return {choice["index"]: choice["finish_reason"] for choice in ends}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 3},
        {"temperature": 0},
        {"stop": ["e", "1a"]},
        {"stop": ["e"], "include_stop_str_in_output": True},
        {"prompt": ["Tom", "has"], "n": 2},
        {"logprobs": 0},
        {"return_token_ids": True},
    ],
)
def test_a_stream_of_completions_is_the_answer_in_pieces(tiny: Client, more: dict) -> None:
    answer = tiny.ask(COMPLETIONS, **{**TOM, **more})
    whole = answer["choices"]
    *found, last = events(tiny, COMPLETIONS, **{**TOM, **more}, stream_options={"include_usage": True})
    assert last["usage"] == answer["usage"]  # with the tokens that brought no text
    assert joined(found, "text") == [one["text"] for one in whole]
    assert reasons(found) == {one["index"]: one["finish_reason"] for one in whole}
    assert len({event["id"] for event in found}) == 1
    assert {event["object"] for event in found} == {"text_completion"}
    assert {event["seed"] for event in found} == {1}
    for one in whole:
        mine = [choice for event in found for choice in event["choices"] if choice["index"] == one["index"]]
        if "return_token_ids" in more:
            assert [i for choice in mine for i in choice["token_ids"]] == one["token_ids"]
            assert mine[0]["prompt_token_ids"] == one["prompt_token_ids"]
            assert not any("prompt_token_ids" in choice for choice in mine[1:])
        if "logprobs" in more:
            for name, values in one["logprobs"].items():
                assert [v for choice in mine for v in choice["logprobs"][name]] == values


def test_a_stream_of_chat_begins_with_the_role_and_ends_with_the_numbers(tiny: Client) -> None:
    asked = {**USER, "n": 2, "logprobs": True, "return_token_ids": True}
    whole = tiny.ask(CHAT, **asked)
    found = events(tiny, CHAT, **asked, stream_options={"include_usage": True})
    assert joined(found, "delta") == [one["message"]["content"] for one in whole["choices"]]
    assert {event["object"] for event in found} == {"chat.completion.chunk"}
    assert [event["choices"][0]["delta"] for event in found[:2]] == [{"role": "assistant", "content": ""}] * 2
    assert found[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [event["usage"] for event in found[:-1]] == [None] * (len(found) - 1)
    assert (found[-1]["choices"], found[-1]["usage"]) == ([], whole["usage"])
    for one in whole["choices"]:
        mine = [choice for event in found[2:-1] for choice in event["choices"] if choice["index"] == one["index"]]
        assert [t for choice in mine for t in choice["logprobs"]["content"]] == one["logprobs"]["content"]
        assert [i for choice in mine for i in choice["token_ids"]] == one["token_ids"]


def test_events_come_while_others_are_drawn(tiny: Client) -> None:
    assert len(events(tiny, COMPLETIONS, **TOM)) > 3


def test_what_is_refused_is_no_stream(tiny: Client) -> None:
    assert tiny.error(COMPLETIONS, prompt="a", stream=True, max_tokens=13)[0] == 400
    assert tiny.error(COMPLETIONS, prompt="a", stream=True, model="gpt")[0] == 404
    with served(service(max_waiting=2)) as client:
        assert client.error(COMPLETIONS, prompt="a", n=3, stream=True)[0] == 429


def test_what_goes_wrong_on_the_way_is_the_last_event() -> None:
    one = service()
    with served(one, timeout=0.2) as client:
        between = one._between_steps

        def slow() -> None:
            time.sleep(0.15)
            between()

        one._between_steps = slow
        last = raw(client, "HTTP/1.1").decode().split("\n\n")[-2]
    error = json.loads(last[last.index("{") :])["error"]
    assert error["type"] == "timeout_error"
    assert "got 0 of 1 completions" in error["message"]
    assert "[DONE]" not in last


def raw(client: Client, version: str) -> bytes:
    """All bytes of an answer over a socket of its own."""
    body = json.dumps({**TOM, "stream": True}).encode()
    head = f"POST {COMPLETIONS} {version}\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(client.url.removeprefix("http://").split(":"), timeout=SECONDS) as connection:
        connection.sendall(head.encode() + body)
        return b"".join(iter(lambda: connection.recv(4096), b""))


def test_chunks_on_the_wire_and_a_client_that_knows_none(tiny: Client) -> None:
    head, _, chunks = raw(tiny, "HTTP/1.1").partition(b"\r\n\r\n")
    assert b"Transfer-Encoding: chunked" in head
    assert chunks.endswith(b"\r\n0\r\n\r\n")
    data = b""
    while chunks != b"0\r\n\r\n":
        size, _, chunks = chunks.partition(b"\r\n")
        data += chunks[: int(size, 16)]
        assert chunks[int(size, 16) :][:2] == b"\r\n"
        chunks = chunks[int(size, 16) + 2 :]
    head, _, plain = raw(tiny, "HTTP/1.0").partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert plain.count(b"data: ") == data.count(b"data: ") > 3
    assert plain.endswith(b"data: [DONE]\n\n")
    assert data.endswith(b"data: [DONE]\n\n")


def test_a_client_that_goes_ends_its_rows() -> None:
    """What it asked for is cancelled; others get their answers."""
    one, begun = service(), []
    with served(one) as client:
        draw, between = one.draw, one._between_steps

        def kept(rows: list) -> None:
            begun.extend(rows)
            draw(rows)

        def slow() -> None:
            time.sleep(0.05)
            between()

        one.draw, one._between_steps = kept, slow
        body = json.dumps({**TOM, "stream": True, "n": 40}).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(client.url.removeprefix("http://").split(":"), timeout=SECONDS) as connection:
            connection.sendall(head.encode() + body)
            assert connection.recv(64)
        end = time.monotonic() + SECONDS
        while not all(row.future.done() for row in begun):
            assert time.monotonic() < end
            time.sleep(0.01)
        assert len(begun) == 40
        assert any(row.future.cancelled() for row in begun)
        one._between_steps = between
        assert client.ask(COMPLETIONS, **TOM)["choices"][0]["text"]


@given(st.text("ab c,\ufffd", max_size=12), st.lists(st.text("abc ", min_size=1, max_size=3), max_size=2))
def test_what_is_settled_stays(text: str, stop: list[str]) -> None:
    """Of every beginning of a text, up to where the first stop string is whole, it is a beginning of the end."""
    ends = [n for n in range(len(text) + 1) if any(one in text[:n] for one in stop)]
    whole = text[: ends[0]] if ends else text
    if len(stop) == 2 and (stop[0] in stop[1] or stop[1] in stop[0]):
        return  # which of them ends the text is the decoder's to say
    settled = [settled_text(whole[:n], stop=stop, tidied=False) for n in range(len(whole))]
    final = cut_at_stop(whole, stop)
    assert all(final.startswith(one) for one in settled)
    assert settled == sorted(settled, key=len)


def test_half_a_character_and_a_space_that_may_go_are_held_back() -> None:
    assert settled_text("Tom \ufffd\ufffd", stop=(), tidied=False) == "Tom "
    assert settled_text("Tom has", stop=(), tidied=True) == "Tom"
    assert settled_text("Tom has", stop=("sun",), tidied=False) == "Tom ha"
    assert settled_text("Tom has", stop=("has it", "s"), tidied=False) == "Tom "
