"""The math reward: three verdicts, one marked answer, and no way to be right but to know."""

import json
import re
import time
from fractions import Fraction

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from published import published

from grpo_fn import verifier
from grpo_fn.core.problem import Completion, Problem
from grpo_fn.rewards.math import correct, correct_evaluated, lenient
from grpo_fn.verifier.equivalence import equal
from grpo_fn.verifier.extract import LONGEST_ANSWER, last_value, marked_answer
from grpo_fn.verifier.screen import exponent_bound, is_costly, is_evasive
from grpo_fn.verifier.spelling import plain_answer


def verdict(gold, text, fn=correct):
    return fn(Problem(0, "?", gold, {}), Completion(text, 1, False))


def boxed(gold, answer, fn=correct):
    return verdict(gold, rf"so \boxed{{{answer}}}.", fn)


RIGHT = [
    ("42", r"so \boxed{42}"),
    ("42", r"\boxed {42}"),
    ("42", r"\boxed{\boxed{42}}"),
    ("42", r"\boxed{41}, no: \boxed{42}"),
    ("42", r"$\boxed{x = 42}$"),
    ("1000", r"\boxed{1,000\,\mathrm{km/h}}"),
    ("42", r"\boxed{42 = x}"),
    ("42", r"\boxed{P(X > 2) = 42}"),
    ("42", r"\boxed{A = \frac{1}{2}bh = 42}"),
    ("42", r"\boxed{\frac{84}{2} = 42}"),
    ("42", r"\boxed{42\text{ cm}}"),
    ("42", r"\boxed{42\,\text{cm}^2}"),
    ("42", r"\boxed{\text{Rs. }42}"),
    ("42", r"\boxed{42.0}"),
    ("42", r"\boxed{\approx 42}"),
    ("42", r"\boxed{\mathbf{42}}"),
    ("42", "6 * 7\n#### 42"),
    ("42", "#### 41\nwait\n#### 42"),
    ("42", "### Answer\n#### Step 1\nThe answer is 42."),
    ("42", "The answer is 42. I am sure of it, 100 times."),
    ("42", r"the answer is \(42\)."),
    ("42", "The answer is **42**."),
    ("42", "The answer is:\n\n42\n"),
    ("42", "**Final Answer:** $42$"),
    ("18", r"\boxed{\$18}"),
    ("1,000", r"\boxed{1000}"),
    ("1000", r"\boxed{1{,}000}"),
    ("42000", r"\boxed{42\,000}"),
    ("1000", "The answer is $1,000."),
    (r"1600\pi", r"\boxed{1,600\pi}"),
    (r"\frac{12}{5,\!525}", r"\boxed{\frac{12}{5,525}}"),
    ("3000000", r"\boxed{3 million dollars}"),
    ("3.5", "The answer is 3.5. Yes."),
    ("-3", r"\boxed{−3}"),
    (r"\frac{1}{2}", r"\boxed{0.5}"),
    (r"\frac{1}{2}", r"\boxed{½}"),
    (r"\frac{1}{3}", r"\boxed{0.\overline{3}}"),
    (r"\frac{1}{3}", r"\boxed{0.333333}"),
    (r"\frac{5}{2}", r"\boxed{2 1/2}"),
    ("50%", r"\boxed{50\%}"),
    ("300000000", r"\boxed{3 \times 10^8}"),
    (r"2\sqrt{6}", r"\boxed{\sqrt{24}}"),
    (r"2\sqrt{6}", r"\boxed{2√6}"),
    ("x^2+1", r"The answer is $1 + x^2$."),
    ("x^2+1", r"\boxed{f(x) = x^2 + 1}"),
    (r"\{1,2\}", r"\boxed{\{2,1\}}"),
    ("2,-2", r"\boxed{x = \pm 2}"),
    ("3, -2", r"\boxed{x = -2 \text{ or } x = 3}"),
    (r"(-\infty,0]\cup[4,\infty)", r"\boxed{[4, ∞) ∪ (-∞, 0]}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}"),
    (r"\begin{pmatrix}0.5\\2\end{pmatrix}", r"\boxed{\begin{bmatrix} 1/2 \\ 2 \end{bmatrix}}"),
    ("5x - y - 17 = 0", r"\boxed{10x - 2y = 34}"),
    (r"x \in [-2,7]", r"\boxed{[-2,7]}"),
    (r"\text{even}", r"\boxed{\text{even}}"),
    (r"\text{A, C}", r"\boxed{A,C}"),
    (r"\text{4:30 p.m.}", r"\boxed{4:30 p.m.}"),
    (r"x \neq 2", r"\boxed{x \neq 2}"),
    (r"\frac{1}{2}", r"\boxed{\frac 1 2}"),
    ("2 + 3i", r"\boxed{3 i + 2}"),
]
WRONG = [
    ("42", ""),
    ("42", "42"),
    ("42", r"\boxed{}"),
    ("42", r"\boxed{42}, no: \boxed{41}"),
    ("42", r"\boxed{42} or rather \boxed{4"),
    ("42", r"\boxed{42"),
    ("42", "#### 42}{41"),
    ("42", "The answer is 41 or 42."),
    ("42", "The answer is 42 and not 41."),
    ("42", r"\boxed{-42}"),
    ("42", r"\boxed{42x}"),
    ("42", r"\boxed{42\text{ million}}"),
    ("42", r"\boxed{4²}"),
    ("42", r"\boxed{4 2 1}"),
    ("42", "#### 42 #### 43"),
    ("5", r"\boxed{2 3}"),
    ("4t", r"\boxed{4}"),
    ("2", r"\boxed{2\sqrt{6}}"),
    (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}"),
    (r"\frac{1}{3}", r"\boxed{0.33}"),
    ("(1,2]", r"\boxed{(1,2)}"),
    ("(1,2)", r"\boxed{(2,1)}"),
    ("0.5", r"\boxed{\frac{1}{0}}"),
    ("42", "\\boxed{" + "42 + 0" * 100 + "}"),
    (r"\text{east}", r"\boxed{\text{seat}}"),
    ("5x - y - 17 = 0", r"\boxed{10x - 2y = 35}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix} 1 \\ 3 \end{pmatrix}}"),
]


