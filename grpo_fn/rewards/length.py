"""Rewards for length, in sampled tokens as the sampler counted them, and for not repeating oneself.

A length reward that compares a completion with the others of its group (Kimi k1.5, arXiv:2501.12599) cannot be a
function of one row and is not here.
"""

import math

from grpo_fn.core.problem import Completion, Problem, RewardFn


def soft_overlong_punishment(problem: Problem, completion: Completion, *, max_length: int, cache_length: int) -> float:
    """0 up to max_length - cache_length tokens, from there linearly down to -1 at max_length, -1 beyond.

    R = ((max_length - cache_length) - length) / cache_length in between: DAPO (arXiv:2503.14476, eq. 13), which adds
    it to the verdict and lets it begin at 16,384 of 20,480 tokens: max_length 20480, cache_length 4096 (section 4.1).

    Args:
        problem: not read.
        completion: the completion; its `length` counts sampled tokens.
        max_length: length from which the reward is -1, tokens.
        cache_length: length of the interval before `max_length` in which the reward falls, tokens.

    Returns:
        The reward, in [-1, 0].

    Raises:
        ValueError: unless 0 < cache_length <= max_length.
    """
    if not 0 < cache_length <= max_length:
        raise ValueError(f"cache_length: got {cache_length} with max_length {max_length}, wanted 1 to max_length")
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
        problem: the problem, passed to `verdict`.
        completion: the completion; its `length` counts sampled tokens.
        verdict: the reward that says right (1 or more) or wrong.
        max_length: length at which the cosine ends, tokens.
        right_empty: reward of a right completion of no token.
        right_full: limit of the reward of a right completion at `max_length`.
        wrong_empty: reward of a wrong completion of no token.
        wrong_full: limit of the reward of a wrong completion at `max_length`.
        exceeded: reward of a completion of `max_length` tokens or more, right or wrong.

    Returns:
        The reward; None where the verdict is None.

    Raises:
        ValueError: unless max_length >= 1.
    """
    if max_length < 1:
        raise ValueError(f"max_length: got {max_length}, wanted at least 1")
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
        problem: not read.
        completion: the completion; its text is split into words.
        ngram: words of an n-gram.
        max_penalty: bound of the penalty, in units of the reward.

    Returns:
        The reward, in (-max_penalty, 0].

    Raises:
        ValueError: unless ngram >= 1 and max_penalty >= 0.
    """
    if ngram < 1 or not max_penalty >= 0:
        raise ValueError(f"got ngram {ngram} and max_penalty {max_penalty}, wanted ngram >= 1 and max_penalty >= 0")
    words = completion.text.lower().split()
    total = len(words) - ngram + 1
    if total < 1:
        return 0.0
    different = len(set(zip(*(words[start : start + total] for start in range(ngram)), strict=True)))
    return max_penalty * (different / total - 1)
