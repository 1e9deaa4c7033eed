"""Products by oneDNN against float64 and against torch's own, forward and backward."""

import pytest
import torch

from coram_hf.geometry.onednn import linear, product
from coram_hf.inputs.dense import fast_layers


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.detach().double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("shape", [(3, 130, 96, 200), (1, 1, 7, 5), (2, 64, 300, 1)])
def test_values_and_gradients(shape: tuple[int, int, int, int]) -> None:
    outer, rows, n_in, n_out = shape
    torch.manual_seed(0)
    x, weight, bias = torch.randn(outer, rows, n_in), torch.randn(n_out, n_in), torch.randn(n_out)
    by_output = torch.randn(outer, rows, n_out)
    given = [one.requires_grad_() for one in (x, weight, bias)]
    found = linear(*given)
    gradients = torch.autograd.grad(found, given, by_output)

    x, weight, bias, by_output = (one.detach().double() for one in (*given, by_output))
    assert relative(found, torch.einsum("ori,ni->orn", x, weight) + bias) < 2e-6
    expected = (
        torch.einsum("orn,ni->ori", by_output, weight),
        torch.einsum("orn,ori->ni", by_output, x),
        by_output.sum((0, 1)),
    )
    for one, exact in zip(gradients, expected, strict=True):
        assert relative(one, exact) < 2e-6


def test_only_what_needs_a_gradient_gets_one() -> None:
    x, weight = torch.randn(20, 8), torch.randn(4, 8, requires_grad=True)
    linear(x, weight).sum().backward()
    assert weight.grad is not None
    assert x.grad is None
    assert torch.allclose(weight.grad, x.sum(0).expand(4, 8), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_torchs_own(dtype: torch.dtype) -> None:
    x, weight = torch.randn(20, 8).to(dtype), torch.randn(4, 8).to(dtype)
    assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))


def test_product_of_transposed_matrices() -> None:
    A, B = torch.randn(30, 50).T, torch.randn(20, 30).T
    assert relative(product(A, B), A.double() @ B.double()) < 2e-6


def test_layers_in_float32_are_as_torch_has_them_to_its_rounding() -> None:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 32, bias=False)
    )
    x = torch.randn(40, 64)
    expected = layers.double()(x.double())
    with fast_layers(), torch.inference_mode():
        found = layers.float()(x)
    assert relative(found, expected) < 2e-6
