"""The openai package's own client against our server: what it sends is taken, and what we answer is what it reads."""

import json
import time
from collections.abc import Iterator

import pytest
from served import Client, served, service
from tool_serving import ScriptedService, tokenizer_of

openai = pytest.importorskip("openai", reason="NOT TESTED: openai is not installed (pip install -e '.[test]')")
pytestmark = pytest.mark.filterwarnings("ignore")
MESSAGES = [{"role": "user", "content": "Tom has"}]
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'


@pytest.fixture(scope="module")
def raw() -> Iterator[Client]:
    with served(service()) as client:
        yield client


def client_of(server: Client, **knobs: object) -> "openai.OpenAI":
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", **{"max_retries": 0, "timeout": 30, **knobs})


@pytest.fixture(scope="module")
def client(raw: Client) -> "openai.OpenAI":
    return client_of(raw)


def test_models(client: "openai.OpenAI") -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.list().data[0].owned_by == "grpo_fn"


def test_completions_of_several_choices_with_log_probs_and_a_stop(raw: Client, client: "openai.OpenAI") -> None:
    asked = {"model": "tiny", "prompt": "Tom has", "seed": 1, "max_tokens": 8}
    found = client.completions.create(**asked, n=3, logprobs=2)
    wanted = raw.ask("/v1/completions", **asked, n=3, logprobs=2)
    assert [choice.text for choice in found.choices] == [choice["text"] for choice in wanted["choices"]]
    assert len({choice.text for choice in found.choices}) == 3
    assert found.choices[0].logprobs.token_logprobs == wanted["choices"][0]["logprobs"]["token_logprobs"]
    assert found.usage.completion_tokens == sum(len(choice.logprobs.tokens) for choice in found.choices)
    text = found.choices[0].text
    (cut,) = client.completions.create(**asked, stop=[text[2]]).choices
    assert (cut.text, cut.finish_reason) == (text[: text.index(text[2])], "stop")
    assert client.completions.create(**asked, extra_body={"return_token_ids": True}).choices[0].token_ids


def test_a_chat_in_one_piece_and_as_a_stream_with_usage(client: "openai.OpenAI") -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "seed": 3, "max_tokens": 8, "n": 2}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=1)
    assert whole.usage.completion_tokens == sum(len(choice.logprobs.content) for choice in whole.choices)
    assert whole.choices[0].logprobs.content[0].top_logprobs[0].logprob <= 0
    texts, reasons, usage = ["", ""], {}, []
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert [one.total_tokens for one in usage] == [whole.usage.total_tokens]


def test_its_exceptions_carry_our_message(client: "openai.OpenAI") -> None:
    asked = {"model": "tiny", "messages": MESSAGES}
    with pytest.raises(openai.BadRequestError, match="temperature: got -1, wanted a number from 0") as raised:
        client.chat.completions.create(**asked, temperature=-1)
    assert (raised.value.param, raised.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError, match="model: got 'gpt', wanted 'tiny'") as raised:
        client.chat.completions.create(**{**asked, "model": "gpt"})
    assert raised.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="response_format: got"):
        client.chat.completions.create(**asked, response_format={"type": "json_object"})
    with pytest.raises(openai.RateLimitError, match="wanted at most 64 together") as raised:
        client.completions.create(model="tiny", prompt="a", n=65)
    assert raised.value.code == "queue_full"
    with pytest.raises(openai.BadRequestError, match="wanted at most 64 positions together") as raised:
        client.completions.create(model="tiny", prompt=[5] * 60, max_tokens=5)
    assert raised.value.code == "context_length_exceeded"


def test_both_kinds_of_timeouts() -> None:
    """Ours is a status with our message, in a stream an error on the way; the client's own ends the completions."""
    slow = service()
    between = slow._between_steps

    def late() -> None:
        time.sleep(0.1)
        between()

    slow._between_steps = late
    asked = {"model": "tiny", "prompt": "a", "seed": 1, "max_tokens": 12}
    with served(slow, timeout=0.3) as server:
        client = client_of(server)
        with pytest.raises(openai.InternalServerError, match=r"within 0\.3 s, wanted all") as raised:
            client.completions.create(**asked)
        assert raised.value.status_code == 504
        with pytest.raises(openai.APIError, match="of 1 completions in time, wanted all"):
            list(client.completions.create(**asked, stream=True))
        with pytest.raises(openai.APITimeoutError):
            client_of(server, timeout=0.1).completions.create(**asked)


ASKED = {"model": "tiny", "messages": MESSAGES, "tools": [TOOL]}


def test_tools_are_called_and_answered() -> None:
    one = ScriptedService([CALL, "It is 3."])
    with served(one, reads=tokenizer_of("hermes")) as server:
        client = client_of(server)
        (choice,) = client.chat.completions.create(**ASKED, tool_choice="auto").choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 3})
        answer = {"role": "tool", "tool_call_id": call.id, "content": "3"}
        messages = [*MESSAGES, choice.message.model_dump(exclude_none=True), answer]
        (last,) = client.chat.completions.create(**{**ASKED, "messages": messages}).choices
        assert (last.finish_reason, last.message.content) == ("stop", "It is 3.")
        with pytest.raises(openai.BadRequestError, match='tool_choice: got "required", wanted "none" or "auto"'):
            client.chat.completions.create(**ASKED, tool_choice="required")
    assert one.asked[1].endswith(f"assistant: {CALL}\ntool: <add> 3\nassistant: ")


def test_the_clients_own_stream_puts_a_call_together() -> None:
    with (
        served(ScriptedService([f"I add.\n{CALL}"]), reads=tokenizer_of("hermes")) as server,
        client_of(server).chat.completions.stream(**ASKED) as stream,
    ):
        stream.until_done()
        found = stream.get_final_completion()
    (choice,) = found.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I add.")
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 3}')
