r"""What is no answer to this gold, judged by the text alone: too costly, evasive, or left to be worked out.

The parser evaluates some of what it reads, and algebra on a few characters can take for ever. So an answer is read
only if it is made of what mathematical answers are made of, and is not out of proportion to its gold; what the gold
itself uses is allowed as well. The bombs that everybody knows end here, in microseconds and wrong. What gets past
this page meets the deadline of a process that can be killed.
"""

import re
from itertools import accumulate
from math import inf, prod

DEEPEST = 10  # brackets within brackets; the deepest gold of MATH has 5
MOST_BARS = 6  # |...| may nest in many ways, and the parser tries them all

_GREEK = "alpha beta delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau"
_GREEK += " upsilon phi varphi chi psi omega Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega pi ell imath"
_FORMS = "frac dfrac tfrac cfrac sqrt cdot times div pm mp infty cup cap setminus in le leq leqslant ge geq geqslant lt"
_FORMS += " gt left right lvert rvert mid vert langle rangle lbrace rbrace lbrack"
_FORMS += " rbrack approx emptyset varnothing mathbb circ degree angle triangle overline bar vec hat prime quad qquad"
_FORMS += " text mathrm mathit mathsf mbox textit textnormal textrm mathcal colon exp"
_FUNCTIONS = "sin cos tan sec csc cot arcsin arccos arctan log ln lg binom dbinom tbinom"
_KNOWN = {f"\\{name}" for name in f"{_GREEK} {_FORMS} {_FUNCTIONS}".split()} | {f"\\{sign}" for sign in "%$,;:! {}|"}
# An answer that leaves a function to be worked out is finished only if its gold has one of the same family.
_FAMILIES = (
    re.compile(r"\\(?:sin|cos|tan|sec|csc|cot)(?![a-z])"),
    re.compile(r"\\arc(?:sin|cos|tan)(?![a-z])"),
    re.compile(r"\\(?:log|ln|lg)(?![a-z])"),
    re.compile(r"\\[dt]?binom|!"),
)

_TOKEN = re.compile(r"\\(?:[A-Za-z]+|.)|[0-9]+|\S", re.DOTALL)
_OPENS, _CLOSES = {"(", "[", "{", r"\{", r"\lbrace", r"\lbrack"}, {")", "]", "}", r"\}", r"\rbrace", r"\rbrack"}
_BARS = {"|", r"\|", r"\vert", r"\mid", r"\lvert", r"\rvert", r"\langle", r"\rangle"}
# What the parser passes over, or takes away before it reads.
_NOTHING = {r"\left", r"\right", r"\,", r"\;", r"\:", r"\!", "\\ ", r"\quad", r"\qquad", r"\$", "$", "~", '"', "'"}
_LARGE = re.compile(r"\\[dt]?binom|!")
_SMALL = re.compile(
    r"\\[dt]?binom\s*(?:\{\s*[0-9]{1,3}\s*\}\s*){2}|\\[dt]?binom\{[a-z](?:[+-][0-9]{1,2})?\}\{[0-9]\}|(?<![0-9}).])[0-9]{1,3}!(?!\s*!)"
)
_RATIO = re.compile(r"\\[dtc]?frac\{([0-9]+)\}\{[0-9]+\}|([0-9]+)/[0-9]+")
_DIGITS = re.compile(r"[0-9]+")
_SIGNS = re.compile(r"(?:[+-]\s*){4}")
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")

_EVASIONS = (
    re.compile(r"!=|\bnot\b", re.IGNORECASE),
    re.compile(r"\.\."),  # every answer at once
    # The parser adds or multiplies neighbours.
    re.compile(r"(?<!_)(?<!frac)(?<!frac )[0-9](?:\s|\\[,;:! ]|~|\\q?quad)+[0-9]"),
    re.compile(r"(?<![\\A-Za-z_^0-9.}\]])(?<!frac )(?:[0-9.]+\s*|\{[0-9.]+\}\s*)\{\s*[0-9]"),
    re.compile(r"\)\s*_"),  # a falling factorial
)
_WORDS = re.compile(r"\\(?:text[a-z]*|mbox|mathrm|mathit)\s*\{([^{}]*)\}")
_NO_UNIT = re.compile(
    r"[0-9]|\b(?:n?or|n?either|if|unless|wrong|dozen|hundred|thousand|[mbtr]+illion)\b", re.IGNORECASE
)
_LINK = re.compile(r"[\s,;]*(?:or|and|if)?[\s,;]*")
_NUMBER = re.compile(r"[0-9A-F]+")
_BASE_ASKED = re.compile(r"(?:\bbase[\s$-]*|_\{?)([0-9]{1,2})", re.I)
_BASE = re.compile(r"[0-9A-Z]_\{?([0-9]+)\}?$")


