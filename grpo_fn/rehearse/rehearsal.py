"""A run's step, taken without weights and without a card, for one rank of many."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad

from grpo_fn.algo.step import from_trainer
from grpo_fn.core import prng
from grpo_fn.core.batch import count
from grpo_fn.core.partials import function_and_knobs, uses_of
from grpo_fn.core.types import Batch, Gains, Scores
from grpo_fn.rehearse import step_pieces as pieces
from grpo_fn.rehearse.cards import Card
from grpo_fn.rehearse.counting import CountingMode
from grpo_fn.rehearse.live_storages import LiveStorages
from grpo_fn.rehearse.lone_rank import LoneRank, lone_rank
from grpo_fn.rehearse.rehearsed_model import (
    ModelAnswers,
    RehearsedSpec,
    answered_logprob_model,
    ask_small_copy,
)
from grpo_fn.rehearse.rehearsed_rows import RowShape, rehearsed_batch, rehearsed_rollout
from grpo_fn.shell.model.attention_kernels.attention_backend import attention_note
from grpo_fn.shell.model.blocks import eager
from grpo_fn.shell.model.logprob_head import CARD_SHARE
from grpo_fn.shell.policy.load_and_shard import LoadedModel, load_and_shard
from grpo_fn.shell.sampler.local import local_sampler
from grpo_fn.shell.sampler.local.cuda_graphs import Sizes, buffer_size, graph_size
from grpo_fn.shell.sampler.local.decode_step import LOOK
from grpo_fn.trainer.build import build_policy, model_spec
from grpo_fn.trainer.checks.device_plan import plan_blocks
from grpo_fn.trainer.checks.validate import ValidatedPlan
from grpo_fn.trainer.sections import Settings

ON_HOST = frozenset({"weights", "gradients", "optimizer state"})  # under offload
MESH = ("replicate", "shard", "tensor")
CARD_SIZES = Sizes(partial(graph_size, least=1), partial(graph_size, least=64), buffer_size, LOOK)


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
    answers = ask_small_copy(checked.config, settings.compute.attention)
    calm = replace(settings, parallelism=replace(settings.parallelism, compile=eager))
    mode = CountingMode(LiveStorages(ON_HOST if settings.parallelism.offload else frozenset()), {})
    with (
        lone_rank(asked.ranks, asked.ranks // asked.hosts) as world,
        FakeTensorMode(allow_non_fake_inputs=True),
        mode.live.following(),
        mode,
    ):
        return _counted(calm, checked, asked, answers, mode, world, new, notes(settings, checked, answers))


def _counted(
    settings: Settings,
    checked: ValidatedPlan,
    asked: Asked,
    answers: ModelAnswers,
    mode: CountingMode,
    world: LoneRank,
    new: int,
    said: tuple[str, ...],
) -> Rehearsal:
    algorithm, vocabulary = settings.algorithm, checked.config.get_text_config().vocab_size
    loaded = load_without_weights(settings, checked, asked.card, answers, mode, world)
    ranks, in_host = name_groups(mode, asked)
    policy = build_policy(settings, loaded, world, reference=checked.reference)
    pieces.make_moments(mode, policy)
    repeats: dict[str, int] = {}
    call, sampled = None, None
    if any(uses_of(local_sampler.local, [settings.sampling.sampler])):
        with mode.holding("sampler's own copy"):
            sampled = loaded.decoding()
        mine = -(-algorithm.prompts // asked.ranks)
        call = pieces.Decoding(
            mine * algorithm.group_size,
            mine,
            algorithm.group_size,
            asked.prompt_tokens,
            new,
            settings.sampling.max_rows,
        )
        if answers.grown_cache is None:
            draws = partial(settings.sampling.token_sampler, temperature=settings.sampling.temperature)
            pieces.count_decoding(mode, sampled, call, CARD_SIZES, draws)
            repeats |= call.repeats()
    updates = algorithm.epochs * algorithm.minibatches
    rows = RowShape(algorithm.prompts // algorithm.minibatches, algorithm.group_size, asked.prompt_tokens, new)
    rollout = rehearsed_rollout(rows, vocabulary)
    batch = rehearsed_batch(rollout, rows)
    one, parts = pieces.one_micro_batch(policy, batch, rollout)
    if passes := score_passes(settings, checked):
        pieces.count_log_probs(mode, policy, one, None)
        repeats["log-probs"] = passes * parts * algorithm.minibatches
    parts = pieces.count_training(mode, policy, batch, entropy=reads_entropy(settings))
    repeats |= {"micro-batch": (parts - 1) * updates, "last micro-batch": updates, "update": updates}
    if sampled is not None:
        pieces.count_sync(mode, policy, sampled)
        repeats["sync"] = 1
    return Rehearsal(
        mode,
        repeats,
        rows,
        updates,
        algorithm.minibatches,
        call,
        ranks,
        in_host,
        said,
    )


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
    answered = partial(answered_logprob_model, made=made, answers=answers, card=True)
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
    old_logp = settings.algorithm.old_logp
    own = getattr(old_logp, "func", old_logp) is from_trainer and not checked.own_pass
    return own + checked.reference + len(checked.teachers)


def reads_entropy(settings: Settings) -> bool:
    """Whether the objective has a slope for entropies, found by asking it."""
    mask = torch.tensor([[False, True, True], [False, True, True]])
    logp = torch.full((2, 3), -1.0)

    def slope(scores: Scores) -> Tensor:
        batch = Batch(mask.long(), mask, logp, logp, logp, logp, torch.ones_like(logp), mask, mask.long())
        return settings.algorithm.objective(scores, batch=batch, totals=count(batch), gains=Gains(1.0, 1.0))[0]

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
    card = plan_blocks(settings.parallelism, None, deterministic=settings.compute.deterministic)
    if function_and_knobs(card.parallelism.compile)[0] is not eager:
        found.append("compiled blocks are counted as written: more launches, bytes and activations than compiled")
    found.extend(card.notes)
    name = settings.compute.attention
    if name in ("sdpa_math", "sdpa_efficient", "sdpa_cudnn"):
        found.append(f"attention is counted as torch's flash kernel over packed rows, not as {name}")
    found.extend(attention_note(name, checked.dtype, None))
    if settings.episodes is not None:
        found.append("episodes are rehearsed as rows of one turn, without the environment's answers")
    if settings.lora is not None and settings.lora.dropout:
        found.append("adapters' dropout is counted as it is written")
    if checked.teachers:
        found.append("a teacher's pass is counted as the policy's own")
    return tuple(found)
