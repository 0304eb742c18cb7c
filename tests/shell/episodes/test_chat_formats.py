"""Chat formats append turns exactly, or are refused with the first token that differs."""

import pytest
from fakes import tokenizer as word_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from grpo_fn.core.environment import Message, ToolCall
from grpo_fn.shell.episodes.chat_format import ChatFormat, text
from grpo_fn.shell.episodes.chat_template import tokenizer_template
from grpo_fn.shell.episodes.renderers_format import family_renderer
from grpo_fn.shell.episodes.tool_calls import hermes, no_calls
from grpo_fn.shell.model.tiny_model import CHAT_TEMPLATE, byte_tokenizer

contents = st.text("aT 7\né<>", max_size=6)
# As Qwen3's: thoughts of turns before the last question are left out.
STRIPS = CHAT_TEMPLATE.replace(
    "message['content']", "(message['content'].split('</think>')[-1] if not loop.last else message['content'])"
)
NO_END = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def chat_tokenizer(chat_template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerBase:
    made = byte_tokenizer(chat=True)
    made.chat_template = chat_template
    return made


def test_they_are_chat_formats() -> None:
    made = (
        text(word_tokenizer(), before="\n", after="\n", read_calls=no_calls),
        tokenizer_template(chat_tokenizer(), observed=("tool",), read_calls=hermes),
    )
    assert all(isinstance(one, ChatFormat) for one in made)


@given(st.lists(contents, min_size=1, max_size=3), contents, st.lists(contents, min_size=1, max_size=2))
def test_a_row_that_grew_is_the_conversation_rendered_at_once(opening, turn, observed) -> None:
    tokenizer = chat_tokenizer()
    made = tokenizer_template(tokenizer, observed=("tool", "user"), read_calls=hermes)
    first, answers = [Message("user", x) for x in opening], [Message("tool", x) for x in observed]
    row = [*made.open(first), *tokenizer(turn)["input_ids"], made.end, *made.extend(answers)]
    whole = [{"role": m.role, "content": m.content} for m in (*first, Message("assistant", turn), *answers)]
    assert row == tokenizer.apply_chat_template(whole, add_generation_prompt=True, return_dict=True)["input_ids"]


@given(contents)
def test_a_turn_is_read_without_its_end(turn: str) -> None:
    tokenizer = chat_tokenizer()
    for made in (
        tokenizer_template(tokenizer, observed=("tool",), read_calls=no_calls),
        text(tokenizer, before="", after="", read_calls=no_calls),
    ):
        assert made.parse([*tokenizer(turn)["input_ids"], made.end]) == Message("assistant", turn)


def test_a_template_that_leaves_thoughts_out_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got .* as token \d+ of a conversation with the turn '<think>.*wanted '<'"):
        tokenizer_template(chat_tokenizer(STRIPS), observed=("user",), read_calls=hermes)


def test_a_template_without_ends_of_turns_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got no '<\|im_end\|>' behind a turn .*, wanted the end-of-turn token"):
        tokenizer_template(chat_tokenizer(NO_END), observed=("user",), read_calls=hermes)


def test_a_tokenizer_without_template_or_end_is_refused() -> None:
    bare = byte_tokenizer(chat=False)
    with pytest.raises(ValueError, match="without chat template or EOS token, wanted both"):
        tokenizer_template(bare, observed=("user",), read_calls=hermes)
    bare.eos_token = None
    with pytest.raises(ValueError, match="without an EOS token"):
        text(bare, before="", after="", read_calls=no_calls)


def test_a_role_that_was_not_tried_is_refused() -> None:
    made = tokenizer_template(chat_tokenizer(), observed=("tool",), read_calls=hermes)
    with pytest.raises(ValueError, match="got an observation of role 'user', wanted tool"):
        made.extend([Message("user", "x")])


def test_a_family_of_the_renderers_package_appends_to_what_was_sampled() -> None:
    pytest.importorskip("renderers", reason="pip install grpo_fn[agents]")
    tokenizer = byte_tokenizer(chat=True)
    tokenizer.unk_token = None
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"])
    made = family_renderer(tokenizer, family="qwen3", observed=("tool",))
    assert isinstance(made, ChatFormat)
    assert (
        tokenizer.decode(made.open([Message("user", "hi")]))
        == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    behind = "\n<|im_start|>user\n<tool_response>\n12\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(made.extend([Message("tool", "12")])) == behind
    turn = tokenizer('so <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>')["input_ids"]
    assert made.parse(turn) == Message("assistant", "so", "", (ToolCall("f", {"x": 1}),))
    broken = made.parse(tokenizer('<tool_call>\n{"name": }\n</tool_call><|im_end|>')["input_ids"])
    assert "invalid_json" in broken.malformed
    with pytest.raises(ValueError, match="family: got 'none'"):
        family_renderer(tokenizer, family="none", observed=("tool",))
