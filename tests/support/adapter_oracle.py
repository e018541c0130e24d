"""What each rank holds of an adapter, cut by hand from whole factors with chunk and cat, and the model with it.

Shares no code with areal_megatron.reshard.
"""

import torch

FACTORS = ("lora_A", "lora_B")
DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a model without experts and latents."""


def random_adapter(tensors, targets, rank, seed):
    """Returns factors for the model with these tensors, by PEFT's names without `base_model.model.`."""
    generator, factors = torch.Generator().manual_seed(seed), {}
    for name, weight in tensors.items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in targets and ".experts." not in name:
            rows, columns = weight.shape
            for factor, shape in zip(FACTORS, ((rank, columns), (rows, rank)), strict=True):
                factors[f"{layer}.{factor}.weight"] = 0.1 * torch.randn(shape, generator=generator)
    return factors


def merged(tensors, factors, scale):
    """Returns the tensors of the model that the adapter makes: W + scale · B · A."""
    result = dict(tensors)
    for name, b in factors.items():
        layer, _, factor = name.removesuffix(".weight").rpartition(".")
        if factor == "lora_B":
            a, weight = factors[f"{layer}.lora_A.weight"], tensors[f"{layer}.weight"]
            result[f"{layer}.weight"] = (weight.double() + scale * b.double() @ a.double()).to(weight.dtype)
    return result


def megatron_factors(factors, config, sizes, rank):
    """Returns what rank `rank` of a MegatronSizes holds of an adapter on DENSE, by Megatron's names."""
    at, held = sizes.coordinates(rank), {}
    for local, layer in enumerate(sizes.chunk_layers(config["num_hidden_layers"], at.pp)[0]):
        a, b = _layer(factors, layer)
        groups = [heads.chunk(config["num_key_value_heads"]) for heads in b[:3]]
        by_group = torch.cat([part for group in zip(*groups, strict=True) for part in group])
        gate, up = (part.chunk(sizes.tp)[at.tp] for part in b[4:6])
        own = {
            "self_attention.linear_qkv": (torch.cat(a[:3]), by_group.chunk(sizes.tp)[at.tp]),
            "self_attention.linear_proj": (a[3].chunk(sizes.tp, 1)[at.tp], b[3]),
            "mlp.linear_fc1": (torch.cat(a[4:6]), torch.cat([gate, up])),
            "mlp.linear_fc2": (a[6].chunk(sizes.tp, 1)[at.tp], b[6]),
        }
        held |= _named(f"decoder.layers.{local}.", ".adapter", own)
    return held


def vllm_factors(factors, config, tp, rank):
    """Returns what rank `rank` of an engine receives of it; with tp above their number key and value heads are
    replicated."""
    held, replicas = {}, max(tp // config["num_key_value_heads"], 1)
    for layer in range(config["num_hidden_layers"]):
        a, b = _layer(factors, layer)
        heads = [b[0].chunk(tp)[rank], *(part.chunk(tp // replicas)[rank // replicas] for part in b[1:3])]
        own = {
            "self_attn.qkv_proj": (torch.cat(a[:3]), torch.cat(heads)),
            "self_attn.o_proj": (a[3].chunk(tp, 1)[rank], b[3]),
            "mlp.gate_up_proj": (torch.cat(a[4:6]), torch.cat([part.chunk(tp)[rank] for part in b[4:6]])),
            "mlp.down_proj": (a[6].chunk(tp, 1)[rank], b[6]),
        }
        held |= _named(f"model.layers.{layer}.", "", own)
    return held


def _layer(factors, layer):
    """The factors A of a layer in the order of DENSE, and the factors B."""
    parts = [f"model.layers.{layer}.{'self_attn' if n < 4 else 'mlp'}.{name}" for n, name in enumerate(DENSE)]
    return ([factors[f"{part}.{factor}.weight"] for part in parts] for factor in FACTORS)


def _named(prefix, suffix, own):
    return {
        f"{prefix}{linear}{suffix}.{factor}": tensor.contiguous()
        for linear, pair in own.items()
        for factor, tensor in zip(FACTORS, pair, strict=True)
    }
