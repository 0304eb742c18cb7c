"""A demonstration's tokens are those that the policy reads and samples, and what learns is the assistant's alone."""

import json

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from grpo_fn.core.problem import COMPLETION, Conversation, Problem
from grpo_fn.shell.model import demonstrations, hf, tiny

CHAT, BARE = tiny.byte_tokenizer(chat=True), tiny.byte_tokenizer(chat=False)
HOWS = {f.__name__: f for f in (demonstrations.last_turn, demonstrations.assistant_turns, demonstrations.every_token)}
texts = st.text(st.characters(codec="utf-8", exclude_characters="<"), min_size=1, max_size=12)


def problem(prompt: str, completion: str) -> Problem:
    return Problem(0, prompt, completion.strip(), {"row": 3, COMPLETION: completion})


def conversation(*contents: str) -> Conversation:
    """Turns of user and assistant, one after the other."""
    roles = ("user", "assistant") * len(contents)
    turns = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return Conversation(json.dumps(turns))


def learned(row: demonstrations.Demonstration, tokenizer) -> str:
    """What learns, in one piece; a bar where something lies between."""
    pieces, on = "", False
    for token, learn in zip(row.tokens, row.learn, strict=True):
        pieces += ("|" if learn and not on and pieces else "") + (tokenizer.decode([token]) if learn else "")
        on = learn
    return pieces


@given(texts, texts)
def test_the_completion_follows_the_prompt_as_the_sampler_reads_it(prompt, completion):
    for tokenizer in (CHAT, BARE):
        read = hf.encode_prompt(tokenizer, prompt)
        row = demonstrations.last_turn(tokenizer, problem(prompt, completion), encode=hf.encode_prompt)
        said = tokenizer(completion, add_special_tokens=False)["input_ids"]
        assert row.tokens == [*read, *said, tokenizer.eos_token_id]
        assert row.learn == [False] * len(read) + [True] * (len(said) + 1)


@given(texts, texts, texts, texts, texts)
def test_every_turn_of_the_assistant_learns_and_nothing_else(a, b, c, d, e):
    a, b, c, d = (text.strip() or "x" for text in (a, b, c, d))
    asked = problem(conversation(a, b, c, d, a), e)
    row = demonstrations.assistant_turns(CHAT, asked, encode=hf.encode_prompt)
    turns = [b, d, e]
    as_read = [CHAT.decode(CHAT(text, add_special_tokens=False)["input_ids"]) for text in turns]
    whole = CHAT.decode([t for t, on in zip(row.tokens, row.learn, strict=True) if on])
    assert whole == "".join(f"{text}<|im_end|>" for text in as_read)
    assert row.tokens == demonstrations.last_turn(CHAT, asked, encode=hf.encode_prompt).tokens


def test_each_knob_chooses_the_tokens_that_learn() -> None:
    asked = problem(conversation("Hi", "Yes?", "1+1"), "2")
    found = {name: learned(how(CHAT, asked, encode=hf.encode_prompt), CHAT) for name, how in HOWS.items()}
    assert found["last_turn"] == "2<|im_end|>"
    assert found["assistant_turns"] == "Yes?<|im_end|>|2<|im_end|>"
    assert found["every_token"].startswith("user\nHi<|im_end|>\n<|im_start|>assistant\nYes?")
    assert found["every_token"].endswith("1+1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>")


def with_template(template: str):
    tokenizer = tiny.byte_tokenizer(chat=True)
    tokenizer.chat_template = template
    return tokenizer


COUNTS = "{{ messages | length }}" + tiny.CHAT_TEMPLATE  # as one that dates or numbers what it renders
SHORTENS = tiny.CHAT_TEMPLATE.replace("message['content']", "message['content'].split('</think>')[-1]")
ENDLESS = tiny.CHAT_TEMPLATE.replace("<|im_end|>", "")


@pytest.mark.parametrize(
    ("template", "answer", "complaint"),
    [
        (COUNTS, "Yes?", r"in which .* go on with '3<\|im_start\|>user\\n.*'"),
        (SHORTENS, "<think>so</think>Yes?", r"that makes it 'Yes\?', expected '<think>so"),
        (ENDLESS, "Yes?", r"that does not end the turn with EOS, '<\|im_end\|>'"),
    ],
    ids=["another_beginning", "another_text", "no_end"],
)
def test_a_template_whose_turns_cannot_be_found_is_refused(template, answer, complaint) -> None:
    asked, tokenizer = problem(conversation("Hi", answer, "1+1"), "2"), with_template(template)
    with pytest.raises(ValueError, match=f"message 1: got a chat template {complaint}") as caught:
        demonstrations.assistant_turns(tokenizer, asked, encode=hf.encode_prompt)
    assert str(caught.value).startswith("demonstration 3, ")
    assert "@demonstrations.last_turn" in str(caught.value)
    demonstrations.last_turn(tokenizer, asked, encode=hf.encode_prompt)


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        (Problem(4, "Hi", "2", {}), "demonstration 4, 'Hi': got a problem without a demonstration"),
        (problem("", "2"), "got a prompt of no tokens"),
        (
            problem(Conversation('[{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]'), "2"),
            "begins with the",
        ),
    ],
    ids=["no_completion", "no_prompt", "assistant_first"],
)
def test_rows_that_are_no_demonstrations_are_refused(asked, complaint) -> None:
    tokenizer = CHAT if isinstance(asked.prompt, Conversation) else BARE
    with pytest.raises(ValueError, match=complaint):
        demonstrations.assistant_turns(tokenizer, asked, encode=hf.encode_prompt)


def test_the_length_of_every_demonstration_is_checked() -> None:
    how = {"tokenizer": BARE, "demonstration": demonstrations.assistant_turns, "encode": hf.encode_prompt}
    rows = [problem("12", "3"), problem("12345", "678")]
    demonstrations.check_demonstrations(rows, **how, most=9, vocabulary=1000)
    demonstrations.check_demonstrations(rows, **how, most=None, vocabulary=1000)
    with pytest.raises(ValueError, match=r"'12345': got 9 tokens with its completion, expected at most 8"):
        demonstrations.check_demonstrations(rows, **how, most=8, vocabulary=1000)


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=4))
def test_rows_are_padded_on_the_right_and_log_probs_say_nothing(pairs):
    rows = [problem(*pair) for pair in pairs]
    how = {"demonstration": demonstrations.last_turn, "encode": hf.bare_prompt}
    found = demonstrations.given_rollout(rows, tokenizer=BARE, device=torch.device("cpu"), **how)
    for b, row in enumerate(rows):
        alone = demonstrations.last_turn(BARE, row, encode=hf.bare_prompt)
        assert found.tokens[b, : len(alone.tokens)].tolist() == alone.tokens
        assert found.mask[b].tolist() == alone.learn + [False] * (found.mask.shape[1] - len(alone.learn))
    assert not found.logp_sampled.any()
    assert found.text == tuple(completion for _, completion in pairs)
