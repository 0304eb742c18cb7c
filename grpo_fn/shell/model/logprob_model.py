"""From token ids to log-probabilities and entropies of the sampled tokens: the module that is sharded and trained."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from grpo_fn.shell.model.attention import gather_tokens
from grpo_fn.shell.model.head_chunk.relative_entropy import (
    TeacherHead,
    dense_taught_scores,
    dense_teacher_head,
    linear_taught_scores,
    linear_teacher_head,
)
from grpo_fn.shell.model.logprob_head import (
    dense_energy,
    dense_logp,
    dense_scores,
    linear_energy,
    linear_logp,
    linear_scores,
)
from grpo_fn.shell.model.packed_input import InputPacking, probe, without_dropout

T = TypeVar("T")


def predicting_states(
    state: Shaped[Tensor, "B T ..."], tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> tuple[Shaped[Tensor, "N ..."], Int[Tensor, "N"]]:
    """The states (or where they are) that predict the masked tokens, and those: state[b, t-1] predicts tokens[b, t].

    This is the only place where the shift by one happens. Only sampled tokens are looked at: prompts and padding
    never reach the head.
    """
    chosen = mask[:, 1:]
    return state[:, :-1][chosen], tokens[:, 1:][chosen]


def scatter_to_rows(values: Float[Tensor, "N"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Values of the masked tokens back at their `[b, t]`; zero elsewhere. The inverse of `predicting_states`."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)


def check_rows(mask: Bool[Tensor, "B T"]) -> None:
    """Raise ValueError when a row's first token claims to be sampled: nothing precedes it that could predict it."""
    if mask[:, 0].any():
        raise ValueError("got a row whose first token is marked as sampled; wanted at least one prompt token before it")


class LogprobModel(nn.Module):
    """A causal language model that is asked for scores, not for logits.

    It is the root of whatever shards the model: embedding, last norm and head belong to it, and are whole while its
    forward runs.

    Args:
        model: a causal language model of Hugging Face.
        temperature: of the softmax, which divides the logits.
        logits_chunk_elements: logits that live at once in the head, about.
        input_packing: (model) -> layout of the rows in the model's input: padded, or end to end.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float,
        logits_chunk_elements: int,
        input_packing: Callable[[nn.Module], InputPacking],
    ) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.logits_chunk_elements = logits_chunk_elements
        self.input_packing = input_packing(model)
        self._linear: bool | None = None  # asked in the first forward: only there is a sharded head whole

    def forward(
        self, tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"], teacher: TeacherHead | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy in nats, `[B T]` each; zero where ~mask. The entropy relative to a teacher's."""
        linear, dense = linear_scores, dense_scores
        if teacher is not None:
            linear, dense = (partial(f, teacher=teacher) for f in (linear_taught_scores, dense_taught_scores))
        logp, entropy = self._of_tokens(tokens, mask, linear, dense)
        return scatter_to_rows(logp, mask), scatter_to_rows(entropy, mask)

    @torch.no_grad()
    def teacher_head(self, tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> TeacherHead:
        """What this model says at each sampled token, in their order, before it is multiplied out."""
        return self._of_tokens(tokens, mask, linear_teacher_head, dense_teacher_head)

    @torch.no_grad()
    def logp(self, tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """The log-probabilities of `forward`, bit for bit, without entropies and without gradients."""
        return scatter_to_rows(self._of_tokens(tokens, mask, linear_logp, dense_logp), mask)

    @torch.no_grad()
    def energy(self, tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """|d logp / d logits|^2 of each sampled token, `[B T]`, at the temperature; zero where ~mask.

        One reduction in place of the two of `forward`; what shards the model has to know it as a forward method.
        """
        return scatter_to_rows(self._of_tokens(tokens, mask, linear_energy, dense_energy), mask)

    def _of_tokens(self, tokens: Tensor, mask: Tensor, linear: Callable[..., T], dense: Callable[..., T]) -> T:
        """What the head says of the sampled tokens: by `linear` from states and weight, or by `dense` from logits."""
        if self._linear is None:
            self._linear = has_linear_head(self.model)
        stream = self.input_packing(tokens, mask)
        before, target = predicting_states(stream.at, tokens, mask)
        model_kwargs = {"input_ids": stream.tokens, "use_cache": False, **stream.model_kwargs}
        if not self._linear:
            logits = self.model(**model_kwargs).logits.flatten(0, 1)
            return dense(gather_tokens(logits, before), target, temperature=self.temperature)
        hidden = self.model.get_decoder()(**model_kwargs).last_hidden_state.flatten(0, 1)
        states, weight = gather_tokens(hidden, before), self.model.get_output_embeddings().weight
        elements = self.logits_chunk_elements
        return linear(states, weight, target, temperature=self.temperature, elements=elements)

    @torch.no_grad()
    def parts(
        self, tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"], micro_tokens: int, devices: int
    ) -> list[Int[Tensor, "b"]]:
        """The rows of micro-batches in which each of `devices` devices has at most `micro_tokens` tokens.

        -1 is a row without a sampled token. How this model takes rows may have to be asked first, on all ranks.
        """
        if self.input_packing.fit is None:
            self(*probe(self.model.config.get_text_config().vocab_size, tokens.device))
        return self.input_packing.parts(tokens, mask, micro_tokens, devices)


@torch.no_grad()
def has_linear_head(model: nn.Module) -> bool:
    """Whether the model's logits are `hidden @ W.T`, by a forward pass: capped, scaled and biased ones are not.

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

    with without_dropout(model):  # some may be training: the dropout of adapters
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        with head.register_forward_hook(instead, prepend=True):
            left = model(input_ids=ids, use_cache=False).logits
    untouched = torch.equal(left.float(), probe.float().expand_as(left))
    return untouched and torch.allclose(entered[0].float(), hidden.float(), rtol=1e-3, atol=1e-3)
