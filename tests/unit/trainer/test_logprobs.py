"""What a GPU compiles: the code between the products of a tile of logits."""

import pytest
import torch

import areal_megatron.trainer  # noqa: F401  (adapts megatron-core to this machine before anything imports it)
from areal_megatron.trainer.logprobs import Fused, fold, slopes


def tensors(vectors: int) -> list[torch.Tensor]:
    torch.manual_seed(vectors)
    return [5 * torch.randn(20, 33), *(torch.rand(20) for _ in range(vectors))]


CASES = [(fold, 2), (fold, 3), (slopes, 2), (slopes, 4)]


@pytest.mark.parametrize(("function", "vectors"), CASES)
def test_the_code_is_one_graph(function, vectors):
    """Without a break: each would be a pass of its own over the logits."""
    traced = torch.compile(function.plain, dynamic=True, fullgraph=True, backend="aot_eager")
    found, expected = (run(*tensors(vectors)) for run in (traced, function.plain))
    torch.testing.assert_close(found, expected)


def test_without_a_compiler_it_runs_as_written(monkeypatch, caplog):
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("/no/compiler",))
    subject = Fused(fold.plain)
    for _ in range(2):
        torch.testing.assert_close(subject.compiled(*tensors(3)), fold.plain(*tensors(3)), atol=0, rtol=0)
    [line] = [record.getMessage() for record in caplog.records if record.name == fold.plain.__module__]
    assert line.startswith("log-probabilities: not compiled, and so slower: ")
    assert "C++ compiler" in line and "\n" not in line


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("function", "vectors"), CASES)
def test_compiled_code_agrees(function, vectors):
    found, expected = (run(*(x.cuda() for x in tensors(vectors))) for run in (function.compiled, function.plain))
    torch.testing.assert_close(found, expected)
    assert function._compiled is not function.plain, "it was not compiled"