@pytest.mark.parametrize(("gold", "text"), RIGHT)
def test_right_answers_are_right(gold, text):
    assert verdict(gold, text) == 1.0
    assert verdict(gold, text, lenient) == 1.0


@pytest.mark.parametrize(("gold", "text"), WRONG)
def test_wrong_answers_are_wrong(gold, text):
    assert verdict(gold, text) == 0.0


# What a lone right number among others, or a statement of another value, would be worth to a policy that does not know.
EVASIONS = [
    *["41, 42", ", ".join(map(str, range(100))), "1, 2, ..., 42", r"\ldots 42", "41 or 42", r"\{41, 42\}", "x > 42"],
    *[r"\{41\} \cup \{42\}", r"x \in \{41, 42\}", r"x = 41 \text{ or } x = 42", r"41 \lor 42", r"\pm 42", r"41 \pm 1"],
    *["[0, 100]", r"\begin{cases} 41 \\ 42 \end{cases}", r"41 \\ 42", r"41 \quad 42", "41; 42", "41|42", "41/42"],
    *[r"42\text{ or 43}", "41 = 42", "42 = 41", "y = 41 = 42", "x = 41 x = 42", r"\neq 42", "not 42", r"\text{not }42"],
    *[r"\cancel{42}", "> 42", r"\geq 42", "@@ 42", "41 ... 42", r"\overline{42}", "42!", r"\sim 42", "42:00"],
]


@pytest.mark.parametrize("answer", EVASIONS)
def test_hedged_denied_and_contradictory_answers_are_wrong(answer):
    assert boxed("42", answer) == boxed("42", answer, lenient) == 0.0


