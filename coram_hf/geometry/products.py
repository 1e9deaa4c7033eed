"""The large products of the kernel, over the d_in columns of slices, and the stacks that they read.

A stack (slices, 2 + N, height, d_in) holds, for every slice, room for Z, then W_0, then tau_1 ... tau_N.

On one core these products are numpy's. Its BLAS has fast kernels for small matrices, but not for a matrix
times its own transpose, nor for many columns at once: therefore one more row than needed is multiplied, and
columns are taken in blocks, over which the sum is in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coram_hf.geometry.slices import as_float64, scratch, with_float64

BASE, EXPERTS = 1, 2
"""The blocks of a stack that hold W_0 and, from there on, the updates."""

COLUMNS, SMALL_PRODUCT = 2048, 900_000
"""The most columns of a block, and the multiplications up to which OpenBLAS takes a product for small."""


class Products(NamedTuple):
    """M_00 = W_0 W_0^T, M_0i = W_0 tau_i^T and M_ii = tau_i tau_i^T of some slices.

    base: (slices, height, height); cross, own: (slices, experts, height, height); all in float64.
    rounded: whether cross and own were computed in float32. base never is: it determines the frame, whose
    error near-degenerate or small singular values would magnify to far more than that of the updates.
    """

    base: Tensor
    cross: Tensor
    own: Tensor
    rounded: bool = False

    def squares(self) -> Tensor:
        """|W_0|^2 and |tau_i|^2, summed over the slices."""
        base = self.base.diagonal(0, 1, 2).sum().view(1)
        return torch.cat([base, self.own.diagonal(0, 2, 3).sum((0, 2))])


def products_of(stack: Tensor) -> Products:
    """The products of W_0 and the updates of every slice."""
    height, n_experts = stack.shape[2], stack.shape[1] - EXPERTS
    rounded = stack.dtype != torch.float64
    updates = stack[:, EXPERTS:].flatten(1, 2)
    if _one_core(stack):
        rows = _base_rows(stack)
        base = _summed(rows, rows[:, 1:])[:, 1:]
        cross = _summed(stack[:, BASE].numpy(), updates.numpy())
        own = _summed(_with_row_before(stack, EXPERTS), stack[:, EXPERTS:].numpy())[:, :, 1:]
    else:
        wide, every = as_float64(stack[:, BASE]), stack.flatten(0, 1)
        base = torch.bmm(wide, wide.mT)
        cross = as_float64(torch.bmm(stack[:, BASE], updates.mT))
        own = as_float64(torch.bmm(every, every.mT).unflatten(0, (-1, EXPERTS + n_experts))[:, EXPERTS:])
    return Products(base, cross.unflatten(2, (n_experts, height)).transpose(1, 2), own, rounded)


def block_squares(stack: Tensor) -> Tensor:
    """|W_0|^2 and |tau_i|^2 over some slices, summed in float64, without their products."""
    like = stack[:, BASE]
    wide = scratch("base", like.numel(), torch.float64, with_float64(stack.device)).view(like.shape)
    norms = [torch.linalg.vector_norm(wide.copy_(block)) for block in stack[:, BASE:].unbind(1)]
    return torch.stack(norms).square()


def combine_updates(P: Tensor, stack: Tensor) -> Tensor:
    """Z Z^T in float64 of Z = [P_1, ..., P_N] [tau_1; ...; tau_N], which is left in the stack."""
    height = stack.shape[2]
    Z, small = stack[:, 0], P.to(stack)
    _multiply(small, stack[:, EXPERTS:].flatten(1, 2), Z)
    if _one_core(stack):
        with_next = stack.flatten(1, 2)[:, : height + 1].numpy()
        return _summed(with_next, Z.numpy())[:, :height]
    return as_float64(torch.bmm(Z, Z.mT))


def combine(L: Tensor, stack: Tensor, out: Tensor) -> Tensor:
    """L [Z; W_0] of every slice, or L W_0 if L has no coefficients of Z, written to `out`."""
    rows = stack[:, :EXPERTS].flatten(1, 2)[:, -L.shape[2] :]
    return _multiply(L.to(stack), rows, out)


def gram_of(rows: Tensor) -> Tensor:
    """X X^T of every slice (slices, rows, d_in)."""
    if _one_core(rows):
        X = rows.numpy()
        with np.errstate(over="ignore", invalid="ignore"):
            return torch.from_numpy(np.matmul(X, X.transpose(0, 2, 1)))
    return torch.bmm(rows, rows.mT)


def _multiply(small: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    """Small matrices times the rows of every slice, written to `out`."""
    if not _one_core(rows):
        return out.copy_(torch.bmm(small, rows))
    A, X, result = small.numpy(), rows.numpy(), out.numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        for some in _blocks(X.shape[2], A.shape[1] * A.shape[2]):
            np.matmul(A, X[..., some], out=result[..., some])
    return out


def _summed(A: np.ndarray, B: np.ndarray) -> Tensor:
    """A B^T, with the sum over blocks of columns in float64."""
    total: Any = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for some in _blocks(A.shape[-1], A.shape[-2] * B.shape[-2]):
            total = total + np.matmul(A[..., some], B[..., some].swapaxes(-1, -2)).astype(np.float64)
    return torch.from_numpy(total)


def _blocks(n_columns: int, others: int) -> Iterator[slice]:
    """Ranges of columns for products whose other two dimensions multiply to `others`."""
    step = max(256, min(COLUMNS, SMALL_PRODUCT // others // 64 * 64))
    for start in range(0, n_columns, step):
        yield slice(start, start + step)


def _base_rows(stack: Tensor) -> np.ndarray:
    """W_0 of every slice in float64, with the row before it."""
    n_slices, _, height, d_in = stack.shape
    if stack.dtype == torch.float64:
        return _with_row_before(stack, BASE)[:, 0]
    wide = scratch("base", (1 + n_slices * height) * d_in, torch.float64).view(-1, d_in)
    wide[0] = 0
    wide[1:].view(n_slices, height, d_in).copy_(stack[:, BASE])
    return wide.as_strided((n_slices, height + 1, d_in), (height * d_in, d_in, 1)).numpy()


def _with_row_before(stack: Tensor, block: int) -> np.ndarray:
    """The blocks of a stack from one on, each with the row before it."""
    n_slices, n_blocks, height, d_in = stack.shape
    start = stack.storage_offset() + (block * height - 1) * d_in
    shape = (n_slices, n_blocks - block, height + 1, d_in)
    return stack.as_strided(shape, stack.stride(), start).numpy()


def _one_core(rows: Tensor) -> bool:
    return rows.device.type == "cpu" and torch.get_num_threads() == 1
