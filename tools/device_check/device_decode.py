"""Sampling on the device: whether an uncached forward pass draws the same, and how close it comes to the bandwidth."""

import warnings
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from device_parts import KEY, forget, full_float32, local, most_held, problems, random_prompt, require, seconds, within
from device_runner import Figure, Setting
from device_shapes import QWEN, TOY, Shape, Work, folder, sized
from device_speed import ceilings
from torch import Tensor, nn
from transformers import AutoConfig

from grpo_fn.core import prng
from grpo_fn.core.sampling import categorical
from grpo_fn.core.types import Rollout
from grpo_fn.shell.model import hf
from grpo_fn.shell.sampler.interface import SamplerContext
from grpo_fn.shell.sampler.local.decode_step import DecodeEngine
from grpo_fn.shell.sampler.local.local_sampler import LocalSampler, SharedDecoder
from grpo_fn.shell.world import alone, find_device

SHORT = Shape(96, 256, 4, 4, 2, 768)  # a vocabulary so small that rows end early, all at different lengths
SPREAD = 0.05
WORK = Work(16, 16, 128, 256)


def context(setting: Setting, model: str, dtype: torch.dtype) -> SamplerContext:
    """A whole model to sample from, of its own."""
    device = find_device(setting.device, 0)
    return SamplerContext(
        folder=model,
        config=AutoConfig.from_pretrained(model),
        dtype=dtype,
        world=alone(device),
        adapters=None,
        full_model=partial(hf.load_model, model, dtype=dtype, device=device, attention="sdpa"),
    )


# -- correctness


def exact(setting: Setting) -> list[Figure]:
    """Draws in float32 and bfloat16: against an uncached forward pass, again, without graphs, in fewer slots."""
    model = folder(setting, TOY if setting.tiny else SHORT, spread=SPREAD, dtype=torch.float32)
    work = Work(2, 3, 5, 72) if setting.tiny else Work(8, 8, 5, 96)  # more than the 64 columns of the first shape
    with warnings.catch_warnings(), full_float32():
        # So the sampler says that it has to do without slots, or without graphs.
        warnings.simplefilter("error", RuntimeWarning)
        single = drawn(setting, model, torch.float32, work)
        half = drawn(setting, model, torch.bfloat16, work)
    require(single.same >= 0.999, f"float32: got {single.same:.4f} of the tokens that an uncached forward pass draws")
    require(single.without >= 0.99, f"float32: got {single.without:.4f} of the tokens that are drawn without graphs")
    require(half.same >= 0.85, f"bfloat16: got {half.same:.4f} of the tokens that an uncached forward pass draws")
    return [
        Figure("float32, log-probs from the uncached, most", single.most, "nats", at_most=1e-4),
        Figure("float32, tokens that the uncached draws, too", single.same, at_least=0.999),
        Figure("float32, tokens again with the same key", single.again, at_least=1.0),
        Figure("float32, tokens without graphs", single.without, at_least=1.0),
        # A draw that rounding makes fall the other way, rightly, changes all that comes after it.
        Figure("float32, tokens in a quarter of the slots", single.fewer, at_least=0.98),
        within("bfloat16, log-probs from the uncached, mean", half.mean, 0.05, goal=0.02, unit="nats"),
        Figure("bfloat16, tokens that the uncached draws, too", half.same, at_least=0.9),
        Figure("bfloat16, tokens again with the same key", half.again, at_least=1.0),
        Figure("bfloat16, tokens without graphs", half.without, at_least=1.0),
        Figure("rows that ended early", single.ended),
        Figure("graphs captured", float(single.graphs)),
    ]


class Drawn(NamedTuple):
    """The same rows drawn in several ways, compared; shares of tokens, and nats."""

    same: float  # as the uncached forward pass draws them
    mean: float  # log-probs from the uncached
    most: float
    again: float
    without: float
    fewer: float
    ended: float  # rows that ended by themselves
    graphs: int


