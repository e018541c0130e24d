"""Options that a config passes through to vLLM (`rollout.vllm`) and to megatron-core (`trainer.megatron`).

Here are the names that the project sets itself, with the reason and the key to use instead. All others are taken under
the names and with the values of the two libraries, which check them (engine/vllm_options.py, trainer/check_fields.py).
Imports neither: a config is loaded where they are not installed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

VLLM = "rollout.vllm"
MEGATRON = "trainer.megatron"


@dataclass(frozen=True)
class Owned:
    """Options that a config may not pass through."""

    reason: str
    """What decides them instead, or why nothing may."""
    names: tuple[str, ...]

    @classmethod
    def of(cls, reason: str, names: str) -> Owned:
        """`names` are separated by white space."""
        return cls(reason, tuple(names.split()))


_MODEL = """model model_tag tokenizer revision code_revision tokenizer_revision hf_config_path config_format runner
    convert model_impl model_class_overrides trust_remote_code generation_config override_generation_config
    skip_tokenizer_init pooler_config"""
_ADAPTERS = """enable_lora lora_modules max_loras max_lora_rank lora_dtype max_cpu_loras lora_target_modules
    default_mm_loras fully_sharded_loras enable_tower_connector_lora enable_mixed_moe_lora_format
    enable_moe_shared_loras max_lora_cls_labels"""
_DIVIDED = """pipeline_parallel_size decode_context_parallel_size prefill_context_parallel_size data_parallel_size
    data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address data_parallel_rpc_port
    data_parallel_backend data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb
    enable_ep_weight_filter"""
_PLACES = """distributed_executor_backend nnodes node_rank master_addr master_port device_ids numa_bind numa_bind_nodes
    numa_bind_cpus headless api_server_count data_parallel_supervisor_port"""
_SERVER = """host port uds grpc grpc_port api_key ssl_keyfile ssl_certfile ssl_ca_certs enable_ssl_refresh ssl_cert_reqs
    ssl_ciphers root_path middleware enable_scale_out disable_uvicorn_access_log"""
_TRANSFERS = """kv_transfer_config kv_events_config kv_offloading_size kv_offloading_backend ec_transfer_config
    kv_sharing_fast_prefill"""
_LISTENS = "the launcher chooses address and port, and each route asks for the secret of the run; see machine.host"
_ANYWHERE = (
    Owned.of("use speculative_config", "spec_method spec_model spec_tokens"),
    Owned.of("a config is kept in the run folder, and secrets are not; log in with `hf auth login`", "hf_token"),
    Owned.of("options in a file would be checked by nobody; give them one by one", "config"),
)

VLLM_OWNED = (
    Owned.of("model.path, its config.json and its generation settings decide it", _MODEL),
    Owned.of("use model.dtype and model.head_dtype", "dtype hf_overrides"),
    Owned.of("use rollout.first_weights", "load_format model_loader_extra_config"),
    Owned.of(
        "weight updates are written into parameters as they are loaded, in model.dtype",
        """quantization quantization_config allow_deprecated_quantization moe_backend cpu_offload_gb
        cpu_offload_params offload_backend offload_group_size offload_num_in_group offload_prefetch_step
        offload_params enable_sleep_mode enable_eplb eplb_config expert_placement_strategy enable_elastic_ep""",
    ),
    Owned.of(
        "engines have the adapters that are trained, or none; use lora.rank and lora.targets",
        _ADAPTERS,
    ),
    Owned.of(
        "weights are transferred by the resharder; use reshard.staging",
        "weight_transfer_config worker_cls worker_extension_cls",
    ),
    Owned.of("use rollout.tp", "tensor_parallel_size"),
    Owned.of("use rollout.expert_parallel", "enable_expert_parallel"),
    Owned.of("use rollout.replay_routes", "enable_return_routed_experts"),
    Owned.of(
        "the resharder knows engines of rollout.tp ranks, and nothing that divides them otherwise",
        _DIVIDED,
    ),
    Owned.of(
        "the launcher places engines on slots and nodes; use rollout.engines and rollout.tp",
        _PLACES,
    ),
    Owned.of(_LISTENS, _SERVER),
    Owned.of("engines serve the model under the name policy", "served_model_name"),
    Owned.of("use data.max_prompt_tokens and rollout.max_new_tokens", "max_model_len"),
    Owned.of("use rollout.max_running", "max_num_seqs max_num_active_seqs max_num_queued_reqs max_num_queued_tokens"),
    Owned.of("use seed", "seed"),
    Owned.of(
        "trainers need the log-probability of each token in the distribution that it was sampled from",
        """logprobs_mode logits_processors return_sampling_mask watermark_config diffusion_config scheduler_cls
        enable_trace_replay""",
    ),
    Owned.of(
        "keys and values outside of the engine would outlive the weights that they were computed with; see "
        "rollout.kv_policy",
        _TRANSFERS,
    ),
    Owned.of("the controller reads the counters of engines", "disable_log_stats show_hidden_metrics_for_version"),
    *_ANYWHERE,
)
"""The options of vLLM's command line that are not passed through."""


def served_owned(name: str) -> tuple[Owned, ...]:
    """Returns the options that are not passed through to the engines of a served model, e.g. of `judge`. What weight
    updates rule out, such as quantization, a frozen model may have."""
    own = f"served.{name}"
    return (
        Owned.of(f"{own}.path, its config.json and its generation settings decide it", _MODEL),
        Owned.of(f"use {own}.dtype", "dtype hf_overrides"),
        Owned.of("its weights are read from the files of its folder", "load_format model_loader_extra_config"),
        Owned.of(f"use {own}.adapter", _ADAPTERS),
        Owned.of("its weights stay as they are", "weight_transfer_config worker_cls worker_extension_cls"),
        Owned.of(f"use {own}.tp", "tensor_parallel_size"),
        Owned.of(f"an engine of it is on {own}.tp slots of one node", f"{_DIVIDED} {_PLACES}"),
        Owned.of(_LISTENS, _SERVER),
        Owned.of(f"engines serve it under the name {name}", "served_model_name"),
        Owned.of(f"use {own}.max_length", "max_model_len"),
        Owned.of("they would change what log-probabilities say", "logprobs_mode logits_processors scheduler_cls"),
        Owned.of("engines of served models keep keys and values to themselves", _TRANSFERS),
        *(Owned.of("use ppo.penalty.kl_top_k", "max_logprobs"),) * (name.startswith("teacher")),
        *_ANYWHERE,
    )


VLLM_ON_CPU = (
    Owned.of("on CPU vLLM's first requests would compile for seconds", "enforce_eager compilation_config"),
    Owned.of(
        "on CPU a step that prefills part of a prompt cannot rewind its random generator", "enable_chunked_prefill"
    ),
    Owned.of("on CPU give the size of the KV cache with kv_cache_memory_bytes", "gpu_memory_utilization"),
)
"""Likewise, on CPU."""

VLLM_SHARED = (
    Owned.of(
        "with machine.shared the launcher divides the memory of a GPU between the pools",
        "gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override",
    ),
)
"""Likewise, where engines and trainers share GPUs."""

