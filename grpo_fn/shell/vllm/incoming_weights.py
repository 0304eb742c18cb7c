"""Weights on their way into a vLLM engine in this process, and those in the folder that it was opened with."""

from collections.abc import Iterator, Mapping, Set

import torch
from safetensors import safe_open
from torch import Tensor

from grpo_fn.shell.model import load_weights
from grpo_fn.shell.sampler.fingerprint import NOTHING, Fingerprint, weight_fingerprint
from grpo_fn.shell.sampler.weight_export import HEAD


class IncomingWeights:
    """Weights on their way into an engine: each is looked at as it passes."""

    def __init__(
        self,
        weights: Iterator[tuple[str, Tensor]],
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        *,
        unwanted: Set[str],
    ) -> None:
        self.weights, self.dtype, self.unwanted = weights, dtype, unwanted
        self.missing = dict(shapes)
        self.wrong: str | None = None
        self.sent = NOTHING

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """All up to the first wrong one: vLLM is in the middle of loading, and must come to an end of it."""
        for name, tensor in self.weights:
            wanted = self.missing.pop(name, None)
            if wanted != tuple(tensor.shape):
                self.wrong = f"got {name} of shape {tuple(tensor.shape)}, wanted {wanted or 'no more of that name'}"
                return
            given = tensor.detach().to(self.dtype) if tensor.is_floating_point() else tensor
            self.sent += weight_fingerprint(given)
            if name not in self.unwanted:
                yield name, given

    def check(self) -> None:
        """Raise ValueError unless all came, and nothing else."""
        if self.wrong is not None:
            raise ValueError(f"push: {self.wrong}")
        if self.missing:
            few = ", ".join([*self.missing][: load_weights.SHOWN])
            raise ValueError(f"push: got no {few} ({len(self.missing)} missing), wanted every weight of the model")


def folder_weights(
    folder: str, names: Set[str], *, tied: bool, dtype: torch.dtype, device: torch.device
) -> Fingerprint | None:
    """Of the weights of these names in a model folder, as an engine opens them; None where they cannot be read."""
    try:
        stored = load_weights.entries(load_weights.folder_of(folder))
    except ValueError:
        return None
    total = NOTHING
    for name in names:
        if tied and name == HEAD and HEAD not in stored:
            name = next((other for other in stored if other.endswith("embed_tokens.weight")), HEAD)
        if name not in stored:
            return None
        with safe_open(stored[name].file, framework="pt", device="cpu") as opened:
            total += weight_fingerprint(opened.get_tensor(name).to(device, dtype))
    return total
