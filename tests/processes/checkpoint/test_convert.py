"""areal_megatron.programs.convert without megatron: there and back, what it copies, and what it refuses."""

import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Library
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from areal_megatron.checkpoint import convert as conversion
from areal_megatron.checkpoint import disk
from areal_megatron.checkpoint import folder as checkpoint_folder
from areal_megatron.checkpoint.convert import from_hf, to_hf
from areal_megatron.checkpoint.disk import CheckpointError
from areal_megatron.config import CheckpointConfig
from areal_megatron.programs import convert
from areal_megatron.run.folder import RunFolder
from tests.support.reshard_oracle import MODELS, write_model
from tests.support.saved_tensors import assert_equal, weights

ROOT = Path(__file__).resolve().parents[3]
FC2 = "decoder.layers.mlp.linear_fc2.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Name → (folder that transformers wrote, its tensors)."""
    folder = tmp_path_factory.mktemp("models")
    return {name: (folder / name, write_model(name, folder / name)) for name in MODELS}


@pytest.fixture(scope="module")
def converted(models, tmp_path_factory):
    """A checkpoint folder of the model qwen3, not to be changed."""
    folder = tmp_path_factory.mktemp("checkpoints") / "qwen3"
    from_hf(models["qwen3"][0], folder)
    return folder


@pytest.fixture
def checkpoint(converted, tmp_path):
    """The same, to be damaged."""
    return shutil.copytree(converted, tmp_path / "checkpoint")


@pytest.fixture
def hf_folder(models, tmp_path):
    """The model qwen3 as a Hugging Face folder to be damaged."""
    return shutil.copytree(models["qwen3"][0], tmp_path / "model")


def refused(capsys, folder, *arguments):
    """The one line of an attempt that leaves `folder` as it was."""
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    capsys.readouterr()
    assert convert.main([*map(str, arguments)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1, message
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    return message


@pytest.mark.parametrize(("name", "block"), [*((name, disk.BLOCK_BYTES) for name in MODELS), ("qwen2", 2000)])
def test_there_and_back_every_bit_is_the_same(models, name, block, tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "BLOCK_BYTES", block)
    monkeypatch.setattr(conversion, "CHUNK_BYTES", 2 * block)
    folder, tensors = models[name]
    from_hf(folder, tmp_path / "checkpoint", verify=True)
    to_hf(tmp_path / "checkpoint", tmp_path / "back", verify=True)
    assert_equal(weights(tmp_path / "back"), tensors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "checkpoint"]


def test_large_models_are_written_in_parts(models, converted, tmp_path):
    import transformers

    folder, tensors = models["qwen3"]
    from_hf(folder, tmp_path / "checkpoint", shard_bytes=60_000)
    assert len(list((tmp_path / "checkpoint" / "trainer").glob("*.distcp"))) > 3
    to_hf(tmp_path / "checkpoint", tmp_path / "back", shard_bytes=60_000)
    parts = sorted((tmp_path / "back").glob("model-*-of-*.safetensors"))
    assert len(parts) > 3 and all(part.stat().st_size < 70_000 for part in parts)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert {name: file for part in parts for name in load_file(part) for file in [part.name]} == index["weight_map"]
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_equal(model.state_dict(), tensors)


def test_dtype_and_what_is_no_weight(models, hf_folder, tmp_path, capsys):
    files = {"tokenizer.json": "{}", "generation_config.json": '{"top_k": 7}', "chat_template.jinja": "{{ messages }}"}
    for name, text in files.items():
        (hf_folder / name).write_text(text)
    run = tmp_path / "checkpoint"
    assert convert.main(["from-hf", str(hf_folder), str(run), "--dtype", "bfloat16", "--verify"]) == 0
    assert convert.main(["to-hf", str(run), str(tmp_path / "own")]) == 0
    wide = ["to-hf", str(run / "trainer"), str(tmp_path / "wide"), "--config", str(run / "hf"), "--dtype", "float32"]
    assert convert.main([*wide, "--verify"]) == 0
    for folder, dtype in ((tmp_path / "own", torch.bfloat16), (tmp_path / "wide", torch.float32)):
        assert_equal(weights(folder), {n: t.bfloat16().to(dtype) for n, t in models["qwen3"][1].items()})
        assert {name: (folder / name).read_text() for name in files} == files
        config = json.loads((folder / "config.json").read_text())
        assert config == json.loads((hf_folder / "config.json").read_text()) | {"dtype": str(dtype)[6:]}


TEMPLATES = {"default": "{{ messages }}", "tool_use": "{{ tools }}", "rag": "{{ documents }}"}


def test_further_chat_templates_are_carried(hf_folder, tmp_path):
    """Those for tools and the like, which transformers saves in a folder of their own."""
    library = Library(WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=library, chat_template=TEMPLATES).save_pretrained(hf_folder)
    assert len([*(hf_folder / "additional_chat_templates").iterdir()]) == 2
    from_hf(hf_folder, tmp_path / "checkpoint")
    to_hf(tmp_path / "checkpoint", tmp_path / "back")
    for folder in (hf_folder, tmp_path / "back"):
        assert AutoTokenizer.from_pretrained(folder).chat_template == TEMPLATES


def test_what_is_no_checkpoint(checkpoint, tmp_path, capsys):
    out = tmp_path / "out"
    assert "is no folder" in refused(capsys, tmp_path, "to-hf", tmp_path / "nothing", out)
    assert "--config HF_DIR" in refused(capsys, tmp_path, "to-hf", checkpoint / "trainer", out)
    for text, problem in (('{"sharded_backend": "zarr"}', "format 'zarr'"), ("[]", "names no sharded_backend")):
        (checkpoint / "trainer" / "metadata.json").write_text(text)
        assert problem in refused(capsys, tmp_path, "to-hf", checkpoint, out)
    (checkpoint / "trainer" / "metadata.json").unlink()
    assert "no whole torch_dist checkpoint" in refused(capsys, tmp_path, "to-hf", checkpoint, out)


def damage(file, offset, data):
    with open(file, "r+b") as stream:
        stream.seek(offset)
        stream.write(data)


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (lambda file: os.truncate(file, file.stat().st_size - 1), "it is truncated"),
        (lambda file: file.unlink(), "0.distcp is missing"),
        (lambda file: damage(file, 0, b"x" * file.stat().st_size), "is damaged: cannot read"),
        (lambda file: damage(file.parent / ".metadata", 0, b"no pickle"), ".metadata ("),
        (lambda file: (file.parent / ".metadata").unlink(), ".metadata ("),
    ],
)
def test_damaged_checkpoints(checkpoint, tmp_path, capsys, harm, problem):
    harm(checkpoint / "trainer" / "__0_0.distcp")
    assert problem in refused(capsys, tmp_path, "to-hf", checkpoint, tmp_path / "out")


