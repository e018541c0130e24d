import json
import subprocess
import sys
from collections import Counter
from math import prod

import pytest

from tests.conftest import ROOT
from tools.bench import convert as bench_convert


@pytest.mark.parametrize("parameters", [1e7, 3e8, 1e9, 2e9])
def test_the_generated_model_has_about_as_many_parameters_as_asked_for(parameters):
    tensors, _ = bench_convert.chunks_of(bench_convert.config_of(parameters))
    layer = sum(prod(shape) / shape[0] for name, shape in tensors.items() if ".layers." in name)
    assert abs(sum(map(prod, tensors.values())) - parameters) <= layer


def test_chunks_cover_each_tensor_once_and_tensor_parallel_ranks_have_parts():
    tensors, chunks = bench_convert.chunks_of(bench_convert.config_of(1e7))
    elements, parts = Counter(), Counter(name for name, _ in chunks)
    for name, box in chunks:
        elements[name] += box.size
        assert all(
            0 <= start < stop <= size for start, stop, size in zip(box.start, box.stop, tensors[name], strict=True)
        )
    assert elements == {name: prod(shape) for name, shape in tensors.items()}
    assert len(set(chunks)) == len(chunks)
    layers = tensors["decoder.layers.mlp.linear_fc2.weight"][0]
    assert (
        parts["decoder.layers.mlp.linear_fc1.weight"] == 2 * parts["decoder.layers.mlp.linear_fc2.weight"] == 4 * layers
    )
    assert parts["embedding.word_embeddings.weight"] == 2 and parts["decoder.final_layernorm.weight"] == 1


def test_figures_of_a_repetition_belong_together(tmp_path):
    arguments = {"--parameters": "1e7", "--repetitions": "1", "--json": tmp_path / "figures", "--out": tmp_path / "out"}
    command = [sys.executable, ROOT / "tools/bench/convert.py", *(x for pair in arguments.items() for x in pair)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=500).stdout.splitlines()
    report = json.loads((tmp_path / "figures").read_text())
    tensors, _ = bench_convert.chunks_of(bench_convert.config_of(1e7))
    assert report.pop("checkpoint_gb") * 1e9 == pytest.approx(2 * sum(map(prod, tensors.values())), rel=0.01)
    for key, figure in report.items():
        assert 0 < figure["min"] == figure["median"] == figure["max"], key
    value = {key: figure["median"] for key, figure in report.items()}
    cp, through, read = value["cp_s"], value["sync_of_the_copy_s"], value["read_s"]
    assert value["no_sync_over_cp_and_read"] == pytest.approx(value["to_hf_no_sync_s"] / (cp + read))
    assert value["time_over_cp_and_read"] == pytest.approx(value["to_hf_s"] / (cp + read))
    assert value["time_over_cp_and_sync_and_read"] == pytest.approx(value["to_hf_s"] / (cp + through + read))
    assert 0.01 < value["peak_rss_gb"] < 0.3, "of another process than the converter"
    assert [line.split()[0] for line in printed[1:]] == list(report)
    assert not (tmp_path / "out").exists()


def test_a_conversion_that_fails_ends_the_benchmark(tmp_path):
    with pytest.raises(SystemExit, match="the conversion ended with exit code 2"):
        bench_convert.run("to-hf", tmp_path / "missing", tmp_path / "out")
