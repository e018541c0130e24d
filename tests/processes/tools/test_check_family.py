"""check_family names what is wrong with a family: faults are planted in a copy of the code."""

import json
import os
import shutil
import subprocess
import sys
from typing import NamedTuple

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from areal_megatron.models.architecture import (
    FAMILIES,
    architecture,
    read_config,
    read_whole_config,
    takes_images,
)
from tests.conftest import ROOT
from tests.support.loading import LONGEST_S
from tests.support.models_with_images import make_with_images
from tools import check_family
from tools.family import tiny

QWEN2, QWEN3, EXPERTS = "DeepSeek-R1-Distill-Qwen-1.5B", "Qwen3-8B", "Qwen3-30B-A3B"


class Fault(NamedTuple):
    """A fault, and what is said about it."""

    file: str
    before: str
    after: str
    model: str
    part: str
    says: str


FAULTS = {
    "missing-bias": Fault(
        "areal_megatron/models/qwen2.py",
        "Family((*ATTENTION, QKV_BIAS, *MLP)",
        "Family((*ATTENTION, *MLP)",
        QWEN2,
        "table",
        "transformers has model.layers.0.self_attn.k_proj.bias, ",
    ),
    "transposed-expert": Fault(
        "areal_megatron/models/table.py",
        '"experts hidden expert_ffn"',
        '"experts expert_ffn hidden"',
        EXPERTS,
        "table",
        "another shape than transformers: model.layers.0.mlp.experts.0.down_proj.weight (192, 128), not (128, 192)",
    ),
    "swapped-gate-and-up": Fault(
        "areal_megatron/models/table.py",
        '{"mlp.gate_proj.weight": "ffn hidden", "mlp.up_proj.weight": "ffn hidden"}',
        '{"mlp.up_proj.weight": "ffn hidden", "mlp.gate_proj.weight": "ffn hidden"}',
        QWEN3,
        "computation",
        "layer 0: the MLP differs",
    ),
    "wrong-share-of-rotated-dimensions": Fault(
        "areal_megatron/trainer/model.py",
        '.get("partial_rotary_factor") or 1.0',
        '.get("partial_rotary_factor") or 0.5',
        QWEN3,
        "computation",
        "layer 0: attention differs",
    ),
    "keys-for-values": Fault(
        "areal_megatron/models/table.py",
        """            "self_attn.k_proj.weight": "key_value hidden",
            "self_attn.v_proj.weight": "key_value hidden",
""",
        """            "self_attn.v_proj.weight": "key_value hidden",
            "self_attn.k_proj.weight": "key_value hidden",
""",
        QWEN2,
        "computation",
        "layer 0: attention differs",
    ),
    "swapped-norms-of-heads": Fault(
        "areal_megatron/models/qwen3.py",
        '{f"self_attn.{head}_norm.weight": "head_dim"}',
        """{f"self_attn.{'qk'[head == 'q']}_norm.weight": "head_dim"}""",
        QWEN3,
        "computation",
        "layer 0: attention differs",
    ),
    "wrong-norm": Fault(
        "areal_megatron/models/table.py",
        '{"input_layernorm.weight": "hidden"},',
        '{"post_attention_layernorm.weight": "hidden"},',
        QWEN3,
        "table",
        "transformers has model.layers.0.input_layernorm.weight",
    ),
    "wrong-weights-of-experts": Fault(
        "areal_megatron/trainer/model.py",
        '"moe_router_pre_softmax": not getattr(hf, "norm_topk_prob", True)',
        '"moe_router_pre_softmax": getattr(hf, "norm_topk_prob", True)',
        EXPERTS,
        "computation",
        "layer 0: the MLP differs",
    ),
    "wrong-epsilon": Fault(
        "areal_megatron/trainer/model.py",
        "layernorm_epsilon=hf.rms_norm_eps",
        "layernorm_epsilon=0.01",
        QWEN3,
        "computation",
        "layer 0: the norm before attention differs",
    ),
    "wrong-cut": Fault(
        "areal_megatron/models/table.py",
        """    Cut.COLUMNS,
    "self_attention.linear_proj.weight",""",
        """    Cut.WHOLE,
    "self_attention.linear_proj.weight",""",
        QWEN3,
        "training",
        "tp2: ",
    ),
    "wrong-name-in-engines": Fault(
        "areal_megatron/models/table.py",
        """    "self_attn.o_proj.weight",
    {""",
        """    "self_attn.dense.weight",
    {""",
        QWEN3,
        "engines",
        "tp1, float32, rank 0: vLLM has model.layers.0.self_attn.o_proj.weight, ",
    ),
    "wrong-dtype-in-engines": Fault(
        "areal_megatron/models/qwen3.py",
        "*HEAD_NORMS, ROUTER, *EXPERTS",
        "*HEAD_NORMS, __import__('dataclasses').replace(ROUTER, engine_dtype='float32'), *EXPERTS",
        EXPERTS,
        "engines",
        "another dtype than vLLM: model.layers.0.mlp.gate.weight torch.float32, not torch.bfloat16",
    ),
}


