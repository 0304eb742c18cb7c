"""Options of TRL that are not carried, with the reason, by pattern of the name; and those that only log or store."""

TRL_LEFT = {
    "vllm_.*": (
        "nothing without use_vllm and the mode or the correction it belongs to; a server's own are flags of "
        "tools/launch/vllm_server.sh, and a colocated engine always sleeps on a GPU"
    ),
    "top_p|top_k|min_p|repetition_penalty|generation_kwargs|cache_implementation": (
        "tokens are drawn from the whole distribution, of which the trainer's log-probs are those"
    ),
    "reward_weights|multi_objective_aggregation": (
        "the reward functions are not in this file: combine.combine.parts, weights"
    ),
    "sync_ref_model|ref_model_.*": "the reference is the model that the run began with",
    "top_entropy_quantile": "there is no mask by entropy; losses.clip_cov and losses.kl_cov choose tokens",
    "deepspeed": "a file of its own: files of scale/ (shard_grad_op is ZeRO-2, full_shard ZeRO-3, offload)",
    "fsdp_config|accelerator_config|parallelism_config|ddp_.*": "mesh.Parallelism and the files of scale/",
    "model_init_kwargs.*": "sections.Compute.dtype, sections.Compute.attention",
    "chat_template_kwargs.*": "the tokenizer's own template is used",
    "use_liger_kernel|use_liger_loss|liger_.*": (
        "log-probs are computed in chunks anyway: sections.Compute.logits_chunk_elements"
    ),
    "max_tool_calling_iterations|tools.*|environment.*": "one turn, without tools",
    "use_adaptive_entropy|entropy_coef_.*|entropy_target": (
        "controllers.adaptive_entropy holds the entropy at a target: it multiplies entropy_bonus, which is not 0 then"
    ),
    "router_aux_loss_coef": "a router's balancing loss is no part of the objective",
    "cast_lm_head_to_fp32": "log-probs are computed in float32 always, from chunks of the head's output",
    "trust_remote_code|model_revision|.*quant.*|load_in_.*bit|lora_task_type|use_rslora|use_dora|lora_modules_.*": (
        "models of the installed transformers, unquantised; adapters are lora.LoRA's"
    ),
    "dataset_.*|datasets.*": "task/rows.gin: rows.jsonl, rows.hub and others",
    "use_transformers_.*|transformers_.*": "the local sampler decodes by continuous batching always",
    "ignore_eval_.*|eval_accumulation_steps|eval_do_concat_batches|batch_eval_metrics": (
        "evaluation is greedy answers to held-out problems, counted over all ranks"
    ),
    "num_generations_eval": "evaluation is greedy; eval/samples.gin draws",
    "shuffle_dataset|data_seed|dataloader_.*": "the order is a function of SEED, every row once an epoch",
    "disable_dropout": "the model's own dropout is always off",
    "label_smoothing_factor|neftune_noise_alpha|group_by_length|auto_find_batch_size|optim_args|optim_target_modules": (
        "there is no such thing here"
    ),
}
TRL_QUIET = [
    r"output_dir|overwrite_output_dir|run_name|report_to|logging_.*|log_.*|num_completions_to_print|push_to_hub.*|hub_.*",
    r"project|trackio_.*|disable_tqdm|remove_unused_columns|do_train|do_eval|do_predict|local_rank|save_strategy|save_only_model",
    r"save_safetensors|load_best_model_at_end|metric_for_best_model|greater_is_better|resume_from_checkpoint|full_determinism",
    r"ds3_gather_for_generation|per_device_eval_batch_size|eval_on_start|eval_delay|ignore_data_skip|wandb_.*|tf32|seed_.*",
    r"gradient_checkpointing_kwargs.*|torch_compile_backend|include_.*|prediction_loss_only|skip_memory_metrics|use_cpu|no_cuda",
    r"pad_to_multiple_of",
]
