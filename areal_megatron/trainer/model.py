"""A megatron-core GPTModel that computes what a Hugging Face model of a known family computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from areal_megatron.config import Config
from areal_megatron.models.adapter import Adapter
from areal_megatron.models.architecture import Architecture, architecture, read_config
from areal_megatron.models.qwen2 import QKV_BIAS
from areal_megatron.models.qwen3 import HEAD_NORMS
from areal_megatron.models.qwen3_next import SHARED_EXPERT_GATE
from areal_megatron.models.table import ROUTER_BIAS, Cut, Dimensions
from areal_megatron.reshard.boxes import Layout
from areal_megatron.reshard.trainer_layout import MegatronSizes
from areal_megatron.trainer import hardware
from areal_megatron.trainer.adapter import add_adapters, is_factor
from areal_megatron.trainer.elementwise import ROTATION, Rotation
from areal_megatron.trainer.gathered import settle
from areal_megatron.trainer.layers import block_spec
from areal_megatron.trainer.marks import mark
from areal_megatron.trainer.megatron_fields import with_fields
from areal_megatron.trainer.parallel import pipeline_group, replicas
from areal_megatron.trainer.patches import accumulate_in_products, cpu_passes_for_cuda
from areal_megatron.trainer.recompute import recompute
from areal_megatron.trainer.routing import replay_routes

BUCKET_ELEMENTS: int | None = None
"""Size of the buckets in which data-parallel ranks reduce gradients and gather parameters; None: Megatron's default."""


class PolicyModel(GPTModel):
    """GPTModel whose last pipeline stage returns the final hidden states [T, 1, hidden] instead of logits.

    trainer/logprobs.py turns these into log-probabilities without ever holding the logits of all tokens.
    """

    def _postprocess(self, hidden_states, *_, **__):
        if self.post_process:
            settle(self.output_layer)
        return hidden_states

    @property
    def output_weight(self) -> torch.Tensor:
        """[padded vocabulary / tp, hidden], on the last pipeline stage."""
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
            assert weight is not None  # as this is the first stage or the last
            return weight
        return cast(torch.Tensor, self.output_layer.weight)


class ValueModel(GPTModel):
    """GPTModel whose last pipeline stage returns a value for each token, float32 [T].

    A value head takes the place of the output layer.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any):
        super().__init__(config, *args, **(options | {"share_embeddings_and_output_weights": False}))
        if self.post_process:
            self.output_layer = ValueHead(config)

    def _postprocess(self, hidden_states, *_, **__):
        return self.output_layer(hidden_states) if self.post_process else hidden_states


class ValueHead(torch.nn.Module):
    """Maps final hidden states to values, float32 [T], the same on all tensor-parallel ranks.

    The hidden states are [T, 1, hidden], or [T / tp, 1, hidden] under sequence parallelism. The weight is zero at
    first: no state is worth more than another.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self._sharded = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        mark(self.weight, sequence_parallel=config.sequence_parallel)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        values = F.linear(hidden.float(), self.weight.float())
        if self._sharded:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values.flatten()


