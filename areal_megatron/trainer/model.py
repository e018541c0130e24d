"""A megatron-core GPTModel with the computation of a Hugging Face Qwen2, Qwen3 or Llama model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from areal_megatron.config import Config
from areal_megatron.reshard.architectures import Architecture, architecture, read_config
from areal_megatron.reshard.megatron import MegatronSizes
from areal_megatron.trainer.attention import CoreAttention
from areal_megatron.trainer.cpu import cpu_passes_for_cuda

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Policy(GPTModel):
    """GPTModel whose last pipeline stage returns the final hidden states [T, 1, hidden] instead of logits.

    trainer/logprobs.py makes log-probabilities of them without ever holding the logits of all tokens.
    """

    def _postprocess(self, hidden_states, *_, **__):
        return hidden_states

    @property
    def output_weight(self) -> torch.Tensor:
        """[padded vocabulary / tp, hidden], on the last pipeline stage."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


class RMSNorm(torch.nn.Module):
    """RMSNorm in float32 whatever the dtype, as Hugging Face has it."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Each rank sees a part of the tokens only, so Megatron must sum this gradient over tp.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Rotary(RotaryEmbedding):
    """Rotary embedding with the frequencies of Hugging Face, one rotation per token of a packed micro-batch."""

    def __init__(self, hf: PretrainedConfig, original: RotaryEmbedding, device: torch.device):
        torch.nn.Module.__init__(self)
        self.rotary_interleaved = False
        self.seq_len_interpolation_factor = None
        self.cp_group = original.cp_group
        self.inv_freq = _inverse_frequencies(hf).to(device)

    def get_rotary_seq_len(self, inference_context, transformer, transformer_input, config, packed=None, **_):
        if packed is not None:
            return packed.positions
        length = super().get_rotary_seq_len(inference_context, transformer, transformer_input, config)
        return torch.arange(length, device=self.inv_freq.device)

    def forward(self, positions: torch.Tensor, **_: Any) -> torch.Tensor:
        """int64 [T] → angles [T, 1, 1, head_dim]"""
        angles = torch.outer(positions.to(self.inv_freq.dtype), self.inv_freq)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


def build_model(config: Config, sizes: MegatronSizes, device: torch.device) -> DistributedDataParallel:
    """This rank's part of the model of model.path, with uninitialised parameters, wrapped for data parallelism.

    The config must have passed `model_check.check_model`; Megatron's process groups must exist.
    """
    hf = AutoConfig.from_pretrained(config.model.path, local_files_only=True)
    held = architecture(read_config(config.model.path))
    transformer = transformer_config(config, hf, held, device)
    with device, cpu_passes_for_cuda():
        model = Policy(
            transformer,
            _block_spec(transformer, sizes.fused_layernorm),
            vocab_size=sizes.padded_vocabulary(held.dimensions.vocabulary),
            max_sequence_length=hf.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=held.tied,
            position_embedding_type="rope",
        )
        model.rotary_pos_emb = Rotary(hf, model.rotary_pos_emb, device)
    return DistributedDataParallel(
        transformer,
        DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
        model,
    )


def parallel_sizes(config: Config, device: torch.device) -> MegatronSizes:
    """The trainer pool's sizes; TransformerEngine's layers are taken where CUDA and it are there."""
    return MegatronSizes.of(config.trainer, transformer_engine=device.type == "cuda" and HAVE_TE)


def transformer_config(
    config: Config, hf: PretrainedConfig, held: Architecture, device: torch.device
) -> TransformerConfig:
    trainer, dtype, dimensions = config.trainer, DTYPES[config.model.dtype], held.dimensions
    on_cuda = device.type == "cuda"
    recompute = {
        "none": {},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    }
    return TransformerConfig(
        num_layers=dimensions.layers,
        hidden_size=dimensions.hidden,
        ffn_hidden_size=dimensions.ffn,
        num_attention_heads=dimensions.heads,
        num_query_groups=dimensions.kv_heads,
        kv_channels=dimensions.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        qk_layernorm=hf.model_type == "qwen3",
        add_qkv_bias=hf.model_type == "qwen2",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=trainer.tp,
        pipeline_model_parallel_size=trainer.pp,
        sequence_parallel=trainer.sequence_parallel,
        variable_seq_lengths=trainer.pp > 1,
        moe_token_dispatcher_type="alltoall",  # asked for with variable lengths, experts or not
        # gloo still reads the buffer of a pending send
        deallocate_pipeline_outputs=on_cuda,
        # the gradient is divided by the trained tokens of all replicas, not averaged over them
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        **recompute[trainer.recompute],
    )


def _block_spec(config: TransformerConfig, transformer_engine: bool) -> TransformerBlockSubmodules:
    if transformer_engine:
        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        layer.submodules.self_attention.submodules.core_attention = CoreAttention
        norm = TENorm
    else:
        layer, norm = _local_layer_spec(config), RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=norm)


def _local_layer_spec(config: TransformerConfig) -> ModuleSpec:
    head_norm = RMSNorm if config.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=CoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    mlp = ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _inverse_frequencies(hf: PretrainedConfig) -> torch.Tensor:
    """float32 [head_dim / 2]"""
    kind = hf.rope_parameters["rope_type"]
    if kind != "default":
        frequencies, _ = ROPE_INIT_FUNCTIONS[kind](hf, device="cpu")
        return frequencies
    size = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    return 1.0 / hf.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
