"""Chat formats append turns exactly, or are refused with the first token that differs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from grpo_fn.core.environment import Message, ToolCall
from grpo_fn.shell.episodes.chat_format import family_renderer, hermes, no_calls, text, tokenizer_template
from grpo_fn.shell.model.tiny import CHAT_TEMPLATE, byte_tokenizer

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
    knobs = {"read_calls": no_calls}
    for made in (tokenizer_template(tokenizer, observed=("tool",), **knobs), text(tokenizer, **knobs)):
        assert made.parse([*tokenizer(turn)["input_ids"], made.end]) == Message("assistant", turn)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (STRIPS, r"got .* as token \d+ of a conversation with the turn '<think>.*expected '<'"),
        (NO_END, r"got no '<\|im_end\|>' behind a turn .*, expected the end-of-turn token"),
    ],
)
def test_a_template_that_turns_cannot_be_appended_to_is_refused(template: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tokenizer_template(chat_tokenizer(template), observed=("user",), read_calls=hermes)


def test_a_tokenizer_without_template_or_end_and_a_role_that_was_not_tried_are_refused() -> None:
    made = tokenizer_template(chat_tokenizer(), observed=("tool",), read_calls=hermes)
    with pytest.raises(ValueError, match="got an observation of role 'user', expected tool"):
        made.extend([Message("user", "x")])
    bare = byte_tokenizer(chat=False)
    with pytest.raises(ValueError, match="without chat template or EOS token, expected both"):
        tokenizer_template(bare, observed=("user",), read_calls=hermes)
    bare.eos_token = None
    with pytest.raises(ValueError, match="without an EOS token"):
        text(bare, read_calls=no_calls)


# -- families of the renderers package, on bytes with their special tokens: their own tokenizers are not here


SPECIAL = """
<tool_call> </tool_call> <tool_response> </tool_response> <think> </think> <|endoftext|> <|vision_start|>
<|vision_end|> <|image_pad|> <|video_pad|> <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>
<|eom_id|> <|end_of_text|> <｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜>
<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜>
<｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜> [gMASK] <sop>
<|system|> <|user|> <|assistant|> <|observation|> <arg_key> </arg_key> <arg_value> </arg_value> <|im_system|>
<|im_user|> <|im_assistant|> <|im_middle|> <|tool_calls_section_begin|> <|tool_calls_section_end|>
<|tool_call_begin|> <|tool_call_end|> <|tool_call_argument_begin|> ]~!b[ ]~b] [e~[ <minimax:tool_call>
</minimax:tool_call> <response> </response> 〈|EOS|〉 <system> </system> <user> </user> <assistant> </assistant>
"""  # of Qwen, Llama, DeepSeek, GLM, Kimi, MiniMax and Laguna
EXACT = ("deepseek-v3", "laguna-xs-2.1", "llama-3", "minimax-m2", "nemotron-3", "prime-qwen3", "qwen3", "qwen3.5")


EXACT = ("deepseek-v3", "laguna-xs-2.1", "llama-3", "minimax-m2", "nemotron-3", "prime-qwen3", "qwen3", "qwen3.5")


REFUSED = {
    "glm-5": r"got '<\|observation\|>' as token \d+ of a conversation with a tool message",  # an end and a beginning
    "kimi-k2": r"got '\\n' as token \d+ of a conversation with a tool message, expected 'f'",  # it names the call
    "default": "got no bridge from a turn to messages of tool, expected one that keeps what was sampled",
}


def family_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = byte_tokenizer(chat=True)
    tokenizer.unk_token = None
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(SPECIAL.split())})
    return tokenizer


@pytest.mark.parametrize("family", EXACT)
def test_a_family_of_the_renderers_package_appends_to_what_was_sampled(family: str) -> None:
    pytest.importorskip("renderers", reason="pip install grpo_fn[agents]")
    made = family_renderer(family_tokenizer(), family=family, observed=("tool",))
    call = {"type": "function", "id": "functions.f:0", "function": {"name": "f", "arguments": {"x": 1}}}
    answer = {"role": "tool", "content": "12", "name": "f", "tool_call_id": "functions.f:0"}
    opened = made.open([Message("user", "hi")])
    for thought in ({}, {"reasoning_content": "so"}):
        turn = {"role": "assistant", "content": "", "tool_calls": [call], **thought}
        whole = made.renderer.render_ids([{"role": "user", "content": "hi"}, turn, answer], add_generation_prompt=True)
        if whole[: len(opened)] == opened:
            break
    turn = whole[len(opened) : whole.index(made.end, len(opened)) + 1]
    assert [*opened, *turn, *made.extend([Message("tool", "12", "f")])] == whole
    assert made.parse(turn) == Message("assistant", "", "", (ToolCall("f", {"x": 1}),))


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_be_appended_to_exactly_is_refused(family: str) -> None:
    pytest.importorskip("renderers", reason="pip install grpo_fn[agents]")
    with pytest.raises(ValueError, match=REFUSED[family]):
        family_renderer(family_tokenizer(), family=family, observed=("tool",))


def test_calls_that_a_renderers_family_cannot_read_are_malformed() -> None:
    pytest.importorskip("renderers", reason="pip install grpo_fn[agents]")
    tokenizer = family_tokenizer()
    made = family_renderer(tokenizer, family="qwen3", observed=("tool",))
    broken = made.parse(tokenizer('<tool_call>\n{"name": }\n</tool_call><|im_end|>')["input_ids"])
    assert "invalid_json" in broken.malformed
    with pytest.raises(ValueError, match="family: got 'none'"):
        family_renderer(tokenizer, family="none", observed=("tool",))