def edit_metadata(checkpoint, change):
    file = checkpoint / "trainer" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def test_missing_tensors_and_parts_are_named(checkpoint, tmp_path, capsys):
    edit_metadata(checkpoint, lambda metadata: metadata.state_dict_metadata[FC2].chunks.pop())
    message = refused(capsys, tmp_path, "to-hf", checkpoint, tmp_path / "out")
    assert f"{FC2} has 18432 of its 24576 elements" in message
    edit_metadata(checkpoint, lambda metadata: metadata.state_dict_metadata.pop(FC2))
    assert f"has no tensor {FC2}" in refused(capsys, tmp_path, "to-hf", checkpoint, tmp_path / "out")


def cover_twice(metadata):
    """Leaves the last layer to nobody."""
    *_, before, last = metadata.state_dict_metadata[FC2].chunks
    last.offsets = before.offsets


def reach_beyond(metadata):
    chunk = metadata.state_dict_metadata[FC2].chunks[0]
    chunk.sizes = torch.Size((10**12, *chunk.sizes[1:]))


@pytest.mark.parametrize("harm", [cover_twice, reach_beyond])
@pytest.mark.timeout(60)
def test_parts_that_lie_over_one_another_or_beyond_their_tensor_are_refused(checkpoint, tmp_path, capsys, harm):
    edit_metadata(checkpoint, harm)
    assert f"{FC2} has parts that lie over" in refused(capsys, tmp_path, "to-hf", checkpoint, tmp_path / "out")


