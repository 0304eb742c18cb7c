"""Small stand-ins: causal language models of three kinds, a tokenizer, and a policy and sampler that are one table."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial

import torch
from batches import dealt
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from experiments.tiny.models import train_tokenizer
from grpo_fn.algo.step import AT_THE_START, Algorithm, Experience, grpo_step
from grpo_fn.core import prng
from grpo_fn.core.problem import Problem
from grpo_fn.core.sampling import categorical
from grpo_fn.core.types import Batch, Pullback, Rollout, Scores

# -- language models

SPREAD = 0.1


def qwen2_tied(vocabulary: int) -> nn.Module:
    """One matrix is embedding and head; the projections have biases."""
    return _filled(Qwen2ForCausalLM(Qwen2Config(**_sizes(vocabulary), tie_word_embeddings=True)))


def qwen3_untied(vocabulary: int) -> nn.Module:
    """Embedding and head apart; queries and keys are normalised."""
    return _filled(Qwen3ForCausalLM(Qwen3Config(**_sizes(vocabulary), head_dim=8, tie_word_embeddings=False)))


def gemma2_capped(vocabulary: int) -> nn.Module:
    """Tied, logits under a soft cap, every other layer with a sliding window shorter than the rows of a test."""
    caps = {"final_logit_softcapping": 0.5, "attn_logit_softcapping": 0.5, "sliding_window": 4}
    return _filled(Gemma2ForCausalLM(Gemma2Config(**_sizes(vocabulary), **caps, head_dim=8, query_pre_attn_scalar=8)))


MODELS = {f.__name__: f for f in (qwen2_tied, qwen3_untied, gemma2_capped)}


def _sizes(vocabulary: int) -> dict[str, object]:
    return {
        **{"vocab_size": vocabulary, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64},
        **{"bos_token_id": None, "eos_token_id": vocabulary - 1, "pad_token_id": vocabulary - 1},
    }


def _filled(model: nn.Module) -> nn.Module:
    """Weights far enough from a fresh model's that biases, norms and every nonlinearity matter.

    And no farther: the error of float32 in a gradient, relative to its largest entry, grows with them.
    """
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(SPREAD * noise if weight.ndim > 1 else weight + SPREAD * noise)
    return model.eval()


# -- a tokenizer

TEXTS = ["Tom has 12 apples. He buys 30 more.\n", "How many apples are there?\n\n", "\\boxed{42} is the answer. "]
VOCABULARY = 290


@lru_cache(maxsize=1)
def tokenizer() -> PreTrainedTokenizerBase:
    """A byte-level BPE of 290 entries in Qwen2's own form; any text is spelt, common words are one token."""
    return train_tokenizer(TEXTS, vocabulary=VOCABULARY)


def problem(uid: int, prompt: str) -> Problem:
    return Problem(uid, prompt, "0", {})


# -- a policy without a model

WORDS = 6  # the table's vocabulary; the last word ends a completion
PROMPT = 2  # tokens of every prompt
LIMIT = 4  # tokens of a completion at most
CUT = partial(dealt, micro_tokens=20, devices=1)


