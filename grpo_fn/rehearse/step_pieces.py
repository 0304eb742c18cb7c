"""The pieces of a training step, each taken once and counted: what a step is made of, and how often.

The pieces are those of a run: the policy's micro-batches, update and log-probs, the sampler's reading of prompts and
its decoding step, the hand-over of weights. The same functions take them with numbers, on real ranks, which is what a
rehearsal is held against.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from grpo_fn.core.batch import trim_rows
from grpo_fn.core.types import Batch, Rollout
from grpo_fn.rehearse.changes import COMPARED, JOINED, SPLIT_KV, without_it
from grpo_fn.rehearse.rehearsed_rows import slopes
from grpo_fn.rehearse.roofline import DECODING, OPTIMIZER
from grpo_fn.rehearse.tracing.counting import CountingMode
from grpo_fn.rehearse.tracing.host_transfers import local_bytes
from grpo_fn.rehearse.tracing.model_parts import following_parts
from grpo_fn.shell.policy.fsdp import FSDPPolicy, ReferenceModel
from grpo_fn.shell.sampler.local.continuous_batching import PREFILL
from grpo_fn.shell.sampler.local.decode_step import (
    LOOK,
    WRITTEN,
    DecodeEngine,
    DecodeShape,
    Eager,
    Marks,
    TokenSampler,
    captured_sizes,
    empty_slots,
    prefill_prompts,
)
from grpo_fn.shell.sampler.local.float32_head import keep_logits_in_float32
from grpo_fn.shell.sampler.local.joined_projections import joined_model
from grpo_fn.shell.sampler.local.kv_cache import KVCache, row_slots
from grpo_fn.shell.sampler.local.split_kv import split_kv_attention

LOAD, GENERATE, SCORE, TRAIN, UPDATE, SYNC = "load", "generate", "log-probs", "train", "update", "sync"
PHASES = (LOAD, GENERATE, SCORE, TRAIN, UPDATE, SYNC)
FIRST_UPDATE = "first update"  # in which the moments are made; a phase that is not reported


def hold_policy(mode: CountingMode, policy: FSDPPolicy) -> None:
    """Say of what the policy keeps what it is."""
    for p in policy.logprob_model.parameters():
        mode.live.hold(p.detach(), "weights")
        for value in policy.optimizer.state.get(p, {}).values():
            if isinstance(value, Tensor):
                mode.live.hold(value, "optimizer state")
    for buffer in policy.logprob_model.buffers():
        mode.live.hold(buffer, "buffers")


def make_moments(mode: CountingMode, policy: FSDPPolicy) -> None:
    """The optimizer's moments, which are there from the first update on."""
    mode.begin(FIRST_UPDATE, phase=FIRST_UPDATE)
    trained = {name for name, x in policy.named_tensors().items() if x.requires_grad}
    policy.make_moments(trained)
    hold_policy(mode, policy)


def count_training(mode: CountingMode, policy: FSDPPolicy, batch: Batch, *, entropy: bool) -> int:
    """An update of the policy: one micro-batch, one more that is the last, and the step of the optimizer.

    Args:
        mode: counts the pieces "micro-batch", "last micro-batch" and "update".
        policy: whose update it is.
        batch: the rows of one update.
        entropy: whether the objective has a slope for entropies.

    Returns:
        Micro-batches of the update; all but the last are counted as the first, the largest.
    """
    mode.begin("split", phase=TRAIN)
    parts = policy.split_rows(batch)
    pieces = ["micro-batch", "last micro-batch"][-min(2, len(parts)) :]
    policy.set_accumulation_steps(len(pieces))

    def reduced(x: Tensor) -> None:
        mode.live.hold(x.grad, "gradients")
        if "gradients" in mode.live.on_host:
            mode.to_host[mode.piece] += local_bytes(x.grad)

    handles = [
        p.register_post_accumulate_grad_hook(reduced) for p in policy.logprob_model.parameters() if p.requires_grad
    ]
    for piece in pieces:
        mode.begin(piece, phase=TRAIN)
        with following_parts(mode, policy.model):
            micro = trim_rows(batch, parts[0])
            _, pullback = policy.vjp(micro)
            pullback(slopes(micro.mask, entropy=entropy))
            del pullback
        for p in policy.logprob_model.parameters():
            if p.grad is not None:
                mode.live.hold(p.grad, "gradients")
    for handle in handles:
        handle.remove()
    mode.begin("update", phase=UPDATE)
    mode.part = OPTIMIZER
    policy.update()
    return len(parts)


def count_log_probs(mode: CountingMode, policy: FSDPPolicy, rollout: Rollout, under: ReferenceModel | None) -> None:
    """A pass without gradients over one micro-batch of the rollout: the policy's, or that of a frozen model."""
    mode.begin("log-probs", phase=SCORE)
    with following_parts(mode, policy.model):
        if under is None:
            policy.logp(rollout)
        else:
            policy.logp_under(under, rollout)
    policy.named_tensors()  # weights that are still gathered are given back