joints = st.sampled_from(
    [
        *[",", ", ", ";", " or ", " and ", r"\text{ or }", r"\cup ", r"\cap ", r"\lor ", "|", "/", "=", r"\equiv "],
        *[r"\mid ", r"\\", r"\quad ", "~", " ", "&", ":", "->", "<", r"\le ", r"\in ", r"\setminus ", r"\pm ", "..."],
        *[r"\ldots ", "-", "^", "!", r"\%", r"\cdot ", "*", "+", "'", "\n", r"\vert ", "{}", "(", "["],
    ]
)
frames = st.sampled_from(
    [
        *["%s%s%s", r"\{%s%s%s\}", "(%s%s%s)", "[%s%s%s]", "x=%s%sx=%s", r"x \in \{%s%s%s\}", r"\text{%s%s%s}"],
        *[r"\begin{pmatrix} %s%s%s \end{pmatrix}", r"\frac{%s%s%s}{1}", r"\sqrt{%s%s%s}", "f(%s)%s%s", "|%s%s%s|"],
    ]
)


@given(st.sampled_from([("41", "42"), ("3", "7"), (r"\frac{1}{2}", r"\frac{1}{3}"), ("x+1", "x-1")]), joints, frames)
def test_no_answer_is_right_for_two_golds(golds, joint, frame):
    first, second = golds
    answer = frame % (first, joint, second)
    for fn in (correct, lenient):
        assert boxed(first, answer, fn) + boxed(second, answer, fn) <= 1.0


UNFINISHED = [
    *[("42", "6 * 7"), ("42", r"6 \cdot 7"), ("42", "48 - 6"), ("42", r"42 = 6 \cdot 7")],
    *[(r"\frac{3}{4}", r"\frac{1}{4} + \frac{1}{2}"), ("42", r"\sqrt{1600} + 2"), ("42", r"3! \cdot 7 + 0")],
]
CLOSED_FORMS = [
    *[("42", r"\sqrt{1764}"), ("120", "5!"), ("70", r"\binom{8}{4}"), ("3", r"\log_2 8"), ("0", r"\sin 0")],
    *[("1", "i^4"), ("360", "3 * 5!"), (r"\frac{\sqrt{2}}{2}", r"\cos\left(\frac{\pi}{4}\right)")],
]


@pytest.mark.parametrize(("gold", "answer"), UNFINISHED)
def test_an_answer_left_to_be_worked_out_is_right_for_lenient_only(gold, answer):
    assert boxed(gold, answer) == boxed(gold, answer, correct_evaluated) == 0.0
    assert boxed(gold, answer, lenient) == 1.0


@pytest.mark.parametrize(("gold", "answer"), CLOSED_FORMS)
def test_a_closed_form_is_right_unless_it_has_to_be_evaluated(gold, answer):
    assert boxed(gold, answer) == boxed(gold, answer, lenient) == 1.0
    assert boxed(gold, answer, correct_evaluated) == 0.0


@pytest.mark.parametrize(
    ("gold", "answer"), [(r"\cos^2\alpha", r"1 - \sin^2 \alpha"), (r"\log_2 3", r"\frac{\ln 3}{\ln 2}"), ("5!", "120")]
)
def test_a_gold_with_a_function_allows_its_family(gold, answer):
    assert boxed(gold, answer) == boxed(gold, answer, correct_evaluated) == 1.0


CLOSED = [
    ("0.0000001", "0.0000002"),
    ("0", "0.0000001"),
    (r"\frac{1}{2^{98}}", "10^{-30}"),
    ("(0.0000001, 1)", "(0.0000002, 1)"),
    ("2516_8", "2516_7"),
    ("2516", "2516_8"),
    ("42", r"4200\%"),
    ("0.42", r"0.42\%"),
    (r"42\%", r"0.42\%"),
    (r"9\text{ a.m.}", r"9\text{ p.m.}"),
    (r"\frac{2}{3}", "0.6666671"),
    ("0", "x^2 - 5x + 6 = 0"),
    ("x = 4", "3x = 12"),
    ("x-1", "x + 1 = x - 1"),
]


@pytest.mark.parametrize(("gold", "answer"), CLOSED)
def test_leniencies_of_math_verify_that_are_closed(gold, answer):
    assert boxed(gold, answer) == boxed(gold, answer, lenient) == 0.0