MEGATRON_OWNED = (
    Owned.of(
        "model.path/config.json decides it",
        """num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels softmax_scale
        softmax_type normalization layernorm_epsilon layernorm_zero_centered_gamma qk_layernorm qk_l2_norm add_qkv_bias
        add_bias_linear gated_linear_unit activation_func glu_linear_offset activation_func_clamp_value
        rotary_interleaved window_size window_attn_skip_freq attention_output_gate multi_latent_attention no_rope_freq
        mrope_section experimental_attention_variant dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk
        dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss linear_attention_freq linear_conv_kernel_dim
        linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads is_hybrid_model
        mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path heterogeneous_block_specs
        hetereogenous_dist_checkpoint mtp_num_layers mtp_loss_scaling_factor mtp_standalone num_moe_experts
        moe_ffn_hidden_size moe_layer_freq moe_shared_expert_intermediate_size moe_shared_expert_gate
        moe_shared_expert_overlap moe_latent_size moe_router_topk moe_router_pre_softmax moe_router_score_function
        moe_router_topk_limited_devices moe_router_num_groups moe_router_group_topk moe_router_topk_scaling_factor
        moe_router_enable_expert_bias moe_apply_probs_on_input
        apply_residual_connection_post_layernorm apply_query_key_layer_scaling""",
    ),
    Owned.of("use model.dtype", "params_dtype pipeline_dtype bf16 fp16 enable_autocast autocast_dtype"),
    Owned.of("use trainer.tp", "tensor_model_parallel_size sequence_parallel"),
    Owned.of("use trainer.cp", "context_parallel_size"),
    Owned.of("use trainer.pp", "pipeline_model_parallel_size"),
    Owned.of("use trainer.vpp", "virtual_pipeline_model_parallel_size microbatch_group_size_per_vp_stage"),
    Owned.of("use trainer.ep", "expert_model_parallel_size"),
    Owned.of("use trainer.etp", "expert_tensor_parallel_size moe_extended_tp"),
    Owned.of(
        "use trainer.expert_dispatch",
        "moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend",
    ),
    Owned.of("use trainer.recompute=full and trainer.recompute_layers", "recompute_method recompute_num_layers"),
    Owned.of(
        "whole layers are recomputed with trainer.recompute=full, parts of them with recompute_modules",
        "moe_layer_recompute distribute_saved_activations num_microbatches_with_partial_activation_checkpoints",
    ),
    Owned.of("use trainer.attention", "attention_backend"),
    Owned.of(
        "trainer/attention.py is the attention of packed rows, and divides them over trainer.cp itself",
        """attention_softmax_in_fp32 masked_softmax_fusion cp_comm_type hierarchical_context_parallel_sizes
        hybrid_context_parallel max_seqlen_per_dp_cp_rank use_kitchen use_kitchen_attention kitchen_attention_backend
        fp8_dot_product_attention fp8_multi_head_attention qk_clip qk_clip_alpha qk_clip_threshold
        log_max_attention_logit""",
    ),
    Owned.of(
        "the kernels that the GPU and the installed packages allow are taken (docs/hardware.md)",
        """bias_activation_fusion apply_rope_fusion fused_single_qkv_rope gradient_accumulation_fusion
        moe_permute_fusion moe_router_fusion moe_grouped_gemm moe_use_legacy_grouped_gemm bias_dropout_fusion
        persist_layer_norm use_fused_weighted_squared_relu transformer_impl use_te_activation_func
        activation_func_fp8_input_store""",
    ),
    Owned.of("trainer/logprobs.py computes log-probabilities", "cross_entropy_loss_fusion cross_entropy_fusion_impl"),
    Owned.of(
        "trainers would compute other log-probabilities than the engines, whose model has none of it",
        """hidden_dropout attention_dropout moe_input_jitter_eps moe_router_force_load_balancing moe_token_dropping
        moe_token_drop_policy moe_expert_capacity_factor moe_pad_expert_input_to_capacity fp32_residual_connection
        test_mode""",
    ),
    Owned.of(
        "gradients are divided by the trained tokens of all replicas (trainer/model.py)", "calculate_per_token_loss"
    ),
    Owned.of(
        "the trainer sets these functions itself",
        """timers finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func init_method
        output_layer_init_method embedding_init_method _cpu_offloading_context""",
    ),
    Owned.of(
        "weights come from model.path",
        """perform_initialization use_cpu_initialization init_method_std embedding_init_method_std
        init_model_with_meta_device""",
    ),
    Owned.of(
        "the trainer sets the schedule of pipeline stages and what they send (trainer/pipeline.py)",
        """variable_seq_lengths overlap_p2p_comm batch_p2p_comm batch_p2p_sync use_ring_exchange_p2p
        overlap_p2p_comm_warmup_flush deallocate_pipeline_outputs pipeline_model_parallel_comm_backend
        num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage pipeline_model_parallel_layout
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split defer_embedding_wgrad_compute
        wgrad_deferral_limit delay_wgrad_compute overlap_moe_expert_parallel_comm ep_overlap_early_attn_memory_release
        barrier_with_L1_time""",
    ),
    Owned.of(
        "its buffers would have to be made by the trainer, which makes none",
        """tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs
        tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs
        tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend symmetric_ar_type""",
    ),
    Owned.of("use rollout.replay_routes", "moe_enable_routing_replay"),
    Owned.of(
        "products in FP8 and FP4 want multiples of 16 tokens, to which packed micro-batches are not padded",
        """fp8 fp8_recipe fp8_param fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len
        fp8_amax_compute_algo fp8_wgrad fp4 fp4_recipe fp4_param fp4_quantizer_factory tp_only_amax_red
        first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 quant_recipe
        moe_router_padding_for_fp8 moe_router_padding_for_quantization disable_parameter_transpose_cache""",
    ),
    Owned.of("weights are published from the memory of the device", "cpu_offloading_weights"),
    Owned.of(
        "CUDA graphs need micro-batches of one length, and packed ones have many",
        """enable_cuda_graph external_cuda_graph cuda_graph_impl cuda_graph_scope cuda_graph_use_single_mempool
        cuda_graph_retain_backward_graph cuda_graph_warmup_steps use_te_rng_tracker""",
    ),
    Owned.of(
        "trainers generate nothing; engines do",
        """flash_decode inference_rng_tracker inference_sampling_seed use_inference_optimized_layers
        inference_fuse_tp_communication mlp_chunks_for_prefill batch_invariant_mode""",
    ),
)
"""The fields of megatron-core's TransformerConfig that are not passed through."""

