"""The command `python -m grpo_fn.run --rehearse`: from bound arguments to a table, a file and an exit code."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_fn.rehearse.cards import Assumptions, find_card, usable_memory
from grpo_fn.rehearse.figures import figures
from grpo_fn.rehearse.rehearsal import Asked, head_chunk, rehearse
from grpo_fn.rehearse.table import table
from grpo_fn.shell.atomic_io import write_json
from grpo_fn.shell.model.hf import find_dtype
from grpo_fn.trainer.checks.dry_run import estimated_memory
from grpo_fn.trainer.checks.validate import validate
from grpo_fn.trainer.sections import Settings

EXIT_TOO_LARGE = 3  # the run does not fit on the card


def rehearse_run(
    kwargs: Mapping[str, Any], *, ranks: int, hosts: int, card: str, prompt_tokens: int, json: Path | None
) -> int:
    """Rehearse the run that gin describes, and print what one of its ranks does.

    Args:
        kwargs: of `train`, as gin bound them.
        ranks: of the run, evenly on so many hosts.
        hosts: of them.
        card: a key of `cards.CARDS`.
        prompt_tokens: of every prompt.
        json: a file for the figures; None: none.

    Returns:
        0, or EXIT_TOO_LARGE where the run does not fit on the card.

    Raises:
        ValueError: an unknown card, a dtype that it has not, ranks that no mesh has, a model that is not there.
    """
    settings = Settings(**kwargs)
    found = find_card(card, find_dtype(settings.compute.dtype))
    settings.parallelism.shape(ranks, ranks // hosts)
    checked = validate(settings)
    asked = Asked(ranks, hosts, found, prompt_tokens)
    counted = rehearse(settings, checked, asked)
    chunk = head_chunk(settings, found)
    estimate = estimated_memory(settings, checked, ranks=ranks, hosts=hosts, logits_chunk_elements=chunk)
    made = figures(counted, asked, Assumptions(), estimate, checked.dtype)
    print(*table(counted, asked, Assumptions(), made), sep="\n")
    if json is not None:
        write_json(json, made.as_dict())
    return 0 if made.peak <= usable_memory(found, Assumptions()) else EXIT_TOO_LARGE
