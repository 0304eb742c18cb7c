"""The differences of a replayed step from its record, or from itself under other knobs, in words."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only

from grpo_fn.algo.metrics import sample_advantages
from grpo_fn.algo.step import Experience
from grpo_fn.core import checksums
from grpo_fn.core.checksums import QUANTITIES, differing_quantities
from grpo_fn.core.types import Groups, Scores
from grpo_fn.lab import presets
from grpo_fn.shell.atomic_io import to_json
from grpo_fn.shell.logging.rollout_store import rollout_rows

Decode = Callable[[list[int]], str]
CIRCUMSTANCES = ("ranks", "device", "torch")
MACHINE = ("time/", "system/", "generation/tokens_per_second", "generation/wait_seconds")  # no two runs have the same
NOT_REPEATED = (*MACHINE, "eval/")  # figures that a step does not make
FIELDS = {  # of a stored row, by the quantity that they are of
    "tokens": ("tokens", "mask", "truncated"),
    "rewards": ("reward", "valid", "parts"),
    "advantages": ("advantage",),
    "logp_old": ("logp_sampled",),
}
MOST_ROUNDING = 0.02  # relative difference that is called rounding in any precision


class StoredRollout(NamedTuple):
    """The rollout of a step that the run has kept."""

    groups: Groups
    rows: list[dict[str, Any]]  # of the file


class RecordedStep(NamedTuple):
    """The record of a step."""

    line: Mapping[str, Any]  # of digests.jsonl; empty when there is none
    figures: Mapping[str, float | None]  # of metrics.jsonl
    stored: StoredRollout | None
    kernels: Mapping[str, str]  # on CUDA alone


class ReplayedStep(NamedTuple):
    """A step that was taken again."""

    seen: Experience
    figures: Mapping[str, float]
    line: Mapping[str, Any]  # as it would stand in digests.jsonl
    signal: Scores  # the learning signal of every row, [B T], summed over the epochs
    kernels: Mapping[str, str]  # on CUDA alone


# -- against what was recorded


def tampered_fields(was: RecordedStep) -> list[str]:
    """The parts of the stored rollout that differ from the step's digests."""
    if was.stored is None:
        return []
    groups = was.stored.groups
    now = {"tokens": checksums.rollout_checksums(groups.rollout), "rewards": checksums.reward_checksums(groups.reward)}
    digests = {name: checksums.hex_digest(number) for name, number in now.items()}
    return [name for name, digest in digests.items() if was.line.get(name, digest) != digest]


def edited_fields(was: RecordedStep, now: ReplayedStep, decode: Decode, *, sampled_anew: bool) -> list[str]:
    """The changes in the record of a step whose digests agree.

    That is: the quantities missing in digests.jsonl; the first row and field of the stored rollout that differ; the
    figures of metrics.jsonl that differ, where the step was sampled anew on the same ranks, device and torch.
    """
    found = []
    expected = [name for name in QUANTITIES if name in now.line]
    if missing := [name for name in expected if name not in was.line]:
        found.append(f"its line in digests.jsonl: got no {', '.join(missing)}, expected {', '.join(expected)}")
    if was.stored is not None:
        found += filter(None, [stored_difference(was.stored, now, decode)])
    if sampled_anew and not circumstances(was, now):
        pairs = differing_figures(was.figures, now.figures).items()
        found += [f"{name} in metrics.jsonl: {of:.9g} recorded, {here:.9g} now" for name, (of, here) in pairs]
    return found


def stored_difference(stored: StoredRollout, now: ReplayedStep, decode: Decode, names: Sequence[str] = ()) -> str:
    """The first row of the stored rollout that is not the step's, its first field, of `names` if any, and both values.

    Empty where there is none.
    """
    problems, rollout, reward = tree_map_only(Tensor, Tensor.cpu, now.seen.groups)
    adv = sample_advantages(now.seen.adv, now.seen.groups).cpu()
    size = len(rollout.text) // len(problems)
    if len(stored.rows) != len(rollout.text):
        return f"rows in rollouts/: {len(stored.rows)} recorded, {len(rollout.text)} now"
    for b, (recorded, row) in enumerate(
        zip(stored.rows, rollout_rows(problems, size, rollout, reward, adv), strict=True)
    ):
        here = json.loads(to_json(row))
        for name in names or here:
            if recorded.get(name) != here[name]:
                where = f"row {b} (problem {recorded['uid']}, sample {b % size})"
                return f"{where}, {field_difference(name, recorded.get(name), here[name], decode)}"
    return ""


def field_difference(name: str, of: object, here: object, decode: Decode) -> str:
    """A field of a row with both values; of lists the first place where they differ."""
    shown = partial(short_text, decode=decode if name == "tokens" else None)
    if isinstance(of, list) and isinstance(here, list):
        i = next(i for i, (a, b) in enumerate(zip_longest(of, here)) if a != b)
        name = f"{name}[{i}]"
        of, here = (values[i] if i < len(values) else None for values in (of, here))
    return f"{name} in rollouts/: {shown(of)} recorded, {shown(here)} now"


