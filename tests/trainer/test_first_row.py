"""The first row as people see it, and the faults of prompts that are certain before weights are loaded."""

import pytest
import torch
from fakes import problem
from transformers import PreTrainedTokenizerBase, Qwen2Config

from grpo_fn.config import load_config
from grpo_fn.core.batch import outcome_reward
from grpo_fn.core.problem import COMPLETION, Conversation, Problem
from grpo_fn.core.types import Groups, Rollout
from grpo_fn.shell.model import hf
from grpo_fn.shell.model.tiny import CHAT_TEMPLATE, byte_tokenizer
from grpo_fn.trainer.evaluation import why_no_reward
from grpo_fn.trainer.first_row import LONGEST_PROMPT, first_row_lines, own_answers
from grpo_fn.trainer.prepare import check_prompts
from grpo_fn.trainer.sections import Settings

TOKENIZER = byte_tokenizer(chat=True)
CONFIG = Qwen2Config(vocab_size=300)


def settings_of(*files: str, **knobs: object) -> Settings:
    """Of the arithmetic run, with files and knobs over it."""
    bound = [f"{name.replace('__', '.')}={value}" for name, value in knobs.items()]
    return Settings(**load_config(["run/arithmetic.gin", *files], bound).kwargs())


def with_template(template: str) -> PreTrainedTokenizerBase:
    """The tokenizer with another chat template."""
    tokenizer = byte_tokenizer(chat=True)
    tokenizer.chat_template = template
    return tokenizer


def test_a_row_is_shown_as_the_policy_reads_it_with_its_ends_and_the_reward_of_each_spelling_of_its_answer() -> None:
    row = Problem(0, "What is 2+3?\x1b[2J", "5", {})
    count = len(hf.encode_prompt(TOKENIZER, row.prompt))
    assert first_row_lines(settings_of(), row, TOKENIZER, [258], CONFIG) == [
        f"first row, as the policy reads it: {count} tokens, 3 of them special («so»)",
        "  | «<|im_start|>»user",
        r"  | What is 2+3?\x1b[2J«<|im_end|>»",
        "  | «<|im_start|>»assistant",
        "  | ",
        "a completion ends    with «<|im_end|>» (258), or after 32 tokens",
        "the row's answer     5",
        r"its reward           0.00 (correct 0.00, boxed 0.00) for 5; 1.10 (correct 1.00, boxed 1.00) for \boxed{5}",
    ]
    long = first_row_lines(settings_of(), row._replace(prompt="x" * 10**5, answer=""), TOKENIZER, [258], CONFIG)
    assert sum(map(len, long)) < LONGEST_PROMPT + 500
    assert long[-1] == "its reward           is not tried here: the row has no answer"
    text_alone = first_row_lines(settings_of(), row._replace(answer=""), None, (), CONFIG)
    assert text_alone[1] == r"  | What is 2+3?\x1b[2J"


def test_special_tokens_spelt_by_a_text_are_not_marked() -> None:
    spelt = with_template("{{ messages[0]['content'] }}")
    spelt.add_tokens(["<plain>"], special_tokens=False)
    lines = first_row_lines(settings_of(), problem(0, "a <plain> b")._replace(answer=""), spelt, [258], CONFIG)
    assert lines[0].endswith(" 0 of them special («so»)")
    assert lines[1] == "  | a <plain> b"


def test_a_row_of_a_supervised_stage_shows_which_tokens_are_learned() -> None:
    knobs = {"MODEL": "'x'", "DATA": "'x'"}
    stage = Settings(**load_config(["run/sft.gin"], [f"{name}={value}" for name, value in knobs.items()]).kwargs())
    row = Problem(0, "2+3?", "5", {COMPLETION: "it is 5"})
    first, *read, learned = first_row_lines(stage, row, TOKENIZER, [258], CONFIG)
    assert first.endswith(", 8 are learned (>)")
    assert "  | 2+3?«<|im_end|>»" in read
    assert learned == "  > it is 5«<|im_end|>»"


def test_the_spellings_of_an_answer() -> None:
    assert own_answers(Problem(0, "", "5", {})) == ["5", r"\boxed{5}"]
    assert own_answers(Problem(0, "", "def f(): ...", {"tests": "x"}))[1] == "```python\ndef f(): ...\n```"


# -- what is certainly a fault


PARTS = "{% for m in messages %}{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}<|im_start|>"


@pytest.mark.parametrize("prompts", [["What is 2+3?", "And 4+5?"], ["Alone?"]])
def test_a_template_that_drops_the_question_is_refused_with_what_is_left_of_it(prompts: list[str]) -> None:
    with pytest.raises(ValueError, match=r"encode_prompt: got .*'<\|im_start\|>', expected the question among them"):
        check_prompts(prompts, with_template(PARTS), hf.encode_prompt)


def test_templates_that_change_white_space_or_what_stands_around_a_question_are_not_refused() -> None:
    kept = CHAT_TEMPLATE.replace("message['content']", "message['content'] | trim | upper")
    chat = Conversation('[{"role": "user", "content": "  a\\n"}, {"role": "assistant", "content": "x"}]')
    check_prompts([" WHAT \n IS 2+3?  ", "Ä\u0301 ", "", "Ä\u0301 "], with_template(kept), hf.encode_prompt)
    check_prompts([chat, " ? "], TOKENIZER, hf.encode_prompt)
    check_prompts(["one", "two"], TOKENIZER, lambda tokenizer, prompt: [len(prompt), prompt == "one"])  # a user's own


def test_a_token_beyond_the_embedding_is_refused_with_its_name() -> None:
    grown = with_template(CHAT_TEMPLATE)
    grown.add_tokens(["<new>"])
    with pytest.raises(ValueError, match=r"got token 259, '<new>', in the first row, expected one below 259"):
        first_row_lines(settings_of(), problem(0, "a <new> b"), grown, [258], Qwen2Config(vocab_size=259))


# -- a first step without a reward


def diagnosis(
    texts: list[str], *, prompts: tuple[str, ...] = ("a", "b"), cut: bool = False, value: float = 0.0
) -> str | None:
    rows = len(texts)
    mask = torch.ones(rows, 4, dtype=torch.bool)
    rollout = Rollout(mask.long(), mask, torch.zeros(rows, 4), torch.full((rows,), cut), tuple(texts))
    values = torch.full((len(prompts), rows // len(prompts)), value)
    reward = outcome_reward(values, torch.ones_like(values, dtype=torch.bool), {"correct": values})
    problems = tuple(Problem(i, prompt, "42", {}) for i, prompt in enumerate(prompts))
    return why_no_reward(Groups(problems, rollout, reward), settings_of().rewards.reward, limit=12)


def test_a_first_step_without_a_reward_has_its_likeliest_reason() -> None:
    numbers = ["it is 42", "so 7.", "x = $3$", "none"]
    assert "\\boxed, ####, 'the answer is'), 3 of 4 end in a number: see math.lenient" in diagnosis(numbers)
    assert "they end without a number: ask for a box" in diagnosis(["none"] * 4)
    assert "4 of 4 completions are cut at 12 tokens" in diagnosis(numbers, cut=True)
    assert "all 2 prompts are the same" in diagnosis(numbers, prompts=("a", "a"))
    assert "4 of 4 completions are empty" in diagnosis([" "] * 4)
    assert r"the first completion is '\boxed{1}', the answer to it '42'" in diagnosis([r"\boxed{1}"] * 4)
    assert diagnosis(numbers, value=0.5) is None
