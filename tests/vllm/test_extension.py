"""What a server's workers do with weights that come, on models as the real vLLM has them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Case, asked, case, refill
from torch import nn

from grpo_fn.core import prng
from grpo_fn.shell.vllm.fingerprint import HEAD, NOTHING, Fingerprint, weight_fingerprint
from grpo_fn.shell.vllm.vllm_sampler import export_weights
from grpo_fn.shell.vllm.vllm_transfer import Chunk, chunks

pytestmark = pytest.mark.xdist_group("vllm")
CLOSE = 1e-4
CHUNK = 20_000  # bytes


def updated(model: nn.Module, *, engine: Any, parts: list[Chunk]) -> tuple[Fingerprint, Fingerprint]:
    """What came and what is held, after an update as a worker makes it."""
    from vllm.config import set_current_vllm_config

    from grpo_fn.shell.vllm.worker_extension import Receiving

    receiving = Receiving()
    receiving.model, receiving.model_config, receiving.device = model, engine.model_config, torch.device("cpu")
    with set_current_vllm_config(engine.vllm_config):
        receiving.start_weight_update()
        for part in parts:
            receiving.hand_over(part)
        receiving.finish_weight_update()
    return receiving.received, receiving.weights_held()


def of(made: Case) -> Callable[[list[Chunk]], tuple[Fingerprint, Fingerprint]]:
    """An update of that case's engine."""
    llm = made.sampler.engine.llm
    return lambda parts: llm.apply_model(partial(updated, engine=llm.llm_engine, parts=parts))[0]


@pytest.mark.parametrize("name", ["gemma2", "qwen2"], ids=["no head of its own", "a head of its own"])
def test_a_tied_model_takes_its_weights_and_holds_what_was_sent(name: str, tmp_path: Path) -> None:
    with case(name, tmp_path / "model", tied=True) as made:
        refill(made.model, 3)
        weights = [(name, x) for name, x in export_weights(made.policy(), made.context)]
        assert HEAD in dict(weights)
        received, held = of(made)(list(chunks(iter(weights), CHUNK)))
        assert received == held == sum((weight_fingerprint(x) for _, x in weights), NOTHING)
        made.sampler.engine.llm.reset_prefix_cache()
        assert made.gap(made.sampler.sample(asked(["Tom"]), 2, key=prng.key(5, device="cpu"))) < CLOSE
        with pytest.raises(ValueError, match="got none for 1 parameters"):
            of(made)([[one for one in weights if not one[0].endswith("model.norm.weight")]])