KEPT = [
    ("42", r"42\%"),
    (r"42\%", "42"),
    ("0.42", r"42\%"),
    (r"42\%", "0.42"),
    ("42", r"42\text{ kg}"),
    ("90", r"90^\circ"),
    ("18", r"\$18"),
    ("2516_8", "2516"),
    ("42", "y = 42"),
    ("42", r"42 \approx 43"),
    ("2X", "2x"),
    ("(1,2)", "1, 2"),
    ("1, 2", "(2, 1)"),
    ("(x-3)(x+3)", "x^2 - 9"),
    (r"2\sqrt{6}", r"\sqrt{24}"),
    (r"\frac{2}{3}", r"\frac{84}{126}"),
    (r"\frac{2}{3}", "0.666667"),
    (r"\frac{2}{3}", "0.666666"),
    ("x = 4", "x - 4 = 0"),
]


@pytest.mark.parametrize(("gold", "answer"), KEPT)
def test_leniencies_that_are_kept_are_the_stated_ones(gold, answer):
    assert boxed(gold, answer) == 1.0


@pytest.mark.parametrize("gold", ["", "   ", r"\frac{}{}", "{{{"])
@pytest.mark.parametrize("text", [r"\boxed{42}", "nothing", r"\boxed{}", ""])
def test_a_gold_that_does_not_parse_is_unscorable_whatever_the_text(gold, text):
    assert verdict(gold, text) is None
    assert verdict(gold, text, lenient) is None


@pytest.mark.parametrize(
    ("gold", "text", "want"),
    [
        *[("42", "42 and then 43", 0.0), ("42", r"\boxed{41} or 42", 0.0), ("42", "1,042.", 0.0), ("42", "", 0.0)],
        *[("42", "-42", 0.0), ("-42", "x = -42", 1.0), ("3", "5-3", 1.0), ("3/4", "it is 3/4", 1.0)],
        *[("1/2", r"so it is $\frac{1}{2}$", 1.0), ("2", r"so it is $\frac{1}{2}$", 0.0), ("2", r"\(3x + 2\)", 0.0)],
        *[("5", r"hence \[2 + 3 = 5\]", 1.0), ("42", "I paid $40, you paid $42", 1.0)],
    ],
)
def test_lenient_falls_back_on_the_last_number_or_its_formula(gold, text, want):
    assert verdict(gold, text, lenient) == want
    assert verdict(gold, text) == 0.0


# A value in many spellings ------------------------------------------------------------------------------------------

wholes = st.integers(-(10**9), 10**9)


def written(value):
    """Ways to write an integer."""
    sign, size = ("-" if value < 0 else ""), abs(value)
    grouped = f"{value:,}"
    return st.sampled_from(
        [
            *[f"{value}", grouped, grouped.replace(",", "{,}"), grouped.replace(",", r"\,"), f"{sign}00{size}"],
            f"{value}.0",
            *[rf"\frac{{{3 * value}}}{{3}}", rf"\left({value}\right)", f"{{{value}}}", *([f"+{value}"] * (value >= 0))],
        ]
    )


def fraction_written(value):
    """Ways to write a fraction."""
    top, bottom = value.numerator, value.denominator
    whole, rest = divmod(abs(top), bottom)
    sign = "-" if top < 0 else ""
    mixed = [rf"{sign}{whole}\frac{{{rest}}}{{{bottom}}}", rf"{sign}{whole} {rest}/{bottom}"] * (whole > 0 and rest > 0)
    decimal = [f"{top / bottom!r}"] * (bottom in (2, 4, 5, 8, 10) and abs(top) < 10**6)
    return st.sampled_from(
        [
            *[
                rf"\frac{{{top}}}{{{bottom}}}",
                rf"\dfrac{{{2 * top}}}{{{2 * bottom}}}",
                rf"{sign}\tfrac{{{abs(top)}}}{{{bottom}}}",
            ],
            *[f"{top}/{bottom}", rf"\frac {{ {top} }} {{ {bottom} }}", *mixed, *decimal],
        ]
    )


