"""The policies behind the seam: `Local`, a module trained in place, and `Functional`, the oracle it is held against."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from grpo_fn.shell.head import dense_scores, linear_scores
from grpo_fn.types import Batch, Pullback, Rollout, Scores

Optimizer = Callable[..., torch.optim.Optimizer]
Schedule = Callable[[int], float]


def predicting(
    state: Float[Tensor, "B T X"], tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> tuple[Float[Tensor, "N X"], Int[Tensor, "N"]]:
    """The states that predict the masked tokens, and those tokens: state[b, t-1] predicts tokens[b, t].

    This is the only place where the shift by one happens. Only sampled tokens are looked at: prompts and padding
    never reach the head.
    """
    chosen = mask[:, 1:]
    return state[:, :-1][chosen], tokens[:, 1:][chosen]


def placed(values: Float[Tensor, "N"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Values of the masked tokens back at their `[b, t]`; zero elsewhere. The inverse of `predicting`'s selection."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)


def check_rows(mask: Bool[Tensor, "B T"]) -> None:
    """Raise ValueError when a row's first token claims to be sampled: nothing precedes it that could predict it."""
    if mask[:, 0].any():
        raise ValueError("got a row whose first token is marked as sampled; wanted at least one prompt token before it")


def _decoder(model: nn.Module) -> nn.Module:
    return model.get_decoder()


