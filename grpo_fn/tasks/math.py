r"""MATH: competition problems of five levels and seven subjects (Hendrycks et al. 2021, arXiv:2103.03874).

The rows of `math500.jsonl`, the usual held-out set (Lightman et al. 2023, arXiv:2305.20050), are all in
`test.jsonl` too: a run trained on that file as well and holds out the 500 keeps the other 4,500, since training rows
that are held-out problems are left out.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from grpo_fn.core.problem import Problem
from grpo_fn.rewards.format import last_box
from grpo_fn.tasks import task as templates
from grpo_fn.tasks.rows import Row, jsonl_rows, text_field
from grpo_fn.tasks.task import Task, all_answered, drop_unanswered, filter_rows, from_rows, with_notes


def task(
    *,
    data: str,
    train: Sequence[str],
    test: str,
    levels: Sequence[int | None],
    subjects: Sequence[str],
    template: str,
) -> Task:
    r"""The problems of the files `train` and `test` in the folder `data`, put to the model as `template` says.

    The held-out set is all of its file, of every level and subject. The answer is the row's own, or where
    it has no such field, as in the original files, the last `\boxed{}` of its solution; `meta` holds `level` and
    `subject`. A training row without an answer is left out and noted (two of the published ones have an empty box); a
    held-out one is refused.

    Args:
        data: folder with the files.
        train: names of the files to train on, JSON lines.
        test: name of the held-out file, JSON lines.
        levels: levels of the training rows, 1 to 5; None for the two published rows that have none.
        subjects: subjects of the training rows, as the files name them.
        template: text of a prompt; holds `{problem}`. Other braces, as of `\boxed{}`, stand for themselves.

    Returns:
        The task.

    Raises:
        ValueError: for a row without the fields or with another level, naming file and line; for a level or subject of
            which there is no row, a held-out row without an answer, and as `gsm8k.task` for the other knobs.
    """
    templates.check_template(template, ["problem"])
    read = partial(jsonl_rows, Path(data), fields=("problem",))
    held_out = all_answered([_problem(row, template) for row in read(test)])
    rows = [_problem(row, template) for name in train for row in read(name)]
    _check_there(levels, {problem.meta["level"] for problem in rows}, "levels")
    _check_there(subjects, {problem.meta["subject"] for problem in rows}, "subjects")
    every = drop_unanswered(from_rows(rows, held_out))
    chosen, left_out = filter_rows(every, lambda row: row.meta["level"] in levels and row.meta["subject"] in subjects)
    if left_out:
        chosen = with_notes(chosen, f"asks {chosen.size} of {every.size} training rows, by level and subject")
    return chosen


def _problem(row: Row, template: str) -> Problem:
    answer = text_field(row, "answer") if "answer" in row.value else last_box(text_field(row, "solution"))
    subject = text_field(row, "subject" if "subject" in row.value else "type")
    prompt = templates.fill_template(template, {"problem": row.value["problem"]})
    return Problem(0, prompt, (answer or "").strip(), {"level": _level(row), "subject": subject})


def _level(row: Row) -> int | None:
    """The level, given as 3 or as "Level 3"; None for "Level ?"."""
    given = row.value.get("level")
    if given == "Level ?":
        return None
    named = {name: level for level in range(1, 6) for name in (level, f"Level {level}")}
    if isinstance(given, bool | float | list | dict) or given not in named:
        raise ValueError(f"{row.where}: got level {given!r}, wanted 1 to 5, or 'Level 1' to 'Level 5', or 'Level ?'")
    return named[given]


def _check_there(wanted: Sequence[Any], there: set[Any], knob: str) -> None:
    absent = [value for value in wanted if value not in there]
    if absent or not wanted:
        known = ", ".join(sorted(map(str, there)))
        raise ValueError(f"{knob}: got {list(wanted)!r}, wanted some of those in the training files: {known}")