wraps = st.sampled_from(
    [
        *["%s", "$%s$", r"\(%s\)", "x = %s", r"\$%s", r"%s\text{ cm}", r"%s \text{ square units}", "%s.", " %s\n"],
        *[r"%s^\circ", r"\mathbf{%s}", "**%s**", r"%s\,\mathrm{km/h}", r"f(2) = %s", r"\approx %s"],
    ]
)
marks = st.sampled_from(
    [r"\boxed{%s}", r"so \boxed{%s}, which is right.", "#### %s", "The answer is %s", r"$\boxed{%s}$", "Answer: %s"]
)


@given(st.data(), wholes, st.integers(-2, 2), wraps, marks)
def test_integers_are_right_iff_equal_however_they_are_written(data, gold, gap, wrap, mark):
    answer = wrap % data.draw(written(gold + gap))
    assume(not (mark.startswith("#") and answer[0].isalpha()))  # that is a heading
    text = mark % answer
    assert verdict(str(gold), text) == verdict(str(gold), text, lenient) == float(gap == 0)


@given(st.data(), st.integers(-99, 99), st.integers(2, 40), st.integers(-2, 2), wraps)
def test_fractions_are_right_iff_equal_however_they_are_written(data, top, bottom, gap, wrap):
    gold, said = Fraction(top, bottom), Fraction(top + gap, bottom)
    assume(gold.denominator > 1 and said.denominator > 1)
    asked = data.draw(fraction_written(gold))
    assert boxed(asked, wrap % data.draw(fraction_written(said))) == float(gap == 0)


shapes = st.sampled_from(
    [
        *[("(%s, %s)", r"\left( %s ,%s \right)"), ("[%s, %s)", r"[%s,%s)"), (r"\{%s, %s\}", r"\{%s,%s\}")],
        *[("%s, %s", "%s,\\ %s"), (r"\begin{pmatrix} %s & %s \end{pmatrix}", r"\begin{bmatrix}%s&%s\end{bmatrix}")],
        *[("%s + %si", "%s+%s i"), (r"%s\sqrt{7} + %s\pi", r"%s \sqrt{7}+%s \pi"), ("%sx + %sy", "%s x+%s y")],
        (r"(-\infty, %s] \cup [%s, \infty)",) * 2,
    ]
)


@given(shapes, st.integers(2, 50), st.integers(1, 50), st.integers(-1, 1), st.integers(-1, 1), wraps)
@example(("%s, %s", "%s,\\ %s"), 50, 50, 0, 0, "%s")  # a comma and a space are no thousands
def test_points_lists_intervals_matrices_and_sums_are_right_iff_their_parts_are(shape, low, step, more, less, wrap):
    gold, said = shape
    high = low + step
    assume((low + more, high + less) != (high, low) and low + more < high + less)
    right = float((more, less) == (0, 0))
    assert boxed(gold % (low, high), said % (low + more, high + less)) == right
    assert boxed(gold % (low, high), "x = " + said % (low + more, high + less), lenient) == right


@given(st.lists(st.integers(-20, 20), min_size=2, max_size=5, unique=True), st.randoms(), st.data())
def test_lists_have_no_order_and_points_have(values, random, data):
    shuffled = list(values)
    random.shuffle(shuffled)
    gold, said = (", ".join(map(str, items)) for items in (values, shuffled))
    assert boxed(gold, said) == 1.0
    assert boxed(rf"\{{{gold}\}}", ", ".join(map(str, [*shuffled[1:], 21]))) == 0.0
    if len(values) > 2:
        assert boxed(f"({gold})", f"({said})") == float(values == shuffled)


@given(st.data(), wholes, st.sampled_from([-1, 0, 1]), st.booleans())
def test_literals_are_read_as_the_parser_reads_them(data, value, gap, decimal):
    text = data.draw(written(value)) if not decimal else f"{value / 1000!r}"
    assume(verifier._LITERAL.fullmatch(plain_answer(text)) and "e" not in text)
    literal, parsed = verifier._read(plain_answer(text)), verifier._parsed(plain_answer(text))
    assert equal(literal, parsed)
    assert equal(parsed, literal)
    assert equal(literal, verifier._parsed(str(value + gap))) == (gap == 0 and not decimal) or decimal


