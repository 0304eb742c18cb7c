"""MetricsWriter: metrics.jsonl and TensorBoard under the same names, rewound exactly on resume."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import torch
from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from grpo_fn.core.display_text import markdown_cell
from grpo_fn.core.json_lines import step_lines
from grpo_fn.shell.atomic_io import to_json, write_bytes
from grpo_fn.shell.background_worker import BackgroundWorker

P = ParamSpec("P")
Rows = Sequence[Mapping[str, object]]

# What a tracker beside TensorBoard keeps of a step, by name (`tracker`): figures, finite values `[N]` of a histogram,
# rows of a table; neither of the latter is empty. It is called in the thread that writes the metrics.
Mirrored = float | int | Tensor | Rows
MirrorWrite = Callable[[int, Mapping[str, Mirrored]], None]


class MetricsWriter(AbstractContextManager):
    """Writes `metrics.jsonl` and `tensorboard/` of a run folder, and gives figures and tables to its mirror.

    A step's number is that of the step just taken, counted from 0: after k steps a run resumes with `start_step=k`,
    and whatever was recorded for steps >= k is dropped from both. In metrics.jsonl NaN and infinities are null.
    """

    def __init__(self, run_dir: Path, *, start_step: int, mirror: MirrorWrite | None = None) -> None:
        self._mirror = mirror or (lambda step, values: None)
        rewind(run_dir / "metrics.jsonl", start_step)
        self._next = start_step
        self._lines = open(run_dir / "metrics.jsonl", "a", encoding="ascii")  # noqa: SIM115 - closed by close()
        self._folder = run_dir / "tensorboard"
        # From the very first start: TensorBoard drops what a restart has undone only if it saw the start before it.
        self._board = SummaryWriter(str(self._folder), purge_step=start_step)

    @contextmanager
    def _tensorboard(self) -> Iterator[SummaryWriter]:
        """TensorBoard's writer, flushed afterwards; its folder is made anew where it has been deleted."""
        self._folder.mkdir(exist_ok=True)
        yield self._board
        self._board.flush()

    def scalars(self, step: int, values: Mapping[str, float | int]) -> None:
        """All scalars of a step, once: one line of metrics.jsonl. Raises ValueError for a step that does not grow."""
        if step < self._next:
            raise ValueError(f"got scalars of step {step}, expected one call a step, {self._next} or later")
        self._next = step + 1
        self._add_scalars(step, values)
        self._lines.write(to_json({"step": step, **values}) + "\n")
        self._lines.flush()
        os.fsync(self._lines.fileno())  # a checkpoint of this step must never outlive the step's line

    def amend(self, step: int, values: Mapping[str, float | int]) -> None:
        """Add late metrics to the line of their step; the file is replaced atomically.

        Raises ValueError for a step without a line.
        """
        path = Path(self._lines.name)
        lines = {line.step: line for line in step_lines(path, torn_end=False)}
        if step not in lines:
            raise ValueError(f"got figures for step {step}, expected a step with a line in {path}")
        self._add_scalars(step, values)
        amended = (to_json({**lines[step].row, **values}) + "\n").encode("ascii")
        self._lines.close()
        write_bytes(path, b"".join(amended if line.step == step else line.line for line in lines.values()))
        self._lines = open(path, "a", encoding="ascii")  # noqa: SIM115 - closed by close()

    def _add_scalars(self, step: int, values: Mapping[str, float | int]) -> None:
        with self._tensorboard() as board:
            for name, value in values.items():
                board.add_scalar(name, value, step)
        self._mirror(step, values)

    def text(self, step: int, tag: str, text: str) -> None:
        """Markdown for TensorBoard's text tab; what a model wrote goes through `table`."""
        with self._tensorboard() as board:
            board.add_text(tag, text.encode("utf-8", "replace").decode("utf-8"), step)

    def table(self, step: int, tag: str, rows: Rows) -> None:
        """Rows of cells by column: a markdown table in TensorBoard's text tab, a table in the mirror."""
        if rows:
            self.text(step, tag, markdown_table(rows))
            self._mirror(step, {tag: rows})

    def histogram(self, step: int, tag: str, values: Tensor) -> None:
        """Distribution of the finite values; of none there is no histogram."""
        flat = values.detach().double().flatten().cpu()
        flat = flat[torch.isfinite(flat)]
        if len(flat):
            with self._tensorboard() as board:
                board.add_histogram(tag, flat.numpy(), step)
            self._mirror(step, {tag: flat})

    def layout(self, charts: Mapping[str, Mapping[str, tuple[str, list[str]]]]) -> None:
        """The charts of the tab "Custom Scalars", by heading and title: ("Multiline" or "Margin", tags)."""
        with self._tensorboard() as board:
            board.add_custom_scalars(charts)

    def hparams(self, knobs: Mapping[str, int | float | str], measures: Sequence[str]) -> None:
        """A line of the tab "HParams": the knobs, beside the newest values of the scalars `measures`."""
        experiment, started, _ = hparams(dict(knobs), dict.fromkeys(measures))
        self._add_summaries(experiment, started)

    def finish(self) -> None:
        """Say in the tab "HParams" that the run came to its end."""
        *_, ended = hparams({}, {})
        self._add_summaries(ended)

    def _add_summaries(self, *summaries: Summary) -> None:
        with self._tensorboard() as board:
            for summary in summaries:
                board._get_file_writer().add_summary(summary)

    def close(self) -> None:
        """Write out everything and let go of the files."""
        self._lines.close()
        with self._tensorboard() as board:
            board.close()

    def __exit__(self, *exc: object) -> None:
        self.close()


