"""Invariants of the stateless generator, against known answers, a scalar oracle and torch's own kernels."""

import importlib.util

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.func import vmap

from grpo_fn.core import prng

word64 = st.integers(0, 2**64 - 1)
counts = st.integers(0, 40)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SIGNIFICAND = {torch.float32: 24, torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}


def words(hexes: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(int(h, 16)) for h in hexes.split())


def make_key(seed: int, offset: int = 0) -> torch.Tensor:
    return torch.tensor([prng.to_int64(seed), prng.to_int64(offset)])


def unit(key, *shape, dtype=torch.float32):
    return prng.uniform(key, *shape, dtype=dtype, low=0.0, high=1.0)


# The kat_vectors of Random123 for philox4x32 with ten rounds: counter, key, output.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers_of_philox4x32_10(counter, key, answer):
    assert prng.philox4x32(words(counter), words(key)) == words(answer)


def block(seed: int, offset: int, i: int) -> list[int]:
    """The oracle: block i of a key, one Python integer at a time."""
    position = (offset + i) % 2**64
    x, y, z, w = position % 2**32, position >> 32, 0, 0
    k0, k1 = seed % 2**32, seed >> 32
    for _ in range(10):
        a, b = x * 0xD2511F53, z * 0xCD9E8D57
        x, y, z, w = (b >> 32) ^ y ^ k0, b % 2**32, (a >> 32) ^ w ^ k1, a % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [x, y, z, w]


@given(word64, word64, word64)
def test_fold_in_reads_a_block_as_a_key(seed, offset, data):
    x, y, z, w = block(seed, offset, data)
    assert prng.fold_in(make_key(seed, offset), data).tolist() == make_key(y << 32 | x, w << 32 | z).tolist()


@given(word64, word64, counts)
def test_uniform_reads_consecutive_blocks(seed, offset, n):
    blocks = [block(seed, offset, i) for i in range(n)]
    narrow = [v for b in blocks for v in b]
    wide = [v for x, y, z, w in blocks for v in (x << 32 | y, z << 32 | w)]
    for dtype, d in SIGNIFICAND.items():
        bits = wide if dtype == torch.float64 else narrow
        expected = [v % 2**d / 2**d for v in bits][:n]
        assert unit(make_key(seed, offset), n, dtype=dtype).tolist() == expected


@given(word64, word64, counts, st.integers(-(2**62), 2**62), st.integers(1, 2**62))
def test_randint_is_the_remainder_of_64_unsigned_bits(seed, offset, n, low, span):
    wide = [v for i in range(n) for x, y, z, w in [block(seed, offset, i)] for v in (x << 32 | y, z << 32 | w)]
    drawn = prng.randint(make_key(seed, offset), n, low=low, high=low + span).tolist()
    assert drawn == [low + v % span for v in wide[:n]]
    assert all(low <= v < low + span for v in drawn)


@given(word64, st.integers(1, 20))
def test_split_is_fold_in(seed, num):
    key = make_key(seed)
    parts = prng.split(key, num)
    assert torch.equal(parts, torch.stack([prng.fold_in(key, i) for i in range(num)]))
    assert torch.equal(prng.split(parts, 3)[2], prng.fold_in(parts, 2))


@given(word64, st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=6), st.integers(0, 9))
def test_tensor_data_equal_a_loop_over_integers(seed, data, g):
    key, uid = make_key(seed), torch.tensor(data)
    keys = prng.fold_in(key, uid, g)
    assert torch.equal(keys, torch.stack([prng.fold_in(key, d, g) for d in data]))
    paired = [prng.fold_in(k, d) for k, d in zip(keys, data, strict=True)]
    assert torch.equal(prng.fold_in(keys, uid), torch.stack(paired))


DRAWS = {
    "float32": unit,
    "float64": lambda key, n: unit(key, n, dtype=torch.float64),
    "matrix": lambda key, n: unit(key, n, 3),
    "randint": lambda key, n: prng.randint(key, n, low=-3, high=1000),
    "permutation": prng.permutation,
    "scalar": lambda key, n: unit(key),
    "split": lambda key, n: prng.split(key, n + 1).movedim(0, -2),
}


