r"""Is the answer right? math-verify behind two functions with three verdicts: 1 right, 0 wrong, None unscorable.

Which text is the answer is decided in `extract`, what is not worth reading in `screen`, and what has the same value in
`equivalence`. What goes into math-verify's parser is always one short answer in one `\boxed{}`: bare LaTeX parses
wrongly there (`2\sqrt{6}` as 2), and its own search merges neighbouring boxes and takes a number in passing for the
answer. No parsed answer is turned into text: that can take for ever.

A model can still write what takes too long. math-verify's time-outs are signals and work in the main thread only, so
they are off: text from a model is scored in processes that can be killed. The row is then unscorable.

Leniencies that are kept, each with its test: units, degrees and currencies are ignored, and so is a base that only one
side names; a percent sign is a unit where the gold has none and is 1 or more, else a hundredth; a name before an equals
sign is ignored; letters have no case; point, open interval and list of the same numbers are equal; expressions with
letters or roots are equal if their values are, multiplied out or not; of decimals, 6 places count.
"""

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from math_verify import LatexExtractionConfig, grader, parse, parser
from sympy import Basic, Float, Integer, MatrixBase

from grpo_fn.core.problem import Completion, Problem
from grpo_fn.rewards.math import equivalence
from grpo_fn.rewards.math.extract import LONGEST_ANSWER, last_value, marked_answer, plain_answer
from grpo_fn.rewards.math.screen import is_costly, is_evasive, is_worked_out

# math-verify warns once per process that its time-outs are off; they are meant to be.
parser.TIMEOUT_WARNING_SHOWN = grader.TIMEOUT_WARNING_SHOWN = True

# Units are taken away in `extract`: the parser takes the t of "4t" for one.
_LATEX = LatexExtractionConfig(try_extract_without_anchor=False, boxed_match_priority=0)
_LATEX = replace(_LATEX, normalization_config=replace(_LATEX.normalization_config, units=False))
_LITERAL = re.compile(r"([+-]?)(?:([0-9]+)|([1-9][0-9]{0,2}(?:,[0-9]{3})+)|([0-9]*\.[0-9]+))")
_NAME = re.compile(r"\s*\\?[A-Za-z](?:[^=<>{}()]|\{[^{}]*\}|\([^()]*\))*=")
_CHAIN = re.compile(r"^[^=,;]*[^=,;\\<>!]=[^,;]*[^,;\\<>!]=[^,;]*$", re.DOTALL)
_WORD = re.compile(r"\\(?:text[a-z]*|mbox|mathrm)\s*\{([^{}\\]*)\}")


class _Verdict(NamedTuple):
    strict: float | None
    lenient: float | None


_UNSCORABLE, _WRONG = _Verdict(None, None), _Verdict(0.0, 0.0)


def correct(problem: Problem, completion: Completion) -> float | None:
    r"""1 iff the marked answer equals the gold and is worked out, else 0; None when the gold itself cannot be parsed.

    The marked answer is the last `\boxed{...}`, or else what follows the last `####`, or else the last "the answer
    is". A last box that never closes, an answer longer than `LONGEST_ANSWER` and no marked answer at all are wrong.
    Worked out means that a gold which is a plain number gets a number, a fraction or a power, not the sum to be done,
    and that no function is left to be evaluated which the gold does not use: to copy the question is no answer.

    Args:
        problem: the problem; its answer is the gold, LaTeX or plain text.
        completion: the completion with the answer.

    Returns:
        1.0, 0.0 or None.
    """
    return _judge(problem.answer, marked_answer(completion.text)).strict


def lenient(problem: Problem, completion: Completion) -> float | None:
    """1 iff the answer equals the gold, worked out or not; without a marked answer, the last number or its formula.

    Args:
        problem: the problem; its answer is the gold, LaTeX or plain text.
        completion: the completion with the answer.

    Returns:
        1.0, 0.0, or None when the gold itself cannot be parsed.
    """
    answer = marked_answer(completion.text)
    return _judge(problem.answer, last_value(completion.text) if answer is None else answer).lenient


def _judge(gold: str, answer: str | None) -> _Verdict:
    if answer is None or len(answer) > LONGEST_ANSWER:
        answer = ""
    return _verdict(plain_answer(gold), plain_answer(answer))


@lru_cache(maxsize=8192)
def _verdict(gold: str, answer: str) -> _Verdict:
    wanted = _read(gold)
    if wanted is None:
        return _UNSCORABLE
    if not answer or is_costly(gold, answer) or is_evasive(gold, answer):
        return _WRONG
    if (_WORD.fullmatch(gold) or ":" in gold) and _words(gold) == _words(answer):  # a time is no quotient
        return _Verdict(1.0, 1.0)
    given = _read(answer)
    if given is None:
        return _WRONG
    try:
        wanted = equivalence.stated_value(wanted)
        given = equivalence.comparable_part(wanted, given)
        right = given is not None and equivalence.equal(wanted, given)
    except MemoryError:
        raise
    except Exception:  # two things that cannot be compared are not equal
        return _WRONG
    if not right:
        return _WRONG
    finished = is_worked_out(gold, answer) and (equivalence.is_written_out(given) or not equivalence.is_plain(wanted))
    return _Verdict(float(finished), 1.0)


@lru_cache(maxsize=2048)
def _read(text: str) -> Any:
    """The parsed text; None where nothing parses."""
    if literal := _LITERAL.fullmatch(text):  # what the parser makes of it, sooner (a test holds it to that)
        sign, _, _, decimal = literal.groups()
        size = Float(decimal) if decimal else Integer(text.lstrip("+-").replace(",", ""))
        return -size if sign == "-" else size
    parsed = _parsed(text)
    if parsed is None and (name := _NAME.match(text)):
        return _parsed(text[name.end() :])
    return parsed


def _parsed(text: str) -> Any:
    try:
        (first, *_) = parse(
            rf"\boxed{{{text}}}", [_LATEX], "no_fallback", "first_match", parsing_timeout=None, raise_on_error=True
        )
    except MemoryError:
        raise
    except Exception:
        return None
    # Where the whole does not parse, the parser makes do with what follows the last of two equals signs.
    whole = equivalence.equation_sides(first) or not _CHAIN.search(text)
    return first if whole and isinstance(first, Basic | MatrixBase) else None


def _words(text: str) -> str:
    bare = " ".join(_WORD.sub(r"\1", text).casefold().split())
    return re.sub(r"\s*,\s*", ",", bare.lstrip("0").rstrip("."))
