"""The types that travel between the parts of the package.

Axes: P prompts, G samples per prompt, B = P * G rows with b = p * G + g, K turns, T padded tokens, V vocabulary
entries.
A row reads `[prompt | completion | padding]`: with causal attention the padding on the right is never seen by a
real token, so no attention mask exists anywhere outside the sampler.
One index: `logp[b, t]` is the log-probability of `tokens[b, t]` given `tokens[b, <t]`, in nats.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Never, Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils import _pytree

from grpo_fn.core.partials import FunctionMisfit
from grpo_fn.core.problem import Problem, Turn


class Rollout(NamedTuple):
    """A sampler's result for P problems with G samples each."""

    tokens: Int[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]  # True where the token was sampled by the policy
    logp_sampled: Float[Tensor, "B T"]  # under the distribution it was drawn from; anything where ~mask
    truncated: Bool[Tensor, "B"]  # ran into a limit before it stopped by itself
    text: tuple[str, ...]  # the B completions, decoded; of episodes their last turns
    turns: tuple[tuple[Turn, ...], ...] = ()  # of each of the B episodes; () where rows are no episodes


class Reward(NamedTuple):
    """Rewards of a rollout; invalid samples carry no information and change nothing.

    `turns` are what the environment gave at each of up to K turns; a row without turns has one, worth its value
    (`groups.outcome_reward`).
    """

    value: Float[Tensor, "P G"]
    valid: Bool[Tensor, "P G"]
    parts: dict[str, Float[Tensor, "P G"]]
    turns: Float[Tensor, "P G K"]  # 0 where a row has no such turn
    states: Int[Tensor, "P G K"]  # equal where turns of a prompt's samples began in the same state; -1: no such turn


class Groups(NamedTuple):
    """P prompts, what was sampled for them and what it was worth."""

    problems: tuple[Problem, ...]
    rollout: Rollout
    reward: Reward


