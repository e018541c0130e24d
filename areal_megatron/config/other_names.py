"""What verl, TRL, slime, NeMo-RL and OpenRLHF call our config keys, and what of theirs there is none of here.

A name stands for every key that ends with it: `kl_loss_coef` for `actor_rollout_ref.actor.kl_loss_coef`.
"""

from __future__ import annotations

_NAMES = {
    "model.path": """model_name_or_path pretrained_model_name_or_path pretrain hf_checkpoint model_name
        actor_rollout_ref.model.path actor.path policy.model_name""",
    "model.dtype": "bf16 fp16 torch_dtype precision param_dtype model_dtype",
    "data.train": "train_files train_file dataset_name dataset_path prompt_data dataset data.path train_data",
    "data.eval": "val_files eval_prompt_data eval_dataset eval_file test_file val_file test_files",
    "data.max_prompt_tokens": "max_prompt_length prompt_max_len rollout_max_prompt_len max_input_length",
    "rollout.max_new_tokens": """max_response_length max_completion_length max_tokens rollout_max_response_len
        generate_max_len max_new_tokens response_length""",
    "rollout.group_size": """n n_samples num_generations n_samples_per_prompt num_generations_per_prompt group_size
        num_return_sequences rollout_n""",
    "rollout.temperature": "rollout_temperature sampling_params.temperature",
    "rollout.tp": """tensor_parallel_size vllm_tensor_parallel_size rollout_num_gpus_per_engine
        rollout.tensor_model_parallel_size gen_tp infer_tp""",
    "rollout.engines": "rollout_num_gpus vllm_num_engines num_engines num_inference_workers",
    "rollout.max_running": "max_num_seqs sglang_server_concurrency max_concurrent_rollouts max_num_reqs",
    "rollout.max_staleness": """max_head_offpolicyness max_trajectory_age_steps max_off_policy_steps async_level
        max_async_level staleness_threshold staleness eta max_staleness""",
    "rollout.workflow": "custom_generate_function_path rollout_function_path agent_loop multi_turn.enable env_name",
    "rollout.turns": "max_turns max_rollout_turns max_user_turns max_assistant_turns",
    "rollout.filter_groups": "filter_groups.enable dynamic_sampling_filter_path dynamic_filtering use_dynamic_sampling",
    "rollout.dump": "rollout_data_dir log_completions save_debug_rollout_data dump_rollout",
    "rollout.vllm.gpu_memory_utilization": "vllm_gpu_memory_utilization sglang_mem_fraction_static mem_fraction_static",
    "batch_size": """train_batch_size global_batch_size per_device_train_batch_size num_prompts_per_step
        train_global_batch_size rollout_batch_size prompts_per_rollout""",
    "updates": """total_epochs total_training_steps num_train_epochs max_steps num_rollout max_num_steps num_episodes
        total_train_steps max_epochs epochs num_epochs steps num_steps total_steps iterations""",
    "ppo.minibatches": """ppo_mini_batch_size mini_batch_size num_steps_per_rollout num_iterations ppo_epochs
        ppo_n_minibatches num_ppo_epochs""",
    "trainer.microbatch_tokens": """ppo_max_token_len_per_gpu max_tokens_per_gpu micro_batch_size train_micro_batch_size
        ppo_micro_batch_size_per_gpu gradient_accumulation_steps use_dynamic_bsz micro_train_batch_size
        ppo_micro_batch_size max_tokens_per_mb""",
    "trainer.tp": "tensor_model_parallel_size",
    "trainer.pp": "pipeline_model_parallel_size pipeline_parallel_size",
    "trainer.cp": "context_parallel_size ulysses_sequence_parallel_size ring_attn_size",
    "trainer.ep": "expert_model_parallel_size expert_parallel_size",
    "trainer.etp": "expert_tensor_parallel_size",
    "trainer.vpp": "virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage",
    "trainer.dp": "data_parallel_size actor_num_gpus_per_node n_gpus_per_node gpus_per_node num_gpus world_size",
    "trainer.recompute": """gradient_checkpointing enable_gradient_checkpointing recompute_granularity
        activation_checkpointing""",
    "machine.shared": "colocate colocate_all_models vllm_mode hybrid_engine",
    "machine.slots": "n_gpus gpus",
    "optimizer.lr": "learning_rate actor_learning_rate optim.lr",
    "optimizer.schedule": "lr_scheduler_type lr_decay_style warmup_style lr_scheduler lr_schedule",
    "optimizer.warmup_steps": "warmup_ratio lr_warmup_steps lr_warmup_steps_ratio lr_warmup_iters",
    "optimizer.clip_grad": "max_grad_norm grad_clip gradient_clipping max_norm",
    "optimizer.beta1": "adam_beta1 betas",
    "optimizer.beta2": "adam_beta2",
    "optimizer.eps": "adam_epsilon adam_eps",
    "optimizer.on_host": "optimizer_offload optimizer_cpu_offload adam_offload offload_optimizer",
    "ppo.algorithm": """adv_estimator advantage_estimator loss_type algorithm.name scale_rewards loss_agg_mode
        policy_loss.loss_mode norm_adv_by_std_in_grpo importance_sampling_level algorithm""",
    "ppo.clip_low": "eps_clip epsilon cliprange clip_ratio clip_ratio_low ratio_clip_min clip_range",
    "ppo.clip_high": "eps_clip_high epsilon_high clip_ratio_high ratio_clip_max",
    "ppo.dual_clip": "clip_ratio_c ratio_clip_c dual_clip_ratio eps_clip_c",
    "ppo.penalty.kl": """kl_coef kl_loss_coef use_kl_loss use_kl_in_reward kl_coeff init_kl_coef kl_ctl kl_ctrl
        reference_policy_kl_penalty kl_penalty_coef kl_beta kl""",
    "ppo.penalty.kl_form": "kl_loss_type kl_penalty kl_estimator reference_policy_kl_type",
    "ppo.penalty.kl_model": "ref_load ref_model ref.path reference_model teacher_model",
    "ppo.penalty.entropy": "entropy_coef entropy_coeff ent_coef entropy_loss_coef entropy_bonus",
    "ppo.correction.truncate": "tis_clip use_tis tis_imp_ratio_cap vllm_importance_sampling_cap rollout_is_threshold",
    "ppo.critic.gae_lambda": "lam lambd lambda gae_lambda",
    "ppo.critic.gamma": "discount_factor discount",
    "ppo.critic.lr": "critic_learning_rate critic.optim.lr critic_lr",
    "sft.turns": "assistant_only_loss completion_only_loss loss_mask_type train_on_input train_on_inputs",
    "sft.max_tokens": "max_seq_length max_seq_len cutoff_len sequence_len",
    "reward.function": """reward_funcs reward_fn reward_function custom_rm_path rm_type rm_url remote_rm_url reward_func
        custom_reward_function custom_reward_function.path custom_reward_function.name reward_fn_path""",
    "served.reward.path": """reward.model reward_model_path reward_model.path rm_path reward_pretrain
        reward_model.model.path""",
    "reward.truncated": "mask_truncated_completions overlong_buffer overlong_filtering overlong_buffer.enable",
    "eval.every": """test_freq eval_steps eval_interval val_period val_check_interval eval_every evaluation_steps
        eval_freq""",
    "eval.n": "val_kwargs.n n_samples_per_eval_prompt eval_n num_eval_samples",
    "eval.temperature": "val_kwargs.temperature eval_temperature",
    "eval.top_p": "val_kwargs.top_p eval_top_p",
    "checkpoint.every": "save_freq save_steps save_interval save_period ckpt_freq save_every",
    "checkpoint.keep": "save_total_limit keep_top_k max_ckpt_num max_actor_ckpt_to_keep keep_last_n",
    "checkpoint.hf_every": "save_hf save_hf_steps hf_save_interval",
    "resume": "resume_from_checkpoint resume_mode load resume_from_path load_checkpoint",
    "runs_dir": "output_dir default_local_dir checkpoint_dir save_path log_dir save logdir fileroot",
    "name": "run_name experiment_name exp_name wandb_run_name trial_name",
    "track.to=wandb": "logger report_to use_wandb wandb wandb.enabled wandb_enabled wandb_mode",
    "track.to=mlflow": "mlflow mlflow.enabled mlflow_enabled",
    "track.to=swanlab": "swanlab swanlab.enabled swanlab_enabled",
    "track.to=trackio": "trackio trackio.enabled",
    "track.project": "project_name wandb_project",
    "seed": "random_seed data_seed",
}
_NONE_HERE = {
    "there are no quantized weights: parameters are trained in model.dtype": """load_in_4bit load_in_8bit quantization
        bnb fp8 quant qlora""",
    "trainers are Megatron's, not FSDP or DeepSpeed: divide the model with trainer.tp, trainer.pp and trainer.dp": """
        fsdp fsdp_config zero_stage deepspeed zero fsdp_size dtensor_cfg strategy""",
    "vLLM alone generates, in engines of its own: see rollout.engines and rollout.tp": """use_vllm rollout.name
        inference_backend rollout.backend use_sglang rollout.mode""",
    "training samples from the whole distribution; eval.top_p and eval.top_k are for evaluations": """top_p top_k
        rollout_top_p rollout_top_k min_p""",
    "areal submit and areal plan take --nodes N --gpus M, areal train takes this machine": """nodes nnodes num_nodes
        actor_num_nodes cluster.num_nodes n_nodes""",
    "columns have fixed names (docs/data.md): rename them, or use a published format": """prompt_key input_key label_key
        answer_key response_key reward_fn_key chat_template_key apply_chat_template""",
    "there is no Ray: processes are started by areal train, areal submit or MPI": "ray ray_init ray_kwargs",
}
REMARKS = {
    "batch_size": "it counts answers: prompts × rollout.group_size",
    "updates": "an update trains batch_size answers; there are no epochs to count",
    "ppo.minibatches": "it is how many there are in a batch, not their size",
    "trainer.microbatch_tokens": "answers are packed up to this number of tokens",
    "rollout.engines": "an engine has rollout.tp GPUs",
    "optimizer.warmup_steps": "it counts optimizer steps, ppo.minibatches an update",
    "ppo.penalty.kl": "0 is no penalty",
}
"""One of our keys → in what it differs from theirs."""
OTHER_NAMES = {name: key for key, names in _NAMES.items() for name in names.split()}
"""A name → our key."""
NONE_HERE = {name: sentence for sentence, names in _NONE_HERE.items() for name in names.split()}
"""A name → what to say of it."""


def find(key: str, names: dict[str, str]) -> str:
    """Returns the entry of `names` for the longest end of a dotted key, "" if there is none."""
    parts = key.lower().replace("-", "_").split(".")
    ends = (".".join(parts[first:]) for first in range(len(parts)))
    return next((names[end] for end in ends if end in names), "")
