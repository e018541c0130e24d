"""What each rank must hold, written down by hand with chunk and cat from the checkpoint's whole tensors.

Shares no code with areal_megatron.reshard: a wrong table there cannot be wrong here in the same way.
Megatron: megatron-core 0.16 (attention.py, mlp.py, layers.py); vLLM: 0.32 (linear.py, vocab_parallel_embedding.py).
"""

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import load_file

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 203,
    "max_position_embeddings": 512,
}
CONFIG = {"architectures": ["Qwen2ForCausalLM"], **SIZES, "num_hidden_layers": 2, "tie_word_embeddings": True}
"""A config.json, for tests that need layouts and no model."""
SIGMOID_ROUTER = {
    "tie_word_embeddings": False,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "moe_intermediate_size": 64,
}
LATENTS = {
    **SIGMOID_ROUTER,
    "num_key_value_heads": 8,
    "kv_lora_rank": 512,  # vLLM's kernels have no others than this and 64
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
NETS = {
    "head_dim": 32,
    "layer_types": [f"{kind}_attention" for kind in ("linear", "linear", "full", "linear")],
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
MODELS = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": False, "head_dim": 32}),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "tie_word_embeddings": False,
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
        },
    ),
    "glm4-moe": (
        "Glm4Moe",
        {
            **SIGMOID_ROUTER,
            "head_dim": 32,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
    "deepseek-v3-moe": ("DeepseekV3", {**LATENTS, "q_lora_rank": 48}),
    "moonlight-moe": ("DeepseekV3", {**LATENTS, "q_lora_rank": None}),
    "glm4-flash-moe": ("Glm4MoeLite", {**LATENTS, "q_lora_rank": 48, "v_head_dim": 64}),
    "qwen3-next-moe": (
        "Qwen3Next",
        {
            "tie_word_embeddings": False,
            **NETS,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "qwen3.5": ("Qwen3_5", {"tie_word_embeddings": True, **NETS}),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        {
            "tie_word_embeddings": False,
            **NETS,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 32,
        },
    ),
}
EXPERTS = tuple(name for name in MODELS if name.endswith("-moe"))


def write_model(name: str, folder: Path, seed: int = 0, **sizes) -> dict[str, torch.Tensor]:
    """Has transformers write a random model into `folder`; returns the tensors of the file."""
    import transformers  # seconds of import that the ranks of a link, which use this file too, need not pay

    family, own = MODELS[name]
    make = getattr(transformers, f"{family}ForCausalLM")
    torch.manual_seed(seed)
    model = make(make.config_class(**{**SIZES, **own, **sizes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms start as ones and biases as zeros: make every element its own
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def megatron_parameters(
    tensors,
    config,
    *,
    tp,
    pp,
    tp_rank,
    stage,
    chunks=None,
    ep=1,
    ep_rank=0,
    etp=None,
    etp_rank=None,
    fused_layernorm=False,
    grouped_experts=False,
    multiple=128,
):
    """GPTModel.named_parameters() of one rank; `chunks`: the layers of each model of a stage with virtual stages."""
    held, per_stage = {}, config["num_hidden_layers"] // pp
    groups, etp = config["num_key_value_heads"], etp or tp
    etp_rank = tp_rank if etp_rank is None else etp_rank
    models = chunks or [range(stage * per_stage, (stage + 1) * per_stage)]

    def vocabulary_part(tensor):
        padded = -(-len(tensor) // (multiple * tp)) * multiple * tp
        return torch.cat([tensor, tensor.new_zeros(padded - len(tensor), tensor.shape[1])]).chunk(tp)[tp_rank]

    def gated(prefix, parts, part):
        gate, up = (tensors[f"{prefix}{x}_proj.weight"].chunk(parts)[part] for x in ("gate", "up"))
        return torch.cat([gate, up]), tensors[f"{prefix}down_proj.weight"].chunk(parts, 1)[part]

    def latent_parts(prefix):
        """Every rank has the projections to latents whole, and those from latents to its heads."""
        has_query = f"{prefix}q_a_proj.weight" in tensors
        parts = {"linear_kv_down_proj.weight": tensors[f"{prefix}kv_a_proj_with_mqa.weight"]}
        parts |= {} if has_query else {"linear_q_proj.weight": tensors[f"{prefix}q_proj.weight"].chunk(tp)[tp_rank]}
        parts |= {"linear_q_down_proj.weight": tensors[f"{prefix}q_a_proj.weight"]} if has_query else {}
        for latent in ("q", "kv") if has_query else ("kv",):
            norm = f"linear_{latent}_up_proj.layer_norm_weight" if fused_layernorm else f"{latent}_layernorm.weight"
            parts[norm] = tensors[f"{prefix}{latent}_a_layernorm.weight"]
            parts[f"linear_{latent}_up_proj.weight"] = tensors[f"{prefix}{latent}_b_proj.weight"].chunk(tp)[tp_rank]
        return parts

    def linear_parts(prefix):
        """A gated delta net. The projections of Qwen3-Next have q, k, v and z, and b and a of one key head after
        another: here each is on its own."""
        heads, key, ratio = (
            config["linear_num_key_heads"],
            config["linear_key_head_dim"],
            config["linear_num_value_heads"] // config["linear_num_key_heads"],
        )
        value = ratio * config["linear_value_head_dim"]
        sections = [heads * key, heads * key, heads * value]
        projected = []
        if f"{prefix}in_proj_qkv.weight" in tensors:
            parts = (tensors[f"{prefix}in_proj_{name}.weight"] for name in ("qkv", "z", "b", "a"))
            projected = [part.chunk(tp)[tp_rank] for part in (*next(parts).split(sections), *parts)]
        for name, widths in (("qkvz", [key, key, value, value]), ("ba", [ratio, ratio])) if not projected else ():
            by_head = tensors[f"{prefix}in_proj_{name}.weight"].view(heads, sum(widths), -1)
            projected += [part.flatten(0, 1).chunk(tp)[tp_rank] for part in by_head.split(widths, 1)]
        mixed = tensors[f"{prefix}conv1d.weight"].split(sections)
        return {
            "in_proj.weight": torch.cat(projected),
            "conv1d.weight": torch.cat([part.chunk(tp)[tp_rank] for part in mixed]),
            **{name: tensors[prefix + name].chunk(tp)[tp_rank] for name in ("dt_bias", "A_log")},
            "out_norm.weight": tensors[f"{prefix}norm.weight"],
            "out_proj.weight": tensors[f"{prefix}out_proj.weight"].chunk(tp, 1)[tp_rank],
        }

    def heads_of_groups(kind, prefix):
        """The query heads of each group, then their gates if there are any, then its key and its value."""
        queries, keys, values = (tensors[f"{prefix}{x}_proj.{kind}"].chunk(groups) for x in "qkv")
        if sum(map(len, queries)) == 2 * config["num_attention_heads"] * config.get("head_dim", 0):
            halves = [group.view(-1, 2, config["head_dim"], group.shape[-1]) for group in queries]
            queries = [torch.cat([half[:, 0].flatten(0, 1), half[:, 1].flatten(0, 1)]) for half in halves]
        return torch.cat([part for group in zip(queries, keys, values, strict=True) for part in group])

    for number, layers in enumerate(models):
        model = f"model{number}." if len(models) > 1 else ""
        if stage == 0 and number == 0:
            held[model + "embedding.word_embeddings.weight"] = vocabulary_part(tensors["model.embed_tokens.weight"])
        for local, layer in enumerate(layers):
            own, hf = f"{model}decoder.layers.{local}.", f"model.layers.{layer}."
            moe = f"{hf}mlp.gate.weight" in tensors
            latents = f"{hf}self_attn.kv_b_proj.weight" in tensors
            linear = f"{hf}linear_attn.A_log" in tensors
            fused = "self_attention.linear_qkv.layer_norm_weight"
            first = fused if fused_layernorm and not latents else "input_layernorm.weight"
            if linear:
                first = "self_attention.in_proj.layer_norm_weight" if fused_layernorm else "input_layernorm.weight"
                held |= {
                    f"{own}self_attention.{name}": part for name, part in linear_parts(f"{hf}linear_attn.").items()
                }
            if latents:
                held |= {f"{own}self_attention.{name}": part for name, part in latent_parts(f"{hf}self_attn.").items()}
            second = "mlp.linear_fc1.layer_norm_weight" if fused_layernorm and not moe else "pre_mlp_layernorm.weight"
            held[own + first] = tensors[hf + "input_layernorm.weight"]
            held[own + second] = tensors[hf + "post_attention_layernorm.weight"]
            for kind in ("weight", "bias"):
                if f"{hf}self_attn.k_proj.{kind}" in tensors:
                    fused = heads_of_groups(kind, f"{hf}self_attn.")
                    held[f"{own}self_attention.linear_qkv.{kind}"] = fused.chunk(tp)[tp_rank]
            for x in "qk":
                if f"{hf}self_attn.{x}_norm.weight" in tensors:
                    held[f"{own}self_attention.{x}_layernorm.weight"] = tensors[f"{hf}self_attn.{x}_norm.weight"]
            if not linear:
                output = tensors[hf + "self_attn.o_proj.weight"].chunk(tp, 1)[tp_rank]
                held[own + "self_attention.linear_proj.weight"] = output
            if not moe:
                held[own + "mlp.linear_fc1.weight"], held[own + "mlp.linear_fc2.weight"] = gated(
                    f"{hf}mlp.", tp, tp_rank
                )
                continue
            held[own + "mlp.router.weight"] = tensors[hf + "mlp.gate.weight"]
            if f"{hf}mlp.gate.e_score_correction_bias" in tensors:
                held[own + "mlp.router.expert_bias"] = tensors[hf + "mlp.gate.e_score_correction_bias"]
            for shared in ("shared_expert", "shared_experts"):
                if f"{hf}mlp.{shared}.up_proj.weight" in tensors:
                    fc1, fc2 = gated(f"{hf}mlp.{shared}.", tp, tp_rank)
                    held[own + "mlp.shared_experts.linear_fc1.weight"] = fc1
                    held[own + "mlp.shared_experts.linear_fc2.weight"] = fc2
            if f"{hf}mlp.shared_expert_gate.weight" in tensors:
                held[own + "mlp.shared_experts.gate_weight"] = tensors[f"{hf}mlp.shared_expert_gate.weight"]
            each = experts_of(config) // ep
            for expert in range(each):
                fc1, fc2 = gated(f"{hf}mlp.experts.{ep_rank * each + expert}.", etp, etp_rank)
                if grouped_experts:
                    held[f"{own}mlp.experts.linear_fc1.weight{expert}"] = fc1
                    held[f"{own}mlp.experts.linear_fc2.weight{expert}"] = fc2
                else:
                    held[f"{own}mlp.experts.local_experts.{expert}.linear_fc1.weight"] = fc1
                    held[f"{own}mlp.experts.local_experts.{expert}.linear_fc2.weight"] = fc2
        if stage == pp - 1 and number == len(models) - 1:
            held[model + "decoder.final_layernorm.weight"] = tensors["model.norm.weight"]
            if not config["tie_word_embeddings"]:
                held[model + "output_layer.weight"] = vocabulary_part(tensors["lm_head.weight"])
            elif pp > 1:
                held[model + "output_layer.weight"] = vocabulary_part(tensors["model.embed_tokens.weight"])
    return held


def experts_of(config) -> int:
    return next(config[key] for key in ("num_local_experts", "n_routed_experts", "num_experts") if key in config)


def megatron_shard(tensors, config, sizes, rank):
    """The same of rank `rank` of a MegatronSizes, which says no more here than where the rank stands."""
    at = sizes.coordinates(rank)
    return megatron_parameters(
        tensors,
        config,
        tp=sizes.tp,
        pp=sizes.pp,
        tp_rank=at.tp,
        stage=at.pp,
        ep=sizes.ep,
        ep_rank=at.ep,
        chunks=sizes.chunk_layers(config["num_hidden_layers"], at.pp),
        etp=sizes.expert_tp,
        etp_rank=at.etp,
        fused_layernorm=sizes.fused_layernorm,
        grouped_experts=sizes.grouped_experts,
    )


def megatron_shards(tensors, config, sizes):
    """The same of all ranks; those that stand in the same place but for data and context parallelism share theirs."""
    place = [sizes.coordinates(rank)._replace(cp=0, dp=0, edp=0) for rank in range(sizes.ranks)]
    held = {at: megatron_shard(tensors, config, sizes, place.index(at)) for at in place}
    return [held[at] for at in place]


def vllm_parameters(tensors, config, *, tp, rank, dp=1, expert_parallel=False):
    """model.named_parameters() of one worker of an engine; the vocabulary's padding is zero."""
    held, ranks, worker = {}, tp * dp, rank
    rank = rank % tp
    replicas = max(tp // config["num_key_value_heads"], 1)

    def vocabulary_part(tensor):
        padded = -(-len(tensor) // 64) * 64
        return torch.cat([tensor, tensor.new_zeros(padded - len(tensor), tensor.shape[1])]).chunk(tp)[rank]

    def experts(prefix):
        """w13 [experts, 2 ffn, hidden] and w2 [experts, hidden, ffn]: some experts whole, or a part of all."""
        own = torch.arange(experts_of(config)).tensor_split(ranks)[worker] if expert_parallel else None
        own, parts, part = (range(experts_of(config)), ranks, worker) if own is None else (own.tolist(), 1, 0)
        get = lambda expert, x: tensors[f"{prefix}.{expert}.{x}_proj.weight"].chunk(parts, int(x == "down"))[part]  # noqa: E731
        w13 = torch.stack([torch.cat([get(expert, "gate"), get(expert, "up")]) for expert in own])
        return {"w13_weight": w13, "w2_weight": torch.stack([get(expert, "down") for expert in own])}

    for name, tensor in tensors.items():
        if ".experts." in name:
            prefix = name[: name.index(".experts.") + len(".experts")]
            if f"{prefix}.routed_experts.w13_weight" not in held:
                held |= {f"{prefix}.routed_experts.{kind}": stack for kind, stack in experts(prefix).items()}
        elif ".mlp.gate." in name or "shared_expert_gate" in name:
            held[name] = tensor
        elif name.endswith((".in_proj_qkvz.weight", ".in_proj_ba.weight", ".A_log", ".dt_bias")):
            held[name] = tensor.chunk(tp)[rank]
        elif name.endswith(".in_proj_qkv.weight"):
            key = config["linear_num_key_heads"] * config["linear_key_head_dim"]
            parts = (*tensor.split([key, key, len(tensor) - 2 * key]), tensors[name.replace("_qkv", "_z")])
            held[name.replace("_qkv", "_qkvz")] = torch.cat([part.chunk(tp)[rank] for part in parts])
        elif name.endswith(".in_proj_b.weight"):
            parts = (tensor, tensors[name.replace("_b.", "_a.")])
            held[name.replace("_b.", "_ba.")] = torch.cat([part.chunk(tp)[rank] for part in parts])
        elif name.endswith((".in_proj_z.weight", ".in_proj_a.weight")):
            continue  # with the one that it is stacked on
        elif name.endswith(".conv1d.weight"):
            key = config["linear_num_key_heads"] * config["linear_key_head_dim"]
            held[name] = torch.cat([part.chunk(tp)[rank] for part in tensor.split([key, key, len(tensor) - 2 * key])])
        elif name.endswith(".out_proj.weight"):
            held[name] = tensor.chunk(tp, 1)[rank]
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            held[name] = vocabulary_part(tensor)
        elif "o_proj" in name or "down_proj" in name:
            held[name] = tensor.chunk(tp, 1)[rank]
        elif "q_a_proj" in name:
            both = (tensor, tensors[name.replace("q_a_proj", "kv_a_proj_with_mqa")])
            held[name.replace("q_a_proj", "fused_qkv_a_proj")] = torch.cat(both)
        elif "kv_a_proj_with_mqa" in name:
            if name.replace("kv_a_proj_with_mqa", "q_a_proj") not in tensors:
                held[name] = tensor
        elif "_b_proj" in name or ("q_proj" in name and name.replace("q_proj", "k_proj") not in tensors):
            held[name] = tensor.chunk(tp)[rank]
        elif "q_proj" in name:
            key, value = (tensors[name.replace("q_proj", x)] for x in ("k_proj", "v_proj"))
            heads = [tensor.chunk(tp)[rank], *(x.chunk(tp // replicas)[rank // replicas] for x in (key, value))]
            held[name.replace("q_proj", "qkv_proj")] = torch.cat(heads)
        elif "gate_proj" in name:
            up = tensors[name.replace("gate_proj", "up_proj")]
            held[name.replace("gate_proj", "gate_up_proj")] = torch.cat([tensor.chunk(tp)[rank], up.chunk(tp)[rank]])
        elif "norm" in name:
            held[name] = tensor
    return held


def expected_checksums(tensors, config, *, tp):
    """sha256 of every parameter that the ranks of an engine should hold, by the names of vLLM's weight checker.

    Without experts and convolutions, of which the CPU's kernels keep a packed form.
    """
    return {
        f"dp0:pp0:pcp0:tp{rank}:{name}": hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()
        for rank in range(tp)
        for name, tensor in vllm_parameters(tensors, config, tp=tp, rank=rank).items()
        if _is_plain(name)
    }


def _is_plain(name):
    return name.endswith((".weight", ".bias")) and not name.endswith(".conv1d.weight")


async def held_checksums(client):
    """The same of what a running engine holds, computed by vLLM itself."""
    checksums = json.loads(await client._call("POST", "/weight_checker", {"action": "checksum"}))["checksums"]
    return {name: sha for name, sha in checksums.items() if _is_plain(name)}
