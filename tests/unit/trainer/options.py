"""Every option of TRL and transformers, and what it means to a run with a draft; `docs/compatibility.md` shows it.

An option stands in one of four tables. `CASES` are run with and without a draft: the policy is the same, bit for bit.
`REFUSED` are errors when the trainer is made. The options of `ELSEWHERE` are tried by other tests, with an engine or
several ranks. `OUTSIDE` cannot reach the draft, for the reason that is given.
"""

import dataclasses
import json

from trl import GRPOConfig

CASES: dict[str, dict] = {
    "GRPO's loss, a second iteration": dict(loss_type="grpo", num_iterations=2, epsilon=0.01, epsilon_high=0.02, delta=1.5),
    "BNPO": dict(loss_type="bnpo", num_iterations=2),
    "Dr. GRPO, rewards as they are": dict(loss_type="dr_grpo", scale_rewards="none", num_iterations=2),
    "DAPO, rewards scaled by batch": dict(
        loss_type="dapo", scale_rewards="batch", multi_objective_aggregation="normalize_then_sum", reward_weights=[0.5]
    ),
    "CISPO": dict(loss_type="cispo", epsilon_high=5.0, num_iterations=2),
    "SAPO": dict(loss_type="sapo", sapo_temperature_neg=2.0, sapo_temperature_pos=0.5, num_iterations=2),
    "VESPO": dict(
        loss_type="vespo", vespo_k_pos=1.0, vespo_lambda_pos=2.0, vespo_k_neg=2.0, vespo_lambda_neg=1.0, num_iterations=2
    ),
    "LUSPO, ratios of sequences": dict(loss_type="luspo", importance_sampling_level="sequence", num_iterations=2),
    "stale rollouts": dict(steps_per_generation=2, average_tokens_across_devices=False),
    "one generation for two steps": dict(generation_batch_size=8, num_generations=2),
    "accumulation": dict(gradient_accumulation_steps=2, per_device_train_batch_size=2),
    "reference model": dict(
        beta=0.1, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.5, use_bias_correction_kl=False
    ),
    "entropy mask": dict(top_entropy_quantile=0.5, temperature=0.7),
    "entropy bonus": dict(
        entropy_coef=0.01, use_adaptive_entropy=True, entropy_coef_min=0.001, entropy_coef_max=0.1, entropy_coef_delta=0.01,
        entropy_target=3.0,
    ),
    "masked rows": dict(
        mask_truncated_completions=True, off_policy_mask_threshold=0.5, num_iterations=2, max_completion_length=8
    ),
    "head in fp32": dict(cast_lm_head_to_fp32=True, bf16=True),
    "router loss": dict(router_aux_loss_coef=0.01),
    "no dropout, padded rows": dict(disable_dropout=True, pad_to_multiple_of=8),
    "Adafactor": dict(optim="adafactor", weight_decay=0.1),
    "AdamW with arguments": dict(
        optim="adamw_torch", optim_args="amsgrad=True", adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-6,
        lr_scheduler_type="polynomial", lr_scheduler_kwargs={"power": 2.0}, warmup_steps=1, learning_rate=2e-3,
    ),
    "clipping": dict(max_grad_norm=1e-3),
    "bf16": dict(bf16=True),
    "checkpointing": dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}),
    "reentrant checkpointing": dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}),
    "NEFTune": dict(neftune_noise_alpha=5.0),
    "determinism, caches": dict(full_determinism=True, torch_empty_cache_steps=1, use_cache=True),
    "rows in order, by epochs": dict(
        shuffle_dataset=False, data_seed=3, dataloader_drop_last=True, max_steps=-1, num_train_epochs=0.0625,
        label_smoothing_factor=0.1, seed=9,
    ),
    "evaluation": dict(
        eval_strategy="steps", eval_steps=1, eval_on_start=True, per_device_eval_batch_size=4, num_generations_eval=2,
        bf16_full_eval=True,
    ),
    "saving": dict(
        save_strategy="steps", save_steps=1, save_total_limit=1, save_only_model=True, eval_strategy="steps", eval_steps=1,
        load_best_model_at_end=True, metric_for_best_model="reward", greater_is_better=False,
    ),
}  # fmt: skip

REFUSED: dict[str, tuple[dict, str, str]] = {  # changes, part of the message, why
    "auto_find_batch_size": (
        dict(auto_find_batch_size=True), "auto_find_batch_size is not supported by GRPO", "by TRL, without a draft too",
    ),
    "fp16": (
        dict(fp16=True), "fp16=True cannot be used with a draft", "the draft's own backward has no loss scaler; take bf16",
    ),
    "use_liger_kernel": (
        dict(use_liger_kernel=True), "use_liger_kernel=True cannot be used with a draft", "never tried; TRL will drop it",
    ),
    "torch_compile": (
        dict(torch_compile=True), "torch_compile=True cannot be used with a draft", "hidden states are read by hooks",
    ),
    "min_p": (dict(min_p=0.1, use_vllm=True), "min_p=0.1 cannot be used with a draft", "vLLM rejects it under speculation"),
    "vllm_structured_outputs_regex": (
        dict(vllm_structured_outputs_regex="a+", use_vllm=True), "cannot be used with a draft",
        "the draft does not follow the grammar",
    ),
    "vllm_mode": (dict(vllm_mode="server", use_vllm=True), "vllm_mode='server' cannot", "'server'; 'colocate' works"),
}  # fmt: skip

