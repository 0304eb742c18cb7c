"""Small checks of the CUDA paths on the fake device. Prints an object: what each said, null where it passed."""

import json
import os
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import fake_cuda as fake

# isort: split
import device_speed
import torch
from device_decode import SPREAD, context, drawn, sample, uncached
from device_parts import built, local, problems, require
from device_runner import Setting
from device_shapes import TOY, Work, folder

from grpo_fn.core import prng
from grpo_fn.shell.sampler.local import cuda_steps, decode_step, local_sampler

ASKED = Work(2, 3, 5, 14)
WAITS = Counter(generate=48, score=5, train=118)  # for the device in a step of a toy, at most


def model_folder(setting: Setting) -> str:
    """Of a toy whose rows end at different lengths."""
    return folder(setting, TOY, spread=SPREAD, dtype=torch.float32)


def small_shapes(model: torch.nn.Module) -> decode_step.DecodeEngine:
    """The engine of a CUDA device, with more shapes than it would have: columns from 4, not from 64."""
    engine = cuda_steps.build_engine(model)
    engine.sizes = engine.sizes._replace(columns=partial(cuda_steps.graph_size, least=4), steps=4)
    return engine


def decoding(setting: Setting) -> None:
    """Captured steps of several shapes and seatings, slots filled again: the tokens of an uncached forward pass."""
    with patch.object(local_sampler, "build_engine", small_shapes), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # by which the sampler says that it does without
        found = drawn(setting, model_folder(setting), torch.float32, ASKED)
    for name in ("same", "again", "without", "fewer"):
        require(getattr(found, name) == 1.0, f"{name}: got {getattr(found, name):.3f} of the tokens, expected all")
    require(found.most < 1e-4, f"log-probs: got {found.most:.2g} nats from the uncached")
    require(found.graphs > 2, f"graphs: got {found.graphs}, expected several shapes")


def decoding_in_products(setting: Setting) -> None:
    """The same where the split-KV kernel cannot be had."""
    with patch.object(cuda_steps, "choose_split_kv", lambda model: None):
        decoding(setting)


def other_seats(setting: Setting) -> None:
    """Rows that sit elsewhere than at the capture, in steps of one shape: the log-probs of an uncached pass."""
    whole = context(setting, model_folder(setting), torch.float32)
    with patch.object(local_sampler, "build_engine", small_shapes):
        captured = replace(local(whole, Work(4, 3, 5, 10)), max_rows=4)
        for seed in range(3):
            rollout = captured.sample(problems(0, 4), 3, key=prng.key(seed, device="cpu"))
            logp = uncached(captured.model, rollout).log_softmax(-1).gather(-1, rollout.tokens[:, 1:, None])[..., 0]
            apart = float((logp - rollout.logp_sampled[:, 1:])[rollout.mask[:, 1:]].abs().max())
            require(apart < 1e-4, f"key {seed}: got log-probs {apart:.2g} nats from the uncached")


def moved_weights(setting: Setting) -> None:
    """Weights that have moved to other addresses are those that the next rows are drawn with."""
    whole = context(setting, model_folder(setting), torch.float32)
    make = partial(local, whole, ASKED)
    sampler, fresh = make(), make()
    for _ in range(2):  # the second use of a shape is captured
        sample(sampler, work=ASKED)
    require(len(sampler.shared.engine.graphs.replays) > 0, "got no graphs")
    kept = [p.data for p in sampler.model.parameters()]  # or the new ones might take their place
    for p in sampler.model.parameters():
        p.data = p.data * 2.0
    for p in fresh.model.parameters():
        p.data.mul_(2.0)
    again, expected = (sample(one, work=ASKED) for one in (sampler, fresh))
    require(len(kept) > 0 and torch.equal(again.tokens, expected.tokens), "got rows of the weights as they were")


def waits_of_a_step(setting: Setting) -> None:
    """The second step of a toy in bfloat16 under FSDP2 waits for the device no more often than it has to."""
    waits: Counter[str] = Counter()

    class Waits(device_speed.Phases):
        def __init__(self, device: str) -> None:
            super().__init__(device)
            waits.clear()

        @contextmanager
        def span(self, name: str) -> Iterator[None]:
            before = sum(fake.backend.waits().values())
            yield
            waits[name] += sum(fake.backend.waits().values()) - before

    bench = built(setting, folder(setting, TOY), torch.bfloat16, micro_tokens=160)
    with patch.object(device_speed, "Phases", Waits):
        device_speed.taken(bench, Work(prompts=4, size=4, prompt=6, new=20), "cuda", steps=1)
    over = waits - WAITS
    require(bool(waits) and not over, f"waits: got {waits}, expected at most {WAITS}")


CHECKS = (decoding, decoding_in_products, other_seats, moved_weights, waits_of_a_step)


def complaint(check: Callable[[Setting], None], setting: Setting) -> str | None:
    """What the check says; None when it passes."""
    try:
        check(setting)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {str(error)[:300]}"
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        setting = Setting(device="cuda", tiny=True, scratch=scratch)
        print(json.dumps({check.__name__: complaint(check, setting) for check in CHECKS}), flush=True)
    os._exit(0)
