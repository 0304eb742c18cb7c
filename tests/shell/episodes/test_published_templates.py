"""Published chat templates, as TRL's package has them: which calls are read, and where turns can be appended exactly.

/path/to/venv-with-trl/bin/python -m pytest tests/shell/episodes/test_published_templates.py
"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from grpo_fn.core.environment import ToolCall
from grpo_fn.shell.episodes import chat_format
from grpo_fn.shell.episodes.chat_format import tokenizer_template
from grpo_fn.shell.model.tiny import byte_tokenizer

FOUND = find_spec("trl")
FOLDER = Path(FOUND.origin).parent / "chat_templates" if FOUND else None
if FOLDER is None or not FOLDER.is_dir():
    pytest.skip("NOT TESTED: trl, which has copies of published templates, is not installed", allow_module_level=True)

READ = {
    **dict.fromkeys(("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"), "hermes"),
    **dict.fromkeys(("qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "nemotron_3_nano"), "qwen_xml"),
    **dict.fromkeys(("llama3_1", "llama3_2"), "llama_json"),
}
# Turns can be appended exactly behind what a tool said; with thoughts kept, behind what a user said, too.
APPENDED = ("qwen2_5", "qwen3_instruct_2507", "qwen3_vl")
ARGUMENTS = {"code": 'if "é" < 1:\n    print("<b>")', "n": 3, "share": 0.5, "deep": {"a": [1, None, True]}, "empty": ""}
QUESTION = {"role": "user", "content": "question"}
TOOL = {"type": "function", "function": {"name": "run", "description": "Run.", "parameters": {"type": "object"}}}


def tokenizer_with(name: str) -> PreTrainedTokenizerBase:
    """A tokenizer of bytes with the template, and the marks of Llama's turns as tokens."""
    made = byte_tokenizer(chat=True)
    made.add_special_tokens({"additional_special_tokens": ["<|eot_id|>"]})
    if name.startswith("llama"):
        made.eos_token = "<|eot_id|>"
    made.chat_template = (FOLDER / f"{name}.jinja").read_text()
    return made


def written_calls(made: PreTrainedTokenizerBase, calls: list[ToolCall]) -> str:
    """What the template writes where the model called tools, as a completion's text is decoded."""
    functions = [{"type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}} for c in calls]
    answer = {"role": "assistant", "content": "", "tool_calls": functions}
    opening = made.apply_chat_template([QUESTION], tools=[TOOL], add_generation_prompt=True, tokenize=False)
    whole = made.apply_chat_template([QUESTION, answer], tools=[TOOL], tokenize=False)
    shared = next((n for n, (a, b) in enumerate(zip(opening, whole, strict=False)) if a != b), len(opening))
    ids = made(whole[shared:], add_special_tokens=False)["input_ids"]
    return made.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", READ)
def test_calls_as_the_template_writes_them_are_read(name: str) -> None:
    made, read = tokenizer_with(name), getattr(chat_format, READ[name])
    calls = [ToolCall("run", ARGUMENTS)] + [ToolCall("stop", {})] * (READ[name] != "llama_json")
    for some in (calls[:1], calls):
        found = read(written_calls(made, some))
        assert found.malformed == ""
        assert [*found.calls] == some


@pytest.mark.parametrize("name", APPENDED)
def test_an_episode_is_the_conversation_that_the_template_renders(name: str) -> None:
    made = tokenizer_with(name)
    tokenizer_template(made, observed=("tool", "user"), read_calls=chat_format.hermes)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "nemotron_3_nano", "llama3_1"])
def test_a_template_that_changes_earlier_turns_is_refused_with_the_token_that_differs(name: str) -> None:
    reader = getattr(chat_format, READ[name])
    with pytest.raises(ValueError, match=r"expected .*: the template changes what was written before"):
        tokenizer_template(tokenizer_with(name), observed=("tool", "user"), read_calls=reader)


def test_thoughts_before_a_tools_answer_stay_in_qwen3() -> None:
    tokenizer_template(tokenizer_with("qwen3"), observed=("tool",), read_calls=chat_format.hermes)


def test_text_and_thoughts_around_a_call_are_its_content() -> None:
    made = tokenizer_with("qwen3")
    call = written_calls(made, [ToolCall("run", {"n": 1})])
    written = f"<think>\nI add.\n</think>\n\n{call.partition('</think>')[2].strip() or call}"
    found = chat_format.hermes(written)
    assert (found.content, json.dumps(found.calls[0].arguments)) == ("<think>\nI add.\n</think>", '{"n": 1}')
