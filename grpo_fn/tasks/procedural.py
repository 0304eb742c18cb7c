"""Procedural tasks of reasoning-gym: a hundred kinds of problems with levels and scorers, made as they are drawn.

Needs the extra `tasks`. A problem is item 0 of the library's dataset with a seed, the seed a function of (key, index).
What `python tools/tables docs/tasks/procedural.md` found wrong with a kind is in `AUDIT_FAILURES`: such a kind is
refused unless `accept` names it. docs/tasks/procedural.md has the whole table.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import islice
from typing import Any

from torch import Tensor

from grpo_fn.core import prng
from grpo_fn.core.problem import Problem
from grpo_fn.tasks import mixture
from grpo_fn.tasks.rows import library
from grpo_fn.tasks.task import (
    Task,
    check_index,
    check_template,
    different_prompts,
    fill_template,
    generated_task,
    normalize_prompt,
)

DEFAULT_LEVEL = -1  # the library's own settings, which are no level of its curriculum
EPOCH = 100_000  # training problems of a kind that are called an epoch
ATTEMPTS = 1000  # seeds of one problem that may be held-out questions or fail to make one

_SPLIT_SEED = 20_261_125  # of what is held out, for every run and every seed alike
_SEED_BITS = 0x7FFFFFFF  # of a seed: some kinds use numpy's generator, which takes 32 bits

# Kinds that fail the audit, and how.
AUDIT_FAILURES: Mapping[str, str] = {
    "advanced_geometry": "the answer among other words is right on 43%",
    "boxnet": "states no answer of its own",
    "codeio": "its own answer is right on 96% of its problems",
    "coin_flip": "the answer '0' solves 92% of what it is no answer to",
    "fraction_simplification": "the answer among other words is right on 57%",
    "game_of_life_halting": "the answer 'zzz' solves 100% of what it is no answer to; "
    "the answer among other words is right on 100%",
    "graph_color": "states no answer of its own",
    "gsm_symbolic": "the answer among other words is right on 100%",
    "isomorphic_strings": "another problem under another hash seed or state of the global generator",
    "kakurasu": "the answer among other words is right on 100%",
    "knight_swap": "another problem under another hash seed or state of the global generator",
    "knights_knaves": "the answer among other words is right on 100%",
    "list_functions": "another problem under another hash seed or state of the global generator",
    "polynomial_multiplication": "another problem under another hash seed or state of the global generator",
    "propositional_logic": "states no answer of its own",
    "ransom_note": "another problem under another hash seed or state of the global generator",
    "rubiks_cube": "states no answer of its own",
    "rush_hour": "states no answer of its own",
    "sokoban": "the answer among other words is right on 100%",
    "spell_backward": "the answer among other words is right on 13%",
    "survo": "the answer among other words is right on 100%",
    "time_intervals": "the answer among other words is right on 43%",
    "word_ladder": "another problem under another hash seed or state of the global generator",
    "word_sorting": "the answer among other words is right on 100%",
}


def task(
    *, weights: Mapping[str, int | float], levels: Sequence[int], template: str, test_size: int, accept: Sequence[str]
) -> Task:
    r"""Problems of several kinds in one stream, in the ratio of their weights, each with its own held-out problems.

    `meta` has the kind as `task`, the `level`, and the library's `entry`, by which `procedural_correct` judges. The
    held-out questions of a kind are the first `test_size` different ones of a stream of their own, whatever the run's
    seed; a training problem whose question is one of them is drawn again with the next seed, and so is one that the
    library fails to make.

    Args:
        weights: weight of each kind in the stream, by the library's name of the kind, `chain_sum` say.
        levels: levels of the library's curriculum, of which each problem draws one; DEFAULT_LEVEL is its own settings.
        template: text of a prompt, holds `{question}`.
        test_size: held-out problems of each kind, spread over the levels.
        accept: kinds that fail the audit and are used all the same.

    Returns:
        The task: a mixture.

    Raises:
        ValueError: without the library; for kinds and levels that it does not have, kinds that fail the audit and are
            not accepted, a template without `{question}`, no levels, a test_size below 1, and a kind that has not so
            many different questions.
    """
    check_template(template, ["question"])
    if not levels or test_size < 1:
        raise ValueError(
            f"got levels {list(levels)} and test_size {test_size}, expected at least one level and problem"
        )
    for name in weights:
        if name not in kinds():
            raise ValueError(f"kind: got {name!r}, expected one of {', '.join(kinds())}")
        if name in AUDIT_FAILURES and name not in accept:
            raise ValueError(
                f"kind: got {name}, expected one that passes the audit: {AUDIT_FAILURES[name]}. To take it all the "
                "same, name it in procedural.task.accept"
            )
        for level in levels:
            settings_of(name, level)
    parts = {name: partial(_kind, name, tuple(levels), template, test_size) for name in weights}
    return mixture.task(tasks=parts, weights=weights)


_factory = partial(library, "reasoning_gym.factory", "tasks")


def kinds() -> list[str]:
    """The kinds of problems that the library has, `composite` apart, which is a mixture of the others."""
    return sorted({*_factory().DATASETS} - {"composite"})


@lru_cache(maxsize=1024)
def settings_of(name: str, level: int) -> Any:
    """The library's configuration of a kind at a level."""
    factory = _factory()
    if level == DEFAULT_LEVEL:
        return factory.DATASETS[name][1](size=1)
    if name not in factory.CURRICULA:
        raise ValueError(f"{name}: got level {level}, expected {DEFAULT_LEVEL}: it has no levels")
    curriculum = factory.create_curriculum(name)
    most = max(len(attribute.levels) for attribute in curriculum.attributes.values())
    if not 0 <= level < most:
        raise ValueError(f"{name}: got level {level}, expected {DEFAULT_LEVEL} or 0 to {most - 1}")
    curriculum.set_global_level(level)
    base = library("reasoning_gym.coaching.base_curriculum", "tasks")
    one_level = base.DefaultCurriculumContext(mode=base.RangeAttributeMode.UPPER_BOUND)
    try:
        settings = curriculum.generate_configuration({"size": 1}, context=one_level)
        if hasattr(settings, "validate"):
            settings.validate()
    except (AssertionError, ValueError, TypeError) as error:
        raise ValueError(f"{name}: got level {level}, at which the library has no settings: {error}") from error
    return settings


