"""Stateless randomness: a key is a value, and the same key always gives the same numbers.

The generator is Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3").
A key is a pair (seed, offset) of 64-bit words. It addresses blocks of 128 random bits,

    block(key, i) = philox4x32_10(counter = (offset + i mod 2^64, 0), key = seed) = (x, y, z, w),

from which everything here is made: `fold_in(key, i)` reads block i as the new pair (seed = y:x, offset = w:z), and
`uniform` turns blocks 0, 1, 2, ... into numbers. So *use a key once*: derive keys from it or draw from it, never both,
for its draws and its descendants are the same bits.

Layout and conversions are those of the CUDA kernels behind `torch.func._random` (torch 2.13: the header
ATen/cuda/StatelessPhilox4x32.cuh, the key and distribution kernels that include it, and `uniform_real` of
ATen/core/TransformationHelper.h), in plain tensor operations that run on any device and under vmap. A test compares the
two bit for bit wherever CUDA and that private module exist.

Keys are int64 `[2]` here and hold the bits of torch's uint64, on which torch has hardly any arithmetic:
`key.view(torch.uint64)` is torch's key, `view(torch.int64)` leads back. Keys may be batched, `[*N, 2]`, and every
function is vectorised over the batch; a batched call gives what a loop over its keys gives.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW32 = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def key(seed: int, *, device: torch.device | str) -> Int[Tensor, "2"]:
    """The key (seed, 0).

    Raises ValueError unless 0 <= seed < 2^64.
    """
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed: got {seed}, expected an integer in [0, 2^64)")
    return torch.tensor([to_int64(seed), 0], dtype=torch.int64, device=device)


def fold_in(key: Int[Tensor, "*K 2"], *data: int | Int[Tensor, "..."]) -> Int[Tensor, "*N 2"]:
    """The key that `data` leads to: `fold_in(key, i) = split(key, n)[i]` for every n > i.

    Several data are folded in from left to right: `fold_in(key, uid, g) = fold_in(fold_in(key, uid), g)`. Data are
    taken modulo 2^64. An integer tensor broadcasts against the batch of keys: a key [2] and data [N] give keys [N, 2],
    keys [N, 2] and data [N] are paired up.

    Raises ValueError for data that are no integers or need more than 64 bits.
    """
    for datum in data:
        x, y, z, w = _philox(key, _as_int64(datum))
        key = torch.stack([_join(y, x), _join(w, z)], dim=-1)
    return key


def split(key: Int[Tensor, "*K 2"], num: int) -> Int[Tensor, "num *K 2"]:
    """`num` independent keys, `split(key, num)[i] = fold_in(key, i)`; the new axis is the first one.

    Raises ValueError unless num >= 1.
    """
    if num < 1:
        raise ValueError(f"num: got {num}, expected at least 1")
    index = torch.arange(num, device=key.device)
    return fold_in(key, index.reshape(num, *(1,) * (key.dim() - 1)))


def uniform(key: Int[Tensor, "*K 2"], *shape: int, dtype: torch.dtype, low: float, high: float) -> Float[Tensor, "..."]:
    """Uniform draws `[*K, *shape]` from [low, high): `low` can come up, `high` never does.

        u = low + (high - low) * (bits mod 2^d) / 2^d,   d = significand bits of dtype

    d is 24 for float32, 53 for float64, 11 for float16 and 8 for bfloat16: `low` comes up once in 2^d draws, and 16-bit
    draws are coarse. Draws extend: element j of a key's (flattened) draws is a function of (key, dtype, j) alone, so a
    longer draw begins with the shorter one.

    Other bounds are applied in float64 and rounded to the dtype at the end, as by a fused multiply-add (in float64
    itself it can be an ulp off). What would round up to `high` becomes the number below it; there torch returns `high`.

    Raises ValueError for a dtype that is not one of these four, or unless low < high in that dtype.
    """
    if dtype not in _SIGNIFICAND:
        raise ValueError(f"dtype: got {dtype}, expected one of {', '.join(map(str, _SIGNIFICAND))}")
    lo, hi = torch.tensor([low, high], dtype=dtype, device="cpu")
    if not lo < hi:
        raise ValueError(f"low, high: got {low}, {high}, expected low < high in {dtype}")
    bits = _bits64(key, shape) if dtype == torch.float64 else _bits32(key, shape)
    d = _SIGNIFICAND[dtype]
    unit = (bits & (2**d - 1)).to(torch.float64) * 2.0**-d
    draws = (unit * (hi - lo).item() + lo.item()).to(torch.promote_types(dtype, torch.float32)).to(dtype)
    return draws.clamp(max=torch.nextafter(hi, lo).item())


def exponential(key: Int[Tensor, "*K 2"], *shape: int) -> Float[Tensor, "..."]:
    """Draws `[*K, *shape]` of the exponential distribution with mean 1, in float32; their -log are Gumbel draws.

        e = -log(1 - u),   u = (bits + 1/2) / 2^32

    Small ones, which decide a race among many, are fine-grained: the smallest is 2^-33. Large ones are as coarse as
    1 - u is with 24 bits; the largest is 24 log 2. Draws extend, as in `uniform`.
    """
    u = (_bits32(key, shape).float() + 0.5) * 2.0**-32
    return -torch.log1p(-u.clamp(max=1 - 2.0**-24))


def randint(key: Int[Tensor, "*K 2"], *shape: int, low: int, high: int) -> Int[Tensor, "..."]:
    """Integers `[*K, *shape]` from low to high - 1: 64 random bits modulo the range, plus low.

    No value is more than one part in 2^64 / (high - low) too likely. Draws extend, as in `uniform`.

    Raises ValueError unless 1 <= high - low <= 2^62.
    """
    span = high - low
    if not 1 <= span <= 2**62:
        raise ValueError(f"low, high: got {low}, {high}, expected 1 <= high - low <= 2^62")
    bits = _bits64(key, shape)
    # The remainder of an unsigned number with signed operations: halve it, then put the lowest bit back.
    half = (bits >> 1) & (2**63 - 1)
    return (half % span * 2 + (bits & 1)) % span + low


def permutation(key: Int[Tensor, "*K 2"], n: int) -> Int[Tensor, "*K n"]:
    """A uniformly random order of 0 .. n-1: the argsort of n draws of 64 bits, the lower index first where two agree.

    Raises ValueError for n < 0.
    """
    if n < 0:
        raise ValueError(f"n: got {n}, expected at least 0")
    return _bits64(key, (n,)).argsort(dim=-1, stable=True)


def to_int64(x: int) -> int:
    """The int64 with the bits of the integer x modulo 2^64."""
    return (x + 2**63) % 2**64 - 2**63


_SIGNIFICAND = {torch.float32: 24, torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}


def _philox(key: Int[Tensor, "*K 2"], index: int | Int[Tensor, "..."]) -> Words:
    """block(key, index): four 32-bit words in int64 tensors, whose shape is that of key batch and index broadcast."""
    seed, counter = key[..., 0], key[..., 1] + index  # wraps around at 2^64
    none = torch.zeros_like(counter)
    return philox4x32((_low(counter), _high(counter), none, none), (_low(seed), _high(seed)))


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Philox4x32-10 of a 128-bit counter under a 64-bit key, both as 32-bit words held in int64, lowest word first.

    One round maps (x, y, z, w) to (hi(b z) ^ y ^ k0, lo(b z), hi(a x) ^ w ^ k1, lo(a x)); the round keys k0 and k1
    advance by constants. A product of two 32-bit words wraps around in int64 without losing a bit.
    """
    x, y, z, w = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        a, b = x * _MULTIPLIERS[0], z * _MULTIPLIERS[1]
        x, y, z, w = _high(b) ^ y ^ k0, _low(b), _high(a) ^ w ^ k1, _low(a)
        k0, k1 = _low(k0 + _WEYL[0]), _low(k1 + _WEYL[1])
    return x, y, z, w


