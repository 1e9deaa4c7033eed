"""Merge several parameters at a time, one per thread: the small algebra of a slice cannot use more cores.

Up to `LARGEST_COUNT` cores, every thread computes on one core, so the bits of a merge do not depend on their
number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch
from threadpoolctl import threadpool_limits

LARGEST_COUNT = 8
"""The most parameters to merge at a time, as each takes memory; further cores are divided among them."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def thread_count(device: torch.device | None) -> int:
    """How many parameters to merge at a time: one per CPU core; one on an accelerator."""
    on_cpu = device is None or device.type == "cpu"
    return min(LARGEST_COUNT, torch.get_num_threads()) if on_cpu else 1


def in_threads(
    work: Callable[[Item], Result], items: Iterable[Item], count: int
) -> Iterator[tuple[Item, Result]]:
    """Yield (item, work(item)) as they finish, `count` at a time; the first error stops the work."""
    threads = torch.get_num_threads()
    share = max(1, threads // count)
    pool = ThreadPoolExecutor(count, "merge", lambda: torch.set_num_threads(share))
    running: dict[Future[Result], Item] = {}
    try:
        with threadpool_limits(share, user_api="blas"):
            for item in items:
                while len(running) >= count:
                    yield from _finished(running)
                running[pool.submit(work, item)] = item
            while running:
                yield from _finished(running)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def _finished(running: dict[Future[Result], Item]) -> list[tuple[Item, Result]]:
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    return [(running.pop(future), future.result()) for future in done]