# Any text -----------------------------------------------------------------------------------------------------------

prose = st.text(st.characters(blacklist_characters="\\{}#", blacklist_categories=("Cs",)), max_size=60)
pieces = st.sampled_from(
    [
        *[*r"0123456789xyzei+-*/^=<>|!%_,;:.()[]{} &~'", "\n", r"\frac{", "}{", r"\sqrt", r"\pi ", r"\boxed{", "####"],
        *[r"\left(", r"\right)", r"\text{", r"\cup ", r"\infty ", r"\%", r"\$", "$", r"\\", r"\begin{pmatrix}", "³"],
        *["√", r"\end{pmatrix}", r"\circ", r"\pm ", r"\le ", r"\ne ", r"\sin ", r"\log_2", "the answer is ", "٤", "½"],
    ]
)
soup = st.lists(pieces, max_size=25).map("".join)
golds = st.sampled_from(
    ["42", r"\frac{1}{2}", r"2\sqrt{6}", "x^2+1", "1, 2", "(1,2)", "[3,\\infty)", "y = 2x", r"\text{A}", ""]
)


@given(golds, st.one_of(prose, soup, st.text(max_size=80)))
@example("42", "\x00\\boxed{\x00}")
@example("42", "\\boxed{" + "\ud800" + "}")
def test_every_text_gets_one_of_three_verdicts_and_strict_right_is_lenient_right(gold, text):
    for answer in (text, rf"\boxed{{{text}}}", f"#### {text}"):
        strict, loose = verdict(gold, answer), verdict(gold, answer, lenient)
        assert strict in {0.0, 1.0, None}
        assert loose in {0.0, 1.0, None}
        assert (strict is None) == (loose is None) == (gold == "")
        assert not strict or loose == 1.0


@given(st.one_of(golds, soup), soup)
def test_the_screen_has_an_answer_for_every_text(gold, answer):
    assert is_costly(gold, answer) in (True, False)
    assert is_evasive(gold, answer, "") in (True, False)
    assert exponent_bound(answer) >= 1.0


@given(st.sampled_from(RIGHT), st.text(" \t\n", max_size=4), st.text(" \t\n", max_size=4))
def test_white_space_around_the_answer_changes_nothing(case, before, after):
    gold, text = case
    answer = marked_answer(text)
    assert boxed(gold, before + answer + after) == 1.0
    assert boxed(before + gold + after, answer) == 1.0


@given(st.one_of(soup, prose, st.sampled_from([text for _, text in RIGHT])))
def test_an_answer_in_plain_spelling_stays_as_it_is(text):
    once = plain_answer(text)
    assume(len(once) <= LONGEST_ANSWER)
    twice = plain_answer(once)
    assert plain_answer(twice) == twice


@given(prose, prose, st.integers(0, 999), st.integers(0, 999))
def test_text_around_the_last_box_changes_nothing(before, after, gold, said):
    text = rf"\boxed{{{gold}}} {before}" + "\n" + rf"\boxed{{{said}}}. {after}"
    assert verdict(str(gold), text) == verdict(str(gold), text, lenient) == float(gold == said)


MINUS_AND_MORE = [
    *[
        ("-7", r"$-\boxed{7}$"),
        ("1-x", r"$= -\boxed{x-1}$"),
        ("7000000", r"\boxed{7} million"),
        ("28%", r"\boxed{28}\%"),
    ],
    *[("36", r"$\boxed{36}\text{ cm}^2$"), ("90", r"$\boxed{90}^\circ$"), ("7", "The answer:\n- \\boxed{7}")],
]


@pytest.mark.parametrize(("gold", "text"), MINUS_AND_MORE)
def test_what_stands_at_a_box_belongs_to_it(gold, text):
    assert verdict(gold, text) == 1.0