def _bits32(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """32 random bits for each number of `[*K, *shape]`: a block gives x, y, z, w."""
    return _draw(key, shape, 4, lambda x, y, z, w: (x, y, z, w))


def _bits64(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """64 random bits for each number of `[*K, *shape]`: a block gives x:y, z:w, the first word on top."""
    return _draw(key, shape, 2, lambda x, y, z, w: (_join(x, y), _join(z, w)))


def _draw(key: Tensor, shape: tuple[int, ...], per_block: int, numbers: Callable[..., tuple[Tensor, ...]]) -> Tensor:
    """`numbers` makes `per_block` of them from the four words of a block; the last block's surplus is dropped."""
    count = torch.Size(shape).numel()
    blocks = torch.arange(-(-count // per_block), device=key.device)
    words = _philox(key[..., None, :], blocks)  # each [*K, blocks]
    flat = torch.stack(numbers(*words), dim=-1).flatten(-2)
    return flat[..., :count].reshape((*key.shape[:-1], *shape))


def _low(x: Tensor) -> Tensor:
    return x & _LOW32


def _high(x: Tensor) -> Tensor:
    return (x >> 32) & _LOW32  # the shift drags the sign along, the mask removes it


def _join(high: Tensor, low: Tensor) -> Tensor:
    return (high << 32) | low


def _as_int64(datum: int | Tensor) -> int | Tensor:
    if isinstance(datum, Tensor):
        if datum.dtype.is_floating_point or datum.dtype.is_complex or datum.dtype == torch.bool:
            raise ValueError(f"data: got a tensor of {datum.dtype}, expected integers")
        return datum.view(torch.int64) if datum.dtype == torch.uint64 else datum.to(torch.int64)
    if not -(2**63) <= datum < 2**64:
        raise ValueError(f"data: got {datum}, expected an integer of 64 bits")
    return to_int64(datum)