@dataclass(frozen=True)
class Undeclared:
    """Stands for log-probs that no function of the algorithm declares (`partials.needs`); to read them is an error."""

    name: str

    def read(self, *_: object) -> Never:
        """Raise FunctionMisfit: a function reads what is not there."""
        raise FunctionMisfit(
            f"got a function of step.Algorithm that reads {self.name} and does not declare it, so the run has none; "
            f'expected your_function.NEEDS = frozenset({{"{self.name}"}}) below the function'
        )

    def __getattr__(self, attribute: str) -> Never:
        if attribute.startswith("__"):  # Python's own protocols, copying among them, look for what may be missing
            raise AttributeError(attribute)
        self.read()

    @classmethod
    def __torch_function__(
        cls, function: object, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Never:
        """Every function of torch and every operator with a tensor comes here."""
        leaves = _pytree.tree_leaves((args, kwargs), is_leaf=lambda x: isinstance(x, cls))
        next(x for x in leaves if isinstance(x, cls)).read()

    # Operators without a tensor on the other side: Python looks these up in the class.
    __add__ = __sub__ = __mul__ = __truediv__ = __pow__ = __lt__ = __le__ = __gt__ = __ge__ = read
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rpow__ = read
    __neg__ = __abs__ = __invert__ = __bool__ = __float__ = __len__ = __iter__ = __getitem__ = read


UNDECLARED = {name: Undeclared(name) for name in ("logp_ref", "logp_teacher")}
_pytree.register_constant(Undeclared)  # vmap and tree_map leave it as it is


class Batch(NamedTuple):
    """Rows to learn from. vmapped over its first axis it is one row, whose fields are all `[T]`."""

    tokens: Int[Tensor, "*B T"]
    mask: Bool[Tensor, "*B T"]
    logp_sampled: Float[Tensor, "*B T"]
    logp_old: Float[Tensor, "*B T"]
    logp_ref: Float[Tensor, "*B T"] | Undeclared
    logp_teacher: Float[Tensor, "*B T"] | Undeclared
    adv: Float[Tensor, "*B T"]  # of each token; anything where ~mask
    selected: Bool[Tensor, "*B T"]  # tokens that the loss is to treat apart, if it does (see `algo.masking`)
    group_tokens: Int[Tensor, "*B T"]  # tokens to learn from in the row's whole group, the same for each of its tokens


class Totals(NamedTuple):
    """Denominators of one optimizer step: over all of its micro-batches, never over one of them."""

    tokens: Float[Tensor, ""]  # sampled tokens
    rows: Float[Tensor, ""]  # rows with at least one sampled token to learn from
    samples: Float[Tensor, ""]  # all rows, also those that filters or a missing score left nothing of
    groups: Float[Tensor, ""]  # groups with at least one sampled token to learn from


class Scores(NamedTuple):
    """A policy's log-probs and entropies of given tokens; also the type of the learning signal."""

    logp: Float[Tensor, "*B T"]  # nats, at the sampling temperature; 0 where ~mask
    entropy: Float[Tensor, "*B T"]  # nats, of the token's distribution, or relative to a teacher's; 0 where ~mask


class Gains(NamedTuple):
    """Factors of the objective's coefficients; 1 unless a controller moves them."""

    kl: float
    entropy: float


Arrays = Mapping[str, Tensor]  # of fixed names, shapes and dtypes, on the CPU


class CurriculumState(NamedTuple):
    """The curriculum's state over its A arms: see `algo.curricula`."""

    turns: Int[Tensor, "A"]  # problems that each arm has been asked
    arrays: Arrays  # the curriculum's own


class Carry(NamedTuple):
    """The state that one step passes to the next, besides the policy."""

    drawn: int  # problems taken from the stream so far
    waiting: Groups | None  # groups with signal that were sampled and not yet learned from
    gains: Gains
    steps: int = 0  # steps taken so far
    curriculum: CurriculumState | None = None  # None: problems come in the order of the stream


class RunState(NamedTuple):
    """All there is to resume besides the policy and what is carried."""

    step: int
    seed: int


Pullback = Callable[[Scores], None]


@runtime_checkable
class TrainablePolicy(Protocol):
    """A policy's interface for an optimizer step; the warm start of a tiny model uses only these steps."""

    dropout: bool  # whether the pass that trains differs from one that does not

    def split_rows(self, batch: Batch) -> list[Int[Tensor, "b"]]:
        """The rows of micro-batches that fit the devices; see `batch.trim_rows`."""

    def vjp(self, batch: Batch) -> tuple[Scores, Pullback]:
        """Scores of the batch's tokens, and the map from their cotangent to accumulated parameter gradients."""

    def set_accumulation_steps(self, parts: int) -> None:
        """Set the number of micro-batches before the next update; gradient all-reduce may wait for the last of them."""

    def update(self) -> dict[str, float]:
        """Clip, take one optimizer step, clear the gradients; returns what it did."""


@runtime_checkable
class Policy(TrainablePolicy, Protocol):
    """A model as algorithms see it: log-probs and their pullback, whatever is sharded, recomputed, adapted or fused."""

    def logp(self, rollout: Rollout) -> Float[Tensor, "B T"]:
        """Log-probabilities without gradients, for `logp_old`."""

    def reference(self, rollout: Rollout) -> Float[Tensor, "B T"] | None:
        """Log-probabilities under the frozen reference; None when the policy keeps none."""

    def energy(self, rollout: Rollout) -> Float[Tensor, "B T"]:
        """|d logp / d logits|^2 of each token, for the optimal token baseline."""


@runtime_checkable
class Sampler(Protocol):
    """Draws completions from the current policy."""

    def sample(self, problems: Sequence[Problem], group_size: int, *, key: Tensor) -> Rollout:
        """G completions of every problem; row b = p * G + g depends on (weights, prompt, key, uid, g) alone."""

    def load(self, policy: Policy) -> None:
        """Take the policy's weights."""

    def rest(self) -> None:
        """Nothing is sampled before the next `load`: the device is needed for training."""