def short_text(value: object, *, decode: Decode | None) -> str:
    """A stored value in at most 80 characters; a token with its text."""
    text = repr(value) if decode is None or not isinstance(value, int) else f"{value} {decode([value])!r}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def explain_difference(name: str, was: RecordedStep, now: ReplayedStep, decode: Decode) -> list[str]:
    """The first difference of the quantity with both values, if stored; then the metrics that differ."""
    differences = []
    if name in FIELDS and was.stored is None:
        differences.append("the rollout of this step is not stored, so it is not known where")
    elif name in FIELDS and (place := stored_difference(was.stored, now, decode, FIELDS[name])):
        differences.append(place)
    found = differing_figures(was.figures, now.figures)
    listed = [f"{key} {of:.9g} recorded, {here:.9g} now" for key, (of, here) in found.items()]
    return [*differences, *listed[:5], *([f"and {len(listed) - 5} more figures"] if len(listed) > 5 else [])]


def circumstances(was: RecordedStep, now: ReplayedStep) -> list[str]:
    """The other differences."""
    pairs = {name: (was.line.get(name), now.line[name]) for name in CIRCUMSTANCES}
    both = [what for what in was.kernels if what in now.kernels]
    pairs |= {f"kernels, {what}": (was.kernels[what], now.kernels[what]) for what in both}
    return [f"{name}: {of} recorded, {here} now" for name, (of, here) in pairs.items() if of not in (None, here)]


def rounding_difference(was: RecordedStep, now: ReplayedStep, eps: float) -> str:
    """The largest relative difference of what both have in numbers, if it is no more than rounding can be.

    With other tokens, and without any numbers, it is not known: the answer is empty.
    """
    found = {}
    if was.line.get("tokens") != now.line["tokens"]:
        return ""
    if was.stored is not None:
        rollout = was.stored.groups.rollout
        stored = checksums.hex_digest(checksums.of_sampled(rollout.logp_sampled, rollout.mask))
        if was.line.get("logp_old") == stored:  # the stored log-probs are those that the ratio was taken with
            old = now.seen.batch.logp_old[now.seen.groups.rollout.mask].cpu()
            found["old log-probs"] = relative_difference(rollout.logp_sampled[rollout.mask], old)
    norm = was.figures.get("loss/grad_norm")
    if norm is not None and "loss/grad_norm" in now.figures:
        found["gradient norm"] = relative_difference(
            torch.tensor([norm]), torch.tensor([now.figures["loss/grad_norm"]])
        )
    if not found or not 0 < max(found.values()) <= min(256 * eps, MOST_ROUNDING):
        return ""
    return "differs by rounding: max relative difference " + ", ".join(
        f"{value:.1e} of the {name}" for name, value in found.items()
    )


def relative_difference(was: Float[Tensor, "N"], now: Float[Tensor, "N"]) -> float:
    """max |now - was| / max |was|; 0 of equal ones."""
    apart, largest = (float(x.abs().max()) if len(x) else 0.0 for x in (now.double() - was.double(), was.double()))
    return apart / largest if largest else float("inf" if apart else 0.0)


def differing_figures(was: Mapping[str, float | None], now: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """The figures that both have and that differ; what the machine did is not among them."""
    both = {name: (of, now[name]) for name, of in was.items() if name in now and not name.startswith(NOT_REPEATED)}
    return {name: (of, here) for name, (of, here) in both.items() if of is not None and of != here}


# -- beside other knobs


def side_by_side(plain: ReplayedStep, other: ReplayedStep) -> list[str]:
    """Both steps figure by figure, the digests that differ, and how alike the learning signals are."""
    names = [name for name in {**plain.figures, **other.figures} if not name.startswith(NOT_REPEATED)]
    width = max(map(len, names))
    lines = [f"{'':{width}}  {'replayed':>14}  {'overridden':>14}"]
    for name in names:
        one, two = plain.figures.get(name), other.figures.get(name)
        lines.append(f"{name:{width}}  {figure_text(one):>14}  {figure_text(two):>14}{'' if one == two else '  *'}")
    odd = differing_quantities(plain.line, other.line)
    alike = [name for name in QUANTITIES if name in plain.line and name not in odd]
    lines.append(f"the same bits: {', '.join(alike) or 'none'}; others: {', '.join(odd) or 'none'}")
    return [*lines, direction(plain, other)]


def figure_text(value: float | None) -> str:
    """A figure, or that there is none."""
    return "-" if value is None else f"{value:.6g}"


def direction(plain: ReplayedStep, other: ReplayedStep) -> str:
    """The similarity of the two learning signals, if they have the same tokens."""
    if plain.line["tokens"] != other.line["tokens"]:
        return "learning signals: of other tokens, so there is no cosine"
    width = max(taken.signal.logp.shape[1] for taken in (plain, other))
    flat = [
        torch.cat([pad(x.cpu().double(), (0, width - x.shape[1])) for x in taken.signal]) for taken in (plain, other)
    ]
    one, two = (float(x.norm()) for x in flat)
    if not one or not two:
        return f"learning signals: norm {one:.6g} replayed, {two:.6g} overridden; there is no cosine with nothing"
    cosine = float(presets.cosines(torch.stack(flat))[0, 1])
    return f"learning signals: cosine {cosine:.6f}, norm {one:.6g} replayed, {two:.6g} overridden"
