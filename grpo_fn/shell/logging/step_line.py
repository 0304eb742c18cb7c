"""The lines of a step on the console and in log.txt: what moves, at most LINE characters, numbers without noise."""

import re
from collections.abc import Iterator, Mapping

from grpo_fn.shell.logging.tensorboard_layout import OF_REWARD

LINE = 110  # characters
PHASES = {"generate": "gen", "score": "score", "train": "train"}
PART = re.compile(f"reward/(?!(?:{OF_REWARD})$)(.+)")
ROUNDING = 1e-6  # nats: the KL between equal policies is the rounding of their log-probs

Metrics = Mapping[str, float | int]


def step_line(step: int, steps: int, metrics: Metrics, eta: float | None) -> str:
    """One step in a line: reward, its parts, length, loss, rate, time left and seconds by phase."""
    head = f"step {step}/{steps}"
    rate = metrics.get("generation/tokens_per_second")
    lengths, parts, phases, loss = _lengths(metrics), [*_parts(metrics)], _phases(metrics), _loss(metrics)
    speed = "" if rate is None else f"{short_count(rate)} tok/s"
    left = "" if eta is None else f"eta {short_time(eta)}"

    def whole(shown: int, *rest: str) -> str:
        return "  ".join(filter(None, (head, _reward(metrics), " ".join(parts[:shown]), lengths, *rest, speed, left)))

    fitting = [whole(len(parts), loss, phases), whole(len(parts), loss)]
    fitting += [whole(shown) for shown in range(len(parts), -1, -1)]
    return next((line for line in fitting if len(line) <= LINE), fitting[-1][:LINE])


def evaluation_line(metrics: Metrics, grader: str) -> str:
    """The held-out accuracy of a step, with the name of the grader that decides it and the 95 % interval."""
    low, high = metrics.get("eval/accuracy_low"), metrics.get("eval/accuracy_high")
    interval = "" if low is None or high is None else f" (95 %: {low:.3f} to {high:.3f})"
    loss = f", loss {format_number(metrics['eval/loss'], 3)}" if "eval/loss" in metrics else ""
    return f"accuracy {metrics['eval/accuracy']:.3f}{interval} by {grader}{loss}"


def format_number(value: float | int, digits: int) -> str:
    """Fixed point, unless that would show a small number as zero or a large one as a row of digits."""
    if value != 0 and digits and (abs(value) < 0.5 * 10**-digits or abs(value) >= 1e6):
        return f"{value:.0e}"
    return f"{value:.{digits}f}"


def short_count(value: float) -> str:
    """A count in three digits: 940, 3.1k, 18k, 1.2M."""
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.{1 if value < 10 * unit else 0}f}{name}"
    return f"{value:.0f}"


def short_time(seconds: float) -> str:
    """Seconds as 40s, 3m20s, 2h05m or 3d04h."""
    whole = round(seconds)
    for unit, name, below, lesser in ((86_400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= unit:
            return f"{whole // unit}{name}{whole % unit // below:02d}{lesser}"
    return f"{whole}s"


def _reward(metrics: Metrics) -> str:
    if "reward/mean" not in metrics:
        return ""
    ends = [format_number(metrics[name], 2) for name in ("reward/min", "reward/max") if name in metrics]
    return f"reward {format_number(metrics['reward/mean'], 2)}" + (f" [{', '.join(ends)}]" if ends else "")


def _parts(metrics: Metrics) -> Iterator[str]:
    found = {match[1]: value for name, value in metrics.items() if (match := PART.fullmatch(name))}
    if len(found) > 1:  # one part is the reward
        yield from (f"{name} {format_number(value, 2)}" for name, value in found.items())


def _lengths(metrics: Metrics) -> str:
    if "generation/length_mean" not in metrics:
        return ""
    return f"len {metrics['generation/length_mean']:.0f} trunc {metrics.get('generation/truncated', 0.0):.0%}"


def _loss(metrics: Metrics) -> str:
    kl = next((name for name in ("loss/kl", "loss/approx_kl") if name in metrics), None)
    shown = [f"sft loss {format_number(metrics['sft/loss'], 3)}"] if "sft/loss" in metrics else []
    shown += [] if kl is None or abs(metrics[kl]) < ROUNDING else [f"kl {format_number(metrics[kl], 3)}"]
    if "loss/grad_norm" in metrics:
        shown.append(f"grad {format_number(metrics['loss/grad_norm'], 2)}")
    return " ".join(shown)


def _phases(metrics: Metrics) -> str:
    shown = [f"{short} {metrics[f'time/{name}']:.1f}" for name, short in PHASES.items() if f"time/{name}" in metrics]
    total = [f"of {metrics['time/total']:.1f}s"] if "time/total" in metrics else []
    return " ".join(shown + total)
