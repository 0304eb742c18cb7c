"""The second root: measure a model on the held-out problems of a task, exactly as a training run would.

It takes the knobs that gin files bind for `train.train`, as far as it needs them, so every training configuration is
one for evaluation too.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from grpo_fn.config import Config
from grpo_fn.core import prng
from grpo_fn.core import sampling as token_samplers
from grpo_fn.core.problem import Problem, Scorer
from grpo_fn.shell.atomic_io import check_space, write_bytes, write_json
from grpo_fn.shell.logging import rollout_store
from grpo_fn.shell.logging.stopwatch import Stopwatch
from grpo_fn.shell.model import hf
from grpo_fn.shell.model.attention import check_attention, model_attention
from grpo_fn.shell.sampler.interface import EngineSampler, FixedWeights, SamplerContext
from grpo_fn.shell.sampler.local.local_sampler import LocalSampler
from grpo_fn.shell.world import alone, find_device
from grpo_fn.tasks.task import held_out_only, sample_tests
from grpo_fn.trainer.build import sampler_options
from grpo_fn.trainer.evaluation import GradedAnswer, problems_by_meta, summarise, tally, wilson
from grpo_fn.trainer.model_source import check_fits, load_located_model, locate
from grpo_fn.trainer.prepare import EVALUATION, prepare_data
from grpo_fn.trainer.requirements import check_engines, check_sandboxes
from grpo_fn.trainer.sections import (
    Compute,
    Data,
    Episodes,
    Evaluation,
    Rewards,
    Sampling,
    check_episodes,
    open_environments,
)
from grpo_fn.trainer.validate import try_task

SAMPLES, RESULTS = "samples.jsonl", "results.json"
BYTES_A_TOKEN = 16  # of samples.jsonl, generously: four of English, six a character of other scripts


@dataclass(frozen=True)
class EvalRequest:
    """The command line of an evaluation."""

    config: Config
    model: str
    out: Path


def measure(
    request: EvalRequest,
    *,
    data: Data,
    compute: Compute,
    sampling: Sampling,
    episodes: Episodes | None,
    rewards: Rewards,
    evaluation: Evaluation,
    seed: int,
) -> int:
    """Evaluate a model and leave config.gin, samples.jsonl and results.json in a folder.

    Raises ValueError, before any weights are loaded, for numbers, data, folders or a model that do not fit together.
    """
    clock = Stopwatch()
    check_sandboxes(evaluation.graders)
    check_episodes(episodes, sampling)
    check_engines([sampling.sampler])
    place, precision = find_device(compute.device, 0), hf.find_dtype(compute.dtype)
    check_attention(compute.attention, place, precision)
    check_free(request.out)
    located = locate(request.model, warn=warn)
    config = located.source.config()
    if located.checkpoint is not None:
        check_fits(located.checkpoint, config)
    held_out = sample_tests(held_out_only(try_task(data.task).test), evaluation.problems)
    if not held_out.test:
        raise ValueError("got a task without held-out problems, expected one that holds some out to evaluate on")
    disable_progress_bar()
    folder, tokenizer, fitting = prepare_data(located.source, held_out, (), config, data, sampling, episodes)
    for note in fitting.notes:
        warn(note)
    problems = fitting.test
    tokens = sampling.max_new_tokens if episodes is None else 2 * sampling.max_total_tokens  # what was observed, too
    check_space(request.out, len(problems) * (1 + evaluation.samples) * tokens * BYTES_A_TOKEN + 2**20)
    request.out.mkdir(parents=True, exist_ok=True)  # before hours of work, to see that it can be written to
    write_bytes(request.out / "config.gin", request.config.text.encode())
    attention = model_attention(compute.attention, config)
    load = partial(hf.load_model, folder, dtype=precision, device=place, attention=attention)
    full_model = cache(partial(load_located_model, located, load))
    where = {"folder": folder, "config": config, "dtype": precision, "world": alone(place), "adapters": None}
    environments, environment_workers = open_environments(episodes, tokenizer)
    context = SamplerContext(**where, full_model=full_model)
    with clock.span("load"):
        options = sampler_options(tokenizer, token_samplers.greedy, sampling, data, environments)
        greedy = sampling.sampler(context, options)
        if located.checkpoint is not None:
            greedy.load(FixedWeights(full_model(), context.world))
        if isinstance(greedy, LocalSampler):
            greedy.prepare()
    with note_on_error(f"evaluating {located.path}"), closing(greedy), environment_workers, rewards.pool() as pool:
        score = clock.span("score")(pool.score)  # its time is counted apart from that of the evaluation around it
        judged = clock.span("evaluate")(graded_answers)(greedy, problems, seed=seed, how=evaluation, score=score)
    rollout_store.write_evaluation_rows(request.out / SAMPLES, [answer.row() for answer in judged])
    figures = {**summarise(judged, ks=evaluation.ks, by=evaluation.by), **clock.lap()}
    results = {
        "model": request.model,
        "weights": located.path,
        "parameters": hf.parameter_count(hf.empty_model(config)),
        "dtype": compute.dtype,
        "device": str(place),
        "seed": seed,
        "fingerprint": request.config.fingerprint,
        "figures": figures,
        "parts": count_parts(judged, evaluation.by),
    }
    write_json(request.out / RESULTS, results)  # the last one: where it is, the others are whole
    print(*report(results), f"written to {request.out}", sep="\n")
    return 0


def graded_answers(
    greedy: EngineSampler, problems: Sequence[Problem], *, seed: int, how: Evaluation, score: Scorer
) -> list[GradedAnswer]:
    """Graded answers to the problems as in training, in parts so that progress is visible."""
    key = prng.fold_in(prng.key(seed, device="cpu"), EVALUATION)
    at_once = max(1, greedy.max_rows // max(1, how.samples))
    judged: list[GradedAnswer] = []
    with tqdm(total=len(problems), unit="problem", file=sys.stderr, disable=None, dynamic_ncols=True) as bar:
        for start in range(0, len(problems), at_once):
            sampled, part = greedy.for_evaluation(how.token_sampler), problems[start : start + at_once]
            judged += how.grade_answers(greedy, sampled, part, key=key, score=score)
            bar.update(len(judged) - bar.n)
    return judged


def count_parts(judged: Sequence[GradedAnswer], by: Sequence[str]) -> dict[str, dict[str, dict[str, float | int]]]:
    """`count_graded` of the problems with each value of a field, for every field that some have."""
    grouped = {key: problems_by_meta(judged, key) for key in by}
    return {key: {value: count_graded(rows) for value, rows in of.items()} for key, of in grouped.items() if of}


def count_graded(judged: Sequence[GradedAnswer]) -> dict[str, float | int]:
    """The number of scored problems, of right ones, and the interval of their share."""
    scored, right = tally(judged)
    low, high = wilson(right, scored)
    accuracy = right / scored if scored else float("nan")
    return {"problems": scored, "right": right, "accuracy": accuracy, "accuracy_low": low, "accuracy_high": high}


def report(results: Mapping[str, Any]) -> list[str]:
    """The results as a table of lines."""
    figures = dict(results["figures"])
    low, high = figures.pop("eval/accuracy_low"), figures.pop("eval/accuracy_high")
    scored = figures["eval/problems"] - figures["eval/unscorable"]
    lines = [f"{results['weights']}: {results['parameters']:,} parameters, {results['dtype']} on {results['device']}"]
    lines += [f"{'':32}{'':>10}   {'95 % interval':16}{'problems':>8}"]
    lines += [accuracy_line("accuracy", figures.pop("eval/accuracy"), low, high, scored)]
    for key, values in results["parts"].items():
        for value, part in values.items():
            figures.pop(f"eval/{key}/{value}", None)
            shares = (part[name] for name in ("accuracy", "accuracy_low", "accuracy_high", "problems"))
            lines.append(accuracy_line(f"  {key} {value}", *shares))
    units = {"time": " s", "length_mean": " tokens"}
    for name, value in figures.items():
        group, _, short = name.partition("/")
        lines.append(f"{short if group == 'eval' else name:32}{value:>10.4g}{units.get(group) or units.get(short, '')}")
    return lines


def accuracy_line(name: str, share: float, low: float, high: float, problems: float | int) -> str:
    """A share with its interval and the number of problems behind it."""
    return f"{name:32}{share:>10.3f}   {f'{low:.3f} to {high:.3f}':16}{problems:>8.0f}"


def check_free(out: Path) -> None:
    """Raise ValueError when results are there already, or the path is no folder."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out: got {out}, a file; expected a folder or a free name")
    if there := [name for name in (SAMPLES, RESULTS) if (out / name).exists()]:
        raise ValueError(f"--out: got {out} with {' and '.join(there)} of another evaluation, expected a free name")


def warn(text: str) -> None:
    """Print it beside the results, not among them."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def note_on_error(what: str) -> Iterator[None]:
    """Add a note to whatever is raised inside: it is no bad input any more."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while {what}")
        raise