RECOMPUTED = ("core_attn", "layernorm", "mlp", "moe")
"""Valid values in recompute_modules: the megatron-core modules that occur in the models here."""
OFFLOADING = ("cpu_offloading", "fine_grained_activation_offloading")
"""Fields of TransformerConfig that move activations to the memory of the host."""
SPECULATIVE = "speculative_config"
SIZES = ("block_size", "kv_cache_memory_bytes", "max_num_batched_tokens", "num_gpu_blocks_override")
"""Options of vLLM that the plan of memory counts with, beside shares and dtypes."""

_STATES = ("auto", "bfloat16", "float16", "float32")
"""The dtypes that states of linear attention may have in engines."""
_NAME = re.compile("[A-Za-z][A-Za-z0-9_]*")

Require = Callable[[bool, str, str], None]
"""(whether it holds, key, problem): raises ConfigError if it does not."""


def why_owned(name: str, groups: Iterable[Owned]) -> str:
    """Returns the reason for which an option is not passed through; "" if it is."""
    return next((group.reason for group in groups if name in group.names), "")


def check_names(section: str, given: Mapping[str, Any], groups: Iterable[Owned], require: Require) -> None:
    """Requires of the options of a section (VLLM or MEGATRON) that none is the project's own to set."""
    for name in given:
        whole, dot, _ = name.partition(".")
        require(not dot, f"{section}.{name}", f"is given whole: {section}.{whole}={{…}}")
        plain = name.lstrip("-").replace("-", "_")
        require(_NAME.fullmatch(name) is not None, f"{section}.{name}", f"is not how names are written here: {plain}")
        reason = why_owned(name, groups)
        require(not reason, f"{section}.{name}", f"cannot be passed through: {reason}")


def check_vllm(given: Mapping[str, Any], on_cpu: bool | None, shared: bool, require: Require) -> None:
    """Requires that rollout.vllm has nothing of the project's own. `on_cpu`: None if that is not known yet."""
    owned = (*VLLM_OWNED, *VLLM_ON_CPU * (on_cpu is True), *VLLM_SHARED * shared)
    check_names(VLLM, given, owned, require)
    check_sizes(VLLM, given, require)


def check_served(name: str, given: Mapping[str, Any], on_cpu: bool | None, require: Require) -> None:
    """Requires the same of the options for the engines of a served model."""
    section = f"served.{name}.vllm"
    check_names(section, given, (*served_owned(name), *VLLM_ON_CPU * (on_cpu is True)), require)
    check_sizes(section, given, require)


