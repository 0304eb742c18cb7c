"""The trainer's extension of a vLLM server: `--worker-extension-cls grpo_fn.shell.vllm.worker_extension.Extension`.

Importing it registers two weight-transfer engines, "grpo_file" and "grpo_nccl"; the class is mixed into every worker
and answers /collective_rpc. Only vLLM imports this module, in its own process.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor, nn
from vllm import envs
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_process_group
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from grpo_fn.shell.vllm.fingerprint import HEAD, NOTHING, Fingerprint, engine_weights, has_head, weight_fingerprint


class Receiving:
    """The part of a transfer engine in which the transports are alike: layer by layer, and counted on the way in."""

    model: nn.Module
    model_config: Any
    device: torch.device
    opened: Fingerprint | None = None  # what was held before the first update

    def start_weight_update(self) -> None:
        """The first of an update's weights is about to come."""
        if self.opened is None:
            self.opened = self.weights_held()
        self.received, self.loaded = NOTHING, set[str]()
        # A tied model may compute its logits with the embedding itself, and knows no other head then.
        self.headless = is_tied(self.model_config) and not has_head(self.model)
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """That was the last. Raise ValueError when parameters have been left out: they are the old ones still."""
        finalize_layerwise_reload(self.model, self.model_config)
        if missing := sorted({name for name, _ in self.model.named_parameters()} - self.loaded):
            raise ValueError(
                f"weights: got none for {len(missing)} parameters, {missing[:5]}; expected every one of the model's"
            )

    def hand_over(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """To the model, which knows where they belong."""
        for _, tensor in weights:
            self.received += weight_fingerprint(tensor)
        known = [(name, tensor) for name, tensor in weights if not (self.headless and name == HEAD)]
        self.loaded |= self.model.load_weights(known) or set()

    def weights_held(self) -> Fingerprint:
        """This worker's share of what the model holds; those of a replica's workers add up to all of it."""
        dtype, tied, group = self.model_config.dtype, is_tied(self.model_config), get_tp_group()
        return engine_weights(self.model, dtype=dtype, tied=tied, rank=group.rank_in_group, ranks=group.world_size)


@dataclass
class FileInit(WeightTransferInitInfo):
    """The folder of the trainer's files."""

    folder: str


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """A file in that folder, and its hash."""

    name: str
    sha256: str


class FileEngine(Receiving, WeightTransferEngine[FileInit, FileUpdate]):
    """Weights in safetensors files of a folder that trainer and server share."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Raise ValueError unless the folder is there."""
        self.folder = Path(init_info.folder)
        if not self.folder.is_dir():
            raise ValueError(
                f"weights: got {self.folder}, which is not there; expected a folder shared with the trainer"
            )

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class has it, less the wait for an accelerator, of which there may be none."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Load one file. Raise ValueError when its bytes are not those that were sent."""
        written = (self.folder / update_info.name).read_bytes()
        if (digest := hashlib.sha256(written).hexdigest()) != update_info.sha256:
            raise ValueError(f"weights: got {update_info.name} with hash {digest}, expected {update_info.sha256}")
        self.hand_over(list(load(written).items()))

    def shutdown(self) -> None:
        """Nothing is held open."""


@dataclass
class NcclUpdate(WeightTransferUpdateInfo):
    """The tensors that are broadcast next, one after another."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class NcclEngine(Receiving, WeightTransferEngine[NCCLWeightTransferInitInfo, NcclUpdate]):
    """Weights broadcast by the trainer, rank 0 of its own group with this server's workers."""

    init_info_cls = NCCLWeightTransferInitInfo
    update_info_cls = NcclUpdate
    group: Any = None

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Meet the trainer; a group from before is given up."""
        self.shutdown()
        self.group = worker_init_process_group(init_info, self.parallel_config)

    def receive_weights(self, update_info: NcclUpdate) -> None:
        """Take part in one broadcast for each tensor."""
        if self.group is None:
            raise RuntimeError(
                "weights: got some before the trainer was met, expected /init_weight_transfer_engine first"
            )
        for name, dtype, shape in zip(update_info.names, update_info.dtypes, update_info.shapes, strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            self.group.broadcast(weight, src=0, stream=torch.cuda.current_stream())
            self.hand_over([(name, weight)])

    def shutdown(self) -> None:
        """Leave the group."""
        if self.group is not None:
            self.group.destroy()
            self.group = None


class Extension:
    """Methods of every worker, for /collective_rpc. Their names must not be any that vLLM's worker has."""

    def grpo_described(self) -> dict[str, Any]:
        """The server's options that matter to a trainer."""
        config = self.vllm_config
        return {
            "backend": config.weight_transfer_config and config.weight_transfer_config.backend,
            "logprobs_mode": config.model_config.logprobs_mode,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "repeatable": self.device.type == "cpu" or envs.VLLM_BATCH_INVARIANT,
            "updating": self._weight_update_active,
        }

    def grpo_abandoned(self) -> dict[str, Any]:
        """Give up an update that its trainer has not finished, so that another one can begin."""
        model = self.model_runner.get_model()  # some of its layers may wait for weights
        if self._weight_update_active or any(get_layerwise_info(layer).can_load() for layer in model.modules()):
            with set_current_vllm_config(self.vllm_config):
                finalize_layerwise_reload(model, self.model_config)
        self._weight_update_active = False
        return {}

    def grpo_receipt(self) -> dict[str, Any]:
        """Checksums of what came with the last update, and of this worker's share of what its replica holds."""
        return {
            "received": list(self.weight_transfer_engine.received),
            "held": list(self.weight_transfer_engine.weights_held()),
            "replica": self.parallel_config.data_parallel_index,
        }

    def grpo_opened(self) -> dict[str, Any]:
        """The same of what it held at first, and of the model folder: where these differ, its layout hides weights."""
        return {
            "received": list(reread_weights(self.vllm_config, self.model_runner.get_model())),
            "held": list(self.weight_transfer_engine.opened),
            "replica": self.parallel_config.data_parallel_index,
        }


def reread_weights(vllm_config: Any, model: nn.Module) -> Fingerprint:
    """Of the weights that the server was started with, read again."""
    config = vllm_config.model_config
    total, names, tied = NOTHING, set[str](), NOTHING
    for name, tensor in get_model_loader(vllm_config.load_config).get_all_weights(config, model):
        fingerprint = weight_fingerprint(tensor.to(config.dtype))
        total, names = total + fingerprint, names | {name}
        if name.endswith("embed_tokens.weight"):
            tied = fingerprint
    return total + tied if is_tied(config) and HEAD not in names else total


def is_tied(model_config: Any) -> bool:
    """Whether the embedding is the head, too."""
    return bool(model_config.hf_text_config.tie_word_embeddings)


for backend, receiving in (("grpo_file", FileEngine), ("grpo_nccl", NcclEngine)):
    if backend not in WeightTransferEngineFactory._registry:  # a second registration raises
        WeightTransferEngineFactory.register_engine(backend, receiving)