def drawn(setting: Setting, model: str, dtype: torch.dtype, work: Work) -> Drawn:
    """The same rows with all slots, again, without graphs, with a quarter of the slots, and by the uncached."""
    draw = partial(sample, work=work)
    usual = local(context(setting, model, dtype), work)
    rollout, again = draw(usual), draw(usual)
    require(usual.shared.engine is not None, "got a sampler that decodes without slots")
    captured = usual.shared.engine.graphs is not None
    require(captured == (setting.device == "cuda"), "got a sampler that captures no graphs on CUDA")
    plain = uncached(usual.model, rollout)
    tokens, mask = rollout.tokens[:, 1:], rollout.mask[:, 1:]
    token, _ = categorical(plain, uniform(rollout, work), temperature=1.0)
    logp = plain.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    apart = (logp - rollout.logp_sampled[:, 1:])[mask].abs()
    return Drawn(
        same=float((token == tokens)[mask].float().mean()),
        mean=float(apart.mean()),
        most=float(apart.max()),
        again=in_common(rollout, again),
        without=in_common(rollout, draw(without_graphs(usual))),
        fewer=in_common(rollout, draw(replace(usual, max_rows=max(2, work.rows // 4), shared=SharedDecoder()))),
        ended=1 - float(rollout.truncated.float().mean()),
        graphs=len(usual.shared.engine.graphs.replays) if captured else 0,
    )


def sample(sampler: LocalSampler, *, work: Work) -> Rollout:
    """The rows."""
    return sampler.sample(problems(0, work.prompts), work.size, key=prng.key(KEY, device="cpu"))


def without_graphs(sampler: LocalSampler) -> LocalSampler:
    """The same in steps of the same shapes, run as they are written."""
    held = SharedDecoder()
    usual = sampler.shared.engine
    held.model, held.engine = (
        sampler.model,
        DecodeEngine(sampler.model, sizes=usual.sizes, code=usual.code, step_model=usual.step_model),
    )
    return replace(sampler, shared=held)


@torch.no_grad()
def uncached(model: nn.Module, rollout: Rollout) -> Tensor:
    """Logits in float32 of every column but the first, `[B, T-1, V]`, each row read whole."""
    return model(input_ids=rollout.tokens, use_cache=False).logits[:, :-1].float()


def uniform(rollout: Rollout, work: Work) -> Tensor:
    """The number that each token was drawn with, at the token's place, `[B, T-1]`."""
    device = rollout.tokens.device
    uid = torch.arange(work.prompts, device=device).repeat_interleave(work.size)
    g = torch.arange(work.size, device=device).repeat(work.prompts)
    key = prng.fold_in(prng.key(KEY, device=device), uid, g)
    u = prng.uniform(key, work.new, low=0.0, high=1.0, dtype=torch.float32)
    drawn = torch.arange(work.new, device=device) < rollout.mask.sum(-1, keepdim=True)
    return torch.zeros(rollout.mask.shape, device=device).masked_scatter(rollout.mask, u[drawn])[:, 1:]


def in_common(one: Rollout, other: Rollout) -> float:
    """The share of one's tokens at whose place the other has the same."""
    width = min(one.tokens.shape[1], other.tokens.shape[1])
    same = (one.tokens[:, :width] == other.tokens[:, :width]) & one.mask[:, :width] & other.mask[:, :width]
    return float(same.sum() / one.mask.sum())


# -- speed


def speed(setting: Setting, *, size: str) -> list[Figure]:
    """Tokens a second over a whole call, its prefill included, and how that compares with transformers' generate.

    The bandwidth limit of a step that decodes one token in each of n rows is the time to read what it must: all weights
    once (2 bytes each; the embedding as the head) and every row's keys and values so far,

        (2 parameters + n (prompt + new / 2) kv_bytes) / bandwidth,

    the mean over `new` steps. The share is that time over the time taken for a step. `generate` of transformers draws
    as many tokens for the same prompts.
    """
    shape = sized(setting, QWEN[size])
    work = Work(2, 3, 5, 6) if setting.tiny else WORK
    whole = context(setting, folder(setting, shape), torch.bfloat16)
    sampler = local(whole, work)
    forget(setting.device)
    tokens = int(sample(sampler, work=work).mask.sum())  # and compiles and captures
    took = seconds(setting.device, partial(sample, sampler, work=work), times=1 if setting.tiny else 2)
    read = 2 * shape.parameters() + work.rows * (work.prompt + work.new / 2) * shape.kv_bytes(2)
    limit = read / ceilings(setting).bandwidth
    share = limit * (tokens / work.rows) / took
    held = most_held(setting)
    sampler.rest()
    theirs = work.rows * work.new / generate(setting, whole.full_model(), work)
    return [
        Figure("tokens/s", tokens / took),
        Figure("share of the bandwidth limit", 100 * share, "%", at_least=50.0),
        Figure("the limit", work.rows / limit, "tokens/s"),
        *held,
        Figure("transformers' generate", theirs, "tokens/s"),
        Figure("times generate", tokens / took / theirs, "x"),
    ]


@torch.no_grad()
def generate(setting: Setting, model: nn.Module, work: Work) -> float:
    """Seconds that transformers takes for as many tokens; sampled, none ends early."""
    prompts = [random_prompt(model.config.vocab_size, work.prompt, None, x.prompt) for x in problems(0, work.prompts)]
    ids = torch.tensor([prompt for prompt in prompts for _ in range(work.size)], device=setting.device)
    call = partial(
        model.generate,
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=work.new,
        min_new_tokens=work.new,
    )
    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=2)
    return seconds(setting.device, call, times=1)