class Rotary(RotaryEmbedding):
    """Rotary embeddings with the frequencies of Hugging Face, for each token of a packed micro-batch."""

    def __init__(self, hf: PretrainedConfig, original: torch.nn.Module, device: torch.device):
        torch.nn.Module.__init__(self)
        self.rotary_interleaved = False
        self.seq_len_interpolation_factor = None
        self.cp_group = original.cp_group
        frequencies, self._factor = _rotary_frequencies(hf)
        self.inv_freq = frequencies.to(device)

    def get_rotary_seq_len(self, inference_context, transformer, transformer_input, config, packed=None, **_):
        if packed is not None:
            return packed.positions
        length = super().get_rotary_seq_len(inference_context, transformer, transformer_input, config)
        return torch.arange(length, device=self.inv_freq.device)

    def forward(self, positions: torch.Tensor, **_: Any) -> torch.Tensor:
        """int64 [T] → angles [T, 1, 1, rotated dimensions of a head]"""
        angles = torch.outer(positions.to(self.inv_freq.dtype), self.inv_freq)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class LatentRotary(Rotary):
    """Rotary embeddings of latent attention, whose queries and keys are rotated in part."""

    def get_rotary_seq_len(self, inference_context, transformer, transformer_input, config, packed=None):
        positions = super().get_rotary_seq_len(inference_context, transformer, transformer_input, config, packed)
        return positions if packed is not None else positions[:, None]

    def forward(self, positions: torch.Tensor, **_: Any) -> tuple[torch.Tensor, float]:
        """int64 [T], or [s, 1] without packing → angles [T, 1, rotated] or [s, 1, 1, rotated], and what the rotated
        parts are multiplied by"""
        angles = super().forward(positions.flatten()).view(*positions.shape, 1, -1)
        return angles, self._factor


def described(path: str) -> tuple[PretrainedConfig, Architecture]:
    """Returns config.json of a Hugging Face folder as transformers reads it, and the model that it describes.

    A model may have a name that transformers does not know, as Kimi-K2 does: its class decides. Raises ConfigError.
    """
    held = architecture(read_config(path))
    return CONFIG_MAPPING[held.model_type].from_pretrained(path, local_files_only=True), held


def build_model(
    config: Config,
    sizes: MegatronSizes,
    device: torch.device,
    kind: type[GPTModel] = PolicyModel,
    *,
    replays_routes: bool = False,
    frozen: bool = False,
    base: Layout | None = None,
) -> list[DistributedDataParallel]:
    """Builds this rank's part of the model of model.path: a module for each of its virtual pipeline stages.

    The modules are wrapped for data parallelism, and their parameters are not initialised; a `frozen` model's have no
    gradients. `replays_routes`: its experts are those that the engines choose. `base`: what this rank holds of the
    model, for one that gets the adapters of the config. The config must have passed `model_check.check_model`, and
    Megatron's process groups must exist.
    """
    hf, held = described(config.model.path)
    absent = hardware.kernels(device, config.model.dtype)
    transformer = transformer_config(config, sizes, hf, held, device)
    if transformer.gradient_accumulation_fusion:
        accumulate_in_products()
    overlap = config.trainer.dp * config.trainer.cp > 1 and not frozen
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        bucket_size=BUCKET_ELEMENTS,
    )
    chunks = []
    for stage in range(sizes.vpp):
        with device, cpu_passes_for_cuda():
            chunk = _chunk(kind, transformer, sizes, hf, held, stage, grouped=not absent["experts"])
        _rotate(chunk, hf, device)
        recompute(chunk, config.trainer)
        if replays_routes:
            replay_routes(chunk)
        chunk.requires_grad_(not frozen)
        if base and (adapter := Adapter.of(config.lora)):
            add_adapters(chunk, held, adapter, base, config.lora.dropout)
        chunks.append(DistributedDataParallel(transformer, settings, chunk, disable_bucketing=stage > 0))
        if not overlap:
            _keep_to_itself(chunks[-1])
    # Megatron would move the routers' biases with every gradient: while they are sent, and where a step is skipped. The
    # routers have read it; Learner.step moves the biases.
    transformer.moe_router_enable_expert_bias = False
    if overlap:  # gradients are reduced in the backward pass of the last micro-batch only
        no_sync: Any = [chunk.no_sync for chunk in chunks]
        transformer.no_sync_func = no_sync if sizes.vpp > 1 else no_sync[0]  # Megatron's type of it lacks the list
    return chunks


def _rotate(chunk: GPTModel, hf: PretrainedConfig, device: torch.device) -> None:
    if not chunk.config.multi_latent_attention:
        chunk.rotary_pos_emb = Rotary(hf, chunk.rotary_pos_emb, device)
        return
    for layer in chunk.decoder.layers:
        attention = cast(Any, layer.self_attention)
        attention.rotary_pos_emb = LatentRotary(hf, attention.rotary_pos_emb, device)


