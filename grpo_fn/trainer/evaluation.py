"""A policy on held-out problems: one greedy answer to each, and any number of sampled ones.

`evaluate` finds out about every problem by itself, `summarise` adds up. What was found may come in parts, from several
calls or several ranks, and in any order: the figures are those of the whole.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import comb, fsum
from typing import Any, NamedTuple

from torch import Tensor

from grpo_fn.core import prng
from grpo_fn.core.display_text import short_line
from grpo_fn.core.partials import uses_of
from grpo_fn.core.problem import Problem, RewardFn, Scorer, Turn, transcript, verdict_name
from grpo_fn.core.types import Groups, Reward, Sampler
from grpo_fn.rewards import math as math_rewards
from grpo_fn.rewards.combine import completions_of, part_names
from grpo_fn.verifier.extract import LONGEST_ANSWER, marked_answer
from grpo_fn.verifier.spelling import plain_answer

# The answer that a completion marks, spelt one way; None where it marks none.
AnswerExtractor = Callable[[str], str | None]

_ENDS_IN_NUMBER = re.compile(r"[0-9][\s.$*%]*\Z")
_SIZED = re.compile(r"\\(?:left|right)(?![A-Za-z])")
_NUMBER = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")

SHOWN = 300  # characters of a text on the console

# Names that eval/<judge> would take from the other figures.
TAKEN = {
    *{"accuracy", "accuracy_low", "accuracy_high", "problems", "unscorable", "length_mean", "truncated", "samples"},
    *{"lag_steps", "seconds"},
}


class Attempt(NamedTuple):
    """One completion, and the scores of the judges."""

    text: str
    marked: str | None  # its answer; "" where it marks none, None where completions have no answer to mark
    scores: dict[str, float | None]  # by judge, the deciding one first; None: could not be scored
    length: int  # sampled tokens
    truncated: bool
    turns: tuple[Turn, ...] = ()  # of an episode, whose last turn `text` is

    def row(self) -> dict[str, Any]:
        """All of it by name; `turns` where it is an episode."""
        fields = {**self._asdict(), "verdict": self.verdict, "turns": [turn._asdict() for turn in self.turns]}
        return {name: value for name, value in fields.items() if name != "turns" or value}

    @property
    def verdict(self) -> str:
        """right, wrong or unscorable, by the first judge."""
        return verdict_name(next(iter(self.scores.values())))


class GradedAnswer(NamedTuple):
    """One problem, with everything that was found out about the policy's answers to it."""

    problem: Problem
    greedy: Attempt
    samples: tuple[Attempt, ...]

    def row(self) -> dict[str, Any]:
        """All of it by name, one level deep but for samples and turns; `answer` is the problem's."""
        uid, prompt, answer, meta = self.problem
        question = {"uid": uid, "prompt": prompt, "answer": answer, "meta": dict(meta)}
        return {**question, **self.greedy.row(), "samples": [attempt.row() for attempt in self.samples]}

    def display_fields(self) -> dict[str, str]:
        """What a person reads of it."""
        predicted = {} if self.greedy.marked is None else {"prediction": self.greedy.marked}
        question = {"problem": self.problem.prompt, "completion": transcript(self.greedy.text, self.greedy.turns)}
        return {**question, **predicted, "truth": self.problem.answer, "verdict": self.greedy.verdict}


def evaluate(
    greedy: Sampler,
    sampled: Sampler,
    problems: Sequence[Problem],
    *,
    key: Tensor,
    judges: Sequence[RewardFn],
    samples: int,
    answer: AnswerExtractor | None,
    score: Scorer,
) -> list[GradedAnswer]:
    """A greedy completion of every problem and `samples` drawn ones, judged; in the order of the problems.

    What is found about a problem depends on (weights, problem, key) alone, so problems may come in any order and in
    any number of calls. Raises ValueError when the judges have no different names.
    """
    names = grader_names(judges)
    keys = prng.split(key, 2)  # sample folds uids into the key it is given, so that key is for nothing else
    completions = completions_of(greedy.sample(problems, 1, key=keys[0])) if problems else []
    if problems and samples:
        completions += completions_of(sampled.sample(problems, samples, key=keys[1]))
    questions = [*problems, *(problem for problem in problems for _ in range(samples))]
    columns = [score(judge, questions, completions) for judge in judges]
    attempts = []
    for completion, *scores in zip(completions, *columns, strict=True):
        marked = None if answer is None else answer(completion.text) or ""
        by_judge = dict(zip(names, scores, strict=True))
        ended = (completion.length, completion.truncated, completion.turns)
        attempts.append(Attempt(completion.text, marked, by_judge, *ended))
    n = len(problems)
    return [
        GradedAnswer(problem, attempts[i], tuple(attempts[n + i * samples : n + (i + 1) * samples]))
        for i, problem in enumerate(problems)
    ]


