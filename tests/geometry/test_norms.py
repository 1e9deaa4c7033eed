"""Norms of a tensor and of its updates, against numpy in float64."""

import numpy as np
import pytest
import torch

from coram_hf.geometry import squared_norms


def squares(base, experts):
    """|W_0|^2 and |W_i - W_0|^2, naively."""
    origin, *others = (np.asarray(tensor.double()) for tensor in (base, *experts))
    return [float((origin**2).sum()), *(float(((other - origin) ** 2).sum()) for other in others)]


def family(shape, size, dtype, scale=1.0):
    """A base and two experts."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(shape, generator=generator)
    others = [base + size * torch.randn(shape, generator=generator) for _ in range(2)]
    return [(scale * tensor).to(dtype) for tensor in (base, *others)]


@pytest.mark.parametrize("shape", [(), (7,), (300, 70), (2, 40, 130), (3000, 700), (0, 4)])
@pytest.mark.parametrize(("dtype", "exact"), [(torch.float64, True), (torch.bfloat16, True)])
def test_exact_norms(shape, dtype, exact):
    base, *experts = family(shape, 0.01, dtype)
    first, rest = squared_norms(base, experts, exact=exact)
    assert [first, *rest] == pytest.approx(squares(base, experts), rel=1e-13)


@pytest.mark.parametrize("shape", [(), (7,), (300, 70), (2, 40, 130), (3000, 700), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 0.01])
def test_norms_in_float32(shape, dtype, size):
    base, *experts = family(shape, size, dtype)
    first, rest = squared_norms(base, experts, exact=False)
    assert [first, *rest] == pytest.approx(squares(base, experts), rel=1e-6)


@pytest.mark.parametrize("scale", [1e-25, 1e-20, 1e25])
def test_what_float32_cannot_square_is_squared_in_float64(scale):
    base, *experts = family((50, 90), 0.1, torch.bfloat16, scale)
    first, rest = squared_norms(base, experts, exact=False)
    assert [first, *rest] == pytest.approx(squares(base, experts), rel=1e-13)


def test_an_expert_that_equals_the_base_has_no_update():
    base, expert, _ = family((50, 90), 0.1, torch.bfloat16)
    assert squared_norms(base, [base.clone(), expert], exact=False)[1][0] == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(value):
    base, expert, other = family((50, 90), 0.1, torch.bfloat16)
    other[3, 4] = value
    _, (fine, found) = squared_norms(base, [expert, other], exact=False)
    assert np.isfinite(fine)
    assert not np.isfinite(found)
