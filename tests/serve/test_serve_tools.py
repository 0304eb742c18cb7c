"""Tools in a chat: rendered as the template has them, the model's calls read back, and everything else refused."""

import http.client
import json
from functools import partial
from urllib.parse import urlsplit

import pytest
from fakes import tokenizer
from served import Client, served, service
from tool_serving import ScriptedService, tokenizer_of

from grpo_fn.serve.tool_chat import calls_reader_of
from grpo_fn.shell.episodes import tool_calls
from grpo_fn.shell.model.hf import with_system
from grpo_fn.shell.serving.http_endpoint import HttpError

CHAT = "/v1/chat/completions"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
ASKED = {"messages": [{"role": "user", "content": "Tom has"}], "tools": [ADD], "seed": 1}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'


def said_call(call: dict) -> tuple[str, dict]:
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    return call["function"]["name"], json.loads(call["function"]["arguments"])


@pytest.mark.parametrize("family", ["hermes", "qwen_xml", "llama_json"])
def test_the_reader_of_a_familys_calls_is_found_by_its_template(family: str) -> None:
    assert calls_reader_of(tokenizer_of(family)) is getattr(tool_calls, family)


def test_calls_come_as_openai_has_them_and_a_tools_answer_is_rendered() -> None:
    one = ScriptedService([f"I add.\n{CALL}{CALL}", "It is 3."])
    with served(one, reads=tokenizer_of("hermes")) as client:
        (choice,) = client.ask(CHAT, **ASKED)["choices"]
        message = choice["message"]
        assert (choice["finish_reason"], message["content"]) == ("tool_calls", "I add.")
        assert [said_call(call) for call in message["tool_calls"]] == [("add", {"a": 3})] * 2
        assert len({call["id"] for call in message["tool_calls"]}) == 2
        answers = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in message["tool_calls"]]
        (last,) = client.ask(CHAT, **{**ASKED, "messages": [*ASKED["messages"], message, *answers]})["choices"]
    assert (last["finish_reason"], last["message"]["content"]) == ("stop", "It is 3.")
    assert "tool_calls" not in last["message"]
    first, second = one.asked
    assert first.startswith("system: tools [{")
    assert '"name": "add", "description": "Add."' in first
    assert first.endswith("user: Tom has\nassistant: ")
    assert second == f"{first}I add.{CALL}{CALL}\ntool: <add> 3\ntool: <add> 3\nassistant: "


@pytest.mark.parametrize(
    ("declared", "wanted"),
    [({"type": "string"}, "3"), ({"type": "integer"}, 3), ({"type": ["string", "null"]}, 3), ({}, 3), (True, 3)],
)
def test_an_argument_that_is_declared_as_text_is_what_was_written(declared: object, wanted: object) -> None:
    """Qwen3-Coder and its like write texts without quotes."""
    parameters = {"type": "object", "properties": {"code": declared}}
    body = {**ASKED, "tools": [{"type": "function", "function": {"name": "run", "parameters": parameters}}]}
    text = "<tool_call>\n<function=run>\n<parameter=code>\n3\n</parameter>\n</function>\n</tool_call>"
    with served(ScriptedService([text]), reads=tokenizer_of("qwen_xml")) as client:
        (choice,) = client.ask(CHAT, **body)["choices"]
    assert said_call(choice["message"]["tool_calls"][0]) == ("run", {"code": wanted})


def test_without_calls_and_with_a_malformed_one_the_text_is_what_was_written() -> None:
    broken = '<tool_call>\n{"name": "add"\n</tool_call> '
    with served(ScriptedService([" so ", broken, CALL]), reads=tokenizer_of("hermes")) as client:
        for text in (" so ", broken):
            (choice,) = client.ask(CHAT, **ASKED)["choices"]
            assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
            assert "tool_calls" not in choice["message"]
        (cut,) = client.ask(CHAT, **ASKED, max_tokens=len(tokenizer()(CALL)["input_ids"]))["choices"]
        assert cut["finish_reason"] == "length"
        assert said_call(cut["message"]["tool_calls"][0]) == ("add", {"a": 3})


def test_without_parallel_calls_the_first_is_shown_and_every_drawn_token_is_counted() -> None:
    text = f"I add.\n{CALL}{CALL.replace('3', '4')} Done."
    drawn = tokenizer()(text, add_special_tokens=False)["input_ids"]
    with served(ScriptedService([text] * 4), reads=tokenizer_of("hermes")) as client:
        one, two = (
            client.ask(CHAT, **ASKED, parallel_tool_calls=parallel, return_token_ids=True) for parallel in (False, True)
        )
        streamed = [
            delta
            for event in events(client, parallel_tool_calls=False)
            for choice in event["choices"]
            if (delta := choice["delta"]).get("tool_calls")
        ]
        (unsaid,) = client.ask(CHAT, **ASKED, parallel_tool_calls=None)["choices"]
    (first,), (both,) = one["choices"], two["choices"]
    assert [said_call(call) for call in first["message"]["tool_calls"]] == [("add", {"a": 3})]
    assert [said_call(call) for call in both["message"]["tool_calls"]] == [("add", {"a": 3}), ("add", {"a": 4})]
    assert len(unsaid["message"]["tool_calls"]) == 2
    assert first["message"]["content"] == both["message"]["content"]
    assert first["token_ids"] == both["token_ids"] == drawn
    assert one["usage"] == two["usage"]
    (delta,) = streamed
    assert [said_call(call) for call in delta["tool_calls"]] == [("add", {"a": 3})]


