"""The warm start of a tiny model: updates of the supervised stage, on rows that its recipe makes.

Objective, denominators, update and optimizer are those of `supervised.supervised_step`; the rows go through the model
padded and not end to end.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from grpo_fn.algo import objective, supervised
from grpo_fn.algo.step import UNMOVED
from grpo_fn.algo.supervised import learn_given
from grpo_fn.core.batch import given_batch
from grpo_fn.core.types import Batch, Pullback, Rollout, Scores
from grpo_fn.shell.model.demonstrations import Demonstration, given_rows
from grpo_fn.shell.model.logprob_model import dense_scores, predicting_states, scatter_to_rows
from grpo_fn.shell.policy import optimizer

Segment = tuple[str, bool]  # text, and whether it is taught or only read
CROSS_ENTROPY = partial(supervised.cross_entropy, token_weight=None, loss_aggregation=objective.token_mean)
ADAMW = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.01}
FINAL = 0.1  # of the learning rate, at the end
WARMUP_SHARE = 20  # one step in so many warms up


@runtime_checkable
class SupervisedPlan(Protocol):
    """The size of a supervised warm start."""

    steps: int
    rows: int
    lr: float


class PaddedPolicy:
    """A model with an optimizer behind the `Policy` protocol: one process, rows padded, no clipping, temperature 1.

    Args:
        model: a causal language model of Hugging Face, trained in place.
        optimize: parameters -> their optimizer.
        schedule: update, from 0 -> multiplier of the learning rate.
    """

    dropout = False

    def __init__(
        self,
        model: nn.Module,
        *,
        optimize: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
        schedule: Callable[[int], float],
    ) -> None:
        self.model = model
        self.optimizer = optimize(model.parameters())
        self.base_lr = [group["lr"] for group in self.optimizer.param_groups]
        self.schedule = schedule
        self.updates = 0

    def vjp(self, batch: Batch) -> tuple[Scores, Pullback]:
        """Scores of the batch's tokens, and the map from the cotangent of their log-probs to gradients."""
        logp, entropy = self._scores(batch.tokens, batch.mask)

        def pullback(dscores: Scores) -> None:
            torch.autograd.backward([logp], [dscores.logp])

        return Scores(logp.detach(), entropy.detach()), pullback

    def _scores(self, tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> tuple[Tensor, Tensor]:
        logits = self.model(input_ids=tokens, use_cache=False).logits
        found = dense_scores(*predicting_states(logits, tokens, mask), temperature=1.0)
        return scatter_to_rows(found[0], mask), scatter_to_rows(found[1], mask)

    def set_accumulation_steps(self, parts: int) -> None:
        """Nothing waits for the last micro-batch here."""

    @torch.no_grad()
    def logp(self, rollout: Rollout) -> Float[Tensor, "B T"]:
        """Log-probs of the rollout's tokens under the weights as they stand."""
        return self._scores(rollout.tokens, rollout.mask)[0]

    def split_rows(self, batch: Batch) -> list[Int[Tensor, "B"]]:
        """All rows as one micro-batch."""
        return [torch.arange(len(batch.mask), device=batch.mask.device)]

    def energy(self, rollout: Rollout) -> Float[Tensor, "B T"]:
        """A supervised stage has no baseline that reads energies."""
        raise NotImplementedError

    def reference(self, rollout: Rollout) -> None:
        """There is no reference."""

    def update(self) -> dict[str, float]:
        """One optimizer step at the schedule's rate; clears the gradients."""
        for group, lr in zip(self.optimizer.param_groups, self.base_lr, strict=True):
            group["lr"] = lr * self.schedule(self.updates)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        return {}


def train_supervised(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    rows: Iterator[Sequence[Segment]],
    plan: SupervisedPlan,
    *,
    report: Callable[[str], None] = print,
) -> None:
    """Minimise the cross entropy of what each row teaches, in `plan.steps` updates of the supervised stage.

    AdamW; the rate rises over a twentieth of the steps, then falls along a line to a tenth. Where the model is.
    """
    device = next(model.parameters()).device
    decay = partial(optimizer.linear_decay, warmup=plan.steps // WARMUP_SHARE, total=plan.steps, final=FINAL)
    policy = PaddedPolicy(model, optimize=partial(optimizer.adamw, lr=plan.lr, **ADAMW), schedule=decay)
    for step in range(plan.steps):
        batch = given_batch(tokenized_rows([next(rows) for _ in range(plan.rows)], tokenizer, device))
        (learned,) = learn_given(policy, batch, CROSS_ENTROPY, UNMOVED, epochs=1, minibatches=1, own_pass=False)
        if (step + 1) % 100 == 0 or step + 1 == plan.steps:
            report(f"[warm start] step {step + 1}/{plan.steps} loss {learned.objective:.3f}")


def tokenized_rows(
    rows: Sequence[Sequence[Segment]], tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> Rollout:
    """Rows of a supervised stage, of segments that become tokens by themselves; one that is taught ends with EOS."""
    eos = tokenizer.eos_token_id
    tokens = iter(tokenizer([text for row in rows for text, _ in row])["input_ids"])
    shown = []
    for row in rows:
        segments = [(([*next(tokens), eos] if taught else next(tokens)), taught) for _, taught in row]
        read = [one for segment, _ in segments for one in segment]
        shown.append(Demonstration(read, [taught for segment, taught in segments for _ in segment]))
    texts = ["".join(text for text, _ in row) for row in rows]
    return given_rows(shown, texts, pad=eos, device=device)
