"""Products of float32 matrices on the CPU by oneDNN, which uses AVX-512 on every CPU that has it.

torch takes MKL's instead, whose products use AVX-512 on Intel's CPUs only: on AMD's, oneDNN's take less than
half the time. Where oneDNN has no AVX-512 either, everything here is torch's own product.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter, functional

PLAIN = (Tensor, Parameter)
"""Subclasses of Tensor, such as quantised weights, multiply in ways of their own."""


@cache
def has_onednn() -> bool:
    """Whether this torch has oneDNN's product, and the CPU AVX-512.

    The operator is the one that compiled models call; it is tried once, so that a torch in which it has
    another form is no error.
    """
    if not (torch.backends.mkldnn.is_available() and "AVX512" in torch.backends.cpu.get_cpu_capability()):
        return False
    ones = torch.ones(2, 2)
    try:
        return bool((_onednn(ones, ones, None) == 2).all())
    except (AttributeError, RuntimeError, TypeError):
        return False


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, by oneDNN if that is faster; with gradients, which are products of the same kind."""
    if not _suits(x, weight):
        return functional.linear(x, weight, bias)
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (x, weight, bias)):
        found: Tensor = _Linear.apply(x, weight, bias)
        return found
    return _onednn(x, weight, bias)


def product(A: Tensor, B: Tensor) -> Tensor:
    """A B of two matrices."""
    return linear(A, B.mT)


def _suits(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and weight.ndim == 2
        and type(x) in PLAIN
        and type(weight) in PLAIN
        and not torch.is_autocast_enabled("cpu")
        and has_onednn()
    )


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found


class _Linear(torch.autograd.Function):
    """x W^T + b with dL/dx = G W, dL/dW = G^T x and dL/db = sum G."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (by_output,), (x, weight) = gradients, ctx.saved_tensors
        rows = by_output.flatten(0, -2)
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            _onednn(by_output, weight.t(), None) if of_x else None,
            _onednn(rows.t(), x.flatten(0, -2).t(), None) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )
