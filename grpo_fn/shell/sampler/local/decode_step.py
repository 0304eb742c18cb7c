"""One token for every row: the buffers of a decoding step, the step, and the texts that end a completion."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from grpo_fn.shell.model import attention
from grpo_fn.shell.sampler.interface import TokenSampler
from grpo_fn.shell.sampler.local.joined_projections import relink
from grpo_fn.shell.sampler.local.kv_cache import (
    AttendFn,
    ChunkAttention,
    DecodeAttention,
    GroupedRows,
    KVCache,
    LongRows,
    PrefillAttention,
    SplitKV,
    attend,
    group_rows,
)

# -- how a step is run: as it is written, or, on CUDA, as a graph (`cuda_steps.GraphCache`)


Step = Callable[[], None]


class Sizes(NamedTuple):
    """Which batches and widths there are, and how many steps are made before anybody looks at what was drawn."""

    rows: Callable[[int], int]  # at least as many
    columns: Callable[[int], int]
    capacity: Callable[[int], int]  # of buffers
    steps: int


def exact_size(n: int) -> int:
    """Any size."""
    return n


@runtime_checkable
class StepRunner(Protocol):
    """Runs the steps of an engine, by their shape."""

    def __call__(self, shape: Hashable, step: Step, state: Sequence[Tensor], *, times: int) -> None:
        """Run the step so many times. Its inputs are in `state`."""

    def drop(self) -> None:
        """Forget what was kept for shapes: what it reads or writes is gone."""


class Eager:
    """Every step as it is written."""

    def __call__(self, shape: Hashable, step: Step, state: Sequence[Tensor], *, times: int) -> None:
        """Run the step so many times."""
        for _ in range(times):
            step()

    def drop(self) -> None:
        """There is nothing to drop."""


def addresses(model: nn.Module) -> tuple[int, ...]:
    """Where the model's weights and buffers lie."""
    return tuple(x.data_ptr() for x in (*model.parameters(), *model.buffers()))


# -- what ends a completion: tokens that do by themselves, and texts that the last token completes


UNSPELT = "\N{REPLACEMENT CHARACTER}"  # what bytes are decoded to that are not a character yet


