"""What a model may write to hang, crash, bloat or fool the verifier, through the real pool of workers.

None of it is ever right. The bombs that are known for what they are, are wrong: to be unscorable takes a row out of
its group, which a policy whose row is wrong would like. What is not known may cost its own row, and no other.
"""

import time

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_fn import verifier
from grpo_fn.core.problem import Completion, Problem
from grpo_fn.rewards.math import correct, lenient
from grpo_fn.shell.reward_workers.reward_pool import RewardPool
from grpo_fn.verifier.screen import is_costly
from grpo_fn.verifier.spelling import plain_answer

DEADLINE = 20.0  # nothing here comes near it on an idle machine
MEGABYTE = 2**20

GOLDS = {
    "fraction": r"\frac{3}{7}",
    "interval": r"(-\infty, 0] \cup [4, \infty)",
    "matrix": r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
    "word": r"\text{even}",
}

TOWERS = {
    "tower": "9^{9^{9^9}}",
    "tower in brackets": "(((9^{9})^{9})^{9})^{9}",
    "tower of fractions": r"\frac{\frac{9^{99}}{1}^{99}}{1}^{99}",
    "tower behind \\left": r"9^\left(9^9\right)",
    "huge exponent": "10^{10000000000}",
    "huge exponent behind zero": "9^{0+999999999}",
    "huge exponent as a product": "9^{99 \\cdot 99 \\cdot 99 \\cdot 99 \\cdot 99}",
    "huge exponent in words": r"9^\text{999999999}",
    "huge negative exponent": "(1/9)^{-999999999}",
    "power of a sum": "(x+y+z+1)^{999}",
    "matrix power": r"\begin{pmatrix} x & 2 \\ 3 & y \end{pmatrix}^{99999}",
    "tower in a matrix": r"\begin{pmatrix} 9^{9^{9^9}} & 9^{9^{9^9}} \\ 1 & 10^{10^{10}} \end{pmatrix}",
    "tower behind a name": "x = 9^{9^{9^9}}",
    "equation of a high degree": "x^{99999} + x + 1 = 0",
}
FACTORIALS = {
    "factorial": "(10^9)!",
    "factorials of factorials": "9!!!!",
    "factorial in an exponent": "9^{9!}",
    "falling factorial": "(99999998 + 1)_{5}",
    "binomial": r"\binom{10^{10}}{10^9}",
    "binomial in an exponent": r"2^{\binom{99}{49}}",
    "gamma": r"\Gamma(10^{9})",
}
COMMANDS = {
    "sum": r"\sum_{k=1}^{10^{12}} \frac{1}{k^k}",
    "integral": r"\int_0^1 e^{\sin(x^x)} dx",
    "zeros": r"\operatorname{zeros}(99999, 99999)",
    "eigenvalues": r"\operatorname{eig}\begin{pmatrix} x & y & z \\ y & z & x \\ 1 & 2 & x \end{pmatrix}",
    "determinant": r"\det\begin{pmatrix} x & y \\ z & 1 \end{pmatrix}",
    "modulus": r"9^{9} \bmod 7",
    "dots": r"1, 2, 3, \ldots, 99999",
}
NESTING = {
    "open brackets": "(" * 200,
    "braces": "{" * 100 + "1" + "}" * 100,
    "fractions": r"\frac{1}{1+" * 22 + "1" + "}" * 22,
    "bars within bars": "|1+" * 20 + "x" + "|" * 20,
    "boxes": r"\boxed{" * 100 + "41" + "}" * 100,
    "unbalanced": "}{" * 100,
    "signs": "-" * 250 + "1",
    "logarithms": r"\log(" * 20 + "x" + ")" * 20,
}
KNOWN_BOMBS = TOWERS | FACTORIALS | COMMANDS
LARGE = {
    "megabyte of digits": "1" * MEGABYTE,
    "megabyte of boxes": r"\boxed{" * (MEGABYTE // 7),
    "megabyte of answers": ", ".join(map(str, range(MEGABYTE // 7))),
    "megabyte of bombs": "9^{9^{9^9}} " * (MEGABYTE // 12),
}
ODD = {
    "reversed arabic digits": "٢٤",
    "roman numerals": "ⅩⅬⅡ",
    "a null": "\x00",
    "a surrogate": "\ud83d",
    "combining marks": "4\u03362\u0336",
    "code": "__import__('os').system('true')",
    "code in a symbol": r"\text{__import__('os')._exit(0)}",
    "every answer at once": ", ".join(map(str, range(60))),
    "every answer as reals": r"\mathbb{R}",
    "every answer as an interval": r"(-\infty, \infty)",
    "whatever it is": r"\text{the correct answer}",
    "nothing known": r"\frac{0}{0}",
}
SMALL = KNOWN_BOMBS | NESTING | ODD


def rows(pairs):
    """(gold, text) as problems and completions."""
    golds, texts = zip(*pairs, strict=True)
    problems = [Problem(uid, "?", gold, {}) for uid, gold in enumerate(golds)]
    return problems, [Completion(text, 1, False) for text in texts]


@pytest.fixture(scope="module")
def pool():
    with RewardPool(workers=2, timeout_per_completion=DEADLINE, memory_mb=1024, stop_on_error=True) as pool:
        pool.score(correct, *rows([(gold, rf"\boxed{{{gold}}}") for gold in GOLDS.values()] * 2))  # parsers wake up
        yield pool


def assert_never_right(pool, fn, gold, texts):
    """None of the texts is right, and the rows between them keep their verdicts."""
    right, wrong = (gold, rf"\boxed{{{gold}}}"), (gold, r"\boxed{8675309}")
    scores = pool.score(fn, *rows([row for text in texts for row in [right, (gold, text), wrong]]))
    assert scores[0::3] == [1.0] * len(texts)
    assert scores[2::3] == [0.0] * len(texts)
    assert set(scores[1::3]) <= {0.0, None}
    return scores[1::3]


def unscorable(texts, scores):
    return [text[:80] for text, score in zip(texts, scores, strict=True) if score is None]


@pytest.mark.parametrize("gold", GOLDS.values(), ids=GOLDS.keys())
def test_nothing_hostile_is_right_or_disturbs_its_neighbours(pool, gold):
    before = len(psutil.Process().children())
    texts = [mark % text for text in SMALL.values() for mark in (r"\boxed{%s}", "the answer is %s")]
    assert unscorable(texts, assert_never_right(pool, correct, gold, texts)) == []
    assert len(psutil.Process().children()) == before


def test_lenient_is_no_easier_to_fool(pool):
    texts = [mark % text for text in SMALL.values() for mark in (r"\boxed{%s}", "%s", "$%s$")]
    assert unscorable(texts, assert_never_right(pool, lenient, "8675309.5", texts)) == []


@pytest.mark.parametrize("fn", [correct, lenient])
def test_a_megabyte_is_wrong_and_disturbs_no_other_row(pool, fn):
    texts = [mark % text for text in LARGE.values() for mark in (r"\boxed{%s}", "the answer is %s")]
    assert unscorable(texts, assert_never_right(pool, fn, "42", texts)) == []


@pytest.mark.parametrize("bomb", KNOWN_BOMBS.values(), ids=KNOWN_BOMBS.keys())
def test_known_bombs_are_wrong_at_once_and_never_reach_the_parser(monkeypatch, bomb):
    golds = {gold: verifier._read(plain_answer(gold)) for gold in GOLDS.values()}
    monkeypatch.setattr(
        verifier, "_read", lambda text, cased=False: golds[text] if text in golds else pytest.fail(text)
    )
    monkeypatch.setattr(verifier, "plain_answer", lambda text: text if text in golds else reward_plain(text))
    for gold in golds:
        # The least of three: a garbage collection, which takes as long, may fall into one of them.
        assert min(seconds_to_refuse(gold, bomb) for _ in range(3)) < 0.1


def seconds_to_refuse(gold, bomb):
    """Processor time of both verdicts, which have to be wrong."""
    start = time.process_time()
    for fn in (correct, lenient):
        assert fn(Problem(0, "?", gold, {}), Completion(rf"\boxed{{{bomb}}}", 1, False)) == 0.0
    return time.process_time() - start


reward_plain = plain_answer


def test_a_gold_may_use_what_would_be_a_bomb_elsewhere():
    for gold in (r"2^{2^{10}}", r"\frac{1}{2004!}", r"\binom{1000}{500}", r"\sum_{k=1}^{9} k", "(x+1)^{99}"):
        assert not is_costly(gold, gold)
        assert not is_costly(gold, rf"x = {gold}")


# A soup of what such texts are made of, for golds that it cannot hold.
spoons = st.sampled_from(
    [
        *["9", "99", "0.1", "x", "y", "e", "i", r"\pi ", "^", "^{", "{", "}", "(", ")", "[", "]", r"\{", r"\}", "|"],
        *["!", "+", "-", "*", "/", "=", "<", ",", ";", "_", "%", " ", r"\frac{", "}{", r"\sqrt{", r"\binom{9}{4}"],
        *[r"\sin ", r"\log_2 ", r"\cup ", r"\infty ", r"\pm ", r"\left(", r"\right)", r"\text{ cm}", r"\cdot "],
        *[r"\le ", r"\in ", r"\begin{pmatrix}", r"\end{pmatrix}", r"\\", "&", "(x+y)", "^{9}", "5!", r"\mathbb{R}"],
        *["x=", r"\circ", r"\neq "],
    ]
)
soups = st.lists(st.lists(spoons, min_size=1, max_size=40).map("".join), min_size=20, max_size=20)
foreign = st.sampled_from(
    [r"\frac{8675309}{31}", "8675309z", "(8675309, 31)", r"\sqrt{8675309}", "z = 8675309w", r"\{8675309, 8675311\}"]
)


@settings(max_examples=10)
@given(foreign, soups)
def test_a_random_soup_is_never_right(pool, gold, texts):
    assert_never_right(pool, correct, gold, [rf"\boxed{{{text}}}" for text in texts])


@pytest.mark.slow
def test_an_unknown_bomb_costs_its_own_row():
    texts = [rf"\boxed{{{place}}}" for place in range(30)]
    texts[10] = "sleep"
    with RewardPool(workers=2, timeout_per_completion=2.0, memory_mb=1024, stop_on_error=True) as pool:
        scores = pool.score(sleeping, *rows([("20", text) for text in texts]))
        assert scores == [None if place == 10 else float(place == 20) for place in range(30)]
        assert pool.counts["timeouts"] == 1


def sleeping(problem, completion):
    """`correct`, with a text that it takes for ever over."""
    if completion.text == "sleep":
        time.sleep(60)
    return correct(problem, completion)