def final_answer(text: str) -> str | None:
    r"""The marked answer in one spelling: `plain_answer`, without spaces, `\left`, `\right` and commas within a number.

    Answers that are equal as mathematics, yet written otherwise, are different votes: 0.5, 1/2 and `\frac{1}{2}`.

    Args:
        text: a completion.

    Returns:
        The answer; None where none is marked, or it is longer than `LONGEST_ANSWER` characters, as for the judges.
    """
    answer = marked_answer(text)
    if answer is None or len(answer) > LONGEST_ANSWER:
        return None
    spelt = _SIZED.sub("", "".join(plain_answer(answer).split())).replace(r"\dfrac", r"\frac")
    return spelt.replace(",", "") if _NUMBER.fullmatch(spelt) else spelt


def grader_names(judges: Sequence[RewardFn]) -> list[str]:
    """The functions' names, as for reward parts. Raises ValueError for none, for two alike and for a figure's name."""
    if not judges:
        raise ValueError("judges: got none, expected at least one: the first decides what is right")
    names = part_names(judges)
    if odd := TAKEN.intersection(names[1:]):
        raise ValueError(
            f"judges: got one called {min(odd)}, expected another name: eval/{min(odd)} is a figure already"
        )
    return names


def summarise(judged: Sequence[GradedAnswer], *, ks: Sequence[int], by: Sequence[str]) -> dict[str, float]:
    """The figures of an evaluation, whatever the order of its problems.

    `eval/accuracy` is the share of greedy completions that the first judge calls right, of those that it could score,
    between the ends of its 95 % interval (`wilson`); `eval/<judge>` the mean score that another judge gives, of those
    that this one could score; `eval/<key>/<value>` the accuracy on problems with that value under a key of `by`. With
    samples, `eval/pass@k` and `eval/maj@k` are means over problems (`estimate_pass_at_k`, `maj_at_k`); a sample that
    could not be scored is not right, and a problem with no sample that could is left out. Lengths count sampled tokens.

    Raises ValueError when nothing was evaluated.
    """
    if not judged:
        raise ValueError("evaluation: got no problems, expected at least one that is held out")
    attempts = [row.greedy for row in judged]
    scored, right = tally(judged)
    low, high = wilson(right, scored)
    others = list(attempts[0].scores)[1:]
    return {
        "eval/accuracy": right / scored if scored else float("nan"),
        "eval/accuracy_low": low,
        "eval/accuracy_high": high,
        **{
            f"eval/{name}": exact_mean([a.scores[name] for a in attempts if a.scores[name] is not None])
            for name in others
        },
        **{
            f"eval/{key}/{value}": right / scored
            for key in by
            for value, rows in problems_by_meta(judged, key).items()
            for scored, right in [tally(rows)]
            if scored
        },
        "eval/problems": float(len(judged)),
        "eval/unscorable": float(len(judged) - scored),
        "eval/length_mean": exact_mean([a.length for a in attempts]),
        "eval/truncated": exact_mean([a.truncated for a in attempts]),
        **sampled_accuracy(judged, ks),
    }


def sampled_accuracy(judged: Sequence[GradedAnswer], ks: Sequence[int]) -> dict[str, float]:
    """pass@k and maj@k; nothing without samples, no maj@k where completions have no answer to vote for."""
    drawn = [row.samples for row in judged if any(a.verdict != "unscorable" for a in row.samples)]
    right = [[a.verdict == "right" for a in samples] for samples in drawn]
    votes = [[a.marked for a in samples] for samples in drawn]
    if not judged[0].samples:
        return {}
    passed = {f"eval/pass@{k}": exact_mean([estimate_pass_at_k(len(r), sum(r), k) for r in right]) for k in ks}
    if judged[0].greedy.marked is None:
        return passed
    return passed | {
        f"eval/maj@{k}": exact_mean([maj_at_k(v, r, k) for v, r in zip(votes, right, strict=True)]) for k in ks
    }


def tally(judged: Sequence[GradedAnswer]) -> tuple[int, int]:
    """(greedy completions that could be scored, those that are right)."""
    words = Counter(row.greedy.verdict for row in judged)
    return words["right"] + words["wrong"], words["right"]


def problems_by_meta(judged: Sequence[GradedAnswer], key: str) -> dict[str, list[GradedAnswer]]:
    """The problems whose meta has a value under the key, sorted; other than letters, digits and `_.-` becomes _."""
    groups: dict[str, list[GradedAnswer]] = {}
    for row in judged:
        if (value := row.problem.meta.get(key)) is not None:
            groups.setdefault(re.sub(r"[^\w.-]+", "_", str(value)), []).append(row)
    return dict(sorted(groups.items()))


