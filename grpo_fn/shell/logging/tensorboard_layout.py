"""The layout of TensorBoard's pages: which charts there are, in which order, and a run's knobs.

The charts are the tab "Custom Scalars", for reading from top to bottom: is the run healthy, does it learn, what does it
write, where does the time go. Every metric of docs/monitoring/metrics.md is in one of them.
"""

import json
from pathlib import Path

from grpo_fn.shell.logging.async_writer import AsyncWriter
from grpo_fn.shell.logging.metrics_writer import MetricsWriter, NullLogger

Chart = tuple[str, list[str]]


def lines(*tags: str) -> Chart:
    """One line for each tag that a regular expression matches as a whole."""
    return "Multiline", [f"(?:{tag})$" for tag in tags]


OF_REWARD = "mean|std|min|max|correct_rate|invalid|timeouts|worker_crashes|protocol_errors|exceptions"
OF_EVAL = (
    r"accuracy|accuracy_low|accuracy_high|problems|unscorable|length_mean|truncated|lag_steps|seconds|"
    r"loss|perplexity|tokens|(pass|maj)@\d+"
)

LAYOUT: dict[str, dict[str, Chart]] = {
    "Health": {
        "trainer against sampler, nats": lines("loss/(logprob_diff_(mean|max)|mismatch_kl)"),
        "KL to the reference": lines("loss/kl"),
        "KL to the start model": lines("loss/kl_start"),
        "KL to the policy that sampled": lines("loss/approx_kl"),
        "entropy": lines("loss/entropy"),
        "gradient norm before clipping": lines("loss/grad_norm"),
        "ratio to the sampling policy": lines("loss/ratio_(mean|min|max)"),
        "samples of another policy: effective share, weights": lines(
            "loss/(mismatch_ess|correction_mean|importance_masked_frac)"
        ),
        "share of tokens clipped, and capped": lines("loss/(clip_(low|high)|ratio_capped)"),
        "groups without signal, steps refused": lines("(advantage/zero_variance_groups|train/skipped_step)"),
        "share without a score": lines("reward/invalid"),
        "rows lost by rewards": lines("reward/(timeouts|worker_crashes|protocol_errors|exceptions)"),
        "judges: questions without an answer or a verdict": lines("judge/(failures|unreadable)"),
        "float16: updates skipped": lines("optimizer/overflows"),
        "float16: loss scale": lines("optimizer/loss_scale"),
        "memory and devices": lines("system/(memory_gb|gpu.*)"),
        "compiled graphs": lines("system/(compiled_graphs|recompilations)"),
    },
    "Learning": {
        "held-out accuracy, 95 %": ("Margin", ["eval/accuracy", "eval/accuracy_low", "eval/accuracy_high"]),
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
        "given tokens: loss and perplexity": lines("(sft|eval|observation)/(loss|perplexity)"),
        "given tokens: how many, what one weighs": lines(
            "(sft/(weight_mean|tokens_per_second)|(sft|eval|observation)/tokens)"
        ),
        "from the policy to its teacher, nats a token": lines("teacher/(reverse_kl|gap_abs|gap_min)"),
        "share of the rows that are taught": lines("teacher/rows_taught"),
        "share of the teacher's part that a step takes": lines("teacher/share"),
        "gains of the controllers": lines("loss/(kl|entropy)_coef_multiplier"),
        "learning rate": lines("optimizer/lr"),
        "updates": lines("optimizer/step"),
        "micro-batches a step": lines("system/micro_batches"),
    },
    "Generation": {
        "length, tokens": lines("generation/length_(mean|min|max)", "eval/length_mean"),
        "share that ran into the limit": lines("generation/truncated", "eval/truncated"),
        "rows": lines("generation/(rows|prompts|group_size)"),
        "tokens": lines("generation/tokens"),
        "dynamic sampling": lines("generation/(batches|carried_over_groups|zero_variance_fill)"),
        "dynamic sampling, share accepted": lines("generation/accepted"),
        "curriculum: share of the problems": lines("curriculum/share/.+"),
        "curriculum: pass rate": lines("curriculum/pass_rate/.+"),
        "curriculum: level, pool": lines("curriculum/(level|pool_size|admitted|retired|set_aside|fresh)"),
        "tokens a second": lines("generation/tokens_per_second"),
        "steps a second": lines("system/steps_per_second"),
        "versions between sampling and learning": lines("generation/staleness(_max)?"),
        "judges: requests, those sent again": lines("judge/(requests|retries)"),
        "judges: tokens": lines("judge/(prompt|completion)_tokens"),
        "engine against policy after a push, nats": lines("engine/probe_gap_(mean|max)"),
        "engine": lines("engine/(?!probe_gap_|.*_seconds$).+"),
    },
    "Time": {
        "seconds a step": lines("time/total"),
        "seconds by phase": lines("time/(?!total$).+"),
        "share of sampling that waits for environments": lines("system/environment_wait_share"),
        "seconds of the engine": lines("generation/wait_seconds", "engine/.*_seconds"),
        "seconds of an evaluation beside the training": lines("eval/seconds"),
    },
}

MEASURES = ["eval/accuracy", "reward/mean", "reward/correct_rate", "loss/entropy", "generation/length_mean"]


def write_run_header(writer: MetricsWriter | AsyncWriter | NullLogger, run_dir: Path) -> None:
    """What the events of a run open with: the charts, the knobs for the tab "HParams", the configuration as text."""
    writer.layout(LAYOUT)
    writer.hparams(read_hparams(run_dir), MEASURES)
    writer.text(0, "config", f"```\n{(run_dir / 'config.gin').read_text(encoding='utf-8')}\n```")


def read_hparams(run_dir: Path) -> dict[str, int | float | str]:
    """The knobs of a run's resolved configuration, numbers and strings by name; none of a run older than this table."""
    return json.loads((run_dir / "run.json").read_bytes()).get("hparams", {})