class Stops:
    """Stop strings, and which of `size` tokens may complete one: text is looked at where one of those was drawn."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], size: int) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.suspect = tokens_of_stops(tokenizer, self.stop, size) if stop else torch.zeros(size, dtype=torch.bool)
        # Every token holds at least one byte, so the last len(stop) tokens hold it; one more in front, because decoders
        # of the SentencePiece kind drop a leading space.
        self.tail = max((len(s.encode()) for s in stop), default=0) + 1

    def first(self, completions: Sequence[list[int]], unseen: Sequence[int]) -> list[int]:
        """How long each completion is when a stop string is in it, of which all but the last `unseen` are known not to
        complete one; 0 for those in which none is."""
        lengths = [0] * len(completions)
        ends = [
            (row, t + 1)
            for row, (tokens, new) in enumerate(zip(completions, unseen, strict=True))
            for t in range(len(tokens) - new, len(tokens))
            if self.suspect[tokens[t]]
        ]
        tails = [completions[row][max(0, end - self.tail) : end] for row, end in ends]
        texts = self.tokenizer.batch_decode(tails, skip_special_tokens=True) if tails else []
        for (row, end), text in zip(ends, texts, strict=True):
            if not lengths[row] and self.holds_stop(completions[row], end, text):
                lengths[row] = end
        return lengths

    def holds_stop(self, tokens: list[int], end: int, text: str) -> bool:
        """Whether a stop string is in the text of the last tokens before `end`, or of up to three more."""
        # A tail may begin within a character. SentencePiece's decoder then spells no byte of the whole run of byte
        # tokens, but one of four starts in a row is the beginning of a character.
        for start in range(end - self.tail - 1, end - self.tail - 4, -1):
            if any(s in text for s in self.stop):
                return True
            if UNSPELT not in text or start < 0:
                return False
            text = self.tokenizer.decode(tokens[start:end], skip_special_tokens=True)
        return any(s in text for s in self.stop)


def tokens_of_stops(tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], size: int) -> Bool[Tensor, "V"]:
    """Tokens whose text holds the last character of a stop string, or bytes that may be part of one.

    Each is decoded behind itself, as decoders drop the space before a first word. Tokens that the tokenizer does not
    know are suspect, and all are where it tidies spaces, because then a token changes the text before it.
    """
    suspect = torch.ones(size, dtype=torch.bool)
    if getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return suspect
    last = {UNSPELT, *(s[-1] for s in stop)}
    ids = range(min(size, len(tokenizer)))
    texts = tokenizer.batch_decode([[i, i] for i in ids], skip_special_tokens=True)
    suspect[: len(ids)] = torch.tensor([not last.isdisjoint(text) for text in texts], dtype=torch.bool)
    return suspect


def token_table(ids: Sequence[int], size: int, device: torch.device) -> Bool[Tensor, "V"]:
    """A table of all tokens in which these are marked; those beyond the vocabulary cannot be drawn."""
    table = torch.zeros(size, dtype=torch.bool)
    table[[i for i in ids if 0 <= i < size]] = True
    return table.to(device)


Layout = PrefillAttention | ChunkAttention | DecodeAttention

KEEP = 1 / 8  # of a device's memory: what captured steps may hold while it is trained on for the first time
MARGIN = 0.1  # of a device's memory that stays free beside captured steps and the training seen so far


class Live(NamedTuple):
    """What is known of the row in each slot. Of one that has ended nothing changes any more."""

    token: Int[Tensor, "S"]  # the last, not yet read by the model
    start: Int[Tensor, "S"]  # tokens of its prompt
    length: Int[Tensor, "S"]  # tokens whose keys and values are known, its prompt's included
    drawn: Int[Tensor, "S"]
    limit: Int[Tensor, "S"]  # most tokens of its completion
    ended: Bool[Tensor, "S"]
    stopped: Bool[Tensor, "S"]  # it ended by itself
    suspect: Bool[Tensor, "S"]  # it may have completed a stop string since that was looked at
    u: Float[Tensor, "S N"]
    tokens: Int[Tensor, "S N+1"]  # those of the completion; the last column is for what counts nowhere
    logp: Float[Tensor, "S N+1"]


def empty_slots(count: int, new: int, device: torch.device) -> Live:
    """Slots without a row."""
    number = partial(torch.zeros, dtype=torch.long, device=device)
    flag = partial(torch.zeros, count, dtype=torch.bool, device=device)
    u = torch.zeros(count, new, dtype=torch.float64, device=device)
    logp = torch.zeros(count, new + 1, device=device)
    return Live(*(number(count) for _ in range(5)), ~flag(), flag(), flag(), u, number(count, new + 1), logp)


class Marks(NamedTuple):
    """Of every token: whether it ends a completion, and whether it may complete a stop string."""

    ends: Bool[Tensor, "V"]
    suspect: Bool[Tensor, "V"]


def draw(live: Live, logits: Float[Tensor, "S V"], token_sampler: TokenSampler, marks: Marks) -> None:
    """The next token of every row, from its own u; in place."""
    width = live.u.shape[1]
    token, logp = token_sampler(logits, live.u.gather(1, live.drawn[:, None].clamp(max=width - 1))[:, 0])
    going = ~live.ended
    at = torch.where(going, live.drawn, width)[:, None]
    live.tokens.scatter_(1, at, token[:, None])
    live.logp.scatter_(1, at, logp[:, None])
    live.token.copy_(token)
    live.drawn.add_(going)
    live.suspect.logical_or_(going & marks.suspect[token])
    live.stopped.logical_or_(going & marks.ends[token])
    live.ended.logical_or_(live.stopped | (live.drawn >= live.limit))


def forward_step(model: nn.Module, ids: Tensor, position: Tensor, layout: Layout, keep: Tensor | int) -> Tensor:
    """Logits of the tokens that `keep` names, `[B K V]`."""
    model_kwargs: dict[str, Any] = {
        "attention_mask": attention.unusable_mask(ids.device),
        "layout": layout,
        "use_cache": False,
    }
    return model(input_ids=ids, position_ids=position, logits_to_keep=keep, **model_kwargs).logits


def prefill_prompts(
    model: nn.Module, prompts: Sequence[list[int]], device: torch.device
) -> tuple[PrefillAttention, Float[Tensor, "P V"]]:
    """Every prompt once, end to end: keys and values, and the logits behind each one's last token."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    context = PrefillAttention(lengths, device=device)
    ids = torch.tensor([token for prompt in prompts for token in prompt], device=device)
    position = torch.cat([torch.arange(len(prompt)) for prompt in prompts]).to(device)
    last = (lengths.cumsum(0) - 1).to(device)
    return context, forward_step(model, ids[None], position[None], context, last)[0]


