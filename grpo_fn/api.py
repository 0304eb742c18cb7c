"""Training, evaluation and scoring from Python, as the commands do them: `grpo_fn.train` is `python -m grpo_fn.run`.

A call is translated into the gin files and parameters of a command, so both start the same run, write the same folder
and refuse the same input. Names are checked before torch is imported.
"""

import ast
import functools
import hashlib
import html
import importlib
import inspect
import json
import math
import re
import shutil
import symtable
import sys
import tempfile
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict, Unpack, get_type_hints

from grpo_fn.command_line import EXIT_ERROR, bad_input, quiet_libraries
from grpo_fn.core.json_lines import json_rows, metrics_by_step
from grpo_fn.core.problem import RewardFn, verdict_name

Reward = RewardFn | str | Mapping[RewardFn | str, float]
OnStep = Callable[[int, Mapping[str, float]], object]


class RunError(ValueError):
    """What a command prints as one line: bad input, an engine that is refused or a full disk.

    Attributes:
        exit_code: of the command: 2 for bad input, 1 for an engine, 74 for a disk.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class TrainingSettings(TypedDict, total=False):
    """Knobs by a short name, with the macro or knob of run/rows.gin that each of them sets."""

    seed: Annotated[int, "SEED"]  # of everything random
    prompts: Annotated[int, "PROMPTS"]  # per step
    group_size: Annotated[int, "GROUP_SIZE"]  # completions per prompt
    max_new_tokens: Annotated[int, "MAX_NEW_TOKENS"]  # per completion
    lr: Annotated[float, "LR"]  # learning rate of AdamW
    held_out: Annotated[int, "HELD_OUT"]  # rows of the data that are evaluated and not trained on
    eval_every: Annotated[int, "EVAL_EVERY"]  # steps; 0: only before and after the training
    save_every: Annotated[int, "SAVE_EVERY"]  # steps between checkpoints
    prompt_field: Annotated[str, "PROMPT_FIELD"]  # of a row
    answer_field: Annotated[str, "ANSWER_FIELD"]  # of a row
    meta_fields: Annotated[Sequence[str], "rows.read_problems.meta_fields"]  # further fields, in problem.meta
    template: Annotated[str, "rows.read_problems.template"]  # around the prompt, with {prompt}
    temperature: Annotated[float, "sections.Sampling.temperature"]
    max_rows: Annotated[int, "sections.Sampling.max_rows"]  # sequences that are decoded at once
    epochs: Annotated[int, "step.Algorithm.epochs"]  # passes over the completions of a step
    minibatches: Annotated[int, "step.Algorithm.minibatches"]  # optimizer steps per pass
    beta: Annotated[float, "objective.policy_objective.beta"]  # weight of the KL to the reference model
    weight_decay: Annotated[float, "optimizer.adamw.weight_decay"]
    max_grad_norm: Annotated[float, "sections.PolicyUpdate.max_grad_norm"]
    micro_tokens: Annotated[int, "sections.PolicyUpdate.micro_tokens"]  # per device and micro-batch
    device: Annotated[str, "sections.Compute.device"]  # "auto", "cpu", "cuda"
    dtype: Annotated[str, "sections.Compute.dtype"]  # of the computation
    reward_workers: Annotated[int, "reward_pool.RewardPool.workers"]  # processes
    reward_timeout: Annotated[float, "reward_pool.RewardPool.timeout_per_completion"]  # seconds


GIN_NAMES = {name: hint.__metadata__[0] for name, hint in get_type_hints(TrainingSettings, include_extras=True).items()}


def train(
    model: str | Path,
    data: str | Path,
    reward: Reward,
    *,
    algorithm: str = "dr_grpo",
    steps: int = 200,
    run_dir: str | Path | None = None,
    lora: bool | int = False,
    gin_files: Sequence[str | Path] = (),
    knobs: Mapping[str, object] | None = None,
    force: bool = False,
    on_step: OnStep | None = None,
    **settings: Unpack[TrainingSettings],
) -> "Run":
    """Train a model on a file of prompts by a reward, or resume the run that an equal call has begun.

    Prints the gin file that the call stands for; `RUN/config.gin` has every knob, and
    `python -m grpo_fn.run --gin_file RUN/config.gin` repeats the run. An interrupt (Ctrl-C, the stop button of a
    notebook) saves a checkpoint and returns with exit code 75.

    Args:
        model: a Hugging Face folder or hub name.
        data: a .jsonl or .parquet file of rows with a prompt (text or chat messages) and an answer.
        reward: `(problem, completion) -> number`; the name of one (`math`, `module.function`); or several with their
            weights, of which the first decides what is right. The source of a function of a script or notebook is
            stored in the run folder.
        algorithm: a preset, a file of gin/algo by its name: docs/algorithms/catalogue.md has all of them.
        steps: of the algorithm.
        run_dir: the run folder, resumed if it exists. None: runs/<data>-<algorithm>-<hash>, with a hash of all
            arguments but `steps`, so that an equal call resumes and another one does not.
        lora: whether adapters train in place of all weights, or their rank.
        gin_files: laid over the run, such as "scale/bf16.gin".
        knobs: any other knob by its gin name, such as {"step.Algorithm.minibatches": 4}; a value is a number, text,
            list or function, or gin text that begins with @ or %.
        force: resume in a run folder that has another configuration.
        on_step: called with the number and the metrics of each step.
        settings: knobs by a short name, those of `TrainingSettings`.

    Returns:
        The run: accuracy before and after, metrics, samples, folder and exit code.

    Raises:
        RunError: for what the command refuses, with its text and its exit code.
    """
    with one_line_errors():
        check_names(settings)
        call = GinCall(["run/rows.gin", algorithm_file(algorithm)])
        call.bind("MODEL", model)
        call.bind("DATA", data)
        call.bind("STEPS", steps)
        call.bind_reward(reward)
        call.add(lora, gin_files, settings, knobs)
        name = f"{Path(data).stem.strip('*?') or 'rows'}-{algorithm}-{call.digest()}"
        folder = Path("runs") / name if run_dir is None else Path(run_dir)
        with call.user_code_in(folder):
            code = start_run(call, folder, steps, force=force, on_step=on_step)
    run = load_run(folder)
    return Run(run.run_dir, code)


def start_run(call: "GinCall", folder: Path, steps: int, *, force: bool, on_step: OnStep | None) -> int:
    """The exit code of the run that a call stands for."""
    from grpo_fn.config import load_config
    from grpo_fn.config.parse import overlay_text

    print(overlay_text(call.files, call.params), f"run folder: {folder}", sep="\n", flush=True)
    config = load_config(call.files, call.params)
    kwargs = config.kwargs()
    from grpo_fn.shell.checkpoint.run_dir import leave_run
    from grpo_fn.train import EngineRefused, RunRequest, launch

    view = NotebookView(folder, steps) if in_notebook() else None
    callbacks = [callback for callback in (on_step, view) if callback is not None]

    def after_step(step: int, metrics: Mapping[str, float]) -> None:
        for callback in callbacks:
            callback(step, metrics)

    request = RunRequest(
        config=config,
        run_dir=folder,
        dry_run=False,
        ranks=1,
        hosts=1,
        force=force,
        on_step=after_step if callbacks else None,
    )
    try:
        code = launch(request, kwargs)
    except EngineRefused as error:
        raise RunError("; ".join([str(error), *getattr(error, "__notes__", [])]), EXIT_ERROR) from None
    finally:
        leave_run(folder)
    if view is not None:
        view.finish()
    return code


def evaluate(
    model: str | Path,
    data: str | Path | None = None,
    reward: Reward | None = None,
    *,
    out: str | Path | None = None,
    gin_files: Sequence[str | Path] = (),
    knobs: Mapping[str, object] | None = None,
    **settings: Unpack[TrainingSettings],
) -> "EvaluationResult":
    """Measure a model: on every row of a file, or on the held-out problems of the run that it belongs to.

    Args:
        model: a Hugging Face folder or hub name, a run folder or one of its checkpoints.
        data: a file as `train` takes it; None: the held-out problems of the run.
        reward: as `train` takes it; the first one decides what is right. None: the run's.
        out: a new folder for the results. None: evals/<model>-<time>.
        gin_files: laid over the configuration.
        knobs: any other knob by its gin name.
        settings: knobs by a short name, those of `TrainingSettings`.

    Returns:
        The evaluation: accuracy with its interval, all figures, samples and the folder.

    Raises:
        RunError: for what the command refuses, and for data without a reward.
    """
    from grpo_fn.eval.__main__ import default_out, flags, launch_evaluation

    with one_line_errors():
        check_names(settings)
        if (data is None) != (reward is None):
            given, absent = ("data", "reward") if reward is None else ("reward", "data")
            raise ValueError(f"got {given} without {absent}, expected both, or neither for the problems of a run")
        places = [Path(model), Path(model).parent.parent] if data is None else []  # a run, or one of its checkpoints
        of_run = [str(place / "config.gin") for place in places if (place / "config.gin").is_file()][:1]
        call = GinCall(of_run if data is None else ["run/rows.gin"])
        if data is not None:
            call.bind("DATA", data)
            call.bind_reward(reward)
            call.bind("sections.Data.task", "@rows.task")
            call.bind("rows.task.train", [])
            call.bind("rows.task.test", ["@rows.read_problems"])
            call.bind("HELD_OUT", sys.maxsize)
        call.add(False, gin_files, settings, knobs)
        folder = default_out(str(model), datetime.now()) if out is None else Path(out)
        with call.user_code_in(folder):
            words = [*(f"--gin_file={name}" for name in call.files), *(f"--gin_param={param}" for param in call.params)]
            launch_evaluation(flags().parse_args([f"--model={model}", f"--out={folder}", *words]))
    return EvaluationResult(folder)


class Score(NamedTuple):
    """The verdict on a completion."""

    verdict: str  # right, wrong or unscorable
    value: float | None
    reason: str  # for a value of None, or the reward's own
    seconds: float


def score(
    rows: Iterable[Mapping[str, Any]],
    reward: RewardFn | str,
    *,
    workers: int = 1,
    timeout: float | None = None,
    memory_mb: int = 1024,
    knobs: Mapping[str, object] | None = None,
) -> list[Score]:
    """Score completions as training would: in other processes, with a deadline.

    Args:
        rows: each with `completion`, and `answer`, `tests` or other fields as the reward reads them.
        reward: a function, or its name as `python -m grpo_fn.score --reward` takes it.
        workers: processes.
        timeout: for one row, seconds; None: 5, for programs 30.
        memory_mb: address space of a worker, MB.
        knobs: of the reward, by name.

    Returns:
        A score for each row, in order.

    Raises:
        RunError: for a reward or a row that cannot be used.
    """
    from grpo_fn.score.scoring import known_reward, parse_row, reward_of
    from grpo_fn.shell.reward_workers.reward_pool import RewardPool
    from grpo_fn.shell.reward_workers.worker_pool import RETURNED_NONE

    with one_line_errors(), ExitStack() as stack:
        code = UserCode()
        spec = known_reward(reward if isinstance(reward, str) else code.function_name(reward))
        stack.enter_context(code.stored_in(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        fn = reward_of(spec, [f"{name}={value!r}" for name, value in (knobs or {}).items()])
        lines = [json.dumps(dict(row)).encode() for row in rows]
        parsed = [parse_row(f"row {n}", n, line, needs=spec.needs, suffix="") for n, line in enumerate(lines)]
        problems, completions = [row[0] for row in parsed], [row[1] for row in parsed]
        deadline = spec.deadline if timeout is None else timeout
        pool = RewardPool(workers=workers, timeout_per_completion=deadline, memory_mb=memory_mb, stop_on_error=False)
        with pool:
            calls = pool.submit(fn, problems, completions)
            outcomes = pool.collect(fn, problems, completions, calls)
    reasons = [spec.none if each.reason == RETURNED_NONE else each.reason for each in outcomes]
    return [
        Score(verdict_name(each.value), each.value, reason, each.seconds)
        for each, reason in zip(outcomes, reasons, strict=True)
    ]


# -- results


@dataclass(frozen=True)
class Run:
    """A run folder, read when it is asked for: a run that is still going on is read as far as it has come."""

    run_dir: Path
    exit_code: int | None = None  # of the call that trained: 0 done, 75 stopped, 76 ended by a rule; None: only loaded

    @property
    def config(self) -> str:
        """The gin file that repeats the run."""
        return (self.run_dir / "config.gin").read_text(encoding="utf-8")

    @property
    def knobs(self) -> dict[str, int | float | str]:
        """Every bound knob by its gin name."""
        return json.loads((self.run_dir / "run.json").read_bytes()).get("hparams", {})

    @property
    def metrics(self) -> dict[int, dict[str, float]]:
        """Figures by step; step 0 is before the training. NaN where one is not finite."""
        steps = metrics_by_step(self.run_dir, torn_end=True)
        return {
            step: {name: math.nan if value is None else value for name, value in row.items()}
            for step, row in steps.items()
        }

    @property
    def accuracy_before(self) -> float:
        """Held-out accuracy before the training; NaN while it is not known."""
        return next(iter(self._accuracies()), math.nan)

    @property
    def accuracy_after(self) -> float:
        """The newest held-out accuracy; NaN while it is not known."""
        return next(reversed(self._accuracies()), math.nan)

    def _accuracies(self) -> list[float]:
        return [row["eval/accuracy"] for row in self.metrics.values() if "eval/accuracy" in row]

    @property
    def steps(self) -> int:
        """Steps taken."""
        return max(self.metrics, default=0)

    @property
    def model(self) -> Path:
        """The trained model, a Hugging Face folder, there when the run is done."""
        return self.run_dir / "model"

    @property
    def curve(self) -> "Curve":
        """Mean reward and held-out accuracy by step, drawn by a notebook."""
        names = {"reward": "reward/mean", "held-out accuracy": "eval/accuracy"}
        metrics = self.metrics
        return Curve(
            {
                label: [(step, row[name]) for step, row in metrics.items() if math.isfinite(row.get(name, math.nan))]
                for label, name in names.items()
            }
        )

    def samples(self, step: int | None = None) -> list[dict[str, Any]]:
        """The training completions of a step, with prompt, text, answer, reward and advantage; None: of the newest one.

        Raises ValueError for a step whose completions are not stored.
        """
        stored = {int(path.name[5:-9]): path for path in sorted(self.run_dir.glob("rollouts/step_*.jsonl.gz"))}
        step = max(stored, default=0) if step is None else step
        if step not in stored:
            raise ValueError(f"got step {step}, expected one whose completions are stored: {[*stored]}")
        return [row.value for row in json_rows(stored[step], expected="an object")]

    def answers(self, step: int) -> list[dict[str, Any]]:
        """The held-out problems and their greedy answers after a step; 0: before the training.

        Raises ValueError for a step after which there was no evaluation.
        """
        path = self.run_dir / "eval" / f"step_{step}.jsonl"
        if not path.is_file():
            there = sorted(int(other.stem[5:]) for other in path.parent.glob("step_*.jsonl"))
            raise ValueError(f"got step {step}, expected one after which there was an evaluation: {there}")
        return [row.value for row in json_rows(path, expected="an object")]

    def __str__(self) -> str:
        return (
            f"{self.run_dir}: {self.steps} steps, held-out accuracy {self.accuracy_before:.3f} before and "
            f"{self.accuracy_after:.3f} after"
        )


def load_run(run_dir: str | Path) -> Run:
    """A run folder as an object: configuration, metrics, samples, model folder.

    Args:
        run_dir: a run folder, finished or not.

    Raises:
        RunError: for a folder that is not one.
    """
    with one_line_errors():
        if not (Path(run_dir) / "run.json").is_file():
            raise ValueError(f"got {run_dir} without run.json, expected a run folder")
    return Run(Path(run_dir))


@dataclass(frozen=True)
class EvaluationResult:
    """The folder of an evaluation."""

    out: Path

    @property
    def figures(self) -> dict[str, float]:
        """Every figure by its name, `eval/accuracy` among them."""
        return json.loads((self.out / "results.json").read_bytes())["figures"]

    @property
    def accuracy(self) -> float:
        """The share of problems whose greedy answer is right."""
        return self.figures["eval/accuracy"]

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the accuracy."""
        return self.figures["eval/accuracy_low"], self.figures["eval/accuracy_high"]

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The problems with their answers and scores."""
        return [row.value for row in json_rows(self.out / "samples.jsonl", expected="an object")]


@dataclass(frozen=True)
class Curve:
    """Lines over the steps of a run, which a notebook draws as SVG."""

    lines: Mapping[str, Sequence[tuple[int, float]]]  # (step, value) by label

    def _repr_svg_(self) -> str:
        width, height, left, low = 560, 240, 48, 204
        points = [point for line in self.lines.values() for point in line] or [(0, 0.0)]
        last = max(step for step, _ in points) or 1
        bottom, top = min(0.0, *(y for _, y in points)), max(1.0, *(y for _, y in points))
        scale = (low - 16) / (top - bottom)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            'font-family="sans-serif" font-size="12" fill="currentColor">',
            f'<path d="M{left} 16V{low}H{width - 12}" fill="none" stroke="currentColor" opacity="0.4"/>',
            f'<text x="{left - 6}" y="20" text-anchor="end">{top:.3g}</text>',
            f'<text x="{left - 6}" y="{low}" text-anchor="end">{bottom:.3g}</text>',
            f'<text x="{width - 12}" y="{low + 16}" text-anchor="end">step {last}</text>',
        ]
        colors = ("#2a78c2", "#d1622b", "#3c9a5f", "#8a5cc2")
        for (label, line), color, place in zip(self.lines.items(), colors, range(left, width, 120), strict=False):
            at = " ".join(
                f"{left + (width - 12 - left) * x / last:.1f},{low - (y - bottom) * scale:.1f}" for x, y in line
            )
            parts.append(f'<polyline points="{at}" fill="none" stroke="{color}" stroke-width="2"/>')
            parts.append(f'<text x="{place + 8}" y="{low + 16}" fill="{color}">{html.escape(label)}</text>')
        return "".join([*parts, "</svg>"])


# -- a notebook


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config


class NotebookView:
    """A progress bar with the newest figures, and the curve at the end."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._display = importlib.import_module("IPython.display")
        self._folder, self._steps = folder, steps
        self._handle = self._display.display(self._bar(0, {}), display_id=True)

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        self._handle.update(self._bar(step, metrics))

    def finish(self) -> None:
        """Show the curve of the whole run."""
        self._display.display(Run(self._folder).curve)

    def _bar(self, step: int, metrics: Mapping[str, float]) -> object:
        names = {"reward/mean": "reward", "eval/accuracy": "held-out accuracy", "generation/length_mean": "length"}
        figures = ", ".join(f"{label} {metrics[name]:.3g}" for name, label in names.items() if name in metrics)
        bar = f'<progress value="{step}" max="{self._steps}" style="width: 20em"></progress>'
        return self._display.HTML(f"{bar} step {step} of {self._steps}{f': {figures}' if figures else ''}")