def rewind(path: Path, start_step: int) -> None:
    """Drop the lines of steps >= `start_step`, all but the last of a step, and a last line torn by a crash.

    The file is replaced at once.

    Raises ValueError for a line before the last that is not an object with a step: that is no crash of grpo_fn.
    """
    kept = b"".join(
        {line.step: line.line for line in step_lines(path, torn_end=True) if line.step < start_step}.values()
    )
    if path.exists() and path.stat().st_size != len(kept):
        write_bytes(path, kept)


def markdown_table(rows: Rows) -> str:
    """A markdown table of the rows, columns in order of first appearance; the cells show their text and do nothing."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *([row.get(name, "") for name in columns] for row in rows)]
    lines = ["| " + " | ".join(markdown_cell(str(value)) for value in line) + " |" for line in cells]
    return "\n".join([lines[0], "|" + " --- |" * len(columns), *lines[1:]])


# -- the same, written in a thread

MAX_PENDING = 24  # calls not yet made, those of a few steps; the training waits when there are more


class AsyncWriter(AbstractContextManager):
    """Makes the calls of a `MetricsWriter` in its own thread, in their order, among other work (`do`).

    Once something raises there, nothing more is written: `failed` says so, and `wait` raises it. Leaving it waits for
    what is left and closes the writer.
    """

    def __init__(self, writer: MetricsWriter, *, deadline: float) -> None:
        self._writer = writer
        self._error: Exception | None = None  # the first one
        self._worker = BackgroundWorker("log", timeout=deadline, torch_threads=1, max_pending=MAX_PENDING)

    @property
    def failed(self) -> bool:
        """Whether something could not be written: `wait` says what and why."""
        return self._error is not None

    def do(self, what: str, work: Callable[[], object]) -> None:
        """Have `work` done, which writes `what`, after all that was asked for before."""
        if not self.failed:
            self._worker.submit(self._write, what, work, what=f"writing {what}")

    def wait(self) -> None:
        """Until everything that was asked for is on the disk.

        Raises what went wrong there, and TimeoutError when it takes longer than the deadline.
        """
        self._worker.wait()
        if self._error is not None:
            raise self._error

    def write(self, call: Callable[Concatenate[MetricsWriter, P], None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Have the writer called as in `call(writer, *args)`, later; the tensors and containers may change at once."""
        what = f"{call.__name__} of step {args[0]}" if args and isinstance(args[0], int) else call.__name__
        on_host = tree_map_only(Tensor, lambda x: x.detach().cpu(), args)  # in its own containers
        self.do(what, partial(call, self._writer, *on_host, **kwargs))

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is None or error is not self._error:  # else the run ends by it already
                self.wait()
        except Exception as also:
            if error is None:
                raise
            error.add_note(f"and the log could not be written: {also}")
        finally:
            self._worker.shutdown(cancel_futures=True)
            self._writer.close()

    def _write(self, what: str, work: Callable[[], object]) -> None:
        """In the thread: `work`, unless something went wrong before."""
        if self._error is None:
            try:
                work()
            except Exception as error:
                error.add_note(f"while writing {what}")
                self._error = error


# -- the layout of TensorBoard's pages

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


def write_run_header(writer: MetricsWriter, run_dir: Path) -> None:
    """The first events of a run: the charts, the knobs for the tab "HParams", the configuration as text."""
    writer.layout(LAYOUT)
    writer.hparams(read_hparams(run_dir), MEASURES)
    writer.text(0, "config", f"```\n{(run_dir / 'config.gin').read_text(encoding='utf-8')}\n```")


def read_hparams(run_dir: Path) -> dict[str, int | float | str]:
    """The knobs of a run's resolved configuration, numbers and strings by name; none of a run older than this table."""
    return json.loads((run_dir / "run.json").read_bytes()).get("hparams", {})
