"""The two large products of a slice, X X^T and L X.

On one core, numpy's BLAS multiplies matrices of so few rows in about two thirds of torch's time; on several
cores, or another device, torch processes slices in parallel.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def gram_of(rows: Tensor) -> Tensor:
    """X X^T of every slice; it is symmetric, so part of it is copied instead of computed."""
    if _one_core(rows):
        X = rows.numpy()
        with np.errstate(over="ignore", invalid="ignore"):
            return torch.from_numpy(np.matmul(X, X.transpose(0, 2, 1)))
    half = rows.shape[1] // 2
    upper = torch.bmm(rows[:, :half], rows.mT)
    lower = torch.bmm(rows[:, half:], rows[:, half:].mT)
    return torch.cat([upper, torch.cat([upper[:, :, half:].mT, lower], dim=2)], dim=1)


def combine(coefficients: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    """L X of every slice, written to `out`."""
    if _one_core(rows):
        with np.errstate(over="ignore", invalid="ignore"):
            np.matmul(coefficients.numpy(), rows.numpy(), out=out.numpy())
        return out
    return torch.bmm(coefficients, rows, out=out)


def _one_core(rows: Tensor) -> bool:
    return rows.device.type == "cpu" and rows.dtype == torch.float64 and torch.get_num_threads() == 1