def has_linear_head(model: nn.Module) -> bool:
    """Whether the model's logits are `hidden @ W.T`, found by asking it: capped, scaled and biased ones are not.

    What enters the head has to be the decoder's output, and what leaves it the logits. The latter is asked with numbers
    far apart put in the head's place: a fresh model's logits are so small that a soft cap leaves no trace on them.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        return False
    ids = torch.arange(4, device=head.weight.device)[None]
    probe = torch.linspace(-1e3, 1e3, len(head.weight)).to(head.weight)
    entered = []

    def instead(_: nn.Module, args: tuple[Tensor, ...], logits: Tensor) -> Tensor:
        entered.append(args[0])
        return probe.expand_as(logits)

    was_training = model.training
    model.eval()
    with torch.no_grad():
        hidden = _decoder(model)(input_ids=ids, use_cache=False).last_hidden_state
        with head.register_forward_hook(instead, prepend=True):
            left = model(input_ids=ids, use_cache=False).logits
    model.train(was_training)
    untouched = torch.equal(left.float(), probe.float().expand_as(left))
    return untouched and torch.allclose(entered[0].float(), hidden.float(), rtol=1e-3, atol=1e-3)


class Local:
    """A causal language model on one device with its optimizer.

    Gradients of any objective of the scores reach the parameters through `vjp`'s pullback, micro-batch by
    micro-batch; `update` clips their global norm and steps. With `reference` a frozen copy of the weights as they
    are now stays beside it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float,
        reference: bool,
        micro_tokens: int,
        optimizer: Optimizer,
        schedule: Schedule,
        max_grad_norm: float,
        head_elements: int,
    ) -> None:
        self.model = model
        self.frozen = copy.deepcopy(model).requires_grad_(False) if reference else None
        self.temperature = temperature
        self.optimizer = optimizer(p for p in model.parameters() if p.requires_grad)
        self.base_lr = [group["lr"] for group in self.optimizer.param_groups]
        self.schedule = schedule
        self.micro_tokens = micro_tokens
        self.max_grad_norm = max_grad_norm
        self.head_elements = head_elements
        self.linear_head = has_linear_head(model)
        self.updates = 0

    def _scores(self, model: nn.Module, tokens: Tensor, mask: Tensor) -> Scores:
        check_rows(mask)
        if self.linear_head:
            hidden = _decoder(model)(input_ids=tokens, use_cache=False).last_hidden_state
            state, target = predicting(hidden, tokens, mask)
            weight = model.get_output_embeddings().weight
            logp, entropy = linear_scores(
                state, weight, target, temperature=self.temperature, elements=self.head_elements
            )
        else:
            logits, target = predicting(model(input_ids=tokens, use_cache=False).logits, tokens, mask)
            logp, entropy = dense_scores(logits, target, temperature=self.temperature)
        return Scores(placed(logp, mask), placed(entropy, mask))

    def vjp(self, batch: Batch) -> tuple[Scores, Pullback]:
        """Scores of the batch's sampled tokens and the map `dscores -> theta.grad += J^T dscores`."""
        scores = self._scores(self.model, batch.tokens, batch.mask)

        def pullback(dscores: Scores) -> None:
            # A zero cotangent is left out: the head then skips the entropy's share of the work.
            pairs = [(y, d) for y, d in zip(scores, dscores, strict=True) if bool(d.any())]
            if pairs:
                torch.autograd.backward([y for y, _ in pairs], [d for _, d in pairs])

        return Scores(scores.logp.detach(), scores.entropy.detach()), pullback

    def logp(self, rollout: Rollout) -> Float[Tensor, "B T"]:
        """log pi_theta of the rollout's tokens under the weights as they stand."""
        return self._logp(self.model, rollout)

    def reference(self, rollout: Rollout) -> Float[Tensor, "B T"] | None:
        """log pi_ref of the rollout's tokens; None when no reference is kept."""
        return None if self.frozen is None else self._logp(self.frozen, rollout)

    @torch.no_grad()
    def _logp(self, model: nn.Module, rollout: Rollout) -> Float[Tensor, "B T"]:
        out = torch.zeros_like(rollout.logp_sampled)
        rows = max(1, self.micro_tokens // rollout.tokens.shape[1])
        for i in range(0, len(out), rows):
            part = slice(i, i + rows)
            out[part] = self._scores(model, rollout.tokens[part], rollout.mask[part]).logp
        return out

    def update(self) -> dict[str, float]:
        """Clip the global gradient norm, step, clear; without any gradient, weights and moments stay as they are.

        Raises FloatingPointError, weights unchanged, on NaN or inf.
        """
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = float(nn.utils.clip_grad_norm_(params, self.max_grad_norm))
        if norm != norm or norm in (float("inf"), float("-inf")):
            self.optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(
                f"got a gradient norm of {norm} at optimizer step {self.updates}, wanted a finite one; the weights are "
                "those before this step"
            )
        factor = self.schedule(self.updates)
        for group, lr in zip(self.optimizer.param_groups, self.base_lr, strict=True):
            group["lr"] = lr * factor
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        lr = self.optimizer.param_groups[0]["lr"]
        return {"loss/grad_norm": norm, "optimizer/lr": lr, "optimizer/step": float(self.updates)}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and persistent buffer once (a tied one under its first name), detached."""
        seen: set[int] = set()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor.detach()

    def optimizer_state(self) -> dict[str, Any]:
        """What `restore` needs besides the weights. Its tensors are the optimizer's own: copy what is to last."""
        return {"optimizer": self.optimizer.state_dict(), "updates": self.updates}

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Copy the weights, take over the optimizer state.

        Raises ValueError, nothing changed, naming the first tensor that does not fit.
        """
        own = dict(self.weights())
        if own.keys() != weights.keys():
            odd = sorted(own.keys() ^ weights.keys())[:3]
            raise ValueError(f"got a checkpoint of another model: {odd} in only one of checkpoint and model")
        for name, tensor in own.items():  # all of them before the first one changes
            got, wanted = ((x.dtype, tuple(x.shape)) for x in (weights[name], tensor))
            if got != wanted:
                raise ValueError(f"got {name} {got} in the checkpoint, wanted {wanted}")
        for name, tensor in own.items():
            tensor.copy_(weights[name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]


class Functional:
    """The oracle: dense log-softmax through `functional_call` and `torch.func.vjp`.

    One device, no hooks, no fused anything; it shares nothing with `Local` but the shift. Its weights are a value,
    `params`, and its accumulated gradient another, `grads`.
    """

    def __init__(self, model: nn.Module, *, temperature: float) -> None:
        self.model = model
        self.temperature = temperature
        self.params = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.grads = {name: torch.zeros_like(p) for name, p in self.params.items()}

    def scores(self, params: dict[str, Tensor], tokens: Tensor, mask: Tensor) -> Scores:
        """Scores as a pure function of the parameters."""
        out = torch.func.functional_call(self.model, params, (), {"input_ids": tokens, "use_cache": False})
        logits, target = predicting(out.logits, tokens, mask)
        return Scores(*(placed(x, mask) for x in dense_scores(logits, target, temperature=self.temperature)))

    def vjp(self, batch: Batch) -> tuple[Scores, Pullback]:
        """As `Local.vjp`, with `torch.func.vjp` doing the work."""
        check_rows(batch.mask)
        scores, vjp_fn = torch.func.vjp(lambda params: self.scores(params, batch.tokens, batch.mask), self.params)

        def pullback(dscores: Scores) -> None:
            (grads,) = vjp_fn(dscores)
            self.grads = {name: self.grads[name] + g for name, g in grads.items()}

        return scores, pullback
