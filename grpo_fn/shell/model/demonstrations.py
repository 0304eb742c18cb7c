"""Demonstrations as tokens: exactly what the policy would have read and sampled, and which of it to learn.

A demonstration is a problem whose `meta` holds a completion. Its prompt goes through the run's own `encode_prompt`, so
that what is learned here is what sampling begins from afterwards.
"""

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo_fn.core.problem import COMPLETION, Conversation, Problem
from grpo_fn.core.types import Rollout
from grpo_fn.shell.model.hf import Encode, check_ids
from grpo_fn.tasks.task import Task, train_problems


class Demonstration(NamedTuple):
    """One row of given tokens."""

    tokens: list[int]
    learn: list[bool]  # which of them are to be learned; never the first, which nothing predicts


# (tokenizer, problem, *, encode) -> its row: last_turn, assistant_turns, every_token
Demonstrate = Callable[..., Demonstration]


def last_turn(tokenizer: PreTrainedTokenizerBase, problem: Problem, *, encode: Encode) -> Demonstration:
    """The prompt as the policy reads it, then the completion and EOS, which are learned.

    Args:
        tokenizer: the policy's.
        problem: with its completion.
        encode: (tokenizer, prompt) -> token ids of the prompt.

    Returns:
        The row.

    Raises:
        ValueError: for a problem without a completion or without prompt tokens, and as `encode` does.
    """
    prompt = encode(tokenizer, problem.prompt)
    if not prompt:
        raise ValueError(f"{place(problem)}: got a prompt of no tokens, expected at least one before the completion")
    answer = tokenizer(completion_text(problem), add_special_tokens=False)["input_ids"]
    return prompt_and_answer(prompt, answer, tokenizer.eos_token_id)


def assistant_turns(tokenizer: PreTrainedTokenizerBase, problem: Problem, *, encode: Encode) -> Demonstration:
    """As `last_turn`, and every earlier turn of the assistant is learned too, up to and with the EOS that ends it.

    An earlier turn's tokens are those of the template: the prompt before it has to be the beginning of the whole, and
    what follows to be the turn's own text up to EOS.

    Args:
        tokenizer: the policy's.
        problem: with its completion; its prompt is a text, or the Conversation before the last turn.
        encode: (tokenizer, prompt) -> token ids of the prompt.

    Returns:
        The row.

    Raises:
        ValueError: where the chat template renders a beginning otherwise once more follows, changes what a turn says,
            or ends it without EOS; names the message, counted from 0. And as `last_turn`.
    """
    row = last_turn(tokenizer, problem, encode=encode)
    messages = problem.prompt.messages if isinstance(problem.prompt, Conversation) else []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        where = f"{place(problem)}, message {number}"
        if number == 0:
            raise ValueError(f"{where}: got a conversation that begins with the assistant, expected a prompt before it")
        before = encode(tokenizer, Conversation(json.dumps(messages[:number], ensure_ascii=False)))
        check_beginning(tokenizer, before, row.tokens, where)
        end = end_of_turn(tokenizer, row, len(before), message["content"], where)
        row.learn[len(before) : end] = [True] * (end - len(before))
    return row


def every_token(tokenizer: PreTrainedTokenizerBase, problem: Problem, *, encode: Encode) -> Demonstration:
    """As `last_turn`, and the prompt is learned too, but for its first token: the text as a whole.

    Args:
        tokenizer: the policy's.
        problem: with its completion.
        encode: (tokenizer, prompt) -> token ids of the prompt.

    Returns:
        The row.

    Raises:
        ValueError: as `last_turn`.
    """
    tokens = last_turn(tokenizer, problem, encode=encode).tokens
    return Demonstration(tokens, [False] + [True] * (len(tokens) - 1))


def completion_text(problem: Problem) -> str:
    """The completion of a demonstration. Raises ValueError for a problem that has none."""
    completion = problem.meta.get(COMPLETION)
    if not isinstance(completion, str) or not completion:
        raise ValueError(
            f"{place(problem)}: got a problem without a demonstration, expected one that rows.read_demonstrations or "
            "arithmetic.demonstration_task has made"
        )
    return completion


def prompt_and_answer(prompt: Sequence[int], answer: Sequence[int], eos: int) -> Demonstration:
    """The row of a prompt and a completion, of which the completion and the EOS that ends it are learned."""
    return Demonstration([*prompt, *answer, eos], [False] * len(prompt) + [True] * (len(answer) + 1))


