"""A run's step, taken without weights and without a card, for one rank of many."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad
from transformers import PretrainedConfig

from grpo_fn.algo.needs import needs
from grpo_fn.algo.objective import objective_value
from grpo_fn.algo.step import from_trainer
from grpo_fn.algo.supervised import Stage
from grpo_fn.core import prng
from grpo_fn.core.batch import count
from grpo_fn.core.partials import function_and_knobs, uses_of
from grpo_fn.core.types import Batch, Gains, Scores
from grpo_fn.rehearse import step_pieces as pieces
from grpo_fn.rehearse.cards import Card
from grpo_fn.rehearse.changes import JOINED, SPLIT_KV, HeadShape, count_heads, without_it
from grpo_fn.rehearse.lone_rank import LoneRank, lone_rank
from grpo_fn.rehearse.rehearsed_model import (
    PADDED_KERNELS,
    ModelAnswers,
    RehearsedSpec,
    answered_logprob_model,
    ask_small_copy,
)
from grpo_fn.rehearse.rehearsed_rows import RowShape, rehearsed_batch, rehearsed_rollout
from grpo_fn.rehearse.roofline import DECODING
from grpo_fn.rehearse.tracing.card_kernels import CardHeadKernels, head_kernels, products_of_a_card
from grpo_fn.rehearse.tracing.counting import CountingMode
from grpo_fn.rehearse.tracing.host_transfers import following_shards
from grpo_fn.rehearse.tracing.live_storages import LiveStorages
from grpo_fn.shell.model import hf
from grpo_fn.shell.model.attention import attention_note
from grpo_fn.shell.model.blocks import compiles_decoding, eager
from grpo_fn.shell.model.logprob_model import CARD_SHARE
from grpo_fn.shell.policy.fsdp import FSDPPolicy
from grpo_fn.shell.policy.load_and_shard import LoadedModel, load_and_shard
from grpo_fn.shell.sampler.local import local_sampler
from grpo_fn.shell.sampler.local.split_kv import ARCHITECTURE, split_kv_uncovered_reason
from grpo_fn.trainer.build import build_policy, model_spec
from grpo_fn.trainer.checks.device_plan import plan_blocks
from grpo_fn.trainer.plan import ValidatedPlan
from grpo_fn.trainer.sections import Settings

ON_HOST = frozenset({"weights", "gradients", "optimizer state"})  # under offload
SAMPLED = "sampler's own copy"
HEADS = {"micro-batch": True, "last micro-batch": True, "log-probs": False}  # pieces with a head, and whether it trains


@dataclass(frozen=True)
class Asked:
    """What a rehearsal is asked about."""

    ranks: int
    hosts: int
    card: Card
    prompt_tokens: int  # of every prompt


@dataclass(frozen=True)
class Rehearsal:
    """What one rank does in a step, and what it holds meanwhile."""

    mode: CountingMode
    repeats: Mapping[str, int]  # how often a step takes each piece
    rows: RowShape  # of one update
    updates: int  # a step
    minibatches: int  # of a step's rows
    decoding: pieces.Decoding | None  # of one rank; None: an engine samples
    group_ranks: Mapping[str, int]
    group_in_host: Mapping[str, bool]
    compiled: frozenset[str]  # pieces whose blocks a card has compiled
    on_host: bool  # weights, gradients and moments lie in the host's memory
    notes: tuple[str, ...]


def rehearse(settings: Settings, checked: ValidatedPlan, asked: Asked) -> Rehearsal:
    """Take every piece of the run's step once, at its real shapes.

    Args:
        settings: of the run.
        checked: what `validate` found out.
        asked: ranks, card and lengths.

    Returns:
        What was counted.

    Raises:
        ValueError: ranks that no mesh has, more ranks than prompts, a model that cannot be rehearsed.
    """
    algorithm, sampling = settings.algorithm, settings.sampling
    if algorithm.prompts < asked.ranks:
        raise ValueError(
            f"prompts: got {algorithm.prompts} a step for {asked.ranks} ranks, wanted at least one for each of them"
        )
    settings.parallelism.shape(asked.ranks, asked.ranks // asked.hosts)
    new = sampling.max_new_tokens
    if sampling.max_total_tokens is not None:
        new = min(new, sampling.max_total_tokens - asked.prompt_tokens)
    if new < 1:
        raise ValueError(
            f"--prompt_tokens: got {asked.prompt_tokens}, wanted fewer than sections.Sampling.max_total_tokens = "
            f"{sampling.max_total_tokens}"
        )
    answers, entropy = ask_small_copy(checked.config, settings.compute.attention), reads_entropy(settings)
    calm = replace(settings, parallelism=replace(settings.parallelism, compile=eager))
    mode = CountingMode(LiveStorages(ON_HOST if settings.parallelism.offload else frozenset()), {})
    with (
        lone_rank(asked.ranks, asked.ranks // asked.hosts) as world,
        products_of_a_card(),
        head_kernels(CardHeadKernels()),
        following_shards(mode),
        FakeTensorMode(allow_non_fake_inputs=True),
        mode.live.following(),
        mode,
    ):
        counted = _counted(calm, checked, asked, answers, mode, world, new, entropy)
        mode.close_chain()
    return replace(counted, compiled=compiled_pieces(settings, checked.config), notes=notes(settings, checked, answers))


def _counted(
    settings: Settings,
    checked: ValidatedPlan,
    asked: Asked,
    answers: ModelAnswers,
    mode: CountingMode,
    world: LoneRank,
    new: int,
    entropy: bool,
) -> Rehearsal:
    algorithm, vocabulary = settings.algorithm, checked.config.get_text_config().vocab_size
    loaded = load_without_weights(settings, checked, asked.card, answers, mode, world)
    ranks, in_host = name_groups(mode, asked)
    policy = build_policy(settings, loaded, world, reference=checked.reference)
    pieces.make_moments(mode, policy)
    repeats: dict[str, int] = {}
    call, sampled = None, None
    if any(uses_of(local_sampler.local, [settings.sampling.sampler])):
        with mode.holding(SAMPLED):
            sampled = loaded.decoding()
        call = sampler_call(settings, asked, new)
        if answers.grown_cache is None:
            draws = partial(settings.sampling.token_sampler, temperature=settings.sampling.temperature)
            split_kv = asked.card.capability >= ARCHITECTURE and split_kv_uncovered_reason(sampled) is None
            holder = "weights" if sampled is policy.model else SAMPLED
            pieces.count_decoding(mode, sampled, call, draws, split_kv=split_kv, holder=holder)
            repeats |= call.repeats()
    updates = algorithm.epochs * algorithm.minibatches
    rows = RowShape(algorithm.prompts // algorithm.minibatches, algorithm.group_size, asked.prompt_tokens, new)
    rollout = rehearsed_rollout(rows, vocabulary)
    batch = rehearsed_batch(rollout, rows)
    one, parts = pieces.one_micro_batch(policy, batch, rollout)
    if passes := score_passes(settings, checked):
        pieces.count_log_probs(mode, policy, one, None)
        repeats["log-probs"] = passes * parts * algorithm.minibatches
    parts = pieces.count_training(mode, policy, batch, entropy=entropy)
    repeats |= {"micro-batch": (parts - 1) * updates, "last micro-batch": updates, "update": updates}
    if sampled is not None:
        pieces.count_sync(mode, policy, sampled)
        repeats["sync"] = 1
    if answers.linear_head:
        heads = {piece: trains for piece, trains in HEADS.items() if repeats.get(piece)}
        devices = prod(settings.parallelism.shape(asked.ranks, asked.ranks // asked.hosts)[:2])
        tokens = -(-int(one.mask[:, 1:].sum()) // devices)  # a micro-batch is shared by the ranks that have rows
        count_heads(mode, head_shape(settings, checked, policy, tokens, entropy), heads)
    return Rehearsal(
        mode,
        repeats,
        rows,
        updates,
        algorithm.minibatches,
        call,
        ranks,
        in_host,
        frozenset(),
        settings.parallelism.offload,
        (),
    )


def sampler_call(settings: Settings, asked: Asked, new: int) -> pieces.Decoding:
    """What one rank samples in a step, `new` tokens a row."""
    mine, group = -(-settings.algorithm.prompts // asked.ranks), settings.algorithm.group_size
    return pieces.Decoding(mine * group, mine, group, asked.prompt_tokens, new, settings.sampling.max_rows)


def head_shape(settings: Settings, checked: ValidatedPlan, policy: FSDPPolicy, tokens: int, entropy: bool) -> HeadShape:
    """What the head is given in a micro-batch with so many sampled tokens; `entropy`: it has a slope."""
    config, module = checked.config.get_text_config(), policy.logprob_model
    return HeadShape(
        tokens,
        config.hidden_size,
        config.vocab_size,
        checked.dtype,
        module.temperature,
        module.logits_chunk_elements,
        trained=settings.lora is None,
        entropy=entropy,
    )


def compiled_pieces(settings: Settings, config: PretrainedConfig) -> frozenset[str]:
    """Pieces of a step whose blocks are compiled on a card; of the sampler's steps that is a question of its own."""
    deterministic = settings.compute.deterministic
    plan = plan_blocks(settings.parallelism, None, config=config, deterministic=deterministic)
    eagerly = function_and_knobs(plan.parallelism.compile)[0] is eager
    trained = () if eagerly else ("micro-batch", "last micro-batch", "log-probs")
    compiles = compiles_decoding(hf.empty_model(config), deterministic=deterministic)
    steps = (DECODING, *(without_it(DECODING, name) for name in (SPLIT_KV, JOINED))) if compiles else ()
    return frozenset((*trained, *steps))