def _keep_to_itself(chunk: DistributedDataParallel) -> None:
    """Leaves out the collectives of groups of one rank, which Megatron calls all the same."""
    for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
        if group.intra_distributed_optimizer_instance_size == 1:
            group.start_grad_sync = group.start_param_sync = lambda *_, **__: None


def _finalise_gradients(chunks: list[DistributedDataParallel], trained: torch.Tensor, *groups: Any, **options: Any):
    """Megatron's function, but that the device divides by the number of trained tokens without being asked for it.

    trained: int32, on the last stage; without any the gradient is zero.
    """
    finalize_model_grads([*chunks], None, *groups, **options)
    stages, group = pipeline_group(), replicas()
    if stages.size() > 1:
        torch.distributed.broadcast(trained, group_src=stages.size() - 1, group=stages)
    if group.size() > 1:
        torch.distributed.all_reduce(trained, group=group)
    factor: Any = 1.0 / trained.clamp(min=1)  # for Megatron a number
    for chunk in chunks:
        chunk.scale_gradients(factor)


def policy_of(chunks: list[DistributedDataParallel]) -> PolicyModel:
    """Returns the policy's last virtual stage on this rank, which has the output layer if any has."""
    policy = chunks[-1].module
    assert isinstance(policy, PolicyModel)
    return policy