@pytest.mark.parametrize("size", ["0", "nan", "inf", "1e300"])
def test_what_no_file_can_be_large_is_refused(tmp_path, capsys, size):
    with pytest.raises(SystemExit, match=r"^2$"):
        convert.main(["from-hf", str(tmp_path), str(tmp_path / "out"), "--shard-gb", size])
    message = capsys.readouterr().err
    assert "--shard-gb: must be a finite number above 0, is" in message and message.count("\n") == 1


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def test_a_checkpoint_is_read_without_running_what_it_says(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = checkpoint / "trainer" / "evil.distcp"
    torch.save(Evil(), file)

    def point_there(metadata):
        for index, where in metadata.storage_data.items():
            if index.fqn == FC2:
                where.relative_path, where.offset, where.length = file.name, 0, file.stat().st_size

    edit_metadata(checkpoint, lambda metadata: setattr(metadata, "planner_data", Evil()))
    to_hf(checkpoint, tmp_path / "converted")
    assert not (tmp_path / "evil").exists()
    edit_metadata(checkpoint, point_there)
    shutil.rmtree(tmp_path / "evil")  # of reading it here
    assert "evil.distcp is damaged" in refused(capsys, tmp_path, "to-hf", checkpoint, tmp_path / "out")
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "config.json names 'GPT2LMHeadModel', which has no table"),
        (
            {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
            "_layernorm.weight of shape [4, 32], which config.json (LlamaForCausalLM)",
        ),
        ({"architectures": ["LlamaForCausalLM"]}, "model_type='qwen3' and the class LlamaForCausalLM, of two models"),
        ({"model_type": "glm4_moe"}, "model_type='glm4_moe' and the class Qwen3ForCausalLM"),
        ({"tie_word_embeddings": True}, "has a tensor output_layer.weight of shape [203, 64]"),
        ({"num_hidden_layers": 5}, "shape [4, 64], config.json (Qwen3ForCausalLM) asks for [5, 64]"),
        (
            {"intermediate_size": 128},
            "linear_fc1.weight has shape [4, 192, 64], config.json (Qwen3ForCausalLM) asks for [4, 256, 64]",
        ),
        ({"vocab_size": 204}, "embedding.word_embeddings.weight has shape [203, 64]"),
        ({"hidden_size": None}, "needs a positive integer hidden_size"),
    ],
)
def test_a_config_of_another_model(checkpoint, tmp_path, capsys, changes, problem):
    file = checkpoint / "hf" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    assert problem in refused(capsys, tmp_path, "to-hf", checkpoint, tmp_path / "out")


def test_without_a_config(checkpoint, tmp_path, capsys):
    shutil.rmtree(checkpoint / "hf")
    assert "error: cannot read" in refused(capsys, tmp_path, "to-hf", checkpoint, tmp_path / "out")


def test_folders_that_cannot_be_written(checkpoint, hf_folder, tmp_path, capsys, monkeypatch):
    for direction, source in (("to-hf", checkpoint), ("from-hf", hf_folder)):
        assert "exists: remove it" in refused(capsys, tmp_path, direction, source, hf_folder)
        assert "make it first" in refused(capsys, tmp_path, direction, source, tmp_path / "no" / "out")
        assert "cannot write /sys/out" in refused(capsys, tmp_path, direction, source, "/sys/out")  # of the kernel
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda path: namedtuple("usage", "free")(1000))
            assert "0.000 GB are free" in refused(capsys, tmp_path, direction, source, tmp_path / "out")


