"""The cuts of TIES are those of a sorted list, whatever the tensor looks like."""

import math

import numpy as np
import pytest
import torch

from coram_hf.methods.cuts import SMALL, above, tensor_cuts
from coram_hf.methods.updates import Updates

GENERATOR = torch.Generator().manual_seed(0)


def noise(*shape):
    return torch.randn(shape, generator=GENERATOR)


def unlike_its_grid():
    """Large entries exactly where none is sampled, whatever regular grid starts at the first row."""
    tensor = torch.zeros(400, 400)
    tensor[399] = noise(400)
    return tensor


UPDATES = {
    "noise": noise(300, 400).bfloat16(),
    "ties": (4 * noise(300, 400)).round(),
    "one dimension": noise(2 * SMALL),
    "rows of all sizes": noise(300, 400) * torch.logspace(-6, 2, 300)[:, None],
    "sparse": unlike_its_grid(),
    "zero": torch.zeros(300, 400),
}


@pytest.mark.parametrize("tau", UPDATES.values(), ids=UPDATES)
def test_cuts_are_those_of_a_sorted_list(tau):
    densities = (0.2, 1e-6, 0.999, 1.0, 0.0015)
    count = len(densities)
    updates = Updates(torch.zeros_like(tau), [tau] * count, (1 / count,) * count, (1.0, -1.0, 1.0, 0.5, 1.0))
    found = tensor_cuts(updates, densities)
    for density, factor, cut in zip(densities, updates.factors, found, strict=True):
        ordered = np.sort(np.abs(factor * tau.float().numpy()).ravel())[::-1]
        assert cut == ordered[max(1, int(density * tau.numel())) - 1]
    assert tensor_cuts(updates, (0.0,) * count) == [math.inf] * count


@pytest.mark.parametrize("tau", UPDATES.values(), ids=UPDATES)
def test_cuts_do_not_depend_on_the_size_of_the_sample(tau, monkeypatch):
    updates = Updates(torch.zeros_like(tau), [tau] * 2, (0.5, 0.5), (1.0, 1.0))
    found = tensor_cuts(updates, (0.2, 0.001))
    monkeypatch.setattr("coram_hf.methods.cuts.LARGEST_SAMPLE", 1 << 10)
    assert tensor_cuts(updates, (0.2, 0.001)) == found


def test_the_tensors_are_only_read():
    base, expert = noise(300, 400), noise(300, 400)
    before = base.clone(), expert.clone()
    tensor_cuts(Updates(base, [expert] * 2, (0.5, 0.5), (1.0, -1.0)), (0.2, 0.001))
    assert torch.equal(base, before[0])
    assert torch.equal(expert, before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entries_that_equal_the_cut_are_kept(dtype):
    tau = torch.tensor([0.5, -0.25, 0.25, 0.0, -0.125], dtype=dtype)
    assert above(tau, 0.25).tolist() == [0.5, -0.25, 0.25, 0.0, 0.0]
    assert above(tau, 0.0).tolist() == tau.tolist()
    assert not above(tau, math.inf).any()
