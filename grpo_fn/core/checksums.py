"""Checksums of what a step saw and did: 64 bits each, the same iff every bit is the same, however it is sharded.

The digest of a tensor is a sum over its elements, modulo 2^64,

    digest = mix(s) + sum_i mix(s + g i + bits_i),   s from name, shape and dtype,   i the place in the whole tensor

with splitmix64's mix and g (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"). Integer sums
are exact in any order, so every device adds up its own part and the parts add up to the whole. Elements of at most 32
bits less than 2^30 places apart never share an argument of mix, because the multiples of g keep their distance. It
finds faults, not forgers.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from hashlib import sha256
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_fn.core.batch import lengths
from grpo_fn.core.prng import to_int64
from grpo_fn.core.problem import Turn
from grpo_fn.core.types import Batch, CurriculumState, Reward, Rollout, Scores

# In the order in which a step makes them: what comes first explains what follows. A run without a curriculum has no
# "curriculum".
QUANTITIES = ("tokens", "rewards", "curriculum", "advantages", "logp_old", "signal", "gradients", "weights")
GAMMA = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio
CHUNK = 2**22  # elements at once: an int64 for each is made several times over
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensor: Tensor) -> int:
    """The digest of a tensor that is all here: an integer in [0, 2^64). NaNs are distinguished, and so are 0 and -0."""
    seed = seed_of("", tensor.shape, tensor.dtype)
    return total_digest(seed, [block_digest(tensor, [0] * tensor.ndim, tensor.shape, seed)])


def seed_of(name: str, shape: Sequence[int], dtype: torch.dtype) -> int:
    """The 64-bit digest of a tensor of any dtype."""
    return int.from_bytes(sha256(f"{name} {tuple(shape)} {dtype}".encode()).digest()[:8], "little")


def block_digest(part: Tensor, offset: Sequence[int], shape: Sequence[int], seed: int) -> int:
    """The share of a block at `offset` of a tensor of `shape` in its digest.

    Raises ValueError for numbers that are not real.
    """
    if part.is_complex():
        raise ValueError(f"got a tensor of {part.dtype}, expected real numbers")
    part = part.detach()
    if part.ndim == 0:
        part, offset, shape = part[None], [0], [1]
    rows, total = max(1, CHUNK // max(1, part[:1].numel())), 0
    for start in range(0, len(part), rows):
        block = part[start : start + rows]
        bits = block.view(BITS[block.element_size()]).long()
        place = element_positions(block.shape, [offset[0] + start, *offset[1:]], shape, bits.device)
        total += int(mix(bits + place * to_int64(GAMMA) + to_int64(seed)).sum())
    return total % 2**64


def element_positions(size: Sequence[int], offset: Sequence[int], shape: Sequence[int], device: torch.device) -> Tensor:
    """The positions of a block's elements in the whole tensor, counted row by row; of the block's size."""
    axes = zip(size, offset, torch.empty(shape, device="meta").stride(), strict=True)
    along = [(torch.arange(length, device=device) + start) * stride for length, start, stride in axes]
    return reduce(torch.add, torch.meshgrid(*along, indexing="ij"))


def total_digest(seed: int, shares: Iterable[int]) -> int:
    """The digest of a tensor from those of its parts."""
    return (int(mix(torch.tensor(to_int64(seed)))) + sum(shares)) % 2**64


def combine_digests(numbers: Iterable[int]) -> int:
    """One number for several, in their order."""
    return int.from_bytes(sha256(b"".join(n.to_bytes(8, "little") for n in numbers)).digest()[:8], "little")


def mix(z: Int[Tensor, "*N"]) -> Int[Tensor, "*N"]:
    """The output function of splitmix64, a permutation of the 64-bit words."""
    z = (z ^ logical_shift_right(z, 30)) * to_int64(0xBF58476D1CE4E5B9)
    z = (z ^ logical_shift_right(z, 27)) * to_int64(0x94D049BB133111EB)
    return z ^ logical_shift_right(z, 31)


def logical_shift_right(z: Int[Tensor, "*N"], by: int) -> Int[Tensor, "*N"]:
    """z >> by of words without a sign."""
    return (z >> by) & (2 ** (64 - by) - 1)


def hex_digest(number: int) -> str:
    """Sixteen hex digits."""
    return f"{number:016x}"


# -- of a step


def rollout_checksums(rollout: Rollout) -> int:
    """Of every row's tokens and which of them were sampled, up to the last sampled one, and of what was truncated.

    Of episodes, the tape as well.
    """
    length = lengths(rollout.mask)
    # Padding may be anything, and as wide as the rows beside it.
    inside = torch.arange(rollout.mask.shape[1], device=length.device) < length[:, None]
    parts = (length, rollout.tokens.long()[inside], rollout.mask[inside], rollout.truncated)
    tape = [tape_digest(turns) for turns in rollout.turns]  # of rows that are no episodes there is none
    return combine_digests([*(digest(part) for part in parts), *(int(link[:16], 16) for link in tape)])


def tape_digest(turns: Sequence[Turn]) -> str:
    """The last link of the hash chain over what the environment answered in an episode, as 64 hex digits.

    h_0 is the SHA-256 of nothing, h_n that of h_{n-1} and the n-th turn: the state that it began in, and the answer.
    """
    return reduce(
        lambda link, turn: sha256("\n".join((link, turn.state, turn.answer)).encode()).hexdigest(),
        turns,
        sha256(b"").hexdigest(),
    )


def reward_checksums(reward: Reward) -> int:
    """Of the rewards, of which are valid, and of every part by its name; of several turns also what they were worth."""
    parts = [x for name in sorted(reward.parts) for x in (seed_of(name, (), torch.int64), digest(reward.parts[name]))]
    turns = [digest(reward.turns), digest(reward.states)] if reward.turns.shape[-1] > 1 else []
    return combine_digests([digest(reward.value), digest(reward.valid), *parts, *turns])


def of_curriculum(state: CurriculumState | None) -> dict[str, str]:
    """`curriculum`: of the turns that each arm has had, and of every array of the curriculum's own by its name."""
    if state is None:
        return {}
    arrays = [x for name in sorted(state.arrays) for x in (seed_of(name, (), torch.int64), digest(state.arrays[name]))]
    return {"curriculum": hex_digest(combine_digests([digest(state.turns), *arrays]))}