def is_costly(gold: str, answer: str) -> bool:
    """Could reading the answer, or comparing it with this gold, take longer than an answer is worth?"""
    known, tokens = _TOKEN.findall(gold), _TOKEN.findall(answer)
    return (
        not {token for token in tokens if token[0] == "\\"} <= _KNOWN | set(known)
        or tokens.count(r"\begin") > 2 * known.count(r"\begin")
        or tokens.count(",") > 2 * known.count(",") + 3
        or sum(token in _BARS for token in tokens) > MOST_BARS
        or _depth(tokens) > DEEPEST
        or _SIGNS.search(answer) is not None
        or (_LARGE.search(_SMALL.sub("", answer)) is not None and _LARGE.search(gold) is None)
        or exponent_bound(answer) > _affordable(gold)
        or (_LETTER.search(gold) is not None and len(answer) > 4 * len(gold) + 40)
    )


def is_evasive(gold: str, answer: str, prompt: str) -> bool:
    """Does the answer deny itself, stand for many, or name another base than the gold, or else the prompt, does?"""
    bases = _BASE.search(gold), _BASE.search(answer)
    named = bases[1][1] if bases[1] and (bases[0] or _NUMBER.fullmatch(gold)) else None
    expected = [bases[0][1]] if bases[0] else ["10", *_BASE_ASKED.findall(prompt)]
    words = set(_WORDS.findall(answer)).difference(_WORDS.findall(gold))
    return (
        any(evasion.search(answer) and not evasion.search(gold) for evasion in _EVASIONS)
        or any(_NO_UNIT.search(text) and not _LINK.fullmatch(text) for text in words)
        or (named is not None and int(named) not in map(int, expected))
    )


def is_worked_out(gold: str, answer: str) -> bool:
    """Does the answer, behind its last equals sign, leave no function to be worked out that the gold does not?"""
    last = answer.rpartition("=")[2]
    return all(family.search(gold) or not family.search(last) for family in _FAMILIES)


def exponent_bound(text: str) -> float:
    """An upper bound on the product of exponents over one base, read as parsers read; inf for an exponent's power."""
    tokens = [token for token in _TOKEN.findall(text) if token not in _NOTHING]
    outer: list[tuple[float, float]] = []  # of each open bracket: the largest so far around it, and right before it
    largest = before = 1.0
    place = 0
    while place < len(tokens):
        token, place = tokens[place], place + 1
        if token == "^":
            exponent, place = _argument(tokens, place)
            if tokens[place : place + 1] == ["^"]:
                return inf
            largest, before = max(largest, before * _size(exponent)), 1.0
        elif token in _OPENS:
            outer.append((largest, before))
            largest = before = 1.0
        elif token in _CLOSES and outer:
            around, beside = outer.pop()
            before = max(largest, beside)  # of a fraction, either part
            largest = max(around, before)
        else:
            before = largest if token in _BARS else 1.0
    return max(largest, *(around for around, _ in outer), 1.0)


def _argument(tokens: list[str], place: int) -> tuple[str, int]:
    """The exponent that begins at `place`, and where it ends: a sign, a command and brackets belong together."""
    start = place
    while place < len(tokens) and (tokens[place] in "+-" or tokens[place][0] == "\\") and tokens[place] not in _CLOSES:
        place += 1
    if place < len(tokens) and tokens[place] not in _OPENS:
        return "".join(tokens[start : place + 1]), place + 1
    while place < len(tokens) and tokens[place] in _OPENS:
        place = _end(tokens, place)
    return "".join(tokens[start:place]), place


def _end(tokens: list[str], place: int) -> int:
    """Behind the bracket that opens at `place`."""
    depth = 0
    for index in range(place, len(tokens)):
        depth += (tokens[index] in _OPENS) - (tokens[index] in _CLOSES)
        if depth == 0:
            return index + 1
    return len(tokens)


def _size(exponent: str) -> float:
    if "^" in exponent or _LARGE.search(exponent):
        return inf
    whole = _RATIO.sub(lambda ratio: ratio[1] or ratio[2], exponent)
    return prod((max(1.0, float(digits)) for digits in _DIGITS.findall(whole)), start=1.0)


def is_whole(text: str) -> bool:
    """Does every bracket close?"""
    tokens = [token for token in _TOKEN.findall(text) if token in "{}"]
    return _depth(tokens) < inf and tokens.count("{") == tokens.count("}")


def _depth(tokens: list[str]) -> float:
    """How deep brackets nest; inf where one closes that was not opened."""
    depths = list(accumulate(((token in _OPENS) - (token in _CLOSES) for token in tokens), initial=0.0))
    return inf if min(depths) < 0 else max(depths)


def _affordable(gold: str) -> float:
    """Numbers are cheap: an integer of d digits may be a power of 2. A product of sums is not, once multiplied out."""
    bound = exponent_bound(gold)
    return 2 * bound + 4 if _LETTER.search(gold) else 4 * max(bound, float(len(gold))) + 12
