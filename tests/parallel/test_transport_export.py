"""Checkpoints exported by two trainer ranks, read back by transformers and safetensors."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.reshard_oracle import write_model

ROOT = Path(__file__).parents[2]
LAYOUTS = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "dp2": {"dp": 2}, "cp2": {"cp": 2}}
EXPERT_LAYOUTS = {"ep2": {"dp": 2, "ep": 2}, "etp2": {"dp": 2, "etp": 2}, "vpp2": {"pp": 2, "vpp": 2}}
MODELS = {
    "qwen2": LAYOUTS,
    "qwen3-tied": LAYOUTS,
    "qwen3-moe": EXPERT_LAYOUTS,
    "glm4-moe": {"vpp2": EXPERT_LAYOUTS["vpp2"]},
}
CASES = [(model, layout) for model, layouts in MODELS.items() for layout in layouts]
LARGE, SMALL = 2**30, 60_000


@pytest.fixture(scope="module")
def world(start_ranks, tmp_path_factory):
    """A folder with models and their exports, named MODEL-LAYOUT, and the tensors that transformers wrote."""
    folder = tmp_path_factory.mktemp("export")
    written, exports = {}, []
    for model, layouts in MODELS.items():
        written[model] = write_model(model, folder / model)
        (folder / model / "tokenizer.json").write_text('{"some": "tokenizer"}')
        for layout, sizes in layouts.items():
            exports.append(
                {
                    "source": str(folder / model),
                    "sizes": sizes,
                    "path": str(folder / f"{model}-{layout}"),
                    "dtype": "float32",
                    "shard_bytes": SMALL if layout == "pp2" else LARGE,
                }
            )
    again = exports[0] | {"dtype": "bfloat16", "source": str(folder / "qwen2")}
    exports += [exports[0] | {"path": str(folder / "twice")}, again | {"path": str(folder / "twice")}]
    start_ranks(folder, "export_checks:export_shards", 2, exports=exports)
    return folder, written


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_export_is_the_checkpoint_that_transformers_wrote(world, model, layout):
    folder, written = world
    exported = read(folder / f"{model}-{layout}")
    assert exported.keys() == written[model].keys()
    for name, tensor in written[model].items():
        assert torch.equal(exported[name], tensor), name


def test_large_models_are_written_in_parts_that_transformers_reads(world):
    import transformers

    folder, written = world
    parts = list((folder / "qwen2-pp2").glob("model-*-of-*.safetensors"))
    assert len(parts) > 3
    assert all(part.stat().st_size < SMALL + 20_000 for part in parts)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "qwen2-pp2", dtype=torch.float32)
    for name, tensor in written["qwen2"].items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_export_keeps_tokenizer_and_config_and_replaces_an_older_one(world):
    folder, written = world
    assert (folder / "twice" / "tokenizer.json").read_text() == '{"some": "tokenizer"}'
    config = json.loads((folder / "twice" / "config.json").read_text())
    assert config == json.loads((folder / "qwen2" / "config.json").read_text()) | {"dtype": "bfloat16"}
    for name, tensor in read(folder / "twice").items():
        assert torch.equal(tensor, written["qwen2"][name].bfloat16()), name
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
