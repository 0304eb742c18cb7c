r"""Generated problems and completions: right answers in every marking, wrong ones, prose, and what a model may write.

A completion is drawn for its problem, so that the branch of a reward in which the answer is right is reached.
"""

import reprlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import hypothesis.strategies as st
from hypothesis.strategies import SearchStrategy

from grpo_fn.core.problem import Completion, Problem

MEGABYTE = 2**20

# Decoded text holds no lone surrogates: a tokenizer replaces what is no UTF-8.
CHARACTERS = st.characters(blacklist_categories=("Cs",))
# Joined from characters: st.text would put in string constants of the modules that are loaded, bombs among them.
PROSE = st.lists(CHARACTERS, max_size=60).map("".join)

# What breaks parsers; a megabyte of anything finds those that are not linear.
HOSTILE = (
    "",
    " \n\t",
    "\x00\x1b[2J\ufeff\u202e\u2028",
    "\u0664\u0662 \uff14\uff12 \u00bd \u2168 e\u0301",  # other digits, a half, a nine, an accent of its own
    "nan inf -inf 1e999 -0 0x2a 1_000 1/0",
    "%s%n{0}{0.__class__}$(exit 1)`exit 1`'\";--",
    "<think><answer></think></answer><think>",
    r"\boxed{\boxed{}} \boxed{42} \boxed{43} \boxed{",
    "(" * 5000 + ")" * 5000,
    "a" * 5000 + "!",
    "x" * MEGABYTE,
    " " * MEGABYTE,
    "[" * MEGABYTE,
    "The answer is " + "9" * MEGABYTE,
    "1+" * (MEGABYTE // 2),
    "<think>" * (MEGABYTE // 7),
    r"\boxed{" * (MEGABYTE // 7),
    "so it is " * (MEGABYTE // 9),
)

# What takes for ever, fills the memory or ends the process when it is computed or run.
BOMBS = (
    r"\boxed{9^{9^{9^9}}}",
    r"\boxed{9!!!!}",
    r"\boxed{\binom{10^{10}}{10^9}}",
    "__import__('os')._exit(1)",
    "```python\nwhile True: pass\n```",
    "```python\n[0] * 10**12\n```",
)

MARKINGS = (
    "{}",
    r"so \boxed{{{}}}.",
    "#### {}",
    "The answer is {}.",
    "<think>hm</think><answer>{}</answer>",
    "<think>hm</think><answer>\\boxed{{{}}}</answer>",
)

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 160


class TextRow(NamedTuple):
    """One problem and one completion of it; shown in brief, since a text may be a megabyte."""

    problem: Problem
    completion: Completion

    def __repr__(self) -> str:
        fields = {**self.problem._asdict(), **self.completion._asdict()}
        return f"Row({', '.join(f'{name}={_short.repr(value)}' for name, value in fields.items())})"


Completions = Callable[[Problem], SearchStrategy[Completion]]


def gold_answers() -> SearchStrategy[str]:
    """Golds as data sets hold them: whole numbers, decimals, fractions, expressions, words, and none at all."""
    whole = st.integers(-(10**6), 10**6)
    written = (str, "{:,}".format, "{:.1f}".format, r"\frac{{{}}}{{7}}".format, r"{}\sqrt{{2}}".format)
    odd = st.sampled_from(["", "x^2 + 1", r"\{1, 2\}", r"\text{even}", "Paris", "True"])
    return st.one_of(*(whole.map(write) for write in written), odd)


def text_problems() -> SearchStrategy[Problem]:
    """Problems with a text as answer and nothing in `meta`; a reward that reads `meta` wants problems of its own."""
    return st.builds(Problem, st.integers(0, 2**31 - 1), PROSE, gold_answers(), st.just({}))


def completions(problem: Problem) -> SearchStrategy[Completion]:
    """Completions of that problem: its answer or another one, marked and amid prose, prose alone, and repetition."""
    answers = st.one_of(st.just(problem.answer), gold_answers())
    marked = st.builds(str.format, st.sampled_from(MARKINGS), answers)
    around = st.builds("{}{}{}".format, PROSE, marked, PROSE)
    repeated = st.builds(str.__mul__, PROSE, st.integers(0, 200))
    text = st.one_of(marked, around, PROSE, repeated)
    return st.builds(Completion, text, st.integers(0, 4096), st.booleans())


def text_rows(problems: SearchStrategy[Problem], completions: Completions) -> SearchStrategy[TextRow]:
    """A problem and a completion drawn for it."""
    # Mapped and not built: hypothesis shows what it builds by its arguments, a long text in full.
    return problems.flatmap(lambda problem: completions(problem).map(partial(TextRow, problem)))