# -- a call as gin


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Raise RunError for what a command reports as one line; every other error keeps its traceback."""
    quiet_libraries()
    try:
        yield
    except RunError:
        raise
    except (ValueError, OSError) as error:
        if (refusal := bad_input(error)) is None:
            raise
        code, text = refusal
        raise RunError(text, code) from None


def check_names(settings: Mapping[str, object]) -> None:
    """Raise ValueError for a setting that there is not, with the nearest name."""
    from grpo_fn.core.display_text import suggest_name

    keywords = [name for name, p in inspect.signature(train).parameters.items() if p.kind is p.KEYWORD_ONLY]
    for name in settings:
        if name not in GIN_NAMES:
            hint = suggest_name(name, [*GIN_NAMES, *keywords])
            known = hint or f": {', '.join(GIN_NAMES)}"
            raise ValueError(f"got the setting {name}, expected one of TrainingSettings, or a gin name in knobs{known}")


def algorithm_file(name: str) -> str:
    """The gin file of a preset. Raises ValueError for another name, with all of them."""
    from grpo_fn.config.parse import GIN_FOLDER
    from grpo_fn.core.display_text import suggest_name

    presets = sorted(path.stem for path in (GIN_FOLDER / "algo").glob("*.gin"))
    if name not in presets:
        hint = suggest_name(name, presets)
        raise ValueError(f"got algorithm {name!r}, expected one of {', '.join(presets)}{hint}")
    return f"algo/{name}.gin"


class GinCall:
    """Gin files and the parameters on top of them, with the functions of the caller's script that they name."""

    def __init__(self, files: Sequence[str]) -> None:
        self.files = [*files]
        self.bindings: dict[str, str] = {}  # gin name -> gin text
        self.code = UserCode()

    def bind(self, name: str, value: object) -> None:
        """Set a macro or knob."""
        self.bindings[name] = self._literal(value, name)

    def bind_reward(self, reward: Reward) -> None:
        """Set the reward: one, or the parts of a weighted sum."""
        if not isinstance(reward, Mapping):
            self.bind("REWARD", self._reward(reward))
            return
        parts = [self._reward(part) for part in reward]
        self.bind("combine.combine.parts", parts)
        self.bind("combine.combine.weights", [*reward.values()])
        self.bind("sections.Evaluation.graders", parts)

    def add(
        self,
        lora: bool | int,
        gin_files: Sequence[str | Path],
        settings: Mapping[str, object],
        knobs: Mapping[str, object] | None,
    ) -> None:
        """Lay files over these, and set what settings and knobs name; knobs win."""
        if lora is not False:
            self.files.append("scale/lora.gin")
        if lora is not True and lora is not False:
            self.bind("lora.LoRA.rank", lora)
            self.bind("lora.LoRA.alpha", 2.0 * lora)
        self.files += map(str, gin_files)
        for name, value in settings.items():
            self.bind(GIN_NAMES[name], value)
        for name, value in (knobs or {}).items():
            self.bind(name, value)

    @property
    def params(self) -> list[str]:
        """`NAME=VALUE`, as --gin_param takes it."""
        return [f"{name}={text}" for name, text in self.bindings.items()]

    def digest(self) -> str:
        """Of everything but the number of steps, which may grow when a run resumes."""
        text = "\n".join([*self.files, *sorted(param for param in self.params if not param.startswith("STEPS="))])
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @contextmanager
    def user_code_in(self, folder: Path) -> Iterator[None]:
        """Have functions of the caller's script in the folder, which workers and a later run import them from."""
        with self.code.stored_in(folder):
            yield

    def _reward(self, reward: RewardFn | str) -> str:
        if isinstance(reward, str):
            from grpo_fn.score.scoring import known_reward

            return f"@{known_reward(reward.removeprefix('@')).function}"
        return self._literal(reward, "reward")

    def _literal(self, value: object, name: str) -> str:
        match value:
            case Path():
                return repr(str(value))
            case str() if value[:1] in ("@", "%"):
                return value
            case None | bool() | int() | float() | str():
                return repr(value)
            case list() | tuple():
                return "[" + ", ".join(self._literal(item, name) for item in value) + "]"
            case Mapping():
                items = (f"{self._literal(k, name)}: {self._literal(v, name)}" for k, v in value.items())
                return "{" + ", ".join(items) + "}"
            case functools.partial(func=function, args=(), keywords=knobs):
                inner = self.code.function_name(function)
                for knob, bound in knobs.items():
                    self.bind(f"{inner}.{knob}", bound)
                return f"@{inner}"
        if callable(value):
            return f"@{self.code.function_name(value)}"
        raise ValueError(f"{name}: got {value!r:.80}, expected a number, text, a list or a function")


