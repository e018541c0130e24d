"""Checks of a trainer rank on one CUDA device, which test_trainer.py starts."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from areal_megatron.packing.row import whole_sequences
from areal_megatron.rank.weights import save_hf
from areal_megatron.trainer import checkpoint, pipeline
from areal_megatron.trainer.attention import Packed, _packed_varlen
from areal_megatron.trainer.attention_blocks import attend_in_blocks
from areal_megatron.trainer.batch import pack_trajectories
from areal_megatron.trainer.logprobs import Vocabulary, token_logprobs
from tests.support import training_oracle as oracle
from tests.support.ranks.trainer_checks import make_config, make_trajectories, open_trainer, train_once
from tests.support.tiny_models import load_oracle


def check_cuda(folder: Path, rank: int) -> None:
    """Log-probabilities in half precision on one CUDA device are near those in float32 on the CPU; an update works."""
    for dtype, error in (("bfloat16", 0.05), ("float16", 0.005)):
        check_half_precision(folder, rank, dtype, error)


def check_half_precision(folder: Path, rank: int, dtype: str, error: float) -> None:
    config = make_config(folder, "qwen3", {}, dtype=dtype)
    reference, trajectories = load_oracle(folder / "qwen3"), make_trajectories(12, 0)
    with open_trainer(folder, rank, config) as subject, torch.no_grad():
        assert subject.device.type == "cuda"
        batch = pack_trajectories(trajectories, [0.0] * 12, [1.0] * 12, 0, "recompute", 1, subject.device)
        work = [(batch.microbatch, lambda hidden: subject.ppo._objective.logprobs(hidden, batch.microbatch))]
        [logprobs] = pipeline.forward(subject.policy.chunks, work)
        expected = [oracle.response_logprobs(reference, t, 0.7)[t.loss_mask == 1] for t in trajectories]
        assert float((logprobs.cpu() - torch.cat(expected)).abs().mean()) < error
        before = {name: value.clone() for name, value in subject.parameters().items()}
        with torch.enable_grad():
            train_once(subject)
        assert any(not torch.equal(value, before[name]) for name, value in subject.parameters().items())


def check_cuda_groups(folder: Path, rank: int) -> None:
    """NCCL alone carries Megatron's groups and gloo those for control; no part of a run needs more."""
    config = make_config(folder, "qwen3_moe", {}, dtype="bfloat16")
    with open_trainer(folder, rank, config) as subject:
        backends = {group: str(backend) for group, backend in dist.distributed_c10d._world.pg_backend_config.items()}
        own = {subject.parallel.control, subject.parallel.replica_control}
        assert {backends.pop(group) for group in own} == {"cpu:gloo,cuda:gloo"}
        assert set(backends.values()) == {"cuda:nccl"}, backends
        train_once(subject)
        saver = checkpoint.Saver(subject)
        saver.begin(folder / "checkpoint")
        saver.wait()
        checkpoint.load(subject, folder / "checkpoint")
        save_hf(config, subject.run, subject)
        assert subject.parallel.share_all(b"to all") == b"to all" and subject.parallel.gather(b"one") == [b"one"]


def check_cuda_logprob_memory(folder: Path, rank: int) -> None:
    """Prints the peak memory of the log-probabilities of 32k tokens over 152k columns, forward and backward."""
    tokens, columns, hidden_size = 32768, 151936, 4096
    with open_trainer(folder, rank, make_config(folder, "qwen3", {}, dtype="bfloat16")) as subject:
        make = {"device": subject.device, "dtype": torch.bfloat16, "requires_grad": True}
        hidden, weight = torch.randn(tokens, 1, hidden_size, **make), torch.randn(columns, hidden_size, **make)
        labels = torch.randint(columns, (tokens,), device=subject.device)
        vocabulary = Vocabulary(size=columns, temperature=1.0, tile=2**27, sequence_parallel=False)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        rows = torch.arange(tokens, device=subject.device)
        logprobs, _ = token_logprobs(hidden, weight, rows, labels, vocabulary)
        forward = torch.cuda.max_memory_allocated() - before
        logprobs.sum().backward()
        peak = torch.cuda.max_memory_allocated() - before
        print(
            f"32k tokens x 152k columns: {forward / 2**30:.2f} GiB forward, {peak / 2**30:.2f} GiB with backward, "
            f"full float32 logits {tokens * columns * 4 / 2**30:.1f} GiB"
        )
        assert forward < tokens * columns * 4 / 5


def check_cuda_attention(folder: Path, rank: int) -> None:
    """varlen_attn in bfloat16 agrees with SDPA in float32, forward and backward, with grouped queries."""
    lengths, heads, groups, size = (70, 1, 300, 33, 33, 8), 8, 2, 64
    packed = Packed(view=whole_sequences(lengths), device="cuda")
    inputs = [torch.randn(sum(lengths), count, size, device="cuda") for count in (heads, groups, groups)]
    results = []
    for attend, dtype in ((_packed_varlen, torch.bfloat16), (attend_in_blocks, torch.float32)):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = attend(*leaves, packed, None)
        out.float().square().sum().backward()
        results.append([out.float(), *(leaf.grad.float() for leaf in leaves)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=0.1, rtol=0.05)