def check(folder, *arguments, code):
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, folder / "tools" / "check_family.py", *arguments]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=2 * LONGEST_S)
    assert done.returncode == code, done.stdout + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_can_be_planted(name):
    fault = FAULTS[name]
    assert (ROOT / fault.file).read_text().count(fault.before) == 1


@pytest.mark.soak
@pytest.mark.timeout(2 * LONGEST_S)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(tmp_path, name):
    fault = FAULTS[name]
    for room in ("areal_megatron", "launch", "tools", "tests/support", "configs"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    source = (tmp_path / fault.file).read_text()
    assert source.count(fault.before) == 1
    (tmp_path / fault.file).write_text(source.replace(fault.before, fault.after))
    said = check(tmp_path, f"configs/models/{fault.model}", "--only", fault.part, code=1)
    [line] = [line for line in said.splitlines() if line.startswith("FAILS")]
    assert line.split()[1] == fault.part and fault.says in line


def test_a_part_that_takes_too_long_fails_in_one_line(tmp_path, monkeypatch, capsys):
    def wait(subject):
        subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.1)

    parts = [check_family.Part("engines", wait), check_family.Part("run", wait, needs=["engines"])]
    monkeypatch.setattr(check_family, "PARTS", parts)
    monkeypatch.setattr(check_family, "TrainerRanks", lambda: None)
    assert not check_family.check(read_config(ROOT / "configs" / "models" / QWEN2), tmp_path, ["engines", "run"])
    _, late, untried = capsys.readouterr().out.splitlines()
    assert late.startswith("FAILS  engines      it has not ended within 0 s: ") and "not tried" in untried


def test_a_model_without_a_table_is_told_the_nearest(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen9MoeForCausalLM"]}))
    said = check(ROOT, tmp_path, code=2)
    assert said == (
        "check_family.py: model.path: config.json names 'Qwen9MoeForCausalLM', which has no table; known are "
        f"{', '.join(FAMILIES)}; the nearest table is that of Qwen3MoeForCausalLM, see docs/adding_a_family.md\n"
    )


def told(capsys, *arguments):
    try:
        code = check_family.main([*map(str, arguments), "--only", "table"])
    except SystemExit as e:
        code = e.code
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2 and line.isprintable()
    return line


@pytest.mark.parametrize("value", [None, [], "\x1b[31m4", 1.5])
@pytest.mark.parametrize("key", ["head_dim", "num_experts_per_tok"])
def test_a_config_of_which_no_model_is_made_is_refused_in_one_line(tmp_path, capsys, key, value):
    config = read_config(ROOT / "configs" / "models" / EXPERTS)
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    assert "config.json" in told(capsys, tmp_path, "--out", tmp_path / "out")


def test_a_folder_and_options_that_are_none_are_told_in_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    model = ROOT / "configs" / "models" / QWEN3
    assert "file/out" in told(capsys, model, "--out", tmp_path / "file" / "out")
    assert "no option --onyl" in told(capsys, model, "--onyl", "run")
    assert "\\x1b" in told(capsys, "no\x1b[31mwhere")


def saved(folder, model, **sizes):
    """A folder as transformers writes it, which adds keys and lists of its own."""
    config = CONFIG_MAPPING[model](**sizes)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model]]
    config.save_pretrained(folder)
    return read_config(folder)


