"""What TensorBoard's pages are told besides numbers: which charts there are, in which order, and a run's knobs.

The charts are the tab "Custom Scalars", for reading from top to bottom: is the run healthy, does it learn, what does it
write, where does the time go. Every metric of the README's table is in one of them.
"""

import ast
import re
from collections.abc import Mapping
from pathlib import Path

from grpo_fn.shell.logging.async_writer import AsyncWriter
from grpo_fn.shell.logging.metrics_writer import MetricsWriter, NullLogger

# A value in config.gin: a string, which is left alone, or a macro.
STRING_OR_MACRO = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|%([\w./]+)""")
BOUND = re.compile(r"^([\w./]+) = (.+)$")
MACRO_DEPTH = 9  # macros that stand for macros; more than that is a circle

Chart = tuple[str, list[str]]


def lines(*tags: str) -> Chart:
    """One line for each tag that a regular expression matches as a whole."""
    return "Multiline", [f"(?:{tag})$" for tag in tags]


def margin(tag: str) -> Chart:
    """A line between the ends of its interval, `tag`_low and `tag`_high."""
    return "Margin", [tag, f"{tag}_low", f"{tag}_high"]


OF_REWARD = "mean|std|min|max|correct_rate|invalid|timeouts|worker_crashes|protocol_errors|exceptions"
OF_EVAL = (
    r"accuracy|accuracy_low|accuracy_high|problems|unscorable|length_mean|truncated|lag_steps|seconds|(pass|maj)@\d+"
)

LAYOUT: dict[str, dict[str, Chart]] = {
    "Health": {
        "trainer against sampler, nats": lines("loss/(logprob_diff_(mean|max)|mismatch_kl)"),
        "KL to the reference": lines("loss/kl"),
        "entropy": lines("loss/entropy"),
        "gradient norm before clipping": lines("loss/grad_norm"),
        "ratio to the sampling policy": lines("loss/ratio_(mean|min|max)"),
        "samples of another policy: effective share, weights": lines(
            "loss/(mismatch_ess|correction_mean|importance_masked_frac)"
        ),
        "share of tokens clipped": lines("loss/clip_(low|high)"),
        "groups without signal, steps refused": lines("(advantage/zero_variance_groups|train/skipped_step)"),
        "share without a score": lines("reward/invalid"),
        "rows lost by rewards": lines("reward/(timeouts|worker_crashes|protocol_errors|exceptions)"),
        "float16: updates skipped": lines("optimizer/overflows"),
        "float16: loss scale": lines("optimizer/loss_scale"),
        "memory and devices": lines("system/(memory_gb|gpu.*)"),
        "compiled graphs": lines("system/(compiled_graphs|recompilations)"),
    },
    "Learning": {
        "held-out accuracy, 95 %": margin("eval/accuracy"),
        "held-out, other judges": lines(rf"eval/(?!({OF_EVAL})$)[^/]+"),
        "held-out accuracy by kind": lines("eval/[^/]+/.+"),
        "held-out, of several samples": lines(r"eval/(pass|maj)@\d+"),
        "held-out problems, those without a score": lines("eval/(problems|unscorable)"),
        "evaluation beside the training, steps late": lines("eval/lag_steps"),
        "share right of what is trained on": lines("reward/correct_rate"),
        "reward": lines("reward/(mean|min|max)"),
        "reward, spread": lines("reward/std"),
        "reward by part": lines(rf"reward/(?!({OF_REWARD})$).+"),
        "advantage": lines("advantage/(mean|std|min|max)"),
        "objective": lines("loss/objective"),
        "gains of the controllers": lines("loss/(kl|entropy)_coef_multiplier"),
        "learning rate": lines("optimizer/lr"),
        "updates": lines("optimizer/step"),
    },
    "Generation": {
        "length, tokens": lines("generation/length_(mean|min|max)", "eval/length_mean"),
        "share that ran into the limit": lines("generation/truncated", "eval/truncated"),
        "rows": lines("generation/(rows|prompts|group_size)"),
        "tokens": lines("generation/tokens"),
        "dynamic sampling": lines("generation/(batches|carried_over_groups|zero_variance_fill)"),
        "dynamic sampling, share accepted": lines("generation/accepted"),
        "tokens a second": lines("generation/tokens_per_second"),
        "versions between sampling and learning": lines("generation/staleness(_max)?"),
        "engine against policy after a push, nats": lines("engine/probe_gap_(mean|max)"),
        "engine": lines("engine/(?!probe_gap_|.*_seconds$).+"),
    },
    "Time": {
        "seconds a step": lines("time/total"),
        "seconds by phase": lines("time/(?!total$).+"),
        "seconds of the engine": lines("generation/wait_seconds", "engine/.*_seconds"),
        "seconds of an evaluation beside the training": lines("eval/seconds"),
    },
}

MEASURES = ["eval/accuracy", "reward/mean", "reward/correct_rate", "loss/kl", "loss/entropy", "generation/length_mean"]


def begin(writer: MetricsWriter | AsyncWriter | NullLogger, config: Path) -> None:
    """What the events of a run open with: the charts, the knobs for the tab "HParams", the configuration as text."""
    text = config.read_text(encoding="utf-8")
    writer.layout(LAYOUT)
    writer.hparams(hparams(text), MEASURES)
    writer.text(0, "config", f"```\n{text}\n```")


def hparams(config: str) -> dict[str, int | float | str]:
    """The knobs of a resolved configuration as numbers and strings, by name; macros are what they stand for.

    `config` is the text of a run's config.gin, which has a binding a line. What is neither a number nor a string is the
    text that gin reads: `True`, `@losses.cispo`, `[1.0, 0.1]`. Raises ValueError for a macro without a value.
    """
    bound = dict(match.groups() for line in config.splitlines() if (match := BOUND.match(line)))
    macros = {name: value for name, value in bound.items() if "." not in name}
    return {name: plain(expanded(value, macros)) for name, value in bound.items() if "." in name}


def expanded(text: str, macros: Mapping[str, str]) -> str:
    """The text with every macro outside a string replaced."""

    def value(match: re.Match) -> str:
        if match[1] is not None:
            return match[1]
        if match[2] not in macros:
            raise ValueError(f"got %{match[2]} in a configuration without it, wanted one of {sorted(macros)}")
        return macros[match[2]]

    for _ in range(MACRO_DEPTH):
        text = STRING_OR_MACRO.sub(value, text)
    return text


def plain(text: str) -> int | float | str:
    """A number or a string where the text is one, else the text itself."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, int | float | str) and not isinstance(value, bool) else text
