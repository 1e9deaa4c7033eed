"""Rows on their way to an accelerator: the next ones are sent while the last are merged.

They go through pinned memory, in the dtype in which they are stored, and on a stream of their own. The tests
run this with a stand-in for an accelerator only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from coram_hf.geometry.slices import Chunk, gather, largest


def is_far(device: torch.device) -> bool:
    """Whether a device has memory of its own; that of Apple's is the CPU's."""
    return device.type not in ("cpu", "mps", "meta")


def on_cpu(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in the memory of the CPU; from an accelerator, in memory that it writes to directly."""
    return torch.empty(tensor.shape, dtype=dtype, pin_memory=is_far(tensor.device)).copy_(tensor)


class Slot:
    """Room for the rows of one chunk on both sides.

    sent: the copy to the device is done. used: so is what was computed from the rows there.
    """

    def __init__(self, matrices: Sequence[Tensor], rows: int, device: torch.device) -> None:
        sizes = [rows * matrix.shape[1] for matrix in matrices]
        kinds = [(size, matrix.dtype) for matrix, size in zip(matrices, sizes, strict=True)]
        self.here = [torch.empty(size, dtype=dtype, pin_memory=True) for size, dtype in kinds]
        self.there = [torch.empty(size, dtype=dtype, device=device) for size, dtype in kinds]
        self.sent, self.used = torch.Event(device), torch.Event(device)
        self.is_sent = self.is_used = False


class Staging:
    """The rows of some matrices on a device, chunk by chunk; those of the next chunk are sent ahead."""

    def __init__(
        self,
        matrices: Sequence[Tensor],
        parts: Sequence[Chunk],
        order: Tensor | None,
        device: torch.device,
    ) -> None:
        self._matrices, self._parts, self._order, self._device = matrices, parts, order, device
        self._stream = torch.Stream(device)
        self._slots = [Slot(matrices, largest(parts), device) for _ in range(2)]
        self._ahead = 0

    def rows(self, part: Chunk) -> list[Tensor]:
        """The rows of a part of every matrix; parts must be asked for in order, and last until the next."""
        index = self._parts.index(part)
        work = torch.accelerator.current_stream(self._device)
        if index > 0:
            before = self._slots[(index - 1) % 2]
            before.used.record(work)
            before.is_used = True
        while self._ahead <= min(index + 1, len(self._parts) - 1):
            self._send(self._ahead)
            self._ahead += 1
        slot = self._slots[index % 2]
        work.wait_event(slot.sent)
        return [held[: self._numel(part, i)].view(-1, m.shape[1]) for i, (m, held) in self._each(slot.there)]

    def _send(self, index: int) -> None:
        """Copy a part to pinned memory, and from there to the device once nothing there is still needed."""
        part, slot = self._parts[index], self._slots[index % 2]
        if slot.is_sent:
            slot.sent.synchronize()
        for i, (matrix, held) in self._each(slot.here):
            held[: self._numel(part, i)].view(-1, matrix.shape[1]).copy_(gather(matrix, part, self._order))
        with _on(self._stream, self._device):
            if slot.is_used:
                self._stream.wait_event(slot.used)
            for i, (_, held) in self._each(slot.here):
                count = self._numel(part, i)
                slot.there[i][:count].copy_(held[:count], non_blocking=True)
            slot.sent.record(self._stream)
        slot.is_sent = True

    def _each(self, held: Sequence[Tensor]) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        return enumerate(zip(self._matrices, held, strict=True))

    def _numel(self, part: Chunk, i: int) -> int:
        return (part.stop - part.start) * self._matrices[i].shape[1]


@contextmanager
def _on(stream: torch.Stream, device: torch.device) -> Iterator[None]:
    """Let this thread's work on a device go to a stream."""
    before = torch.accelerator.current_stream(device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
