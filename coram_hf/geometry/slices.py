"""Row slices: how a matrix is cut into groups of h rows and walked in chunks, in memory that is reused."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from coram_hf.config import CoramConfig

CHUNK_BYTES = 12 * 2**20
"""Size of the working buffer of one chunk: small enough for a last-level cache, large enough for `bmm`."""


class Chunk(NamedTuple):
    """Rows `start:stop` of the (permuted) matrix, to be read as slices of `height` rows."""

    start: int
    stop: int
    height: int


def chunks(d_out: int, height: int, slice_bytes: int, budget: int | None = None) -> Iterator[Chunk]:
    """Cut d_out rows into chunks of whole slices; the last d_out mod h rows make one shorter slice."""
    whole = d_out - d_out % height
    yield from parts(Chunk(0, whole, height), slice_bytes, CHUNK_BYTES if budget is None else budget)
    if whole < d_out:
        yield Chunk(whole, d_out, d_out - whole)


def parts(chunk: Chunk, slice_bytes: int, budget: int) -> Iterator[Chunk]:
    """Cut a chunk into parts of as many slices as fit in the budget of bytes, at least one."""
    step = chunk.height * max(1, budget // max(1, slice_bytes))
    for start in range(chunk.start, chunk.stop, step):
        yield Chunk(start, min(start + step, chunk.stop), chunk.height)


def as_rows(tensor: Tensor) -> Tensor:
    """View a tensor in one or two dimensions; all dimensions but the last become rows."""
    if tensor.ndim == 0:
        return tensor.reshape(1)
    return tensor.flatten(0, -2) if tensor.ndim > 2 else tensor


def row_blocks(tensor: Tensor) -> Iterator[slice]:
    """Ranges of rows of `as_rows(tensor)`, several float64 copies of which fit in a chunk."""
    rows = len(as_rows(tensor))
    row_bytes = 8 * tensor.numel() // max(1, rows)
    step = max(1, CHUNK_BYTES // 6 // max(1, row_bytes))
    for start in range(0, rows, step):
        yield slice(start, start + step)


def gather(matrix: Tensor, chunk: Chunk, order: Tensor | None) -> Tensor:
    """The chunk's rows of one matrix, in slice order."""
    if order is None:
        return matrix[chunk.start : chunk.stop]
    return matrix.index_select(0, order[chunk.start : chunk.stop].to(matrix.device))


def load(matrices: Sequence[Tensor], chunk: Chunk, order: Tensor | None, buffer: Tensor) -> Tensor:
    """Copy a chunk of every matrix into `buffer`, viewed as (slices, matrices, height, d_in)."""
    d_in = matrices[0].shape[1]
    shape = ((chunk.stop - chunk.start) // chunk.height, len(matrices), chunk.height, d_in)
    stack = buffer[: shape[0] * shape[1] * shape[2] * shape[3]].view(shape)
    for i, matrix in enumerate(matrices):
        stack[:, i].copy_(gather(matrix, chunk, order).unflatten(0, (shape[0], chunk.height)))
    return stack


def buffer_for(
    work: Iterable[Chunk], row_numel: int, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Memory to `load` these chunks into, one at a time; this thread's next buffer reuses it."""
    return scratch("slices", largest(work) * row_numel, dtype, device)


def largest(work: Iterable[Chunk]) -> int:
    """Rows of the largest chunk."""
    return max((chunk.stop - chunk.start for chunk in work), default=0)


def with_float64(device: torch.device) -> torch.device:
    """The device, or the CPU in place of one without float64."""
    return torch.device("cpu") if device.type == "mps" else device


def as_float64(tensor: Tensor) -> Tensor:
    """In float64, on the CPU if the tensor's device has none."""
    return tensor.to(with_float64(tensor.device)).double()


def compute_dtype(config: CoramConfig, dtypes: Iterable[torch.dtype], device: torch.device) -> torch.dtype:
    """The dtype of the large products for base, experts and result of these dtypes."""
    if config.compute_dtype != "auto":
        return torch.float32 if config.compute_dtype == "float32" else torch.float64
    narrow = all(dtype.itemsize <= 2 for dtype in dtypes)
    return torch.float32 if narrow or with_float64(device) != device else torch.float64


def times(A: Tensor, B: Tensor) -> Tensor:
    """A B of many small matrices; on the CPU numpy's product, which takes a third of torch's time."""
    if A.device.type != "cpu":
        return A @ B
    return torch.from_numpy(np.matmul(A.numpy(), B.numpy()))


class Rows:
    """Matrices of one shape, base first: the order of their rows, and the memory to load slices in."""

    def __init__(
        self,
        matrices: Sequence[Tensor],
        config: CoramConfig,
        factors: Sequence[float],
        device: torch.device,
        order: Tensor | None,
        compute: torch.dtype,
    ) -> None:
        """`order`: the permutation whose consecutive runs of rows are the slices; None: as stored."""
        self.weights = torch.tensor(
            config.expert_weights(len(factors)), dtype=torch.float64, device=with_float64(device)
        )
        self._matrices, self._compute, self._device = matrices, compute, device
        self._d_out, self._d_in = matrices[0].shape
        self._row_numel = len(matrices) * self._d_in
        self._slice_bytes = config.slice_height * self._row_numel * compute.itemsize
        self._balanced = any(factor != 1 for factor in factors)
        self._order = order

    def _reserve(self, work: Iterable[Chunk]) -> None:
        self._buffer = buffer_for(work, self._row_numel, self._compute, self._device)

    def _load(self, chunk: Chunk) -> Tensor:
        return load(self._matrices, chunk, self._order, self._buffer)


_local = threading.local()


def scratch(use: str, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """An uninitialised flat tensor; the next call of this thread for the same use overwrites it.

    Each use belongs to one module, which passes the buffer to others if they must share it.
    """
    kept: dict[str, Tensor] = _local.__dict__
    key = f"{use} {dtype} {device}"
    buffer = kept.get(key)
    if buffer is None or len(buffer) < numel:
        with torch.inference_mode(False):
            kept.pop(key, None)
            buffer = kept[key] = _new(numel, dtype, torch.device(device))
    return buffer[:numel]


def _new(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """New memory; if possible straight from the system: the allocator keeps much of what it gets back."""
    if device.type != "cpu" or numel == 0 or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.empty(numel, dtype=dtype, device=device)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize, flags=private), dtype=dtype)