class StepCode(NamedTuple):
    """What runs in a step besides the model, as it is written or compiled."""

    attend: AttendFn
    wrap_token_sampler: Callable[[TokenSampler], TokenSampler]  # what is run for it
    split_kv: SplitKV | None = None  # in the place of `attend`


EAGER_CODE = StepCode(attend, lambda token_sampler: token_sampler)


class DecodeShape(NamedTuple):
    """What a step looks at: so many slots and columns of what was drawn, of prompts, and of rows of a prompt."""

    rows: int
    columns: int
    prompts: int
    prompt_columns: int
    width: int


class Capacity(NamedTuple):
    """Of an engine's buffers: rows and prompts at once, tokens of the longest completion and the longest prompt."""

    rows: int
    new_tokens: int
    prompts: int
    prompt_tokens: int


class DecodeEngine:
    """A model, and the buffers that it decodes with. They are as large as the largest call so far needed, no larger."""

    def __init__(
        self, model: nn.Module, *, sizes: Sizes, run: StepRunner, code: StepCode, step_model: nn.Module | None = None
    ) -> None:
        self.model, self.sizes, self.run, self.code = model, sizes, run, code
        self.step_model = model if step_model is None else step_model  # what is run in a step, of the same weights
        self.drawn: KVCache | None = None
        self.prompts: KVCache | None = None
        self.live: Live | None = None
        self.marks: Marks | None = None
        self.grouped_rows: dict[DecodeShape, GroupedRows] = {}
        self.addresses: tuple[int, ...] = ()  # of the weights, when steps were last prepared
        self.kept = 0  # bytes of the buffers while something else used the device last
        self.versions: int | None = None  # of the weights then
        self.trained = False  # whether they have changed since: then the peak of memory is that of training, too

    def choices(self) -> dict[str, str]:
        """What was chosen for its steps on this device: how they attend, and whether projections are one product."""
        attends = "matrix products" if self.code.split_kv is None else "split-KV kernel"
        return {"decoding attention": attends, "projections": "apart" if self.step_model is self.model else "joined"}

    def ready(self, capacity: Capacity, marks: Marks) -> None:
        """Have at least that capacity, for exactly `new_tokens` a row, and no row in it."""
        new, sizes = capacity.new_tokens, (capacity.rows, capacity.prompts, capacity.prompt_tokens)
        rows, prompts, longest = (self.sizes.capacity(n) for n in sizes)
        self.trained = self.trained or self.versions not in (None, weight_versions(self.model))
        if not self.fits(rows, prompts, longest, new, len(marks.ends)):
            if (
                self.drawn is not None
            ):  # buffers never shrink: calls of two sizes in turns would make them anew each time
                rows = max(rows, self.drawn.count)
                prompts, longest = max(prompts, self.prompts.count), max(longest, self.prompts.columns)
            self.drop()
            self.drawn, self.prompts = KVCache(rows, new), KVCache(prompts, longest)
            self.live = empty_slots(rows, new, marks.ends.device)
            self.marks = Marks(*(x.clone() for x in marks))
        if addresses(self.model) != self.addresses:  # graphs read weights where they were, and joined ones are copies
            self.run.drop()
            relink(self.step_model)
            self.addresses = addresses(self.model)
        self.live.ended.fill_(True)
        for x, mark in zip(self.marks, marks, strict=True):
            x.copy_(mark)

    def fits(self, rows: int, prompts: int, longest: int, new: int, vocabulary: int) -> bool:
        """Whether the buffers will do."""
        if self.drawn is None or self.drawn.columns != new or len(self.marks.ends) != vocabulary:
            return False
        return self.drawn.count >= rows and self.prompts.count >= prompts and self.prompts.columns >= longest

    def set_grouped_rows(self, shape: DecodeShape, grouped: GroupedRows) -> None:
        """Where rows are in steps of that shape from now on: in tensors that stay, as a captured step reads them."""
        if shape not in self.grouped_rows:
            device = self.live.length.device
            row, place = (x.to(device, copy=True) for x in (grouped.row, grouped.place))
            self.grouped_rows[shape] = GroupedRows(row, place, grouped.width)
        self.grouped_rows[shape].row.copy_(grouped.row)
        self.grouped_rows[shape].place.copy_(grouped.place)

    def advance(
        self, shape: DecodeShape, token_sampler: TokenSampler, *, steps: int, long: LongRows | None = None
    ) -> None:
        """So many tokens for every row in the first `shape.rows` slots; `long` ones see more than `shape.columns`."""

        def step() -> None:
            live = Live(*(x[: shape.rows] for x in self.live))
            context = DecodeAttention(
                self.prompts,
                self.drawn,
                self.grouped_rows[shape],
                live.start,
                live.length,
                prompt_columns=shape.prompt_columns,
                columns=shape.columns,
                attend_fn=self.code.attend,
                split_kv=self.code.split_kv,
                long=long,
            )
            logits = forward_step(self.step_model, live.token[:, None], live.length[:, None], context, 1)[:, -1]
            live.length.add_(~live.ended)
            draw(live, logits, self.code.wrap_token_sampler(token_sampler), self.marks)

        self.run((shape, token_sampler), step, self.live, times=steps)

    def rest(self) -> None:
        """Free the buffers, unless steps were captured with them and what else is done there has space beside them."""
        if self.drawn is None:
            return
        device, size = self.marks.ends.device, self.drawn.bytes + self.prompts.bytes
        keeps = device.type == "cuda" and size <= self.free_bytes(device)
        if not keeps:
            self.drop()
        self.kept, self.versions = size * keeps, weight_versions(self.model)

    def free_bytes(self, device: torch.device) -> float:
        """Bytes that the buffers may hold meanwhile: what the most that was ever allocated leaves, a margin apart.

        Before anything was trained, whose peak that would be, a share of the device.
        """
        if not self.trained:
            return KEEP * memory_budget(device)
        return (1 - MARGIN) * memory_budget(device) - (torch.cuda.max_memory_allocated(device) - self.kept)

    def drop(self) -> None:
        """Free the buffers, and forget what was captured with them."""
        self.run.drop()
        self.grouped_rows.clear()
        self.drawn = self.prompts = self.live = self.marks = None