class TablePolicy:
    """Every token is drawn from softmax(table), whatever came before; plain gradient descent, float64.

    `log` lists the calls in order; `reference_table` is what `reference` answers with, or None; `cut` makes the rows of
    micro-batches.
    """

    dropout = False

    def __init__(
        self,
        table: Tensor,
        *,
        lr: float,
        reference_table: Tensor | None,
        cut: Callable[[Batch], list[Tensor]] = CUT,
    ) -> None:
        self.table, self.lr, self.reference_table, self.split_rows = table.double(), lr, reference_table, cut
        self.grad = torch.zeros_like(self.table)
        self.log: list[str] = []
        self.seen: list[Batch] = []
        self.signals: list[Scores] = []
        self.steps: list[Tensor] = []

    def set_accumulation_steps(self, parts: int) -> None: ...

    def vjp(self, batch: Batch) -> tuple[Scores, Pullback]:
        self.log.append("vjp")
        self.seen.append(batch)
        scores, vjp_fn = torch.func.vjp(lambda table: table_scores(table, batch.tokens, batch.mask), self.table)

        def pullback(dscores: Scores) -> None:
            self.log.append("pullback")
            self.signals.append(dscores)
            self.grad = self.grad + vjp_fn(dscores)[0]

        return scores, pullback

    def logp(self, rollout: Rollout) -> Tensor:
        self.log.append("logp")
        return table_scores(self.table, rollout.tokens, rollout.mask).logp

    def reference(self, rollout: Rollout) -> Tensor | None:
        self.log.append("reference")
        if self.reference_table is None:
            return None
        return table_scores(self.reference_table, rollout.tokens, rollout.mask).logp

    def energy(self, rollout: Rollout) -> Tensor:
        """|onehot - p|^2, p the probabilities of the words."""
        self.log.append("energy")
        p = self.table.softmax(-1)
        return torch.where(rollout.mask, 1 - 2 * p[rollout.tokens] + p.square().sum(), 0.0)

    def update(self) -> dict[str, float]:
        self.log.append("update")
        self.steps.append(self.grad)
        norm = float(self.grad.norm())
        self.table = self.table - self.lr * self.grad
        self.grad = torch.zeros_like(self.table)
        return {"loss/grad_norm": norm, "optimizer/lr": self.lr, "optimizer/step": float(len(self.steps))}


def table_scores(table: Tensor, tokens: Tensor, mask: Tensor) -> Scores:
    logprobs = table.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum()
    return Scores(torch.where(mask, logprobs[tokens], 0.0), torch.where(mask, entropy, 0.0))


class TableSampler:
    """Draws rows from the table it was last loaded with; garbage stands in logp_sampled where nothing was sampled."""

    def __init__(self, policy: TablePolicy) -> None:
        self.log = policy.log
        self.table = policy.table

    def load(self, policy: TablePolicy) -> None:
        self.log.append("load")
        self.table = policy.table

    def rest(self) -> None:
        self.log.append("rest")

    def sample(self, problems: Sequence[Problem], group_size: int, *, key: Tensor) -> Rollout:
        self.log.append("sample")
        uid = torch.tensor([p.uid for p in problems]).repeat_interleave(group_size)
        g = torch.arange(group_size).repeat(len(problems))
        u = prng.uniform(prng.fold_in(key, uid, g), LIMIT, dtype=torch.float32, low=0.0, high=1.0)
        drawn, _ = categorical(self.table.expand(*u.shape, -1), u, temperature=1.0)
        # A row goes on until the first WORDS - 1, which is part of it.
        ended = (drawn == WORDS - 1).cumsum(-1)
        on = torch.cat([torch.ones_like(ended[:, :1]), 1 - ended[:, :-1].clamp(max=1)], 1).bool()
        mask = torch.cat([torch.zeros(len(u), PROMPT, dtype=torch.bool), on], 1)
        tokens = torch.cat([torch.zeros(len(u), PROMPT, dtype=torch.long), drawn], 1)
        logp = torch.where(mask, self.table.log_softmax(-1)[tokens], torch.nan)
        text = tuple(" ".join(map(str, row[keep].tolist())) for row, keep in zip(tokens, mask, strict=True))
        return Rollout(tokens, mask, logp, ended[:, -1] == 0, text)


def first_step(
    policy: TablePolicy, algo: Algorithm, *, key: Tensor, reward: Callable, teacher: Callable | None = None
) -> tuple[Experience, dict[str, float]]:
    """What a policy learned from in its first step, and the figures of that."""

    def stream(first: int, count: int) -> list[Problem]:
        return [problem(i, "?") for i in range(first, first + count)]

    run = {"reward": reward, "span": lambda name: nullcontext(), "teacher": teacher, "demonstrations": None}
    experience, _, figures = grpo_step(policy, TableSampler(policy), stream, AT_THE_START, key=key, algo=algo, **run)
    return experience, figures
