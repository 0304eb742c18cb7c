"""Random bits on the device: those of the CPU, and those of torch's own Philox."""

import importlib

import torch
from device_parts import require
from device_runner import Figure, Setting
from torch import Tensor

from grpo_fn.core import prng

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def randomness(setting: Setting) -> list[Figure]:
    """Bits of every draw on the device and on the CPU; torch's kernels where they are."""
    drawn = [draws(prng.key(seed, device=device)) for device in ("cpu", setting.device) for seed in (0, 42, 2**63 + 1)]
    half = len(drawn) // 2
    same = all(
        torch.equal(a, b.cpu())
        for one, other in zip(drawn[:half], drawn[half:], strict=True)
        for a, b in zip(one, other, strict=True)
    )
    require(same, f"prng: got other bits on {setting.device} than on the CPU")
    return [Figure("bits as on the CPU", "yes"), *(theirs() if setting.device == "cuda" else [])]


def draws(key: Tensor) -> list[Tensor]:
    """Of every kind and dtype, derived keys among them."""
    keys = prng.fold_in(prng.split(key, 5)[:, None], torch.arange(3, device=key.device))
    unit = [prng.uniform(keys, 257, dtype=dtype, low=0.0, high=1.0) for dtype in FLOATS]
    return [keys, *unit, prng.randint(keys, 65, low=-3, high=2**40), prng.permutation(key, 1000)]


def theirs() -> list[Figure]:
    """Torch's own Philox: the generator of every CUDA tensor, and the stateless one where torch has it."""
    generated = generator(seed=20_26)
    try:
        random = importlib.import_module("torch.func._random")
    except ImportError:
        return [generated, Figure("torch.func._random", f"not in torch {torch.__version__}")]
    for seed in (0, 42, 2**64 - 1):
        their_key, key = random.key(seed, device="cuda"), prng.key(seed, device="cuda")
        their_key, key = random.fold_in(their_key, 7), prng.fold_in(key, 7)
        require(
            torch.equal(their_key.view(torch.int64), key), f"torch.func._random: got another key than seed {seed}'s"
        )
        for dtype in FLOATS:
            got = prng.uniform(key, 1001, dtype=dtype, low=0.0, high=1.0)
            wanted = random.uniform(their_key, 1001, dtype=dtype)
            require(torch.equal(got, wanted), f"torch.func._random: got other draws of {dtype}")
    return [generated, Figure("torch.func._random", "the same bits")]


def generator(seed: int) -> Figure:
    """`torch.rand` draws from Philox4x32-10, its key the seed, a counter for each thread, a block of four words a draw.

    Which thread draws which number is torch's own affair. So every number it draws has to be one of the words of the
    first blocks of as many threads, rounded to float32 by u = w 2^-32 + 2^-33.
    """
    n = 256
    drawn = torch.rand(n, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).double()
    thread = torch.arange(n, device="cuda")
    none = torch.zeros_like(thread)
    words = torch.stack(prng.philox4x32((none, none, thread, none), (none + seed, none))).flatten()
    apart = (drawn[:, None] - (words.double() * 2.0**-32 + 2.0**-33)).abs().amin(1).max()
    require(float(apart) <= 2.0**-23, f"torch.rand: got numbers {float(apart):.2g} from any word of its Philox")
    return Figure("torch.rand, from the words of its Philox", float(apart), at_most=2.0**-23)