def weight_versions(model: nn.Module) -> int:
    """A number that changes when a weight is written to."""
    return sum(p._version for p in model.parameters())


def memory_budget(device: torch.device) -> float:
    """Bytes of the device that this process may take."""
    share = torch.cuda.get_per_process_memory_fraction(device)
    return share * torch.cuda.get_device_properties(device).total_memory


# -- is a model fit for it


@torch.no_grad()
def decoding_unsupported_reason(model: nn.Module, device: torch.device) -> str | None:
    """Why the model must not be decoded this way; None when it may. By steps of a short trial."""
    try:
        attention.install(model)
        return attention.packing_unsupported_reason(model, device) or decoding_difference(model, device)
    except torch.OutOfMemoryError:
        raise
    except attention.REFUSALS as error:
        return attention.refusal(error)


def decoding_difference(
    model: nn.Module, device: torch.device, split_kv: SplitKV | None = None, step_model: nn.Module | None = None
) -> str | None:
    """How far logits of two decoding steps are from those of the whole rows; None when that is rounding."""
    size = model.config.get_text_config().vocab_size
    texts = [[(5 * b + t) ** 2 % size for t in range(n)] for b, n in enumerate((7, 3, 7))]
    texts[2][:-2] = texts[0][:-2]  # two rows go on from one prompt
    starts, prompt_slot = [text[:-2] for text in texts[:2]], torch.tensor([0, 1, 0])
    start = torch.tensor([len(text) - 2 for text in texts], device=device)
    prompts, drawn = KVCache(2, len(starts[0])), KVCache(3, 2)
    grouped = group_rows(prompt_slot, prompt_slot >= 0, 2, 2)
    grouped = GroupedRows(grouped.row.to(device), grouped.place.to(device), grouped.width)
    with attention.without_dropout(model):
        whole = [torch.tensor([text], device=device) for text in texts]
        reference = [model(input_ids=ids, use_cache=False).logits[0, -3:] for ids in whole]
        context, logits = prefill_prompts(model, starts, device)
        context.copy(prompts, torch.arange(2, device=device))
        logits_by_step = [logits[prompt_slot.to(device)]]
        for t in (0, 1):
            token = torch.tensor([[text[t - 2]] for text in texts], device=device)
            context = DecodeAttention(
                prompts,
                drawn,
                grouped,
                start,
                start + t,
                prompt_columns=prompts.columns,
                columns=t + 1,
                attend_fn=attend,
                split_kv=split_kv,
            )
            logits_by_step.append(forward_step(step_model or model, token, (start + t)[:, None], context, 1)[:, -1])
    reference = torch.stack(reference).to(model.get_input_embeddings().weight.dtype)  # which says how close is close
    return attention.too_far_apart("logits", torch.stack(logits_by_step, 1) - reference, reference)
