r"""Rewards for the form of a completion: boxes and tags, its length, or word for word the text that is expected.

    problem      the problem; `same_text` reads its answer, the others nothing of it
    completion   the completion that is judged; its `length` counts sampled tokens
    tags         names of the tags, in order, without brackets
    max_length   length at which a reward of length ends, tokens
    returns      the reward; of form 1.0 or 0.0

A completion that ran into the limit is never well formed. A box is `\boxed{...}` with braces balanced as TeX balances
them: an escaped brace `\{` is a character, not a brace.
"""

import math
import re
from collections import deque
from collections.abc import Sequence

from grpo_fn.core.problem import Completion, Problem, RewardFn

_OPENING = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MENTION = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_TAG_NAME = re.compile(r"[A-Za-z][\w-]*")


def boxed(problem: Problem, completion: Completion) -> float:
    r"""1 iff the completion ended by itself and holds exactly one `\boxed{...}`, closed and not empty; else 0."""
    text = completion.text
    if completion.truncated or len(_MENTION.findall(text)) != 1:
        return 0.0
    return 1.0 if (last_box(text) or "").strip() else 0.0


def answer_tags(problem: Problem, completion: Completion, *, tags: Sequence[str]) -> float:
    """1 iff the completion is `<a>...</a><b>...</b>` for the tags a, b, in this order, and ended by itself; else 0.

    Every tag opens once and closes once, no block is empty, and nothing but white space stands outside of the blocks.
    `("think", "answer")` is the format of DeepSeek-R1 (arXiv:2501.12948, table 1). Time is linear in the text.
    Other tags than different names raise ValueError.
    """
    return _well_tagged(completion.text, completion.truncated, tags)


def answer_tags_by_prompt(problem: Problem, completion: Completion, *, tags: Sequence[str]) -> float:
    """`answer_tags`, for a prompt or chat template that has opened the first tag already: the completion is inside."""
    return _well_tagged(f"<{tags[0]}>{completion.text}" if tags else "", completion.truncated, tags)


def last_box(text: str) -> str | None:
    r"""Content of the last `\boxed{`, as it is; None when there is none or the last one never closes.

    The last opening decides: an answer retracted by a second box does not count, and of nested boxes the inner one
    does. Time is linear in the text.

    Args:
        text: text of a completion or of a solution.
    """
    opening = next(iter(deque(_OPENING.finditer(text), maxlen=1)), None)
    if opening is None:
        return None
    depth = 1
    for brace in _BRACE.finditer(text, opening.end()):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[opening.end() : brace.start()]
    return None


def _well_tagged(text: str, truncated: bool, tags: Sequence[str]) -> float:
    if isinstance(tags, str) or not tags or len(set(tags)) < len(tags) or not all(map(_TAG_NAME.fullmatch, tags)):
        raise ValueError(f'tags: got {tags!r}, expected different names such as ("think", "answer")')
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    pieces = re.split(f"({'|'.join(marks)})", text, maxsplit=len(marks))  # text, mark, text, mark, ..., text
    if truncated or pieces[1::2] != marks:
        return 0.0
    # Outside, inside the first block, between, inside the second, ..., outside; one mark too many is in the last.
    return float(all((place % 2 == 1) == bool(piece.strip()) for place, piece in enumerate(pieces[::2])))


# -- Is the completion the text that was expected, word for word?


def same_text(problem: Problem, completion: Completion) -> float:
    """1 iff the completion ended by itself and is the answer, white space around them aside; else 0."""
    return float(not completion.truncated and completion.text.strip() == problem.answer.strip())


# -- Rewards for length, in sampled tokens as the sampler counted them, and for not repeating oneself.
#
# A length reward that compares a completion with the others of its group (Kimi k1.5, arXiv:2501.12599) cannot be a
# function of one row and is not here.


def soft_overlong_punishment(problem: Problem, completion: Completion, *, max_length: int, cache_length: int) -> float:
    """0 up to max_length - cache_length tokens, from there linearly down to -1 at max_length, -1 beyond.

    R = ((max_length - cache_length) - length) / cache_length in between: DAPO (arXiv:2503.14476, eq. 13), which adds
    it to the verdict and lets it begin at 16,384 of 20,480 tokens: max_length 20480, cache_length 4096 (section 4.1).

    Args:
        cache_length: length of the interval before `max_length` in which the reward falls, tokens.

    Raises:
        ValueError: unless 0 < cache_length <= max_length.
    """
    if not 0 < cache_length <= max_length:
        raise ValueError(f"cache_length: got {cache_length} with max_length {max_length}, expected 1 to max_length")
    return min(0.0, max(-1.0, (max_length - cache_length - completion.length) / cache_length))


def cosine_length(
    problem: Problem,
    completion: Completion,
    *,
    verdict: RewardFn,
    max_length: int,
    right_empty: float,
    right_full: float,
    wrong_empty: float,
    wrong_full: float,
    exceeded: float,
) -> float | None:
    """full + (empty - full) (1 + cos(pi length / max_length)) / 2, from `empty` at no token to `full` at max_length.

    `right_...` where the verdict is 1, `wrong_...` where it is less, `exceeded` from max_length on, None where the
    verdict is None. The cosine reward of Yeo et al. (arXiv:2502.03373), who take 2, 1, -10, 0 and -10: short right
    answers over long ones, and thinking longer over being wrong soon.

    Args:
        verdict: the reward that says right (1 or more) or wrong.
        right_empty: reward of a right completion of no token.
        right_full: limit of the reward of a right completion at `max_length`.
        wrong_empty: reward of a wrong completion of no token.
        wrong_full: limit of the reward of a wrong completion at `max_length`.
        exceeded: reward of a completion of `max_length` tokens or more, right or wrong.

    Raises:
        ValueError: unless max_length >= 1.
    """
    if max_length < 1:
        raise ValueError(f"max_length: got {max_length}, expected at least 1")
    score = verdict(problem, completion)
    if score is None:
        return None
    if completion.length >= max_length:
        return exceeded
    empty, full = (right_empty, right_full) if score >= 1 else (wrong_empty, wrong_full)
    return full + (empty - full) * (1 + math.cos(math.pi * completion.length / max_length)) / 2


def repeated_ngrams(problem: Problem, completion: Completion, *, ngram: int, max_penalty: float) -> float:
    """-max_penalty (1 - different / all) over the n-grams of words, n = `ngram`; 0 for fewer than n words.

    Yeo et al. (arXiv:2502.03373), the scalar form of their code. A word is what white space separates, in lower case:
    a reward knows the text and not its tokens. In scripts that do not space words it therefore sees little.

    Args:
        ngram: words of an n-gram.
        max_penalty: bound of the penalty, in units of the reward.

    Raises:
        ValueError: unless ngram >= 1 and max_penalty >= 0.
    """
    if ngram < 1 or not max_penalty >= 0:
        raise ValueError(f"got ngram {ngram} and max_penalty {max_penalty}, expected ngram >= 1 and max_penalty >= 0")
    words = completion.text.lower().split()
    total = len(words) - ngram + 1
    if total < 1:
        return 0.0
    different = len(set(zip(*(words[start : start + total] for start in range(ngram)), strict=True)))
    return max_penalty * (different / total - 1)