@pytest.mark.parametrize("direction", ["to-hf", "from-hf"])
def test_a_write_that_fails_leaves_nothing(checkpoint, hf_folder, tmp_path, direction):
    """As on a full disk: the process may write files of 100 kB only."""
    source = checkpoint if direction == "to-hf" else hf_folder
    before = sorted(tmp_path.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-m", "areal_megatron.programs.convert", direction, source, tmp_path / "out"],
        cwd=ROOT,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=500,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: cannot write") and "File too large" in done.stderr
    assert done.stderr.count("\n") == 1 and sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("harm", [KeyboardInterrupt, SystemExit, MemoryError])
def test_an_end_in_the_middle_leaves_nothing(checkpoint, hf_folder, tmp_path, harm):
    before = sorted(tmp_path.rglob("*"))

    def end(done, total):
        if done > total / 2:
            raise harm

    for convert_folder, source in ((to_hf, checkpoint), (from_hf, hf_folder)):
        with pytest.raises(harm):
            convert_folder(source, tmp_path / "out", report=end)
        assert sorted(tmp_path.rglob("*")) == before


def test_a_checkpoint_is_not_removed_while_it_is_read(models, checkpoint, tmp_path):
    """Its run goes on meanwhile, and keeps one."""
    run = RunFolder(tmp_path / "run")
    run.create()
    run.begin()
    for version in (1, 2, 3):
        shutil.copytree(checkpoint, checkpoint_folder.partial(run, version))
        checkpoint_folder.seal(run, version, version)

    def tidy(*_):
        checkpoint_folder.tidy(run, CheckpointConfig(keep=1))

    def there():
        return [folder.name[-1] for folder in checkpoint_folder.complete(run)]

    to_hf(run.checkpoints / "version-000001", tmp_path / "out", verify=True, report=tidy)
    assert_equal(weights(tmp_path / "out"), models["qwen3"][1])
    assert there() == ["1", "3"]
    tidy()
    assert there() == ["3"]


@pytest.mark.parametrize("direction", ["to-hf", "from-hf"])
def test_verify_finds_one_wrong_bit(checkpoint, hf_folder, tmp_path, capsys, monkeypatch, direction):
    compare, source = conversion.compare, checkpoint if direction == "to-hf" else hf_folder

    def harmed(*arguments):
        [file] = [*tmp_path.glob(".out.partial/model.safetensors"), *tmp_path.glob(".out.partial/trainer/*.distcp")]
        content = file.read_bytes()
        at = content.index(load_file(hf_folder / "model.safetensors")["model.norm.weight"].numpy().tobytes())
        damage(file, at, bytes([content[at] ^ 1]))
        compare(*arguments)

    monkeypatch.setattr(conversion, "compare", harmed)
    message = refused(capsys, tmp_path, direction, source, tmp_path / "out", "--verify")
    assert "model.norm.weight read back is not what was written" in message


def test_layers_that_predict_further_tokens_are_left_out(tmp_path, caplog):
    tensors = write_model("glm4-moe", tmp_path / "model")
    further = {f"model.layers.4.{name}": torch.zeros(3) for name in ("eh_proj.weight", "enorm.weight")}
    save_file(tensors | further, tmp_path / "model" / "model.safetensors")
    from_hf(tmp_path / "model", tmp_path / "checkpoint")
    assert "model.layers.4.eh_proj.weight and 1 more, which predict further tokens" in caplog.text
    to_hf(tmp_path / "checkpoint", tmp_path / "again", dtype="bfloat16", verify=True)
    found = load_file(tmp_path / "again" / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        kind = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        assert torch.equal(found[name], tensor.to(kind)) and found[name].dtype == kind


def in_8_bits(tensors, scales):
    """Quantises matrices of layers but routers as DeepSeek-V3 has them, and Qwen's models with scales in bfloat16, by
    torch; returns the folder's tensors, and what they stand for."""
    stored, meant = {}, {}
    for name, tensor in tensors.items():
        stored[name] = meant[name] = tensor
        if tensor.dim() == 2 and ".layers." in name and ".mlp.gate." not in name:
            rows, columns = tensor.shape
            padded = F.pad(tensor, (0, -columns % 128, 0, -rows % 128))
            blocks = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
            scale = (blocks.abs().amax((1, 3)) / 448).to(scales)
            by_element = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
            stored[name] = (tensor / by_element).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale
            meant[name] = stored[name].float() * by_element
    return stored, meant


@pytest.mark.parametrize(
    ("name", "scales"),
    [("deepseek-v3-moe", torch.float32), ("qwen3-next-moe", torch.bfloat16)],
    ids=["deepseek", "qwen"],
)
def test_weights_in_8_bits_become_whole(tmp_path, name, scales):
    model = tmp_path / "model"
    tensors = write_model(name, model, hidden_size=160, intermediate_size=288)
    stored, meant = in_8_bits(tensors, scales)
    assert sum(name.endswith("_scale_inv") for name in stored) > 100
    save_file(stored, model / "model.safetensors")
    described = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(described | {"quantization_config": {"quant_method": "fp8"}}))
    from_hf(model, tmp_path / "checkpoint", verify=True)
    to_hf(tmp_path / "checkpoint", tmp_path / "whole", verify=True)
    found = load_file(tmp_path / "whole" / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in meant.items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name
        if f"{name}_scale_inv" in stored:
            assert found[name].dtype == torch.bfloat16
    assert "quantization_config" not in json.loads((tmp_path / "whole" / "config.json").read_text())
    name = next(name for name in stored if name.endswith("_scale_inv"))
    save_file(stored | {name: torch.ones(1, 1)}, model / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"has 8 bits, and no .*_scale_inv in float32 or bfloat16 of shape .* 128 × 128"
    ):
        from_hf(model, tmp_path / "again")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "has no tensor model.norm.weight"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(63)}),
            "has shape [63], config.json (Qwen3ForCausalLM) asks for [64]",
        ),
        (lambda tensors: tensors.update({"extra.weight": torch.zeros(3)}), "has a tensor extra.weight"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}),
            "has dtype I8; supported are",
        ),
    ],
)
def test_a_model_folder_of_another_model(hf_folder, tmp_path, capsys, change, problem):
    tensors = load_file(hf_folder / "model.safetensors")
    change(tensors)
    save_file(tensors, hf_folder / "model.safetensors")
    assert problem in refused(capsys, tmp_path, "from-hf", hf_folder, tmp_path / "out")


def test_damaged_model_folders(hf_folder, tmp_path, capsys):
    file = hf_folder / "model.safetensors"
    for size in (file.stat().st_size - 1, 500, 3):
        os.truncate(file, size)
        assert "is truncated or no safetensors" in refused(capsys, tmp_path, "from-hf", hf_folder, tmp_path / "out")
    file.unlink()
    assert "has neither" in refused(capsys, tmp_path, "from-hf", hf_folder, tmp_path / "out")
    (hf_folder / "model.safetensors.index.json").write_text("{}")
    assert "index.json cannot be read" in refused(capsys, tmp_path, "from-hf", hf_folder, tmp_path / "out")