def test_no_choice_of_tools_neither_shows_nor_reads_them() -> None:
    one = ScriptedService([CALL])
    with served(one, reads=tokenizer_of("hermes")) as client:
        (choice,) = client.ask(CHAT, **ASKED, tool_choice="none")["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
    assert one.asked == ["user: Tom has\nassistant: "]


def events(client: Client, **body: object) -> list[dict]:
    connection = http.client.HTTPConnection(urlsplit(client.url).netloc, timeout=30)
    connection.request("POST", CHAT, json.dumps({**ASKED, "stream": True, **body}))
    lines = connection.getresponse().read().decode().split("\n\n")
    connection.close()
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_a_stream_has_the_calls_of_each_choice_when_it_has_ended() -> None:
    texts = [f"I add.\n{CALL}", "Nothing to add."]
    with served(ScriptedService(texts), reads=tokenizer_of("hermes")) as client:
        found = events(client, n=2, stream_options={"include_usage": True})
    assert found[-1]["usage"]["completion_tokens"] > 0
    choices = [choice for event in found for choice in event["choices"]]
    deltas = {n: [c["delta"] for c in choices if c["index"] == n] for n in (0, 1)}
    assert deltas[1] == [{"role": "assistant", "content": ""}, {"content": "Nothing to add."}]
    assert deltas[0][1]["content"] == "I add."
    (call,) = deltas[0][1]["tool_calls"]
    assert call["index"] == 0
    assert said_call(call) == ("add", {"a": 3})
    assert {c["index"]: c["finish_reason"] for c in choices if c["finish_reason"]} == {0: "tool_calls", 1: "stop"}


# -- what is refused

ANSWER = {"role": "tool", "tool_call_id": "x", "content": "3"}
WRONG = [
    ({"tools": {}}, "tools: got {}, wanted a list of tools"),
    ({"tools": [ADD, ADD]}, 'tools: got ["add", "add"], wanted each name once'),
    ({"tools": [{"type": "custom"}]}, 'tools[0]: got {"type": "custom"}, wanted {"type": "function"'),
    (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        'tools[0].function.name: got "a b", wanted 1 to 64',
    ),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 3}}]}, "tools[0].function: got"),
    ({"tools": [{"type": "function", "function": {"name": "a", "strict": True}}]}, "strict: got true, wanted false"),
    ({"tool_choice": "required"}, 'tool_choice: got "required", wanted "none" or "auto"'),
    ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice: got {"),
    ({"parallel_tool_calls": "no"}, 'parallel_tool_calls: got "no", wanted true or false'),
    ({"messages": []}, "messages: got [], wanted a list of messages"),
    ({"messages": [{"role": "assistant", "content": "a"}]}, 'messages: got "assistant", wanted a last message'),
    ({"messages": [ANSWER]}, 'messages[0].tool_call_id: got "x", wanted the id of a call'),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "messages[0].tool_calls: got"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}, ANSWER]}, "messages[0].tool_calls[0]: got"),
    ({"messages": [{"role": "user"}]}, "messages[0]: got the keys role, wanted role, content"),
]
HELD = {"id": "x", "type": "function", "function": {"name": "add", "arguments": "[3]"}}


@pytest.mark.parametrize(("body", "message"), WRONG)
def test_a_wrong_request_of_tools_is_refused_with_got_and_wanted(body: dict, message: str) -> None:
    with served(ScriptedService([]), reads=tokenizer_of("hermes")) as client:
        status, error = client.error(CHAT, **{**ASKED, **body})
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert message in error["message"]
    assert error["param"] in ("tools", "tool_choice", "parallel_tool_calls", "messages")


def test_arguments_that_are_no_object_are_refused() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [HELD]}, ANSWER]
    with served(ScriptedService([]), reads=tokenizer_of("hermes")) as client:
        assert (
            'arguments: got "[3]", wanted the text of a JSON object'
            in client.error(CHAT, **{**ASKED, "messages": messages})[1]["message"]
        )


def test_a_model_that_knows_no_tools_says_so() -> None:
    blind = tokenizer_of("odd")
    blind.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}assistant: "
    with served(service()) as client:
        assert "for a model without a chat template" in client.error(CHAT, **ASKED)[1]["message"]
    with served(ScriptedService([]), reads=blind) as client:
        assert "for a chat template that does not show them" in client.error(CHAT, **ASKED)[1]["message"]
    with served(ScriptedService([]), reads=tokenizer_of("odd")) as client:
        assert (
            "writes a call as '@tool@', wanted one that hermes, qwen_xml" in client.error(CHAT, **ASKED)[1]["message"]
        )
    with served(ScriptedService([]), reads=tokenizer_of("refusing")) as client:
        assert "that refuses a call of a tool (no calls)" in client.error(CHAT, **ASKED)[1]["message"]
    system = partial(with_system, system="Be brief.")
    with served(ScriptedService([]), reads=tokenizer_of("hermes"), encode=system) as client:
        assert "encode_prompt is grpo_fn.shell.model.hf.with_system" in client.error(CHAT, **ASKED)[1]["message"]
    with pytest.raises(HttpError, match="without a chat template"):
        calls_reader_of(tokenizer())