def load_without_weights(
    settings: Settings, checked: ValidatedPlan, card: Card, answers: ModelAnswers, mode: CountingMode, world: LoneRank
) -> LoadedModel:
    """The run's model in place, with its reference and teachers, none of which has data."""
    key = prng.key(settings.seed, device="cpu")
    spec, compute = model_spec(settings, checked, "", key, world.device), settings.compute
    packing = compute.input_packing
    made = partial(
        compute.logprob_model,
        temperature=settings.sampling.temperature,
        logits_chunk_elements=head_chunk(settings, card),
        input_packing=packing,
    )
    answered = partial(answered_logprob_model, made=made, answers=answers, card=compute.attention)
    rehearsed = RehearsedSpec(**{**vars(spec), "logprob_model": answered}, mode=mode)
    offloads = settings.parallelism
    if settings.teacher is not None:
        offloads = replace(offloads, offload_reference=settings.teacher.offload)
    teachers = {
        name: replace(rehearsed, config=config, adapters=None, parallelism=offloads)
        for name, (_, config) in checked.teachers.items()
    }
    with mode.holding("weights"):
        return load_and_shard(world, rehearsed, reference=checked.frozen, teachers=teachers)


def head_chunk(settings: Settings, card: Card) -> int:
    """Logits in a chunk of the head, as `logprob_head.chunk_elements` has it on that card."""
    return min(settings.compute.logits_chunk_elements, card.memory // (CARD_SHARE * torch.float32.itemsize))


def name_groups(mode: CountingMode, asked: Asked) -> tuple[dict[str, int], dict[str, bool]]:
    """Name the mesh's process groups for `mode`; how many ranks each has, and whether they are on one host."""
    ranks, in_host, each = {}, {}, asked.ranks // asked.hosts
    for group, name in dist.distributed_c10d._world.pg_names.items():
        members = dist.get_process_group_ranks(group)
        words = group.group_desc or name
        label = {"default_pg": "all ranks"}.get(words, words.removeprefix("mesh_"))
        mode.groups[name] = label
        ranks[label] = len(members)
        in_host[label] = len({rank // each for rank in members}) == 1
    return ranks, in_host


def score_passes(settings: Settings, checked: ValidatedPlan) -> int:
    """Passes without gradients over the step's rows: the trainer's own log-probs, the reference, teachers in place."""
    algo = settings.algorithm
    if isinstance(algo, Stage):
        return 0
    early = settings.teacher or algo.token_mask or algo.reweighting or needs(algo.credit) & {"logp_ref", "trainer_logp"}
    dropout = settings.lora is not None and settings.lora.dropout > 0
    own = algo.old_logp is from_trainer and bool(early or dropout or algo.epochs * algo.minibatches > 1)
    return own + checked.reference + len(checked.teachers)


def reads_entropy(settings: Settings) -> bool:
    """Whether the objective has a slope for entropies: its gradient over two rows of made-up scores, with numbers."""
    mask = torch.tensor([[False, True, True], [False, True, True]])
    logp = torch.full((2, 3), -1.0)

    def slope(scores: Scores) -> Tensor:
        batch = Batch(mask.long(), mask, logp, logp, logp, logp, torch.ones_like(logp), mask, mask.long())
        return objective_value(settings.algorithm.objective, scores, batch, count(batch), Gains(1.0, 1.0))[0]

    return bool(grad(slope)(Scores(logp, -logp)).entropy.any())


def notes(settings: Settings, checked: ValidatedPlan, answers: ModelAnswers) -> tuple[str, ...]:
    """What of the run is rehearsed in another way than it is run, or not at all."""
    found = []
    if answers.unpacked is not None:
        found.append(f"rows are padded, not packed: {answers.unpacked}")
    if not any(uses_of(local_sampler.local, [settings.sampling.sampler])):
        found.append("the sampler's engine is not rehearsed: it has memory and time of its own")
    elif answers.grown_cache is not None:
        found.append(f"decoding is not rehearsed, as its cache grows: {answers.grown_cache}")
    deterministic = settings.compute.deterministic
    card = plan_blocks(settings.parallelism, None, config=checked.config, deterministic=deterministic)
    if function_and_knobs(card.parallelism.compile)[0] is not eager:
        found.append("compiled blocks: activations are counted as written, and each elementwise chain as one kernel")
    found.extend(card.notes)
    name = settings.compute.attention
    if name in PADDED_KERNELS and answers.unpacked is not None:
        found.append(f"attention over padded rows is counted as torch's flash kernel, not as {name}")
    found.extend(attention_note(name, checked.dtype, None))
    if settings.episodes is not None:
        found.append("episodes are rehearsed as rows of one turn, without the environment's answers")
    if settings.lora is not None and settings.lora.dropout:
        found.append("adapters' dropout is counted as it is written")
    if checked.reference and settings.parallelism.offload_reference and not settings.parallelism.offload:
        found.append("the transfers of a reference that lies on the host are not counted")
    if checked.teachers:
        found.append("a teacher's pass is counted as the policy's own")
    return tuple(found)