def check_sizes(section: str, vllm: Mapping[str, Any], require: Require) -> None:
    """Requires of what the sizes of caches are counted with that it has the right type."""
    for name in SIZES:
        value = vllm.get(name)
        whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
        require(value is None or whole, f"{section}.{name}", f"must be a whole number above 0, is {value!r}")
    dtype, skipped = vllm.get("kv_cache_dtype"), vllm.get("kv_cache_dtype_skip_layers")
    require(dtype is None or isinstance(dtype, str), f"{section}.kv_cache_dtype", f"must be a text, is {dtype!r}")
    require(
        skipped is None or isinstance(skipped, list),
        f"{section}.kv_cache_dtype_skip_layers",
        f"must be a list such as ['0', '1'], is {skipped!r}",
    )
    for name in ("mamba_cache_dtype", "mamba_ssm_cache_dtype"):
        value = vllm.get(name)
        require(value is None or value in _STATES, f"{section}.{name}", f"is none of {', '.join(_STATES)}: {value!r}")
    share = vllm.get("gpu_memory_utilization")
    number = isinstance(share, int | float) and not isinstance(share, bool) and 0 < share <= 1
    require(
        share is None or number,
        f"{section}.gpu_memory_utilization",
        f"must be a number above 0 and at most 1, is {share!r}",
    )


def check_speculation(vllm: Mapping[str, Any], starts_empty: bool, require: Require) -> None:
    """Requires that speculation samples from the policy, and that a draft model has its own weights. `starts_empty`:
    whether engines begin without weights."""
    speculation = vllm.get(SPECULATIVE)
    if speculation is None:
        return
    key = f"{VLLM}.{SPECULATIVE}"
    require(isinstance(speculation, Mapping), key, "must be a dict such as {method: ngram, num_speculative_tokens: 4}")
    require(
        speculation.get("rejection_sample_method", "standard") != "synthetic",
        key,
        "rejection_sample_method=synthetic accepts tokens that the policy did not sample; leave it out",
    )
    model, ranks = speculation.get("model"), speculation.get("draft_tensor_parallel_size", 1)
    tokens = speculation.get("num_speculative_tokens")
    whole = tokens is None or (type(tokens) is int and tokens > 0)
    require(whole, key, f"num_speculative_tokens must be a whole number above 0, is {tokens!r}")
    require(model is None or isinstance(model, str), key, f"model must be a folder, is {model!r}")
    require(
        isinstance(ranks, int) and ranks > 0, key, f"draft_tensor_parallel_size must be a whole number, is {ranks!r}"
    )
    require(
        not (starts_empty and "model" in speculation),
        key,
        "an engine that begins without weights has none for a draft model either: set rollout.first_weights=model",
    )


def check_modules(megatron: Mapping[str, Any], experts: bool, require: Require) -> None:
    """Requires that the model has what is to be recomputed."""
    for module, of_experts in (("mlp", False), ("moe", True)):
        require(
            module not in (megatron.get("recompute_modules") or ()) or experts is of_experts,
            f"{MEGATRON}.recompute_modules",
            f"{module}: the model has {'experts: moe' if experts else 'no experts: mlp'} names its layers",
        )


def check_balance(megatron: Mapping[str, Any], require: Require) -> None:
    """Requires that tokens go to the experts to which engines send them."""
    kinds = megatron.get("moe_router_load_balancing_type")
    require(
        "sinkhorn" not in str(kinds),
        f"{MEGATRON}.moe_router_load_balancing_type",
        "sinkhorn sends tokens to other experts than the engines do",
    )


def check_recomputation(megatron: Mapping[str, Any], recompute: str, require: Require) -> None:
    """Requires that megatron-core's recomputation is asked for as a whole, and that the trainer's own is off."""
    granularity, modules = megatron.get("recompute_granularity"), megatron.get("recompute_modules")
    require(
        granularity in (None, "selective"),
        f"{MEGATRON}.recompute_granularity",
        f"must be selective, is {granularity!r}; for whole layers use trainer.recompute=full",
    )
    require(
        modules is None or granularity is not None,
        f"{MEGATRON}.recompute_modules",
        f"would change nothing without {MEGATRON}.recompute_granularity=selective",
    )
    require(
        granularity is None or recompute in ("auto", "none"),
        f"{MEGATRON}.recompute_granularity",
        f"trainer.recompute={recompute} recomputes parts of layers, too: set it to none",
    )
    require(
        modules is None or isinstance(modules, list),
        f"{MEGATRON}.recompute_modules",
        f"must be a list such as [core_attn], is {modules!r}",
    )
    for module in modules or []:
        require(
            module in RECOMPUTED,
            f"{MEGATRON}.recompute_modules",
            f"{module!r} is none of {', '.join(RECOMPUTED)}",
        )
