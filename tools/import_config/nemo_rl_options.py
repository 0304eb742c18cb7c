"""Keys of NeMo-RL that are not carried, with the reason, by pattern of the name; and those that only log."""

NEMO_LEFT = {
    r"grpo\.async_grpo\..*": "engine/async_one_step.gin samples whole batches ahead, where it is on",
    r"grpo\.reward_scaling\..*": "weigh the parts of the reward: combine.combine.weights",
    r"grpo\.val_(batch_size|at_start|at_end)": "evaluated before and after; sections.Sampling.max_rows",
    r"grpo\.batch_multiplier": "dynamic sampling samples `prompts` problems at a time",
    r"grpo\.max_rollout_turns": "one turn",
    r"grpo\.(seq_logprob_error_.*|skip_reference_.*|calculate_advantages_on_gpu|adv_estimator\.normalize_advantages)": (
        "there is no such thing here"
    ),
    r"grpo\.(advantage_clip_.*|invalid_tool_call_.*|malformed_thinking_.*)|reward_penalties\..*": (
        "advantages are as the estimator gives them; a penalty is a part of the reward (combine.combine)"
    ),
    r"grpo\.(val_(start_at|num_generations_per_prompt)|stop_at_validation_.*)": (
        "evaluation is greedy, before and after too; eval/samples.gin draws; sections.Health.stop ends a run"
    ),
    r"grpo\.(reward_shaping\.stop_properly_.*|adv_estimator\.reward_weights)": (
        "combine.combine.weights; a truncated answer is left out by masking.drop_truncated"
    ),
    r"loss_fn\.positive_example_nll_weight": "there is no second term of the loss",
    r"policy\.(tokenizer\.use_fastokens|dtensor_cfg\.automodel_kwargs.*)": "transformers' own tokenizer and model",
    r"policy\.generation\.(val_.*|port_range_.*|refit_.*|real_quant_.*|trtllm_.*|dynamo_.*|router.*)": (
        "evaluation is greedy; ports and weight sync are the engine's: docs/running/engines.md"
    ),
    r"loss_fn\.truncated_importance_sampling.*": "nothing is corrected: importance_correction = None",
    r"loss_fn\.kl_(input|output)_clamp_value": "x is capped before exp, its value is not",
    r"policy\.generation\.(top_p|top_k|stop_token_ids)": (
        "tokens are drawn from the whole distribution, to the tokenizer's and model's ends"
    ),
    r"policy\.generation\.(vllm_.*|colocated\.resources.*)": (
        "prompts and new tokens have a limit each here; the rest is as engine/*.gin has it, or a flag of "
        "tools/launch/vllm_server.sh"
    ),
    r"policy\.generation\.(colocated\..*|mcore_.*|sglang_.*)": "vLLM or the local sampler draws here",
    r"policy\.megatron_cfg\..*": "FSDP2 and tensor parallelism: the files of scale/",
    r"policy\.(dynamic_batching|sequence_packing)\..*": (
        "rows always lie end to end without padding, a group's prompt once (packed_input.pack_shared_prompts): "
        "micro_tokens"
    ),
    r"policy\.(logprob_(batch|chunk)_size|generation_batch_size|make_sequence_.*)": (
        "sections.PolicyUpdate.micro_tokens"
    ),
    r"policy\.(tokenizer|hf_config_overrides)\..*": "the model folder's own tokenizer, template and config",
    r"policy\.dtensor_cfg\.(_v2|custom_parallel_plan|sequence_parallel|context_parallel_size)": (
        "the model's own plan of tensor parallelism; a row lies on one device"
    ),
    r"policy\.dtensor_cfg\.(clear_cache.*|env_vars.*)": "variables of the environment are the launcher's",
    r"policy\.dtensor_cfg\.(expert_parallel_size|moe_parallelizer.*)": "experts are sharded like any weight",
    r"policy\.dtensor_cfg\.lora_cfg\.(exclude_modules|dropout_position|lora_A_init|use_triton)": (
        "PEFT's way: dropout before A, A uniform"
    ),
    r"policy\.optimizer\.kwargs\.(foreach|fused)": "fused; scale/adamw_foreach.gin for the other",
    r"policy\.optimizer\.kwargs\.(master_weights|store_param_remainders|exp_avg_dtype|exp_avg_sq_dtype)": (
        "weights and moments are in float32; scale/adamw_8bit.gin has moments in 8 bits"
    ),
    r"policy\.offload_optimizer_for_logprob": "scale/offload.gin",
    r"data\..*": "a task: docs/tasks/tasks.md",
    r"env\..*": "base.gin's verified answers (math-verify) and box; reward_pool.RewardPool.workers",
    r"data_plane\..*": "rows go from sampler to trainer in the ranks",
    r"on_policy_distillation.*": "teachers lie beside the policy, one for all: docs/algorithms/distillation.md",
    r"cluster\..*": "how many ranks there are is the launcher's: docs/running/cluster.md",
}
NEMO_QUIET = [r"logger\..*", r"checkpointing\..*", r"policy\.(refit_.*|draft\..*|megatron_.*|fp8.*)"]