class Decoding(NamedTuple):
    """A call of the sampler on one rank."""

    rows: int
    prompts: int
    group: int
    prompt_tokens: int
    new_tokens: int
    slots: int

    @property
    def at_once(self) -> int:
        """Rows that are decoded side by side."""
        return min(self.rows, self.slots)

    @property
    def read_at_once(self) -> int:
        """Prompts that go through the model in one call."""
        return min(-(-self.at_once // self.group), max(1, PREFILL // self.prompt_tokens), self.prompts)

    def repeats(self) -> dict[str, int]:
        """How often each piece is taken: prompts in parts, and a token for all rows at once until all are complete.

        The first token of a row is drawn from what its prompt's reading left.
        """
        return {
            "read prompts": -(-self.prompts // self.read_at_once),
            DECODING: self.waves * (self.new_tokens - 1),
        }

    @property
    def waves(self) -> int:
        """How often the slots are filled."""
        return -(-self.rows // self.at_once)

    @property
    def looks(self) -> int:
        """How often the host waits to see which rows have ended: behind the first token, then every LOOK steps."""
        return self.waves * (1 + -(-(self.new_tokens - 1) // LOOK))


@torch.no_grad()
def count_decoding(
    mode: CountingMode, model: nn.Module, call: Decoding, token_sampler: TokenSampler, *, split_kv: bool, holder: str
) -> None:
    """Prompts are read, then a token for all rows: with slots half full, which is the average, and with full ones.

    Then the same token with attention by matrix products, and with a product for each projection, each counted as a
    piece of its own.

    Args:
        mode: counts the pieces "read prompts" and "decode a token"; of the step with full slots the memory alone.
        model: whole, in the dtype of the computation.
        call: rows, and how long they are.
        token_sampler: draws the tokens.
        split_kv: steps attend in the split-KV kernel.
        holder: what the model's weights are held as; joined ones are made anew.
    """
    device, sizes = torch.device("cpu"), captured_sizes(split_kv=split_kv)
    keep_logits_in_float32(model)
    with mode.holding(holder):
        joined = joined_model(model)
    rows, many = sizes.capacity(call.at_once), sizes.capacity(min(call.prompts, call.at_once + 1))
    columns = sizes.capacity(call.prompt_tokens)
    mode.begin("read prompts", phase=GENERATE)
    code = WRITTEN._replace(split_kv=split_kv_attention if split_kv else None)
    engine = DecodeEngine(model, sizes=sizes, run=Eager(), code=code, stepped=joined)
    flags = torch.zeros(model.config.get_text_config().vocab_size, dtype=torch.bool)
    engine.prompts, engine.drawn = KVCache(many, columns), KVCache(rows, call.new_tokens)
    engine.live, engine.marks = empty_slots(rows, call.new_tokens, device), Marks(flags, flags.clone())
    with following_parts(mode, model):
        prompts = [[0] * call.prompt_tokens] * call.read_at_once
        context, logits = prefill_prompts(model, prompts, device)
        with mode.holding("KV cache"):
            for layer, streams in context.kept.items():
                engine.prompts.of(layer, *streams)
                engine.drawn.of(layer, *streams)
        context.copy(engine.prompts, torch.arange(call.read_at_once))
        del context, logits
        engine.live.start.fill_(call.prompt_tokens)
        half = -(-call.new_tokens // 2)
        for piece, seen in ((DECODING, half), ("decode the last token", call.new_tokens)):
            mode.begin(piece, phase=GENERATE)
            decode_token(engine, call, seen, token_sampler)
        if split_kv:
            engine.sizes, engine.code = captured_sizes(split_kv=False), WRITTEN
            mode.begin(without_it(DECODING, SPLIT_KV), phase=COMPARED)
            decode_token(engine, call, half, token_sampler)
            engine.sizes, engine.code = sizes, code
        if joined is not model:
            engine.stepped = model
            mode.begin(without_it(DECODING, JOINED), phase=COMPARED)
            decode_token(engine, call, half, token_sampler)


def decode_token(engine: DecodeEngine, call: Decoding, seen: int, token_sampler: TokenSampler) -> None:
    """A token for the rows in all slots, each of which has drawn so many with it."""
    sizes, prompts = engine.sizes, engine.prompts
    columns = min(sizes.columns(seen), call.new_tokens)
    rows = min(sizes.rows(call.at_once), engine.drawn.count)
    home, there = torch.arange(rows) // call.group, torch.arange(rows) < call.at_once
    home[~there] = 0
    many = min(sizes.rows(int(home.max()) + 1), prompts.count)
    reach = min(sizes.columns(call.prompt_tokens), prompts.columns)
    wide = min(call.group, call.at_once)
    shape = DecodeShape(rows, columns, many, reach, wide)
    engine.live.length.fill_(call.prompt_tokens + seen - 1)
    engine.set_row_slots(shape, row_slots(home, there, many, wide))
    engine.advance(shape, token_sampler, steps=1)


@torch.no_grad()
def count_sync(mode: CountingMode, policy: FSDPPolicy, sampled: nn.Module) -> None:
    """The sampler takes the policy's weights, tensor by tensor; nothing to do where the module is shared."""
    mode.begin("sync", phase=SYNC)
    mode.part = "weights to the sampler"
    if policy.model is sampled:
        return
    own = sampled.state_dict(keep_vars=True)
    if "weights" in mode.live.on_host:  # their parts are gathered on the card
        trained = [x for x in policy.named_tensors().values() if x.requires_grad]
        mode.to_card[mode.piece] += sum(map(local_bytes, trained))
    for name, weight in policy.weights(trained=True):
        own[name].copy_(weight)


def one_micro_batch(policy: FSDPPolicy, batch: Batch, rollout: Rollout) -> tuple[Rollout, int]:
    """The rows of the first micro-batch as a rollout, and how many micro-batches there are."""
    parts = policy.split_rows(batch)
    rows = parts[0].clamp(min=0)
    fields = {name: getattr(rollout, name)[rows] for name in ("tokens", "mask", "logp_sampled", "truncated")}
    return rollout._replace(**fields, text=("",) * len(rows)), len(parts)