def make_entry(name: str, level: int, seed: int) -> dict[str, Any]:
    """Item 0 of the library's dataset with this seed: `question`, `answer` and `metadata`."""
    settings = settings_of(name, level)
    return _factory().DATASETS[name][0](config=type(settings)(**{**vars(settings), "seed": seed}))[0]


def _kind(name: str, levels: tuple[int, ...], template: str, test_size: int) -> Task:
    """One kind: its stream, and its first held-out questions."""
    source = prng.key(_SPLIT_SEED, device="cpu")
    failed: list[Exception] = []
    stream = _made((_problem(name, levels, template, source, i, 0) for i in range(ATTEMPTS * test_size)), failed)
    test = tuple(islice(different_prompts(stream), test_size))
    if len(test) < test_size:
        raise ValueError(
            f"got {len(test)} different questions of {name} in {ATTEMPTS * test_size} seeds{_failures(failed)}, "
            f"expected {test_size}"
        )
    held_out = frozenset(normalize_prompt(problem.prompt) for problem in test)
    return generated_task(partial(_train, name, levels, template, held_out), test, EPOCH)


def _made(attempts: Iterator[Problem | Exception], failed: list[Exception]) -> Iterator[Problem]:
    """The problems among the attempts; what the library raised goes to `failed`. It ends where the first all fail."""
    made = 0
    for attempt in attempts:
        if isinstance(attempt, Problem):
            made += 1
            yield attempt
        else:
            failed.append(attempt)
            if not made and len(failed) == ATTEMPTS:
                return


def _failures(failed: Sequence[Exception]) -> str:
    """The number of seeds for which the library made no problem, and its last error."""
    if not failed:
        return ""
    last = " ".join(f"{type(failed[-1]).__name__}: {failed[-1]}".split())[:300]
    return f", {len(failed)} of which the library made no problem of, the last with {last}"


def _train(
    name: str, levels: tuple[int, ...], template: str, held_out: frozenset[str], key: Tensor, index: int
) -> Problem:
    check_index(index)
    failed: list[Exception] = []
    attempts = (_problem(name, levels, template, key, index, attempt) for attempt in range(ATTEMPTS))
    for problem in _made(attempts, failed):
        if normalize_prompt(problem.prompt) not in held_out:
            return problem._replace(uid=index)
    hint = "" if len(failed) == ATTEMPTS else ": lower test_size"
    raise ValueError(
        f"{name}: got {ATTEMPTS} seeds without a question that is not held out{_failures(failed)}, expected one{hint}"
    )


def _problem(
    name: str, levels: tuple[int, ...], template: str, key: Tensor, index: int, attempt: int
) -> Problem | Exception:
    """The problem of an attempt, or what the library raised where it fails to make one of this seed."""
    chosen, seed = (int(word) & _SEED_BITS for word in prng.fold_in(key, index, attempt))
    level = levels[chosen % len(levels)]
    try:
        entry = make_entry(name, level, seed)
    except Exception as error:  # whatever a generator of the library raises where it gives a seed up
        return error
    prompt = fill_template(template, {"question": entry["question"]})
    return Problem(index, prompt, entry["answer"] or "", {"level": level, "entry": entry})