def before_and_after(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> list[str]:
    """One held-out problem with its greedy answers before and after the training, from the rows of two evaluations.

    The first problem that is right only after it, or else the first one; nothing without a problem in both.
    """
    old = {row["uid"]: row for row in before}
    pairs = [(old[row["uid"]], row) for row in after if row["uid"] in old]
    if not pairs:
        return []
    learned = (pair for pair in pairs if pair[0]["verdict"] != "right" and pair[1]["verdict"] == "right")
    first, last = next(learned, pairs[0])

    def answer(row: Mapping[str, Any]) -> str:
        turns = [Turn(**turn) for turn in row.get("turns", ())]
        return f"{row['verdict']:<10}  {short_line(transcript(row['text'], turns), SHOWN)}"

    return [
        f"a held-out problem   {short_line(last['prompt'], SHOWN)}",
        f"  expected           {short_line(last['answer'], SHOWN)}",
        f"  before training    {answer(first)}",
        f"  after training     {answer(last)}",
    ]


# -- a first step in which no sample has a reward


def why_no_reward(groups: Groups, reward: Callable[..., Reward], *, limit: int) -> str | None:
    """The likeliest reason why no sample of a step has a reward, in a line; None when one has, or none has a score.

    Args:
        groups: problems, completions and rewards of the step.
        reward: the reward, with its parts.
        limit: most tokens of a completion.
    """
    problems, rollout, result = groups
    if not result.valid.any() or (result.value[result.valid] > 0).any():
        return None
    texts, count = rollout.text, len(rollout.text)
    if len(problems) > 1 and len({problem.prompt for problem in problems}) == 1:
        reason = f"all {len(problems)} prompts are the same"
    elif rollout.truncated.all():
        reason = f"{count} of {count} completions are cut at {limit} tokens: raise sections.Sampling.max_new_tokens"
    elif not any(text.strip() for text in texts):
        reason = f"{count} of {count} completions are empty"
    elif any(uses_of(math_rewards.correct, reward)) and all(marked_answer(text) is None for text in texts):
        numbers = sum(_ENDS_IN_NUMBER.search(text) is not None for text in texts)
        cut = int(rollout.truncated.sum())
        ends = (
            f"{numbers} of {count} end in a number: see math.lenient, or" if numbers else "they end without a number:"
        )
        reason = (
            r"no completion holds an answer that math.correct reads (\boxed, ####, 'the answer is'), "
            f"{ends} ask for a box in the prompt{f'; {cut} of {count} are cut at {limit} tokens' if cut else ''}"
        )
    else:
        first, answer = short_line(texts[0], SHOWN), short_line(problems[0].answer, SHOWN)
        reason = f"the first completion is '{first}', the answer to it '{answer}'"
    return f"no sample of the first step has a reward: {reason}"


# -- shares of problems: their intervals, and estimates from samples


def exact_mean(values: Sequence[float | int]) -> float:
    """Their mean, to the last bit the same in any order; nan of none."""
    return fsum(values) / len(values) if values else float("nan")


def wilson(right: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a binomial share (Wilson 1927); (0, 1) of no trials."""
    if n == 0:
        return 0.0, 1.0
    z = 1.959963984540054
    p, scale = right / n, 1 + z * z / n
    centre = (p + z * z / (2 * n)) / scale
    half = z * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5 / scale
    return centre - half if right else 0.0, centre + half if right < n else 1.0  # not a rounding off 0 or 1


def estimate_pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that k of n samples, drawn without replacement, hold one of the c right ones: 1 - C(n-c, k) / C(n, k).

    An unbiased estimate of the chance that k samples hold a right one, 1 - (1 - p)^k (Chen et al. 2021,
    arXiv:2107.03374, eq. 1 in section 2.1). Wants 0 <= c <= n and 1 <= k <= n.
    """
    return 1 - comb(n - c, k) / comb(n, k)


def maj_at_k(votes: Sequence[str], right: Sequence[bool], k: int) -> float:
    """How often the majority of k samples is right, in the n // k disjoint runs of k consecutive samples of n.

    A sample votes for the answer it marks, if it marks one. A run is right when the sample that first gave the winning
    answer is; without any vote it is wrong. The vote is that of self-consistency (Wang et al. 2022, arXiv:2203.11171).
    """
    starts = range(0, len(votes) - k + 1, k)
    winners = ((start, majority(votes[start : start + k])) for start in starts)
    return exact_mean([place is not None and right[start + place] for start, place in winners])


def majority(votes: Sequence[str]) -> int | None:
    """The place of the first vote for the winner: of the answers with most votes the one given first; "" is no vote."""
    counts = Counter(filter(None, votes))
    return votes.index(max(counts, key=counts.__getitem__)) if counts else None