@given(
    st.integers(1, 99),
    st.sampled_from(["-%s", "1%s", "%s0", "%s.5", "%s^2", r"%s\pi", "%s/2", r"2\cdot 3%s", "%s million"]),
)
def test_a_box_that_is_part_of_another_number_is_not_that_number(gold, frame):
    box = rf"\boxed{{{gold}}}"
    assert verdict(str(gold), f"so ${frame % box}$") == 0.0


@given(prose)
def test_without_a_marked_answer_strict_is_never_right(text):
    assume(marked_answer(text) is None)
    assert verdict("42", text) == 0.0


def test_an_answer_over_the_length_cap_is_wrong_even_if_equal():
    assert verdict("7", r"\boxed{" + "0" * (LONGEST_ANSWER - 1) + "7}") == 1.0
    assert verdict("7", r"\boxed{" + "0" * LONGEST_ANSWER + "7}") == 0.0


# Time ---------------------------------------------------------------------------------------------------------------

UNITS = {
    "blanks": "\n",
    "open boxes": r"\boxed{",
    "boxes and spaces": "\\boxed" + " " * 20,
    "digits": "9",
    "groups of digits": "1,111",
    "hashes and spaces": "####" + " " * 50,
    "answers": "answer  *",
    "dollars and digits": "$1",
    "open formulas": r"\(1",
    "letters": "x",
}