@pytest.mark.parametrize("name", DRAWS)
@given(word64, counts, st.integers(1, 5))
def test_batched_equals_looped_equals_vmapped(name, seed, n, batch):
    draw, keys = DRAWS[name], prng.split(make_key(seed), batch)
    batched = draw(keys, n)
    assert torch.equal(batched, torch.stack([draw(key, n) for key in keys]))
    assert torch.equal(batched, vmap(lambda key: draw(key, n))(keys))
    grid = torch.stack([keys, prng.fold_in(keys, 1)])
    assert torch.equal(draw(grid, n)[0], batched)


@given(word64, st.floats(-1e3, 1e3), st.floats(1e-3, 1e3), st.sampled_from(FLOATS))
def test_uniform_keeps_within_its_bounds(seed, low, span, dtype):
    lo, hi = torch.tensor([low, low + span], dtype=dtype)
    if lo < hi:
        u = prng.uniform(make_key(seed), 100, dtype=dtype, low=low, high=low + span)
        assert u.dtype == dtype
        assert ((u >= lo) & (u < hi)).all()


def test_uniform_returns_low_but_never_high():
    # 2^16 draws of 8 bits meet every value; on [1, 1 + one ulp] every draw above the middle would round up to high.
    u = unit(make_key(0), 2**16, dtype=torch.bfloat16)
    assert u.unique().tolist() == [i / 256 for i in range(256)]
    tight = prng.uniform(make_key(0), 1000, dtype=torch.float32, low=1.0, high=1.0 + 2**-23)
    assert (tight == 1.0).all()


@pytest.mark.parametrize(
    "call",
    [
        lambda key: prng.fold_in(key, 2**64),
        lambda key: prng.split(key, 0),
        lambda key: prng.uniform(key, 3, dtype=torch.float32, low=1.0, high=1.0),
        lambda key: prng.uniform(key, 3, dtype=torch.bfloat16, low=1.0, high=1.001),
        lambda key: prng.uniform(key, 3, dtype=torch.int64, low=0.0, high=1.0),
        lambda key: prng.randint(key, 3, low=0, high=0),
        lambda key: prng.permutation(key, -1),
    ],
)
def test_bad_knobs_say_what_was_got_and_expected(call):
    with pytest.raises(ValueError, match=r"got .*, expected"):
        call(make_key(0))


def torch_random():
    """torch's private stateless generator, or a skip that says why it is out of reach."""
    if not torch.cuda.is_available():
        pytest.skip("torch.func._random has CUDA kernels only, and there is no CUDA device")
    if importlib.util.find_spec("torch.func._random") is None:
        pytest.skip(f"torch {torch.__version__} has no torch.func._random")
    return importlib.import_module("torch.func._random")


@pytest.mark.parametrize("seed", [0, 1, 42, 2**63 + 12345, 2**64 - 1])
def test_agrees_with_the_kernels_of_torch(seed):
    theirs = torch_random()
    their_key, our_key = theirs.key(seed, device="cuda"), prng.key(seed, device="cuda")
    assert torch.equal(their_key.view(torch.int64), our_key)
    for data in (0, 1, 2**31, 2**40 + 7):
        their_key, our_key = theirs.fold_in(their_key, data), prng.fold_in(our_key, data)
        assert torch.equal(their_key.view(torch.int64), our_key)
    assert torch.equal(theirs.split(their_key, 5).view(torch.int64), prng.split(our_key, 5))
    their_keys, our_keys = theirs.split(their_key, 5)[:, None], prng.split(our_key, 5)
    for dtype in FLOATS:
        for n in (1, 3, 64, 1001):
            assert torch.equal(theirs.uniform(their_key, n, dtype=dtype), unit(our_key, n, dtype=dtype))
            assert torch.equal(theirs.uniform(their_keys, 5, n, dtype=dtype), unit(our_keys, n, dtype=dtype))
    scaled = theirs.uniform(their_key, 1001, low=-2.5, high=4.0)
    torch.testing.assert_close(scaled, prng.uniform(our_key, 1001, dtype=torch.float32, low=-2.5, high=4.0))
