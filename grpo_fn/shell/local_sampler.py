"""Sampling from the policy's own module: one prefill per prompt, KV-cached decoding, rows that end leave the batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedTokenizerBase

from grpo_fn import prng
from grpo_fn.problem import Problem
from grpo_fn.shell.completions import assemble, check_lengths, check_limits, positions
from grpo_fn.shell.engine import Seat
from grpo_fn.shell.hf import Encode, as_tokens, stop_ids
from grpo_fn.shell.outgoing import Fixed
from grpo_fn.shell.policy import Sharded
from grpo_fn.types import Rollout

# (logits [B V], u [B]) -> (token [B], logp [B]): sampling.categorical, sampling.greedy, ...
Choose = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Decoded(NamedTuple):
    """Completions of some rows, `[R, N]` with N = max_new_tokens; columns past `length` are padding."""

    tokens: Tensor
    logp: Tensor
    length: Tensor
    stopped: Tensor


def local(
    seat: Seat,
    tokenizer: PreTrainedTokenizerBase,
    *,
    choose: Choose,
    encode: Encode,
    max_new_tokens: int,
    stop: Sequence[str],
    max_rows: int,
) -> "LocalSampler":
    """A sampler from a module in this process: no engine besides torch and transformers."""
    return LocalSampler(seat.whole(), tokenizer, choose, encode, max_new_tokens, stop, max_rows)


@dataclass(frozen=True)
class LocalSampler:
    """Samples from `model`: the policy's own module where that is whole and computes in its dtype, else one of ours."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    choose: Choose
    encode: Encode
    max_new_tokens: int
    stop: Sequence[str]
    max_rows: int  # rows decoded at once; bounds the KV cache
    ranks: ClassVar[int] = 1  # that have one of it together
    overlaps: ClassVar[bool] = False  # it cannot sample while its device trains
    repeatable: ClassVar[bool] = True
    mixes: ClassVar[bool] = False

    @property
    def complaints(self) -> list[str]:
        """It has none."""
        return []

    def __post_init__(self) -> None:
        """Raise ValueError for limits below 1 and for stop strings that would stop at once or letter by letter."""
        check_limits(self.stop, max_new_tokens=self.max_new_tokens, max_rows=self.max_rows)

    @torch.no_grad()
    def load(self, policy: Sharded | Fixed) -> None:
        """Take the policy's weights, tensor by tensor; nothing to do where the module is shared."""
        if policy.model is self.model:
            return
        own = self.model.state_dict(keep_vars=True)
        for name, weight in policy.weights(trained=True):
            own[name].copy_(weight)

    def rest(self) -> None:
        """Nothing is held between two calls but the weights."""

    def figures(self) -> dict[str, float]:
        """There is nothing to tell."""
        return {}

    def close(self) -> None:
        """There is nothing to close."""

    @torch.no_grad()
    def sample(self, problems: Sequence[Problem], group_size: int, *, key: Tensor) -> Rollout:
        """G completions of every problem. Row p * G + g draws from fold_in(key, uid, g) and from nothing else."""
        device = next(self.model.parameters()).device
        prompts = [self.encode(self.tokenizer, problem.prompt) for problem in problems]
        check_lengths(problems, prompts, max_new_tokens=self.max_new_tokens, limit=positions(self.model.config))
        uid = torch.tensor([p.uid for p in problems], device=device).repeat_interleave(group_size)
        g = torch.arange(group_size, device=device).repeat(len(problems))
        u = prng.uniform(
            prng.fold_in(key.to(device), uid, g), self.max_new_tokens, low=0.0, high=1.0, dtype=torch.float32
        )
        # Whole groups share one prefill, as many as fit; a group that does not fit alone comes in pieces.
        at_once, width = max(1, self.max_rows // group_size), min(group_size, self.max_rows)
        by_group = rearrange(u, "(p g) n -> p g n", g=group_size)
        parts = [
            self._decode(prompts[i : i + at_once], by_group[i : i + at_once, j : j + width])
            for i in range(0, len(prompts), at_once)
            for j in range(0, group_size, width)
        ]
        decoded = Decoded(*(torch.cat(field) for field in zip(*parts, strict=True)))
        completions = [row[:n] for row, n in zip(decoded.tokens.tolist(), decoded.length.tolist(), strict=True)]
        drawn = torch.arange(self.max_new_tokens, device=device) < decoded.length[:, None]
        return assemble(self.tokenizer, prompts, completions, decoded.logp[drawn], decoded.stopped)

    def _decode(self, prompts: list[list[int]], u: Tensor) -> Decoded:
        """Completions of every prompt, as many as u `[P, G, N]` has numbers for; row p * G + g."""
        device, group_size = u.device, u.shape[1]
        u = rearrange(u, "p g n -> (p g) n")
        pad = self.tokenizer.eos_token_id
        ends = torch.tensor(stop_ids(self.tokenizer, self.model), device=device)
        ids = as_tokens(prompts, pad, device)
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        width = ids.shape[1]
        attend = torch.arange(width, device=device) >= width - lengths[:, None]
        cache = DynamicCache(config=self.model.config)
        logits = self._forward(ids, attend, (attend.long().cumsum(-1) - 1).clamp(min=0), cache)

        cache.batch_repeat_interleave(group_size)
        logits, attend, position = (x.repeat_interleave(group_size, 0) for x in (logits, attend, lengths))
        rows = len(u)
        out = Decoded(
            torch.full((rows, self.max_new_tokens), pad, device=device),
            torch.zeros(rows, self.max_new_tokens, device=device),
            torch.full((rows,), self.max_new_tokens, device=device),
            torch.zeros(rows, dtype=torch.bool, device=device),
        )
        row = torch.arange(rows, device=device)  # which output row each live row writes to
        for t in range(self.max_new_tokens):
            token, logp = self.choose(logits, u[row, t])
            out.tokens[row, t], out.logp[row, t] = token, logp
            ended = torch.isin(token, ends) | self._hit_stop_string(out.tokens[row, : t + 1])
            out.stopped[row] = ended
            out.length[row[ended]] = t + 1
            live = (~ended).nonzero()[:, 0]
            if not len(live) or t + 1 == self.max_new_tokens:
                break
            if len(live) < len(row):
                cache.batch_select_indices(live)
                row, token, attend, position = row[live], token[live], attend[live], position[live]
            attend = torch.cat([attend, attend.new_ones(len(attend), 1)], 1)
            logits = self._forward(token[:, None], attend, position[:, None], cache)
            position = position + 1
        return out

    def _forward(self, ids: Tensor, attend: Tensor, position: Tensor, cache: DynamicCache) -> Tensor:
        """Logits after the last column, `[R, V]`."""
        return self.model(
            input_ids=ids,
            attention_mask=attend.long(),
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]

    def _hit_stop_string(self, tokens: Tensor) -> Tensor:
        """Rows whose text now ends in (or just completed) a stop string; the string stays part of the completion."""
        if not self.stop:
            return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        # Every token holds at least one byte, so the last len(stop) tokens hold it; one more in front, because decoders
        # of the SentencePiece kind drop a leading space.
        tail = max(len(s.encode()) for s in self.stop) + 1
        texts = self.tokenizer.batch_decode(tokens[:, -tail:], skip_special_tokens=True)
        return torch.tensor([any(s in text for s in self.stop) for text in texts], device=tokens.device)
