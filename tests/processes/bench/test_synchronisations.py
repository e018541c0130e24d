"""tools/bench/synchronisations.py on single operations, against what CUDA is known to do."""

import numpy as np
import pytest
import torch

from areal_megatron.trainer.copies import to_device
from tools.bench.synchronisations import Site, synchronisations

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="torch itself tells on CUDA")
DEVICE = torch.device("cpu")
X = torch.tensor([3.0, -1.0, 2.0])
"""Made before anybody watched: the device's."""

WAITS = {
    "item": lambda: X.sum().item(),
    "bool": lambda: bool(X[0] > 0),
    "as a bound of a slice": lambda: X[: X.argmax()],
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "cpu": lambda: X.cpu(),
    "to cpu": lambda: X.to("cpu"),
    "to host memory": lambda: torch.zeros(3).copy_(X),
    "mask as index": lambda: X[X > 0],
    "masked_select": lambda: X.masked_select(X > 0),
    "nonzero": lambda: X.nonzero(),
    "values at a mask": lambda: X.clone().index_put((X > 0,), torch.ones(2, device=DEVICE)),
    "bincount": lambda: X.abs().long().bincount(),
    "unique": lambda: X.unique(),
    "repeats on the device": lambda: X.repeat_interleave(X.abs().long()),
    "number to the device": lambda: torch.tensor(3.0, device=DEVICE),
    "array to the device": lambda: torch.from_numpy(np.ones(3)).to(DEVICE),
    "into a tensor of the device": lambda: X.clone().copy_(torch.zeros(3)),
    "in a backward pass": lambda: _Waits.apply(X.clone().requires_grad_()).backward(),
}
GOES_ON = {
    "arithmetic": lambda: (X * 2 + X.new_full((3,), 1.0)).sum(),
    "value at a mask": lambda: X.clone().masked_fill_(X > 0, 0.0).where(X > 0, 1.0),
    "array without waiting": lambda: to_device(np.ones(3), DEVICE) + X,
    "list of places": lambda: torch.arange(3)[[0, 2]].tolist(),
    "the host's own": lambda: torch.stack([torch.zeros(2).sum(), torch.ones(2).sum()]).double().tolist(),
    "the host's own, selected": lambda: torch.arange(3)[torch.arange(3) > 0].nonzero(),
    "to the host without waiting": lambda: X.to("cpu", non_blocking=True),
    "factories": lambda: torch.full((3,), 2.0, device=DEVICE) + torch.zeros_like(X),
}


class _Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(3) * gradient.item()


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_found_with_its_place(name):
    with synchronisations() as seen:
        WAITS[name]()
    [(site, count)] = seen.items()
    assert count == 1 and site.file == "tests/processes/bench/test_synchronisations.py", seen
    assert ("backward" if "backward" in name else "<lambda>") in site.function


@pytest.mark.parametrize("name", GOES_ON)
def test_what_does_not_wait_is_not_counted(name):
    with synchronisations() as seen:
        GOES_ON[name]()
    assert not seen


def test_a_known_tensor_of_the_host_is_not_waited_for():
    with synchronisations([X]) as seen:
        X.tolist()
    assert not seen
    with synchronisations() as seen:
        X.tolist()
    place = "test_a_known_tensor_of_the_host_is_not_waited_for"
    assert seen == {Site("tests/processes/bench/test_synchronisations.py", place, "tolist"): 1}
