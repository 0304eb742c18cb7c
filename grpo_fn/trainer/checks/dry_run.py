"""What a dry run prints: the plan of a run on so many ranks, with the memory of one device."""

from dataclasses import replace

from grpo_fn.core.partials import uses_of
from grpo_fn.shell.model.attention import attention_note
from grpo_fn.shell.policy import memory_estimate
from grpo_fn.shell.policy.memory import Memory
from grpo_fn.shell.sampler.local import local_sampler
from grpo_fn.trainer.checks.device_plan import (
    decoding_notes,
    plan_blocks,
    planned_chunk,
    planned_device,
    precision_notes,
)
from grpo_fn.trainer.plan import ValidatedPlan
from grpo_fn.trainer.sections import Settings


def dry_run_lines(settings: Settings, checked: ValidatedPlan, *, ranks: int, hosts: int) -> list[str]:
    """The plan of a run on so many ranks, evenly on so many hosts, with the memory of one device."""
    mesh = settings.parallelism.shape(ranks, ranks // hosts)
    device = planned_device(settings.compute.device)
    chunk = planned_chunk(settings.compute.logits_chunk_elements, device)
    memory = estimated_memory(settings, checked, ranks=ranks, hosts=hosts, logits_chunk_elements=chunk)
    shape = "replicate {} x shard {} x tensor {}".format(*mesh)
    local = any(uses_of(local_sampler.local, [settings.sampling.sampler]))
    engine = (
        [] if local else ["  nor counted: the sampler's engine, which has a share of the device or devices of its own"]
    )
    return [
        *replace(checked.plan, ranks=ranks, arrangement=shape, memory=memory).lines(),
        *engine,
        *(decoding_notes(checked.config, settings.lora, device) if local else []),
        *plan_blocks(
            settings.parallelism, device, config=checked.config, deterministic=settings.compute.deterministic
        ).notes,
        *precision_notes(checked.dtype, device),
        *attention_note(settings.compute.attention, checked.dtype, device),
        *checked.task.notes,
    ]


def estimated_memory(
    settings: Settings, checked: ValidatedPlan, *, ranks: int, hosts: int, logits_chunk_elements: int
) -> Memory:
    """What one device of so many holds, by sums over the model's weights.

    Args:
        settings: of the run.
        checked: what `validate` found out.
        ranks: devices, evenly on so many hosts.
        hosts: of them.
        logits_chunk_elements: logits in a chunk of the head.

    Returns:
        Its parts.
    """
    plan = replace(checked.plan, ranks=ranks)
    mesh = settings.parallelism.shape(ranks, ranks // hosts)
    local = any(uses_of(local_sampler.local, [settings.sampling.sampler]))
    relative = settings.teacher is not None and settings.teacher.relative_entropy
    return memory_estimate.device_memory(
        checked.config,
        settings.lora,
        settings.parallelism,
        settings.policy.optimizer,
        mesh=mesh,
        dtype=checked.dtype,
        attention=settings.compute.attention,
        reference=checked.frozen,
        teachers=[config for _, config in checked.teachers.values()],
        offload_teachers=settings.teacher is not None and settings.teacher.offload,
        relative_to=next((config for _, config in checked.teachers.values()), None) if relative else None,
        average=checked.plan.average,
        micro_tokens=settings.policy.micro_tokens,
        width=settings.sampling.max_new_tokens,
        logits_chunk_elements=logits_chunk_elements,
        cache=plan.kv_bytes() if local else 0,
        local_sampler=local,
    )
