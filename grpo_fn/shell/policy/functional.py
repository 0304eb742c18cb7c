"""The oracle that the sharded policy is held against: a pure function of its parameters, on one device."""

import torch
from torch import Tensor, nn

from grpo_fn.core.types import Batch, Pullback, Scores
from grpo_fn.shell.model.logprob_model import check_rows, dense_energy, dense_scores, predicting_states, scatter_to_rows


class FunctionalPolicy:
    """Dense log-softmax through `functional_call` and `torch.func.vjp`.

    One device, no hooks, no fused anything; it shares nothing with `FSDPPolicy` but the shift. Its weights are a value,
    `params`, and its accumulated gradient another, `grads`. Parameters that do not train stay the model's own.
    """

    def __init__(self, model: nn.Module, *, temperature: float) -> None:
        self.model = model
        self.temperature = temperature
        self.params = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        self.grads = {name: torch.zeros_like(p) for name, p in self.params.items()}

    def scores(self, params: dict[str, Tensor], tokens: Tensor, mask: Tensor) -> Scores:
        """Scores as a pure function of the parameters."""
        out = torch.func.functional_call(self.model, params, (), {"input_ids": tokens, "use_cache": False})
        logits, target = predicting_states(out.logits, tokens, mask)
        return Scores(*(scatter_to_rows(x, mask) for x in dense_scores(logits, target, temperature=self.temperature)))

    @torch.no_grad()
    def energy(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """|d logp / d logits|^2 of each sampled token, `[B T]`; zero where ~mask."""
        out = torch.func.functional_call(self.model, self.params, (), {"input_ids": tokens, "use_cache": False})
        logits, target = predicting_states(out.logits, tokens, mask)
        return scatter_to_rows(dense_energy(logits, target, temperature=self.temperature), mask)

    def vjp(self, batch: Batch) -> tuple[Scores, Pullback]:
        """As `FSDPPolicy.vjp`, with `torch.func.vjp` doing the work."""
        check_rows(batch.mask)
        scores, vjp_fn = torch.func.vjp(lambda params: self.scores(params, batch.tokens, batch.mask), self.params)

        def pullback(dscores: Scores) -> None:
            (grads,) = vjp_fn(dscores)
            self.grads = {name: self.grads[name] + g for name, g in grads.items()}

        return scores, pullback
