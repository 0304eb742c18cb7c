"""The rest of a NeMo-RL YAML: model, precision, adapters, engine, optimizer and schedule."""

from collections.abc import Mapping

from import_draft import DIFFERS, LEFT, Draft, Number, Reader, Text, adamw, colocated, schedule

PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": None}


def nemo_policy(key: Reader, draft: Draft) -> None:
    """Model, precision, adapters, arrangement, sampling."""
    model = key("policy.model_name", str, None)
    if model is not None:
        draft.macros["MODEL"] = Text(model)
    if key("policy.megatron_cfg.enabled", bool, False):
        raise ValueError("policy.megatron_cfg.enabled: got true, wanted a file for dtensor_cfg")
    if not key("policy.dtensor_cfg.enabled", bool, True):
        raise ValueError("policy.dtensor_cfg.enabled: got false without megatron_cfg, wanted true")
    precision = key.choice("policy.precision", "bfloat16", PRECISIONS)
    draft.includes += [f"scale/{precision}.gin"] if precision else []
    for knob, name in (("cpu_offload", "offload"), ("activation_checkpointing", "activation_checkpointing")):
        if key(f"policy.dtensor_cfg.{knob}", bool, False):
            draft.includes.append(f"scale/{name}.gin")
    draft.knobs["mesh.Parallelism.tp"] = key.count("policy.dtensor_cfg.tensor_parallel_size", 1)
    draft.knobs["sections.Sampling.temperature"] = key.positive("policy.generation.temperature", 1.0, zero=False)
    stops = key("policy.generation.stop_strings", list, [])
    draft.knobs["sections.Sampling.stop"] = [Text(stop) for stop in stops if stop]
    lora(key, draft)


def nemo_engine(key: Reader, draft: Draft) -> None:
    """vLLM where the training is or on servers, and sampling ahead."""
    place = "policy.generation."
    ahead = key("grpo.async_grpo.enabled", bool, False)
    backend, beside = key(f"{place}backend", str, None), key(f"{place}colocated.enabled", bool, True)
    if ahead and (backend != "vllm" or beside):
        raise ValueError(f"grpo.async_grpo.enabled: got true, wanted {place}backend vllm with colocated.enabled false")
    if backend not in (None, "vllm"):
        draft.note(LEFT, f"{place}backend", f"{backend!r}: vLLM (files of engine/) or the local sampler draws here")
    elif backend and beside:
        name = f"{place}vllm_cfg.gpu_memory_utilization"
        share, ranks = key.positive(name, 0.6, zero=False), key.count(f"{place}vllm_cfg.tensor_parallel_size", 1)
        colocated(draft, share=share, ranks=ranks, name=name)
        eager = key(f"{place}vllm_cfg.enforce_eager", bool, False)
        draft.knobs["vllm_sampler.colocated_sampler.enforce_eager"] = eager
    elif backend:
        draft.includes.append("engine/vllm_dedicated.gin")
        draft.note(
            DIFFERS, f"{place}colocated.enabled", "start tools/launch/vllm_server.sh first; SERVERS says where they are"
        )
    if ahead:
        nemo_ahead(key, draft)


def nemo_ahead(key: Reader, draft: Draft) -> None:
    """The next batches sampled while the policy trains."""
    place = "grpo.async_grpo."
    if "objective.policy_objective.importance_correction" not in draft.knobs:
        raise ValueError(f"loss_fn.use_importance_sampling_correction: got false with {place}enabled, wanted true")
    draft.includes.append("engine/async_one_step.gin")
    draft.knobs["sections.Sampling.max_staleness"] = key.count(f"{place}max_trajectory_age_steps", 1)
    if key(f"{place}in_flight_weight_updates", bool, False):
        draft.knobs["vllm_servers.DedicatedEngine.pause"] = "keep"
    draft.note(
        DIFFERS, f"{place}max_trajectory_age_steps", "whole batches in their order here, not single trajectories"
    )


def lora(key: Reader, draft: Draft) -> None:
    """Adapters, where they are enabled."""
    name = "policy.dtensor_cfg.lora_cfg."
    targets, every = key(f"{name}target_modules", list, []), key(f"{name}match_all_linear", bool, True)
    rank, alpha = key.count(f"{name}dim", 8), key.positive(f"{name}alpha", 32, zero=False)
    dropout = key.positive(f"{name}dropout", 0.0, zero=True)
    if not key(f"{name}enabled", bool, False):
        return
    if dropout >= 1:
        raise ValueError(f"{name}dropout: got {dropout}, wanted less than 1")
    if not every and not targets:
        raise ValueError(f"{name}target_modules: got none without match_all_linear, wanted names")
    draft.includes.append("scale/lora.gin")
    draft.knobs |= {"lora.LoRA.rank": rank, "lora.LoRA.alpha": alpha, "lora.LoRA.dropout": dropout}
    draft.knobs["lora.LoRA.targets"] = "all-linear" if every else [Text(target) for target in targets]
    draft.note(DIFFERS, f"{name}match_all_linear", "all linear layers of the blocks; the head is not among them")


def nemo_optimizer(key: Reader, draft: Draft) -> None:
    """AdamW, and a warm-up where the schedule begins with one."""
    name = key("policy.optimizer.name", str, "torch.optim.AdamW")
    if name.rpartition(".")[2] not in ("AdamW", "FusedAdam"):
        raise ValueError(f"policy.optimizer.name: got {name!r}, wanted torch.optim.AdamW or a FusedAdam")
    betas = key("policy.optimizer.kwargs.betas", list, [0.9, 0.999])
    if len(betas) != 2 or not all(isinstance(beta, Number) and 0 <= beta < 1 for beta in betas):
        raise ValueError(f"policy.optimizer.kwargs.betas: got {betas}, wanted two numbers in [0, 1)")
    place = "policy.optimizer.kwargs."
    adamw(
        draft,
        "adamw",
        lr=key.positive(f"{place}lr", 5e-6, zero=True),
        beta1=betas[0],
        beta2=betas[1],
        eps=key.positive(f"{place}eps", 1e-8, zero=False),
        weight_decay=key.positive(f"{place}weight_decay", 0.01, zero=True),
    )
    if draft.knobs["optimizer.adamw.weight_decay"]:
        draft.note(DIFFERS, "weight_decay", "on matrices alone here, not on norms and biases")
    stages = key("policy.scheduler", list, [])
    updates = draft.knobs["step.Algorithm.minibatches"]  # of a step; schedules count steps there, updates here
    warm, odd = 0, []
    for stage in stages:
        name = str(stage.get("name", "")).rpartition(".")[2] if isinstance(stage, Mapping) else str(stage)
        kwargs = stage.get("kwargs", {}) if isinstance(stage, Mapping) else {}
        if name == "LinearLR" and isinstance(kwargs, Mapping) and isinstance(kwargs.get("total_iters"), int):
            warm = max(0, kwargs["total_iters"]) * updates
        elif name not in ("ConstantLR", ""):
            odd.append(name)
    if odd:
        draft.note(LEFT, "policy.scheduler", f"{odd}: constant after the warm-up")
    if warm:
        draft.note(
            DIFFERS,
            "policy.scheduler",
            f"from its start_factor in {warm // updates} steps there; from 1/{warm + 1} to 1 in {warm} updates here",
        )
    schedule(draft, "constant", warm, 0, 0.0)
    draft.knobs["sections.PolicyUpdate.max_grad_norm"] = key.positive("policy.max_grad_norm", 1.0, zero=True) or 1e9
