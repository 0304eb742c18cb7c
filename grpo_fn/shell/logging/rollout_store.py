"""Samples and their scores, one compressed file a step, from which it can be replayed; and answers of evaluations."""

import gzip
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from grpo_fn.core.batch import lengths, outcome_reward
from grpo_fn.core.checksums import tape_digest
from grpo_fn.core.json_lines import json_rows
from grpo_fn.core.problem import Problem, Turn
from grpo_fn.core.types import Groups, Reward, Rollout
from grpo_fn.rewards.combine import completions_of, with_turns
from grpo_fn.shell.atomic_io import to_json, write_bytes


def store_rollouts(
    root: Path,
    step: int,
    problems: Sequence[Problem],
    group_size: int,
    rollout: Rollout,
    reward: Reward,
    adv: Float[Tensor, "P G"],
    *,
    keep: int,
) -> None:
    """Write `root/step_000012.jsonl.gz`, one object a row in the order b = p * G + g; keep the newest `keep` steps.

    `tokens` and `mask` end with the last sampled token (what follows is padding); `logp_sampled` lists the sampled
    tokens alone, exactly. NaN and infinities become null. Equal rollouts give equal bytes. Files of later steps belong
    to a future that a resume has undone and are removed. `keep=0` stores nothing.
    """
    if keep < 0:
        raise ValueError(f"got keep {keep}, expected 0 or more")
    if not keep:
        return
    root.mkdir(parents=True, exist_ok=True)
    lines = "".join(to_json(row) + "\n" for row in rollout_rows(problems, group_size, rollout, reward, adv))
    write_bytes(root / f"step_{step:06d}.jsonl.gz", gzip.compress(lines.encode("ascii"), compresslevel=6, mtime=0))
    stored = rollout_steps(root)
    kept = [past for past in stored if past <= step][-keep:]
    for other in {*stored} - {*kept}:
        (root / f"step_{other:06d}.jsonl.gz").unlink()


def load_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of either kind, in order. Raises ValueError, naming the line, for what is not an object."""
    return [row.value for row in json_rows(path, expected="an object")]


def groups_from_rows(rows: Sequence[Mapping[str, Any]]) -> Groups:
    """The stored rows of a step as the groups that were learned from, on the CPU; `meta` is not stored."""
    width = max(len(row["tokens"]) for row in rows)
    mask = torch.tensor([row["mask"] + [0] * (width - len(row["mask"])) for row in rows]).bool()
    tokens = torch.tensor([row["tokens"] + [0] * (width - len(row["tokens"])) for row in rows])
    logp = torch.zeros(mask.shape).masked_scatter(mask, torch.tensor([x for row in rows for x in row["logp_sampled"]]))
    size = sum(row["uid"] == rows[0]["uid"] for row in rows)

    def grid(column: list[Any]) -> Tensor:
        return rearrange(torch.tensor(column), "(p g) -> p g", g=size)

    names = rows[0]["parts"]
    rollout = Rollout(
        tokens,
        mask,
        logp,
        torch.tensor([row["truncated"] for row in rows]),
        tuple(row["text"] for row in rows),
        tuple(tuple(Turn(**turn) for turn in row["turns"]) for row in rows if "turns" in row),
    )
    reward = outcome_reward(
        grid([row["reward"] for row in rows]),
        grid([row["valid"] for row in rows]),
        {name: grid([row["parts"][name] for row in rows]) for name in names},
    )
    problems = tuple(Problem(row["uid"], row["prompt"], row["answer"], {}) for row in rows[::size])
    return Groups(problems, rollout, with_turns(reward, completions_of(rollout)))


def rollout_steps(root: Path) -> list[int]:
    """The steps that have a file, ascending; none without the folder."""
    return sorted(int(m[1]) for p in root.glob("step_*") if (m := re.fullmatch(r"step_(\d{6,})\.jsonl\.gz", p.name)))


def rollout_rows(
    problems: Sequence[Problem], group_size: int, rollout: Rollout, reward: Reward, adv: Float[Tensor, "P G"]
) -> Iterator[dict[str, Any]]:
    """The rows of a step's file, in order. Raises ValueError where there are not `group_size` for each problem."""
    if len(problems) * group_size != len(rollout.text):
        raise ValueError(f"got {len(rollout.text)} rows for {len(problems)} problems x {group_size}, expected P * G")
    mask, logp = rollout.mask.cpu(), rollout.logp_sampled.detach().cpu()
    ends = lengths(mask).tolist() if mask.numel() else [0] * len(mask)
    columns = (rollout.tokens, rollout.truncated, reward.value.flatten(), reward.valid.flatten(), adv.flatten())
    parts = {name: value.flatten().tolist() for name, value in reward.parts.items()}
    rows = zip(product(problems, range(group_size)), rollout.text, *(x.tolist() for x in columns), strict=True)
    for b, ((problem, g), text, tokens, truncated, value, valid, advantage) in enumerate(rows):
        end = ends[b] or mask.shape[1]
        row = {
            "uid": problem.uid,
            "g": g,
            "prompt": problem.prompt,
            "text": text,
            "answer": problem.answer,
            "reward": value,
            "parts": {name: column[b] for name, column in parts.items()},
            "valid": valid,
            "advantage": advantage,
            "length": int(mask[b].sum()),
            "truncated": truncated,
            "tokens": tokens[:end],
            "mask": mask[b, :end].int().tolist(),
            "logp_sampled": logp[b][mask[b]].tolist(),
        }
        if rollout.turns:  # of an episode; the tape is the end of the hash chain over what its environment answered
            row |= {"turns": [turn._asdict() for turn in rollout.turns[b]], "tape": tape_digest(rollout.turns[b])}
        yield row


# -- evaluations: one object a problem, in files that people and tools read


Rows = Sequence[Mapping[str, Any]]


def store_evaluation(root: Path, step: int, rows: Rows) -> None:
    """Write `root/step_N.jsonl`. Files of later steps belong to a future that a resume has undone and are removed."""
    root.mkdir(parents=True, exist_ok=True)
    write_evaluation_rows(root / f"step_{step}.jsonl", rows)
    for later in evaluation_steps(root):
        if later > step:
            (root / f"step_{later}.jsonl").unlink()


def write_evaluation_rows(path: Path, rows: Rows) -> None:
    """Replace the file at once, one object a line.

    NaN and infinities become null, and what JSON has no form for becomes its text. Equal rows give equal bytes.
    """
    write_bytes(path, "".join(to_json(_plain(row)) + "\n" for row in rows).encode("ascii"))


def evaluation_steps(root: Path) -> list[int]:
    """The steps that have a file, ascending; none without the folder."""
    return sorted(int(m[1]) for p in root.glob("step_*") if (m := re.fullmatch(r"step_(0|[1-9]\d*)\.jsonl", p.name)))


def _plain(value: Any) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
    return str(value)
