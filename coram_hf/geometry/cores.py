"""Small decompositions on one core: on several, threads that wait for each other take many times as long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from threadpoolctl import ThreadpoolController


@contextmanager
def one_core() -> Iterator[None]:
    """Restrict torch and numpy's BLAS to one core; nothing changes if they already are."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        with _controller().limit(limits=1, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)


@cache
def _controller() -> ThreadpoolController:
    """The loaded BLAS libraries, kept because finding them takes a while."""
    return ThreadpoolController()
