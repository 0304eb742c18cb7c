"""What a run recorded of its steps, and the state before one of them, brought back into memory."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from grpo_fn.algo.group_sampling import Explore, GroupBatch
from grpo_fn.core.batch import pad_rollout
from grpo_fn.core.problem import Problem
from grpo_fn.core.types import Carry, Groups, Rollout
from grpo_fn.replay.diff import StoredRollout
from grpo_fn.shell.checkpoint import store
from grpo_fn.shell.logging import rollout_store
from grpo_fn.shell.policy.fsdp import FSDPPolicy
from grpo_fn.trainer.loop import training_problem
from grpo_fn.trainer.model_source import verified_checkpoint
from grpo_fn.trainer.run import TrainingRun, check_restored, first_carry, follow_groups
from grpo_fn.trainer.state import unpack_carried


def load_stored_rollout(run_dir: Path, step: int, width: int) -> StoredRollout | None:
    """The stored rollout of a step, padded to the width that it had; None when there is none.

    Raises ValueError for one that cannot be read.
    """
    path = run_dir / "rollouts" / f"step_{step:06d}.jsonl.gz"
    try:
        rows = rollout_store.load_rollouts(path)
        groups = rollout_store.groups_from_rows(rows)
        rollout = pad_rollout(groups.rollout, max(width, groups.rollout.tokens.shape[1]))
        return StoredRollout(groups._replace(rollout=rollout), rows)
    except FileNotFoundError:
        return None
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, RuntimeError) as error:
        raise ValueError(f"got {path}, which is broken ({error}), wanted what the run stored") from error


def require_stored(stored: StoredRollout | None, run_dir: Path, step: int) -> StoredRollout:
    """What is stored. Raises ValueError when nothing is."""
    if stored is None:
        raise ValueError(
            f"got no rollout of step {step} in {run_dir / 'rollouts'}, wanted its tokens there "
            "(sections.Logging.keep_rollouts says how many steps are kept)"
        )
    return stored


def from_store(run: TrainingRun, stored: StoredRollout) -> Callable[[Explore, Carry], GroupBatch]:
    """The stored groups in the place of sampled ones, rewarded anew.

    Raises ValueError when the task has other prompts now.
    """
    groups = stored.groups
    problems = tuple(map(training_problem(run), (problem.uid for problem in groups.problems)))
    for past, drawn in zip(groups.problems, problems, strict=True):
        if past.prompt != drawn.prompt:
            raise ValueError(
                f"problem {drawn.uid}: got the prompt {drawn.prompt[:80]!r}, wanted the stored one, "
                f"{past.prompt[:80]!r}: has the data changed?"
            )
    rollout = tree_map_only(Tensor, lambda x: x.to(run.world.device), groups.rollout)
    if not rollout.turns:  # of episodes the text is that of the last turn
        sampled = [tokens[mask].tolist() for tokens, mask in zip(rollout.tokens, rollout.mask, strict=True)]
        # The stored text may have been edited.
        rollout = rollout._replace(text=tuple(run.tokenizer.batch_decode(sampled, skip_special_tokens=True)))

    def collect(explore: Explore, carried: Carry, prompts: int) -> GroupBatch:
        found = Groups(problems, rollout, run.reward(problems, rollout))
        return GroupBatch(found, found, carried, {})

    return follow_groups(run.settings, run.task, collect)


class NoSampler:
    """A `TrainingSampler` for steps that learn from stored rollouts: it takes no weights, and draws nothing."""

    max_staleness = 0

    def load(self, policy: FSDPPolicy) -> None:
        """It has no use for them."""

    def rest(self) -> None:
        """It holds nothing."""

    def sample(self, problems: Sequence[Problem], group_size: int, *, key: Tensor) -> Rollout:
        """Raise RuntimeError: who asks has lost what was stored."""
        raise RuntimeError(f"got {len(problems)} problems to sample, wanted none: the step learns from stored tokens")

    def refill(self, ahead: object) -> None:
        """It hands out nothing."""

    def drain(self) -> list[dict[str, Any]]:
        """It has begun nothing."""
        return []

    def figures(self) -> dict[str, float]:
        """None."""
        return {}

    def messages(self) -> list[str]:
        """None."""
        return []


class RestoredState(NamedTuple):
    """The state that a policy was brought to."""

    step: int  # after which it was saved; 0 for the model that the run began with
    carried: Carry
    notes: list[str]  # where it came from, for people


def restore_nearest(run: TrainingRun, last: int) -> RestoredState:
    """Bring policy and sampler to the newest state that is kept of step `last` or before."""
    notes, root = [], run.run_dir / "checkpoints"
    found = run.world.agree(partial(nearest_checkpoint, root, last, notes), what="the checkpoint before the step")
    if found is None:
        notes.append("no checkpoint is kept before this step: from the model that the run began with")
        step, carried, ahead = 0, first_carry(run), []
    else:
        step, path, blobs = found
        notes.append(f"restored {path}")
        run.policy.restore(partial(store.load_into, path, world=run.world), blobs["policy"])
        carried = check_restored(run, unpack_carried(blobs["carried"], training_problem(run)))
        ahead = blobs.get("ahead", [])
    run.sampler.load(run.policy)
    run.sampler.refill(ahead)
    return RestoredState(step, carried, notes)


def nearest_checkpoint(root: Path, last: int, notes: list[str]) -> tuple[int, Path, dict[str, Any]] | None:
    """The newest whole checkpoint of step `last` or before; None when there is none."""
    for step in reversed([step for step in store.steps(root) if step <= last]):
        try:
            path = verified_checkpoint(root / f"step_{step}")
            return step, path, store.blobs(path)
        except (ValueError, OSError) as error:  # broken; or deleted this moment by the run
            notes.append(f"skipped: {error}")
    return None


class Before(NamedTuple):
    """The state before the step, on the CPU: this rank's part of every tensor, counters, and what is carried."""

    tensors: dict[str, Tensor]
    counters: Mapping[str, Any]
    carried: Carry
    ahead: list[dict[str, Any]]  # batches that are sampled and not yet learned from


def before(policy: FSDPPolicy, sampler: Any, carried: Carry) -> Before:
    """A copy of all that the step begins with."""
    tensors = {name: local_part(x).detach().cpu().clone() for name, x in policy.tensors().items()}
    return Before(tensors, policy.counters(), carried, sampler.drain())


def copy_state_into(held: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
    """Copy the state into tensors that are to be the same ones. Raises ValueError where they are others."""
    shapes = [{name: (tuple(x.shape), x.dtype) for name, x in some} for some in (held.items(), locally(into).items())]
    odd = sorted(name for name in {**shapes[0], **shapes[1]} if shapes[0].get(name) != shapes[1].get(name))
    if odd:
        raise ValueError(
            f"--override: got knobs that change what is trained or how it lies, {odd[0]} and {len(odd) - 1} more, "
            "wanted some that leave the model, its optimizer and its place as they are"
        )
    with torch.no_grad():
        for name, x in locally(into).items():
            x.copy_(held[name])


def locally(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's parts."""
    return {name: local_part(x) for name, x in tensors.items()}


def local_part(x: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x