def named_parameters(chunks: list[DistributedDataParallel]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yields this rank's parameters, and the factors of their adapters, with their names in
    `reshard.trainer_layout.layout`."""
    for number, chunk in enumerate(chunks):
        prefix = f"model{number}." if len(chunks) > 1 else ""
        for name, parameter in chunk.module.named_parameters():
            yield prefix + name, parameter


def factors(chunks: list[DistributedDataParallel]) -> dict[str, torch.Tensor]:
    """Returns the live values of the factors of adapters, by name."""
    return {name: parameter.data for name, parameter in named_parameters(chunks) if is_factor(name)}


def tensors(chunks: list[DistributedDataParallel]) -> dict[str, torch.Tensor]:
    """Returns the live values of the model's parameters without adapters, and of the routers' biases, by name."""
    found = {name: parameter.data for name, parameter in named_parameters(chunks) if not is_factor(name)}
    for number, chunk in enumerate(chunks):
        prefix = f"model{number}." if len(chunks) > 1 else ""
        for name, values in chunk.module.named_buffers():
            if name.endswith(ROUTER_BIAS.megatron):
                found[prefix + name] = values
    return found


def _chunk(
    kind: type[GPTModel],
    transformer: TransformerConfig,
    sizes: MegatronSizes,
    hf: PretrainedConfig,
    held: Architecture,
    stage: int,
    grouped: bool,
) -> GPTModel:
    chunk = kind(
        transformer,
        block_spec(transformer, sizes, stage, grouped),  # pyright: ignore[reportArgumentType]: it takes a block's, too
        vocab_size=sizes.padded_vocabulary(held.dimensions.vocabulary),
        max_sequence_length=hf.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=held.tied,
        position_embedding_type="rope",
        vp_stage=stage if sizes.vpp > 1 else None,
    )
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            # Megatron does this for ep above 1 only. But if etp differs from tp, the experts' replicas differ from
            # those of the rest of the model whatever ep is, and their gradients belong to the experts' groups.
            mark(parameter, allreduce=False)
    return chunk


def parallel_sizes(config: Config, device: torch.device) -> MegatronSizes:
    """Returns the trainer pool's sizes. Layers are TransformerEngine's if it is installed, the device is CUDA, they get
    no adapters and none is a gated delta net."""
    # Adapters need what TransformerEngine's layers give to no one: the norm of their input, which they compute within.
    plain = config.has_adapters or architecture(read_config(config.model.path)).dimensions.linear
    engine = device.type == "cuda" and HAVE_TE and not plain
    return MegatronSizes.of(config.trainer, transformer_engine=engine)


def transformer_config(
    config: Config, sizes: MegatronSizes, hf: PretrainedConfig, held: Architecture, device: torch.device
) -> TransformerConfig:
    dtype, dimensions = getattr(torch, config.model.dtype), held.dimensions
    absent = hardware.kernels(device, config.model.dtype)
    fusions = hardware.fusions(absent, bool(dimensions.experts))
    if device.type == "cpu" and not dimensions.experts:  # trainer/elementwise.py has one for CPUs, without weights
        fusions["bias_activation_fusion"] = True
    latents = dimensions.latent > 0
    own = dict(
        num_layers=dimensions.layers,
        hidden_size=dimensions.hidden,
        ffn_hidden_size=dimensions.ffn or dimensions.expert_ffn,
        num_attention_heads=dimensions.heads,
        num_query_groups=dimensions.kv_heads,
        kv_channels=dimensions.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        qk_layernorm=latents or held.has(HEAD_NORMS[0]),
        add_qkv_bias=held.has(QKV_BIAS),
        attention_output_gate=any(row.cut is Cut.GATED_HEADS for row in held.layer),
        layernorm_zero_centered_gamma=held.family.added_to_one,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        moe_router_bias_update_rate=0.0,
        # The gradient is divided by the trained tokens of all replicas, not averaged over replicas.
        calculate_per_token_loss=True,
        finalize_model_grads_func=_finalise_gradients,
        # "alltoall" is required with variable lengths, even without experts
        moe_token_dispatcher_type=config.trainer.expert_dispatch,
        **fusions,
        **(_latents(hf, dimensions) if latents else _scale(hf, dimensions)),
        **(_experts(sizes, hf, held) if dimensions.experts else {}),
        **(_linear_attention(dimensions) if dimensions.linear else {}),
        **_parallel(config, sizes, dimensions.layers, on_cuda=device.type == "cuda"),
        **_whole_layers_again(config, dimensions.layers),
    )
    made = with_fields(own, config.trainer.megatron, MLATransformerConfig if latents else TransformerConfig)
    vars(made)[ROTATION] = Rotation(_factor_of_part(hf, dimensions), in_one_pass=not absent["rotary"])
    return made


def _scale(hf: PretrainedConfig, dimensions: Dimensions) -> dict[str, Any]:
    # Hugging Face multiplies queries and keys by the rope factor when it rotates them.
    factor = _rotary_frequencies(hf)[1] / _factor_of_part(hf, dimensions)
    return {"softmax_scale": factor**2 / dimensions.head_dim**0.5}


def _factor_of_part(hf: PretrainedConfig, dimensions: Dimensions) -> float:
    """Returns the factor of rotated queries and keys where only a part of a head is rotated, so that the scale of the
    softmax cannot have it; else 1."""
    if dimensions.latent:
        return 1.0  # LatentRotary has it
    frequencies, factor = _rotary_frequencies(hf)
    return factor if 2 * len(frequencies) < dimensions.head_dim else 1.0


def _latents(hf: PretrainedConfig, d: Dimensions) -> dict[str, Any]:
    rope = hf.rope_parameters
    return {
        "q_lora_rank": d.query_latent or None,
        "kv_lora_rank": d.latent,
        "qk_head_dim": d.head_dim - d.rotated,
        "qk_pos_emb_head_dim": d.rotated,
        "v_head_dim": d.value_dim,
        "rope_type": "yarn",  # the one whose embeddings may have a factor; LatentRotary takes their place
        # The scale of the softmax grows with these two alone.
        "rotary_scaling_factor": rope.get("factor") or 1.0,
        "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
    }


def _whole_layers_again(config: Config, layers: int) -> dict[str, Any]:
    if config.trainer.recompute != "full":
        return {}
    count = config.trainer.recompute_layers or layers  # of a virtual stage, which has no more than the model
    return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": count}


def _experts(sizes: MegatronSizes, hf: PretrainedConfig, held: Architecture) -> dict[str, Any]:
    d = held.dimensions
    return {
        "num_moe_experts": d.experts,
        "moe_ffn_hidden_size": d.expert_ffn,
        "moe_shared_expert_intermediate_size": d.shared_ffn or None,
        "moe_shared_expert_gate": held.has(SHARED_EXPERT_GATE),
        # A list names the tensors of checkpoints by layer, as they must be where layers differ.
        "moe_layer_freq": [0] * d.dense_layers + [1] * d.sparse_layers if d.dense_layers else 1,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": sizes.grouped_experts,
        **(_sigmoid_router(hf) if held.has(ROUTER_BIAS) else _softmax_router(hf)),
    }


def _linear_attention(d: Dimensions) -> dict[str, Any]:
    return {
        # A list names the tensors of checkpoints by layer.
        "linear_attention_freq": [int(number in d.linear) for number in range(d.layers)],
        "linear_conv_kernel_dim": d.kernel,
        "linear_key_head_dim": d.linear_key_dim,
        "linear_value_head_dim": d.linear_value_dim,
        "linear_num_key_heads": d.linear_key_heads,
        "linear_num_value_heads": d.linear_value_heads,
    }


def _softmax_router(hf: PretrainedConfig) -> dict[str, Any]:
    balanced = hf.output_router_logits  # Hugging Face's condition for the load-balancing loss
    return {
        # A softmax over the chosen experts alone equals the softmax over all experts, normalised over the chosen.
        "moe_router_pre_softmax": not getattr(hf, "norm_topk_prob", True),  # always so in Qwen3.5, which has no key
        "moe_router_load_balancing_type": "aux_loss" if balanced else "none",
        "moe_aux_loss_coeff": hf.router_aux_loss_coef if balanced else 0.0,
    }


def _sigmoid_router(hf: PretrainedConfig) -> dict[str, Any]:
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
        "moe_router_load_balancing_type": "none",
        **({"moe_router_num_groups": hf.n_group, "moe_router_group_topk": hf.topk_group} if hf.n_group > 1 else {}),
    }


def _parallel(config: Config, sizes: MegatronSizes, layers: int, on_cuda: bool) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": sizes.tp,
        "sequence_parallel": sizes.tp > 1,
        "context_parallel_size": sizes.cp,
        "expert_model_parallel_size": sizes.ep,
        "expert_tensor_parallel_size": sizes.expert_tp,
        "pipeline_model_parallel_size": sizes.pp,
        "virtual_pipeline_model_parallel_size": sizes.vpp if sizes.vpp > 1 else None,
        **sizes.uneven_stages(layers),
        "variable_seq_lengths": sizes.pp > 1,
        # With virtual stages the first stage follows the last. If there are two, each would batch what it sends
        # forwards and backwards to the other, and the receiver would mistake one for the other.
        "overlap_p2p_comm": sizes.vpp > 1,
        "batch_p2p_comm": sizes.vpp == 1,
        "batch_p2p_sync": False,  # for torch before 2.0; see pipeline.Stages
        # gloo still reads the buffer of a pending send.
        "deallocate_pipeline_outputs": on_cuda,
    }


def _rotary_frequencies(hf: PretrainedConfig) -> tuple[torch.Tensor, float]:
    """Returns the inverse frequencies, float32 [rotated dimensions of a head / 2], and the factor of rotated queries
    and keys."""
    kind = hf.rope_parameters["rope_type"]
    if kind != "default":
        return ROPE_INIT_FUNCTIONS[kind](hf, device="cpu")
    size = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    size = int(size * (hf.rope_parameters.get("partial_rotary_factor") or 1.0))
    return 1.0 / hf.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size), 1.0