ELSEWHERE: dict[str, str] = {
    "use_vllm vllm_model_impl vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_max_model_length "
    "vllm_tensor_parallel_size": "the engine; `tests/e2e/test_engine.py`, `tests/unit/trainer/test_refusals.py`",
    "top_p top_k repetition_penalty generation_kwargs": "how rollouts are sampled; `tests/e2e/test_engine.py`, "
    "`tests/unit/trainer/test_refusals.py`",
    "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp "
    "fsdp_config deepspeed ds3_gather_for_generation accelerator_config parallelism_config": "several ranks; "
    "`tests/distributed`",
    "resume_from_checkpoint ignore_data_skip restore_callback_states_from_checkpoint output_dir":
        "`tests/unit/trainer/test_resume.py`",
    "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision":
        "`tests/unit/hub/test_card.py`, `tests/unit/test_cli.py`",
    "model_init_kwargs trust_remote_code": "which policy is loaded; `tests/unit/policy`",
}  # fmt: skip

OUTSIDE: dict[str, str] = {
    "vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port":
        "only of `vllm_mode='server'`, which is refused",
    "vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max "
    "vllm_importance_sampling_clip_min vllm_importance_sampling_cap":
        "a factor of the policy's loss, which TRL computes from log-probs; the draft sees hidden states and tokens",
    "cache_implementation use_transformers_continuous_batching transformers_continuous_batching_config "
    "use_transformers_paged": "how rollouts are generated without vLLM, while no hidden states are read",
    "chat_template_kwargs max_tool_calling_iterations": "what the rows say; tokens of tools are not supervised",
    "torch_compile_backend torch_compile_mode": "only of `torch_compile`, which is refused",
    "liger_kernel_config": "only of `use_liger_kernel`, which is refused",
    "optim_target_modules": "which of the policy's weights GaLore and APOLLO take; the draft has an optimizer of its own",
    "logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter log_level log_level_replica "
    "log_completions log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo disable_tqdm "
    "report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id "
    "include_num_input_tokens_seen skip_memory_metrics": "what is logged, and where",
    "prediction_loss_only eval_delay eval_do_concat_batches eval_use_gather_object eval_accumulation_steps "
    "include_for_metrics batch_eval_metrics fp16_full_eval": "evaluation, in which the draft is not trained",
    "save_on_each_node enable_jit_checkpoint": "where and when a checkpoint is written; the draft is written with it",
    "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
    "dataloader_multiprocessing_context dataloader_in_order": "how prompts reach the trainer",
    "remove_unused_columns label_names train_sampling_strategy length_column_name":
        "TRL reads every column and has a sampler of its own",
    "tf32 use_cpu": "the hardware's arithmetic, the same with and without a draft",
    "debug do_train do_eval do_predict local_rank": "not read while training, or a check of transformers' own",
}  # fmt: skip


def spread(table: dict[str, str]) -> dict[str, str]:
    """One entry an option."""
    return {name: reason for names, reason in table.items() for name in names.split()}


def known() -> set[str]:
    """All options that stand in a table."""
    return (
        {name for changes in CASES.values() for name in changes}
        | REFUSED.keys()
        | {*spread(ELSEWHERE), *spread(OUTSIDE)}
    )


def render() -> str:
    """The tables as Markdown."""
    lines = [
        f"All {len(dataclasses.fields(GRPOConfig))} options of TRL's `GRPOConfig`. \"Same\": the policy's weights and log were "
        "compared with those of plain `GRPOTrainer` after two steps on the same rollouts, bit for bit, while the draft trained.",
        "",
        "| option | with a draft | |",
        "|---|---|---|",
    ]
    for field in dataclasses.fields(GRPOConfig):
        lines.append(f"| `{field.name}` | {' | '.join(_row(field.name))} |")
    return "\n".join(lines)


def _row(name: str) -> tuple[str, str]:
    if name in REFUSED:
        return "refused", REFUSED[name][2]
    values = [changes[name] for changes in CASES.values() if name in changes]
    if values:
        return "same", ", ".join(dict.fromkeys(f"`{json.dumps(value)}`" for value in values))
    if name in spread(ELSEWHERE):
        return "tested elsewhere", spread(ELSEWHERE)[name]
    return "no effect on it", spread(OUTSIDE)[name]
