"""Does the completion say the same again and again?"""

from grpo_fn.core.problem import Completion, Problem


def repeated_ngrams(problem: Problem, completion: Completion, *, ngram: int, max_penalty: float) -> float:
    """-max_penalty (1 - different / all) over the n-grams of words, n = `ngram`; 0 for fewer than n words.

    Yeo et al. (arXiv:2502.03373), the scalar form of their code. A word is what white space separates, in lower case:
    a reward knows the text and not its tokens. In scripts that do not space words it therefore sees little.
    Raises ValueError unless ngram >= 1 and max_penalty >= 0.
    """
    if ngram < 1 or not max_penalty >= 0:
        raise ValueError(f"got ngram {ngram} and max_penalty {max_penalty}, wanted ngram >= 1 and max_penalty >= 0")
    words = completion.text.lower().split()
    total = len(words) - ngram + 1
    if total < 1:
        return 0.0
    different = len(set(zip(*(words[start : start + total] for start in range(ngram)), strict=True)))
    return max_penalty * (different / total - 1)
