"""Which kernels attend, by name: `sections.Compute.attention`.

`eager` and the names of transformers are as there. `sdpa_...` is `scaled_dot_product_attention` held to one of torch's
backends, for padded rows and for packed ones; `sdpa` leaves the choice to torch, and for packed rows to what is
installed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

KNOB = "sections.Compute.attention"
LEAST_CUDNN = 90000  # torch's cuDNN attention asks for 9.0


class AttentionBackend(NamedTuple):
    """What a name stands for, and what it asks for."""

    sdpa: SDPBackend | None = None  # that `scaled_dot_product_attention` is held to
    module: str | None = None  # to be imported
    install: str = ""  # how that module is had
    halves: bool = False  # bfloat16 and float16 alone
    least: tuple[int, int] | None = None  # compute capability of the card; None: any device
    most: tuple[int, int] | None = None
    repeats: bool = True  # whether its gradients are the same bits again under deterministic kernels


FLASH_2 = "pip install --no-build-isolation 'grpo-fn[flash]'"
FLASH_3 = "pip install --no-build-isolation ./hopper in a checkout of github.com/Dao-AILab/flash-attention"
BACKENDS = {
    "eager": AttentionBackend(),
    "sdpa": AttentionBackend(),
    "sdpa_math": AttentionBackend(SDPBackend.MATH),
    "sdpa_flash": AttentionBackend(SDPBackend.FLASH_ATTENTION, halves=True, least=(8, 0), repeats=False),
    "sdpa_efficient": AttentionBackend(SDPBackend.EFFICIENT_ATTENTION, least=(5, 0), repeats=False),
    "sdpa_cudnn": AttentionBackend(SDPBackend.CUDNN_ATTENTION, halves=True, least=(8, 0), repeats=False),
    "flash_attention_2": AttentionBackend(None, "flash_attn", FLASH_2, halves=True, least=(8, 0)),
    "flash_attention_3": AttentionBackend(
        None, "flash_attn_interface", FLASH_3, halves=True, least=(9, 0), most=(9, 9)
    ),
}
# Transformers takes a name with "flash" in it for that of a package, and looks for it: ours goes by another name there.
IN_TRANSFORMERS = {"sdpa_flash": "sdpa_fused"}
HERE = {there: name for name, there in IN_TRANSFORMERS.items()}
SCORES_IN_MEMORY = ("eager", "sdpa_math")  # written out operator by operator, the same on every device
REPEATING = ", ".join(name for name, backend in BACKENDS.items() if backend.repeats)


def transformers_name(name: str) -> str:
    """The name by which transformers knows an attention.

    Args:
        name: `sections.Compute.attention`.
    """
    return IN_TRANSFORMERS.get(name, name)


def attention_name(found: str) -> str:
    """The name of an attention in `sections.Compute.attention`.

    Args:
        found: its name in transformers.
    """
    return HERE.get(found, found)


def counted_attention(name: str) -> str:
    """What stands in for an attention on any machine where memory and work alone are counted.

    Args:
        name: `sections.Compute.attention`.

    Returns:
        Itself where every device computes it: "eager" and "sdpa_math", which write scores out; else "sdpa", fused.
    """
    return name if name in SCORES_IN_MEMORY else "sdpa"


def check_attention_choice(name: str, dtype: torch.dtype, *, deterministic: bool) -> None:
    """Raise ValueError for an attention that no machine has, or that does not go with the rest of the configuration.

    Args:
        name: `sections.Compute.attention`.
        dtype: that the model computes in.
        deterministic: `sections.Compute.deterministic`.
    """
    backend = BACKENDS.get(name)
    if backend is None:
        raise ValueError(f"{KNOB}: got {name!r}, wanted one of {', '.join(BACKENDS)}")
    if backend.halves and dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"{KNOB}: got {name!r} in {str(dtype).removeprefix('torch.')}, wanted sections.Compute.dtype 'bfloat16' or "
            "'float16' (scale/bf16.gin, scale/fp16.gin), or attention 'sdpa'"
        )
    if deterministic and not backend.repeats:
        raise ValueError(
            f"{KNOB}: got {name!r}, whose gradients are added up in any order, with sections.Compute.deterministic, "
            f"wanted one of {REPEATING}"
        )


def check_attention(name: str, device: torch.device, dtype: torch.dtype, *, deterministic: bool) -> None:
    """Raise ValueError for an attention that is not to be had here, by its package, the card or torch's build.

    Args:
        name: `sections.Compute.attention`.
        device: that the model computes on.
        dtype: that it computes in.
        deterministic: `sections.Compute.deterministic`.
    """
    check_attention_choice(name, dtype, deterministic=deterministic)
    backend = BACKENDS[name]
    if backend.module is not None and find_spec(backend.module) is None:
        raise ValueError(
            f"{KNOB}: got {name!r} without the module {backend.module}, wanted it installed ({backend.install}), or "
            "attention 'sdpa'"
        )
    if backend.least is None:
        return
    wanted = f"compute capability {'.'.join(map(str, backend.least))}" + (" or later" if backend.most is None else "")
    if device.type != "cuda":
        raise ValueError(f"{KNOB}: got {name!r} on {device}, wanted a CUDA device of {wanted}, or attention 'sdpa'")
    found = torch.cuda.get_device_capability(device)
    if found < backend.least or (backend.most is not None and found > backend.most):
        raise ValueError(
            f"{KNOB}: got {name!r} on a card of compute capability {found[0]}.{found[1]}, wanted {wanted}, or "
            "attention 'sdpa'"
        )
    if backend.sdpa is SDPBackend.CUDNN_ATTENTION and (version := torch.backends.cudnn.version() or 0) < LEAST_CUDNN:
        raise ValueError(f"{KNOB}: got {name!r} with cuDNN {version}, wanted {LEAST_CUDNN} or later")


def attention_note(name: str, dtype: torch.dtype, device: torch.device | None) -> list[str]:
    """What attends to packed rows on a card: for the plan of a run.

    Args:
        name: `sections.Compute.attention`.
        dtype: that the model computes in.
        device: where; None for a card that is not here.

    Returns:
        One line; none on other devices.
    """
    if device is not None and device.type != "cuda":
        return []
    backend, how = BACKENDS[name], "padded buckets"
    if name == "eager":
        how += ", written out"
    elif backend.sdpa is not None and name != "sdpa_flash":
        how += f", by torch's {backend.sdpa.name}"
    elif dtype not in (torch.bfloat16, torch.float16):
        how += ", by scaled_dot_product_attention"
    elif name == "flash_attention_3":
        how = "flash-attn 3's kernel for rows of unequal length"
    elif name == "sdpa_flash":
        how = "torch's flash kernel for rows of unequal length"
    else:
        how = "flash-attn's kernel for rows of unequal length where it imports, else torch's"
    return [f"packed rows attend in {how} ({KNOB} = {name!r})"]


@contextmanager
def held_to(name: str) -> Iterator[None]:
    """`scaled_dot_product_attention` held to what the name says; nothing changes where that leaves it to torch."""
    backend = BACKENDS[name].sdpa if name in BACKENDS else None
    if backend is None:
        yield
    else:
        with sdpa_kernel(backend):
            yield


def _padded_rows(module: nn.Module, *streams: Tensor | None, backend: str, **how: Any) -> tuple[Tensor, Tensor | None]:
    """What transformers calls for padded rows: queries, keys, values, and a mask where there is one."""
    with held_to(backend):
        return sdpa_attention_forward(module, *streams, **how)


# Transformers then takes these names as it takes its own.
for _name, _backend in BACKENDS.items():
    if _backend.sdpa is not None:
        AttentionInterface.register(transformers_name(_name), partial(_padded_rows, backend=_name))
        AttentionMaskInterface.register(transformers_name(_name), ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
