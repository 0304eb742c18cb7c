r"""Is the answer right? math-verify behind one function with three verdicts: 1 right, 0 wrong, None unscorable.

Which text is the answer is decided here, not by math-verify, whose own search merges neighbouring boxes and lets a
number in passing beat the answer. What goes into its parser is always one short answer in one `\boxed{}`: bare LaTeX
parses wrongly there (`2\sqrt{6}` as 2).

A model can write what takes for ever to compare. math-verify's own time-outs are switched off, because they are
signals and work in the main thread only: whoever scores text from a model does so in processes that can be killed.
Nothing here turns a parsed answer into text, which can hang as well.

Known leniencies of math-verify 0.9.0 that are kept: 42 % equals both 42 and 0.42; floats are compared to 6 decimals;
units, degrees and bases are ignored; of `y = 41 = 42` the last side counts.
"""

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, grader, parse, parser, verify

from grpo_fn.problem import Completion, Problem
from grpo_fn.rewards.format import has_box, last_box

LONGEST_ANSWER = 256  # characters; the longest gold of MATH has 159

# math-verify warns once per process that its time-outs are off; they are meant to be.
parser.TIMEOUT_WARNING_SHOWN = grader.TIMEOUT_WARNING_SHOWN = True

_WITH_UNITS = LatexExtractionConfig()
_WITHOUT_UNITS = replace(_WITH_UNITS, normalization_config=replace(_WITH_UNITS.normalization_config, units=False))

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_NUMBER = rf"[+-]?(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)"
_LAST_NUMBER = re.compile(rf"(?<![0-9.]){_NUMBER}")
_INTEGER = re.compile(r"[+-]?(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)")
_COUNTED = re.compile(rf"[$€£¥]?\s*({_NUMBER}(?:/[0-9]+)?)\s+[A-Za-z]{{2}}[A-Za-z .,'’*!-]*")  # "42 dollars"

_HASHES = re.compile(r"####[ \t]*(?=[^\sA-Za-z#])")  # not a heading of Markdown
_SAID = re.compile(r"the\s+(?:final\s+|correct\s+)?answer\s+is\b\s*:?", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\n|\.(?=\s|$)")

_MATH_SIGNS = re.compile(r"\\?\$|(?<!\\)\\[()\[\]]")
_THIN_SPACE = re.compile(r"(?<=[0-9])(?:,?\\[,;:! ]|\{,\}|~)(?=[0-9]{3}(?![0-9]))")  # within a number
_TRAILING = re.compile(r"(?:\\?[.,;:\s])+$")
_DENIAL = re.compile(r"\\n(?:e|eq|ot)(?![A-Za-z])|\\not(?![A-Za-z])|≠|!=")


def correct(problem: Problem, completion: Completion) -> float | None:
    r"""1 iff the marked answer equals the gold, else 0; None when the gold itself cannot be parsed.

    The marked answer is the last `\boxed{...}`, or else what follows the last `####`, or else the last "the answer
    is". A last box that never closes, an answer longer than `LONGEST_ANSWER` and no marked answer at all are wrong.
    """
    return _judge(problem.answer, marked_answer(completion.text))


def lenient(problem: Problem, completion: Completion) -> float | None:
    """`correct`, except that a completion without a marked answer is judged by the last number in it."""
    answer = marked_answer(completion.text)
    return _judge(problem.answer, last_number(completion.text) if answer is None else answer)


def marked_answer(text: str) -> str | None:
    """The text that is marked as the answer, as written; None where nothing is. Time is linear in the text."""
    if has_box(text):
        return last_box(text)
    for marker in (_HASHES, _SAID):
        if mark := _last(marker, text):
            return _SENTENCE_END.split(text[mark.end() : mark.end() + 2 * LONGEST_ANSWER].lstrip(), maxsplit=1)[0]
    return None


def last_number(text: str) -> str | None:
    """The last number in the text, as written; None where there is none."""
    number = _last(_LAST_NUMBER, text)
    return number.group() if number else None


def _judge(gold: str, answer: str | None) -> float | None:
    if answer is None or len(answer) > LONGEST_ANSWER:
        answer = ""
    return _verdict(_plain(gold), _plain(answer))


def _plain(answer: str) -> str:
    """Without what surrounds an answer: dollar signs, emphasis, a final full stop, thin spaces, a unit in words."""
    bare = _TRAILING.sub("", _MATH_SIGNS.sub("", answer).strip("* \n\t"))
    counted = _COUNTED.fullmatch(bare)
    return counted.group(1) if counted else _THIN_SPACE.sub("", bare)


@lru_cache(maxsize=4096)
def _verdict(gold: str, answer: str) -> float | None:
    # Plain integers need no parser: math-verify compares two of them exactly as well (a test holds it to that).
    if _INTEGER.fullmatch(gold) and (not answer or _INTEGER.fullmatch(answer)):
        return float(bool(answer) and _integer(gold) == _integer(answer))
    if gold and gold == answer:
        return 1.0
    if not _scorable(gold):
        return None
    if not answer or (_DENIAL.search(answer) and not _DENIAL.search(gold)):
        return 0.0  # "\neq 42" parses as 42
    try:
        return float(verify(list(_parsed(gold)), list(_parsed(answer)), timeout_seconds=None, raise_on_error=True))
    except MemoryError:
        raise
    except Exception:  # two things that cannot be compared are not equal
        return 0.0


def _scorable(gold: str) -> bool:
    """Did any of the gold parse? Where nothing does, math-verify returns the text itself or nothing."""
    return any(not isinstance(parsed, str) for parsed in _parsed(gold))


@lru_cache(maxsize=1024)
def _parsed(answer: str) -> tuple[Any, ...]:
    """Every reading of the answer, which goes on being text where nothing parses."""
    first = _read(answer, _WITH_UNITS)
    if any(not isinstance(parsed, str) for parsed in first):
        return first
    return _read(answer, _WITHOUT_UNITS)  # "a + b + c" ends in a unit, for a parser that looks for units


def _read(answer: str, config: LatexExtractionConfig) -> tuple[Any, ...]:
    try:
        return tuple(
            parse(rf"\boxed{{{answer}}}", [config, ExprExtractionConfig()], parsing_timeout=None, raise_on_error=True)
        )
    except MemoryError:
        raise
    except Exception:
        return ()


def _integer(digits: str) -> int:
    return int(digits.replace(",", ""))


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = None
    for match in pattern.finditer(text):
        found = match
    return found