def check_beginning(
    tokenizer: PreTrainedTokenizerBase, before: Sequence[int], whole: Sequence[int], where: str
) -> None:
    """Raise ValueError, naming the first token that differs, unless `before` is the beginning of `whole`."""
    for place_, token in enumerate(before):
        if place_ >= len(whole) or token != whole[place_]:
            follows = repr(tokenizer.decode(whole[place_ : place_ + 8])) if place_ < len(whole) else "nothing"
            raise ValueError(
                f"{where}: got a chat template in which the messages before it go on with {follows} at token {place_} "
                f"where more follows, expected {tokenizer.decode(before[place_ : place_ + 8])!r} as without; the turn "
                "cannot be found: sections.Data.demonstration = @demonstrations.last_turn"
            )


def end_of_turn(tokenizer: PreTrainedTokenizerBase, row: Demonstration, start: int, text: str, where: str) -> int:
    """Where a turn that begins at `start` ends: behind its EOS. Raises ValueError unless what it says is `text`."""
    stop = next((i for i in range(start, len(row.tokens)) if row.tokens[i] == tokenizer.eos_token_id), None)
    if stop is None or row.learn[stop]:
        raise ValueError(
            f"{where}: got a chat template that does not end the turn with EOS, {tokenizer.eos_token!r}, expected it: "
            "sections.Data.demonstration = @demonstrations.last_turn"
        )
    own = tokenizer(text, add_special_tokens=False)["input_ids"]
    got, expected = (tokenizer.decode(ids).strip() for ids in (row.tokens[start:stop], own))
    if got != expected:
        raise ValueError(
            f"{where}: got a chat template that makes it {got[:80]!r}, expected {expected[:80]!r}: "
            "sections.Data.demonstration = @demonstrations.last_turn"
        )
    return stop + 1


def place(problem: Problem) -> str:
    """A demonstration for people: its row, or its number, and how its prompt begins."""
    return f"demonstration {problem.meta.get('row', problem.uid)}, {problem.prompt[:60]!r}"


def given_rollout(
    problems: Sequence[Problem],
    *,
    tokenizer: PreTrainedTokenizerBase,
    demonstration: Demonstrate,
    encode: Encode,
    device: torch.device,
) -> Rollout:
    """Demonstrations as rows like those of a sampler, padded on the right."""
    rows = [demonstration(tokenizer, problem, encode=encode) for problem in problems]
    texts = [completion_text(problem) for problem in problems]
    return given_rows(rows, texts, pad=tokenizer.eos_token_id, device=device)


def given_rows(rows: Sequence[Demonstration], texts: Sequence[str], *, pad: int, device: torch.device) -> Rollout:
    """Rows of given tokens as a rollout whose mask is what to learn, padded on the right to the longest.

    Log-probs are 0, as nothing was drawn; `texts` say what each row says, for people.
    """
    width = max(len(row.tokens) for row in rows)
    short = [width - len(row.tokens) for row in rows]
    mask = torch.tensor([row.learn + [False] * n for row, n in zip(rows, short, strict=True)], device=device)
    return Rollout(
        tokens=torch.tensor([row.tokens + [pad] * n for row, n in zip(rows, short, strict=True)], device=device),
        mask=mask,
        logp_sampled=torch.zeros(mask.shape, device=device),
        truncated=torch.zeros(len(rows), dtype=torch.bool, device=device),
        text=tuple(texts),
    )


def shown_rows(task: Task, key: Tensor, rows: int, read: Callable[[Sequence[Problem]], Rollout], steps: int) -> Rollout:
    """The demonstrations beside a step's samples: the next so many of their stream."""
    return read(train_problems(task, key, steps * rows, rows))


def check_demonstrations(
    problems: Sequence[Problem],
    *,
    tokenizer: PreTrainedTokenizerBase,
    demonstration: Demonstrate,
    encode: Encode,
    most: int | None,
    vocabulary: int,
) -> None:
    """Raise ValueError unless each demonstration can be made, of at most so many tokens that the model knows."""
    for one in {(problem.prompt, problem.meta.get(COMPLETION)): problem for problem in problems}.values():
        tokens = demonstration(tokenizer, one, encode=encode).tokens
        check_ids(tokens, vocabulary, tokenizer, place(one))
        length = len(tokens)
        if most is not None and length > most:
            raise ValueError(
                f"{place(one)}: got {length} tokens with its completion, expected at most {most}, as many as the model "
                "reads (sections.Sampling.max_total_tokens, where that is set)"
            )