class UserCode:
    """Functions by the names that gin files and workers find them by.

    A function of a script or notebook has no such name: the module `__main__` is another one in every process. Its
    source, with that of all that it uses, becomes a module that is named after its content.
    """

    def __init__(self) -> None:
        self.modules: dict[str, str] = {}  # name -> source

    def function_name(self, function: Callable[..., Any]) -> str:
        """`package.module.function`. Raises ValueError for a function that no name leads to."""
        name = getattr(function, "__qualname__", None)
        if name is None:
            raise ValueError(f"got an object of {type(function).__name__}, expected a function, or its name as text")
        if "<" in name:
            raise ValueError(
                f"got {name}, expected a function that is defined with def at the top of a module, script or notebook: "
                "other processes find it by its name"
            )
        if function.__module__ != "__main__":
            return f"{function.__module__}.{name}"
        source = module_source(name, function, vars(sys.modules["__main__"]))
        module = f"user_code_{hashlib.sha256(source.encode()).hexdigest()[:8]}"
        self.modules[module] = source
        return f"{module}.{name}"

    @contextmanager
    def stored_in(self, folder: Path) -> Iterator[None]:
        """Have the modules in a folder that is searched for modules. They go again if nothing else comes into it."""
        from grpo_fn.config.resolve import search_folder
        from grpo_fn.shell.atomic_io import write_bytes

        paths = {folder / f"{name}.py": source for name, source in self.modules.items()}
        there = folder.exists()
        for path, source in paths.items():
            folder.mkdir(parents=True, exist_ok=True)
            write_bytes(path, source.encode())
            search_folder(folder.resolve())
        importlib.invalidate_caches()
        try:
            yield
        except BaseException:
            if paths and not there and {*folder.iterdir()} <= {*paths, folder / "__pycache__"}:
                shutil.rmtree(folder)
            raise