LINEAR, FULL = "linear_attention", "full_attention"
GROUPS = {"n_group": 3, "topk_group": 2, "num_experts_per_tok": 4}
GLM4 = {
    "hidden_size": 96 * 64
}  # heads of 64: those of the class's defaults are of 42, half of it rotated, an odd number
FOLDERS = {
    **{f"{n}-layers": ("qwen3", {"num_hidden_layers": n}, {}) for n in (1, 2, 3)},
    "three-kinds": ("qwen3_next", {"num_hidden_layers": 3, "layer_types": [LINEAR, LINEAR, FULL]}, {}),
    "full-at-the-end": ("qwen3_next", {"num_hidden_layers": 16, "full_attention_interval": 8}, {}),
    "saved-deepseek": ("deepseek_v3", {}, {"n_group": 4, "topk_group": 2, "n_routed_experts": 8}),
    "three-groups": ("deepseek_v3", GROUPS | {"n_routed_experts": 9}, {"n_group": 3, "n_routed_experts": 9}),
    "all-groups": (
        "glm4_moe",
        GLM4 | GROUPS | {"topk_group": 3, "n_routed_experts": 96},
        {"n_group": 3, "topk_group": 3},
    ),
    "five-groups": (
        "glm4_moe",
        GLM4 | GROUPS | {"n_group": 5, "n_routed_experts": 35},
        {"n_group": 5, "n_routed_experts": 15},
    ),
    "nine-heads": (
        "llama",
        {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3},
        {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 288},
    ),
    "seven-heads-a-key": (
        "qwen2",
        {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2},
        {"num_attention_heads": 14, "num_key_value_heads": 2},
    ),
    "prime-heads": (
        "qwen2",
        {"hidden_size": 704, "num_attention_heads": 11, "num_key_value_heads": 11, "intermediate_size": 333},
        {"num_attention_heads": 7, "num_key_value_heads": 7, "intermediate_size": 141},
    ),
    "nine-experts": (
        "qwen3_moe",
        {"hidden_size": 768, "num_experts": 9, "num_attention_heads": 6, "num_key_value_heads": 3},
        {},
    ),
}


@pytest.mark.parametrize("width", [32, 96, 160, 1408])
def test_half_of_a_tiny_expert_is_nothing_that_engines_pad(width):
    config = read_config(ROOT / "configs" / "models" / EXPERTS) | {"moe_intermediate_size": width}
    assert tiny.shrunk(config)["moe_intermediate_size"] % 64 == 0


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe"])
def test_models_with_images_are_right_in_small(tmp_path, name):
    make_with_images(name).save_pretrained(tmp_path / "saved")
    assert check_family.check(read_whole_config(tmp_path / "saved"), tmp_path, ["table", "conversion"])
    assert takes_images(tmp_path / check_family.MODEL) and takes_images(tmp_path / "back")


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_transformers_saved_is_right_in_small(tmp_path, name, capsys):
    model, sizes, small = FOLDERS[name]
    described = saved(tmp_path / "saved", model, **sizes)
    assert check_family.check(described, tmp_path, ["table"])
    made = read_config(tmp_path / "model")
    assert small.items() <= made.items()
    assert set(described.get("layer_types") or ()) == set(made.get("layer_types") or ())
    assert capsys.readouterr().out.splitlines()[1].startswith("ok     table ")


@pytest.mark.parametrize(
    ("name", "layouts", "says"),
    [
        ("1-layers", ["one rank", "tp2", "pp2·vpp2", "cp2", "tp2·pp2"], ""),
        ("nine-heads", ["one rank", "tp3", "pp2·vpp2", "cp2", "tp3·pp2"], ""),
        ("prime-heads", ["one rank", "pp2·vpp2", "cp2"], "NOT tried: tp2 (trainer.tp: 2 does not divide num_attention"),
        ("nine-experts", ["one rank", "tp3", "pp2", "dp3·ep3", "tp3·ep3·etp1"], ""),
    ],
)
def test_layouts_are_those_that_the_numbers_of_heads_and_experts_allow(tmp_path, name, layouts, says):
    model, sizes, _ = FOLDERS[name]
    config = tiny.shrunk(saved(tmp_path / "saved", model, **sizes))
    tiny.write(config, tmp_path / check_family.MODEL)
    found, untried = check_family._possible(check_family.Subject(tmp_path, {}, architecture(config), None))
    assert [check_family._named(layout) for layout in found] == layouts
    assert says in untried and bool(says) == bool(untried)


@pytest.mark.soak
@pytest.mark.timeout(2 * LONGEST_S)
@pytest.mark.parametrize("name", ["nine-heads", "three-groups", "1-layers", "three-kinds"])
def test_a_saved_folder_is_right_in_every_part(tmp_path, name):
    model, sizes, _ = FOLDERS[name]
    saved(tmp_path, model, **sizes)
    said = check(ROOT, tmp_path, code=0)
    assert [line.split()[0] for line in said.splitlines()[1:]] == ["ok"] * 6


@pytest.mark.soak
@pytest.mark.timeout(2 * LONGEST_S)
@pytest.mark.parametrize("model", [QWEN2, EXPERTS])
def test_families_that_are_there_are_right(model):
    said = check(ROOT, f"configs/models/{model}", code=0)
    assert [line.split()[0] for line in said.splitlines()[1:]] == ["ok"] * 6
