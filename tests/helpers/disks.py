"""Disks that are slow, full or watched, as far as tensors are written to them."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def watched(before: Callable[[int], object]) -> Iterator[None]:
    """Call `before` with the number of bytes ahead of every write of rows to a file."""
    write = os.pwrite

    def pwrite(handle, data, offset):
        before(len(data))
        return write(handle, data, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        yield


@contextmanager
def failing(after: int, error: BaseException) -> Iterator[None]:
    """A disk that takes so many bytes and no more."""
    written = 0

    def count(size):
        nonlocal written
        written += size
        if written > after:
            raise error

    with watched(count):
        yield


@contextmanager
def slow(bytes_per_second: float, tell: Callable[[int], object] = lambda written: None) -> Iterator[None]:
    """A disk of this speed, which tells how much has been written so far."""
    written = 0

    def wait(size):
        nonlocal written
        time.sleep(size / bytes_per_second)
        written += size
        tell(written)

    with watched(wait):
        yield