def of_sampled(x: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> int:
    """Of the values at sampled tokens, row by row: what stands elsewhere does not count."""
    return digest(x[mask])


def of_signal(sent: Sequence[tuple[Batch, Scores]]) -> int:
    """Of the learning signals, in the order in which rows went to the policy, whatever the micro-batches were."""
    fields = [[getattr(signal, name)[batch.mask] for batch, signal in sent] for name in Scores._fields]
    return combine_digests(digest(torch.cat(field)) for field in fields if field)


def of_step(
    rollout: Rollout,
    reward: Reward,
    adv: Float[Tensor, "P G T"],
    logp_old: Float[Tensor, "B T"],
    sent: Sequence[tuple[Batch, Scores]],
) -> dict[str, str]:
    """All of QUANTITIES that the step knows; gradients and weights are the policy's own, and a curriculum the run's."""
    numbers = {
        "tokens": rollout_checksums(rollout),
        "rewards": reward_checksums(reward),
        "advantages": of_sampled(rearrange(adv, "p g t -> (p g) t"), rollout.mask),
        "logp_old": of_sampled(logp_old, rollout.mask),
        "signal": of_signal(sent),
    }
    return {name: hex_digest(number) for name, number in numbers.items()}


def differing_quantities(recorded: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """The quantities that differ, in the order in which a step makes them; one that was not recorded does not."""
    return [name for name in QUANTITIES if recorded.get(name) not in (None, found.get(name))]
