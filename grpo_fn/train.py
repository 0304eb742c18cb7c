"""The one configurable root: check what gin named, put the pieces together, and hand them to the loop."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from grpo_fn import plan as planning
from grpo_fn import prng, sampling
from grpo_fn.algorithm import Algo
from grpo_fn.loop import DATA, Built, Cadence, work
from grpo_fn.problem import Problem, RewardFn
from grpo_fn.resume import begun
from grpo_fn.shell import hf
from grpo_fn.shell.reward_pool import RewardPool
from grpo_fn.shell.run_dir import open_run
from grpo_fn.tasks.task import Task, train_problems

# Keyword-only parameters that the program passes to what gin names here; gin binds the others.
SUPPLIED = {
    "policy": ("temperature", "reference", "micro_tokens"),
    "sampler": ("choose",),
    "choose": ("temperature",),
    "reward": ("score",),
    "objective": ("batch", "totals"),
}


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    config_text: str
    fingerprint: str
    run_dir: Path
    dry_run: bool
    force: bool


def launch(kwargs: Mapping[str, Any], **request: Any) -> int:
    """Run `train` with the configured arguments; returns the exit code."""
    return train(Request(**request), **kwargs)


def train(
    request: Request,
    *,
    task: Callable[[], Task],
    model: str | hf.ModelSource,
    dtype: str,
    device: str,
    attention: str,
    policy: Callable[..., Any],
    sampler: Callable[..., Any],
    choose: Callable[..., tuple[Tensor, Tensor]],
    temperature: float,
    reward: Callable[..., Any],
    verdict: RewardFn,
    reward_pool: Callable[[], RewardPool],
    advantage: Callable[[Tensor, Tensor], Tensor],
    objective: Callable[..., tuple[Tensor, dict[str, Tensor]]],
    old_logp: Callable[..., Tensor],
    group_size: int,
    epochs: int,
    minibatches: int,
    micro_tokens: int,
    prompts: int,
    eval_problems: int,
    cadence: Cadence,
    seed: int,
) -> int:
    """Train a policy on a task and leave a run folder; every argument is named in a gin file.

    Returns 0 when all steps are done and EXIT_STOPPED when a signal asked to stop. Raises ValueError, before any
    weights are loaded, for numbers, data, folders or a model that do not fit together.
    """
    started = time.perf_counter()
    planning.check_positive(
        group_size=group_size,
        epochs=epochs,
        minibatches=minibatches,
        micro_tokens=micro_tokens,
        prompts=prompts,
        steps=cadence.steps,
        save_every=cadence.save_every,
        eval_problems=eval_problems,
        keep_last=cadence.keep_last,
    )
    planning.check_divides(prompts, minibatches)
    planning.check_advantage(advantage, group_size)
    reference = planning.uses_reference(objective)
    place, precision = hf.find_device(device), hf.find_dtype(dtype)
    source = hf.Pretrained(model) if isinstance(model, str) else model
    config = source.config()
    problems = task()
    plan = planning.Plan(
        prompts=prompts,
        group_size=group_size,
        minibatches=minibatches,
        epochs=epochs,
        steps=cadence.steps,
        train_rows=problems.size,
        test_rows=len(problems.test),
        max_new_tokens=sampler.keywords["max_new_tokens"],
        max_rows=sampler.keywords["max_rows"],
        parameters=hf.parameter_count(hf.empty_model(config)),
        kv_bytes_per_token=planning.kv_bytes_per_token(config, precision.itemsize),
        weight_bytes=precision.itemsize,
        reference=reference,
    )
    if request.dry_run:
        print(request.config_text, *plan.lines(), sep="\n")
        return 0
    disable_progress_bar()  # transformers' bars, one a file: they would bury the lines of the run
    key, held_out = prng.key(seed, device="cpu"), problems.test[:eval_problems]
    drawn = train_problems(problems, prng.fold_in(key, DATA), 0, min(problems.size, prompts * cadence.steps))
    ready = partial(prepare, source, [*drawn, *held_out], config, plan.max_new_tokens)
    enter = partial(
        open_run,
        request.run_dir,
        config_text=request.config_text,
        fingerprint=request.fingerprint,
        force=request.force or not begun(request.run_dir),  # a start that failed has left nothing to lose
        need_bytes=plan.need_bytes(),
    )
    if isinstance(model, str):  # all there to be looked at before a run folder is made
        folder, tokenizer = ready()
        enter()
    else:  # to be made, which takes time: not before the run folder is known to be ours
        enter()
        folder, tokenizer = ready()
    module = hf.load_model(folder, dtype=precision, device=place, attention=attention)
    drawing = sampler(module, tokenizer, choose=partial(choose, temperature=temperature))
    with reward_pool() as pool:
        built = Built(
            run_dir=request.run_dir,
            key=key,
            seed=seed,
            policy=policy(module, temperature=temperature, reference=reference, micro_tokens=micro_tokens),
            sampler=drawing,
            greedy=replace(drawing, choose=sampling.greedy),
            tokenizer=tokenizer,
            algo=Algo(
                reward=partial(reward, score=pool.score),
                advantage=advantage,
                objective=objective,
                old_logp=old_logp,
                group_size=group_size,
                epochs=epochs,
                minibatches=minibatches,
                micro_tokens=micro_tokens,
            ),
            task=problems,
            held_out=held_out,
            prompts=prompts,
            verdict=verdict,
            score=pool.score,
            cadence=cadence,
            plan=plan.lines(),
            start_over=request.force,
            started=started,
        )
        return work(built)


def prepare(
    source: hf.ModelSource, problems: Sequence[Problem], config: PretrainedConfig, max_new_tokens: int
) -> tuple[str, PreTrainedTokenizerBase]:
    """The model's folder and tokenizer, once every prompt is known to have tokens and to fit, with its completion."""
    folder = source.folder()
    tokenizer = hf.load_tokenizer(folder)
    sizes = [len(hf.encode_prompt(tokenizer, problem.prompt)) for problem in problems]
    if min(sizes) == 0:
        empty = problems[sizes.index(0)].prompt
        raise ValueError(
            f"got a prompt of no tokens, {empty[:80]!r} with the tokenizer of {folder}, wanted at least one: is "
            "the prompt empty, or the folder without the tokenizer's files?"
        )
    longest = max(sizes)
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and longest + max_new_tokens > limit:
        prompt = problems[sizes.index(longest)].prompt
        raise ValueError(
            f"got a prompt of {longest} tokens and max_new_tokens {max_new_tokens}, wanted at most {limit} positions "
            f"together, as the model has; the prompt: {prompt[:80]!r}"
        )
    return folder, tokenizer