def module_source(name: str, function: Callable[..., Any], names: Mapping[str, Any]) -> str:
    """The source of a module with the function and all that it uses of `names`, the globals around it.

    Raises ValueError for a global that no source text makes again.
    """
    imports: dict[str, str] = {}
    definitions: dict[str, str] = {}
    under_way: set[str] = set()

    def add(name: str, value: Any) -> None:
        if name in imports or name in under_way:
            return
        under_way.add(name)
        home, own_name = getattr(value, "__module__", None), getattr(value, "__name__", name)
        if isinstance(value, types.ModuleType):
            imports[name] = f"import {own_name}" + alias(name, own_name)
        elif home == "__main__" and hasattr(value, "__qualname__") and own_name != name:
            add(own_name, value)
            definitions[name] = f"{name} = {own_name}"
        elif home == "__main__" and hasattr(value, "__qualname__"):
            text = source_text(value, name)
            for used in global_names(text):
                if used in names and used != name:
                    add(used, names[used])
            definitions[name] = text
        elif home is not None and getattr(sys.modules.get(home), own_name, None) is value:
            imports[name] = f"from {home} import {own_name}" + alias(name, own_name)
        elif isinstance(value, re.Pattern):
            imports["re"] = "import re"
            definitions[name] = f"{name} = re.compile({value.pattern!r}, {value.flags})"
        elif is_literal(value):
            definitions[name] = f"{name} = {value!r}"
        else:
            raise ValueError(
                f"{function.__name__} uses {name}: got a value of type {type(value).__name__} of this script or "
                "notebook, expected functions, modules, text, numbers and collections of these: other processes need "
                "it too; move it with the function to a file, mine.py, and import the function from there"
            )

    add(name, function)
    head = ["from __future__ import annotations", *sorted(imports.values())]
    return "\n".join(head) + "\n\n\n" + "\n\n\n".join(definitions.values()) + "\n"


def alias(name: str, own_name: str) -> str:
    """` as NAME` for an import under another name."""
    return "" if name == own_name else f" as {name}"


def source_text(value: Any, name: str) -> str:
    """The source of a function or class. Raises ValueError if Python does not know it."""
    try:
        return textwrap.dedent(inspect.getsource(value)).rstrip()
    except (OSError, TypeError) as error:
        raise ValueError(
            f"got {name}, whose source Python does not know ({error}), expected a function of a file or a notebook's "
            "cell: move it to a file, mine.py, and import it from there"
        ) from error


def global_names(source: str) -> Iterator[str]:
    """The names that a definition takes from its module, those of decorators, defaults and annotations too."""
    tables = [symtable.symtable(source, "<definition>", "exec")]
    while tables:
        table = tables.pop()
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (table.get_type() == "module" or symbol.is_global()):
                yield symbol.get_name()
        tables += table.get_children()


def is_literal(value: Any) -> bool:
    """Whether Python reads the value's text as the value."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return False