def seconds(fn, text):
    start = time.process_time()
    fn(text)
    return time.process_time() - start


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS.keys())
def test_a_megabyte_is_searched_in_linear_time(unit):
    for fn in (marked_answer, last_value):
        quarter, whole = (r"The answer is \boxed{41}" + unit * (size // len(unit)) for size in (2**18, 2**20))
        assert min(seconds(fn, whole) for _ in range(3)) < 0.2 + 10 * seconds(fn, quarter)


@pytest.mark.parametrize(
    "unit", [*UNITS.values(), r"\text{a ", "1 ", "√", "≤", "½", r"\frac", "1 2/3", "about ", "~", "=", r"\ "]
)
def test_the_longest_answer_is_put_in_plain_spelling_at_once(unit):
    text = (unit * LONGEST_ANSWER)[:LONGEST_ANSWER]
    for answer in (text, text[:-1] + "!", "1" + text[1:], text[:-10] + r"\text{ cm}x"):
        assert min(seconds(plain_answer, answer) for _ in range(3)) < 0.1


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS.keys())
def test_a_megabyte_of_text_is_wrong(unit):
    text = unit * (2**20 // len(unit))
    for mark in ("%s", r"\boxed{%s}"):
        assert verdict("42", mark % text) == verdict("42", mark % text, lenient) == 0.0


# The published golds ------------------------------------------------------------------------------------------------


def answers(name):
    lines = published(name).read_text(encoding="utf-8").splitlines()
    return [str(json.loads(line)["answer"]) for line in lines]


def respelled(gold):
    """The same gold in another hand."""
    text = re.sub(r"\\[dt]?frac(?![a-z])", lambda found: r"\frac" if found.group() != r"\frac" else r"\dfrac", gold)
    return rf" {text} ."


def failures(name, *, every):
    return [
        place
        for place, gold in enumerate(answers(name))
        if place % every == 0
        and not boxed(gold, gold) == boxed(gold, respelled(gold)) == boxed(gold, gold, lenient) == 1.0
    ]


# Rows with an empty box in their solution. Everything else parses and equals itself.
PUBLISHED = {"math/train.jsonl": 7500, "math/test.jsonl": 5000, "math/math500.jsonl": 500}
SMALL = {"aime/aime24.jsonl": 30, "aime/aime25.jsonl": 30, "amc/amc23.jsonl": 40}


@pytest.mark.parametrize("name", PUBLISHED)
def test_math_golds_equal_themselves_in_another_hand(name):
    """Every one equals itself: below."""
    assert len(answers(name)) == PUBLISHED[name]
    assert failures(name, every=41) == []


OTHER_GOLDS = [
    *[
        r"A \cap B",
        r"AB \perp CD",
        r"\neg p",
        r"p \mid n",
        r"p \to q",
        r"x \equiv 3 \pmod{7}",
        r"\frac{d}{dx}",
        r"\vec a",
    ],
    *[
        r"f: \mathbb{R} \to \mathbb{R}",
        r"\begin{cases} 1 & x > 0 \\ 0 & x \le 0 \end{cases}",
        r"\square ABCD",
        "a \\neq b, c",
    ],
    *[r"A \subseteq B", r"\forall x \exists y", "Na_2CO_3", r"\text{H}_2\text{O}", "C_6H_{12}O_6"],
]


@pytest.mark.parametrize("gold", OTHER_GOLDS)
def test_a_gold_that_does_not_parse_is_right_in_its_own_words_only(gold):
    assert boxed(gold, gold) == boxed(gold, gold.replace(" ", "  ")) == 1.0
    assert boxed(gold, "42") == boxed(gold, gold + "x") == 0.0


@given(soup, st.sampled_from(["", " "]))
@example("the answer is ", "")
def test_equal_text_is_right_or_its_gold_is_no_answer(gold, gap):
    assume("\\boxed" not in gold and len(gold) < LONGEST_ANSWER and marked_answer(rf"\boxed{{{gold}}}") == gold)
    assert boxed(gold, gap + gold) in (1.0, None)


@pytest.mark.parametrize("name", SMALL)
def test_every_aime_and_amc_gold_equals_itself(name):
    assert len(answers(name)) == SMALL[name]
    assert failures(name, every=1) == []


def neighbours(gold):
    """Other values in the gold's own spelling: one digit changed, one at a time, and the sign."""
    for digit in re.finditer("[0-9]", gold):
        yield gold[: digit.start()] + str((int(digit.group()) + 1) % 10) + gold[digit.end() :]
    yield f"-({gold})" if re.fullmatch(r"[0-9]+", gold) and gold.strip("0") else "0.123"


@pytest.mark.parametrize("name", ["math/test.jsonl"])
def test_a_gold_with_one_digit_changed_is_wrong(name):
    for gold in answers(name)[::97]:
        for other in neighbours(gold):
            if boxed(other, other) == 1.0:
                assert boxed(gold, other, lenient) == 0.0, (gold, other)


def gsm8k(name):
    lines = published(f"gsm8k/{name}").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["answer"] for line in lines]


@pytest.mark.parametrize(("name", "count"), [("train.jsonl", 7473), ("test.jsonl", 1319)])
def test_every_gsm8k_solution_is_right_and_every_gold_equals_itself(name, count):
    solutions = gsm8k(name)
    assert len(solutions) == count
    for solution in solutions:
        gold = solution.rpartition("####")[2].strip()
        assert verdict(gold, solution) == boxed(gold.replace(",", ""), gold) == 1.0


# Neighbours in the files that are spelt differently and have the same value, a unit, a percent sign or a name aside.
SAME_NEIGHBOURS = [
    *[("8", "K=8"), (r"25\%", "25"), ("120", r"120^\circ"), ("120", r"120^\circ"), (r"21\text{ dogs}", "21")],
    *[(r"18 \text{ degrees}", "18"), (r"\frac{3}{4}", r"\frac34"), (r"120^\circ", "120"), (r"7\%", "7")],
]


@pytest.mark.slow
def test_every_gold_equals_itself_in_five_seconds_and_its_neighbour_only_where_that_has_its_value():
    files = [answers("math/train.jsonl"), answers("math/test.jsonl")]
    files += [[text.rpartition("####")[2].strip() for text in gsm8k(name)] for name in ("train.jsonl", "test.jsonl")]
    golds = [[gold for gold in file if gold] for file in files]
    assert sum(map(len, golds)) == 21_290
    slowest = 0.0
    for gold in {gold for file in golds for gold in file}:
        start = time.perf_counter()
        assert boxed(gold, gold) == 1.0, gold
        slowest = max(slowest, time.perf_counter() - start)
    assert slowest < 5.0
    pairs = [pair for file in golds for pair in zip(file, [*file[1:], file[0]], strict=True) if pair[0] != pair[1]]
    assert [pair for pair in pairs if boxed(*pair, lenient) != 0.0] == SAME_NEIGHBOURS
