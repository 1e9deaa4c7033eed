"""Tasks: what is done with one parameter, and several of them at a time, with a queue for each device.

The small algebra of a slice cannot use more than one core. Up to `LARGEST_COUNT` cores, every thread computes
on one, so the bits of a merge do not depend on their number. Every parameter is merged on one device, whole,
so they do not depend on the number of accelerators of a kind either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple, Protocol, TypeVar

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from coram_hf.execution.device import to_device
from coram_hf.inputs.inputs import Inputs, Parameter
from coram_hf.methods.protocol import How, Work
from coram_hf.methods.record import Record, check_finite, measure
from coram_hf.outputs.layout import Unit
from coram_hf.outputs.place import Output, Place

LARGEST_COUNT = 8
"""The most parameters to merge at a time, as each takes memory; further cores are divided among them."""

Task = Callable[[Parameter, Place | None], Record]
"""Merges one parameter into its place; without a place it is only measured."""

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


class Done(NamedTuple):
    """One finished unit: the records of its parameters, and their outputs."""

    records: list[Record]
    outputs: Mapping[str, Output]


class WholeSink(Protocol):
    """A sink that takes every parameter of the model, merged or not."""

    def place(self, name: str) -> Place:
        """Where one merged parameter goes."""
        ...

    def unchanged(self, name: str, tensor: Tensor) -> Output:
        """A parameter that is not merged."""
        ...


def merge_task(
    work: Work, names: Mapping[str, How], lam: float | None, inputs: Inputs, measures: bool
) -> Task:
    """The task of merging one parameter: amplified if the method says so, and measured along the way."""
    experts = list(inputs.experts)

    def task(parameter: Parameter, place: Place | None) -> Record:
        record, strength = Record(), lam if names[parameter.name].amplified else 1.0
        for block in work(parameter):
            record.slices += block.stats
            if block.squares is not None:
                of_base, *of_updates = block.squares.tolist()
                record.measure(of_base, of_updates)
            if block.decorrelation:
                record.decorrelate(block.decorrelation)
            if place is not None:
                record.write(*place.add(block, parameter, strength))
        if place is not None:
            record.write(*place.close(parameter, strength))
        if measures and not record.updates:
            measure(parameter, record, experts)
        elif record.updates:
            check_finite(parameter.name, record, experts)
        return record

    return task


def here(inputs: Inputs, name: str) -> Parameter:
    """A parameter, under any of its names, on the device where it is merged."""
    return to_device(inputs.parameter(inputs.base.tied.get(name, name)), inputs.device_of(name))


def merge_unit(unit: Unit, inputs: Inputs, merged: Collection[str], task: Task, sink: WholeSink) -> Done:
    """Merge the named parameters of a unit; the others stay as in the base, and are measured."""
    records: list[Record] = []
    outputs: dict[str, Output] = {}
    for name in unit:
        parameter = here(inputs, name)
        if parameter.name in merged:
            place = sink.place(name)
            outputs[name] = place.out
            records.append(task(parameter, place))
        else:
            outputs[name] = sink.unchanged(name, parameter.base)
            record = Record()
            if parameter.base.is_floating_point():
                measure(parameter, record, list(inputs.experts), exact=False)
            records.append(record)
    return Done(records, outputs)


def queues(inputs: Inputs) -> dict[torch.device, int]:
    """How many parameters to merge at a time on each device of a merge."""
    return {device: thread_count(device) for device in inputs.devices}


def thread_count(device: torch.device) -> int:
    """How many parameters to merge at a time: one per CPU core; one on an accelerator."""
    return min(LARGEST_COUNT, torch.get_num_threads()) if device.type == "cpu" else 1


def in_threads(
    work: Callable[[Item], Result], items: Iterable[Item], count: int
) -> Iterator[tuple[Item, Result]]:
    """Yield (item, work(item)) as they finish, `count` at a time; the first error stops the work."""
    return in_queues(work, items, lambda item: None, {None: count})


def in_queues(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    queue_of: Callable[[Item], Key],
    counts: Mapping[Key, int],
) -> Iterator[tuple[Item, Result]]:
    """Yield (item, work(item)) as they finish, with `counts[queue]` threads for the items of each queue.

    An item is taken once any queue has room; those of full queues wait. The first error stops the work.
    """
    threads = torch.get_num_threads()
    share = max(1, threads // max(1, sum(counts.values())))
    pools = {
        key: ThreadPoolExecutor(count, "merge", lambda: torch.set_num_threads(share))
        for key, count in counts.items()
    }
    waiting: dict[Key, deque[Item]] = {key: deque() for key in counts}
    busy = dict.fromkeys(counts, 0)
    running: dict[Future[Result], tuple[Key, Item]] = {}

    def start() -> bool:
        """Start what can be started, and tell whether any queue has room for more."""
        for key, count in counts.items():
            while waiting[key] and busy[key] < count:
                item = waiting[key].popleft()
                running[pools[key].submit(work, item)] = key, item
                busy[key] += 1
        return any(busy[key] < count for key, count in counts.items())

    def finished() -> Iterator[tuple[Item, Result]]:
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            key, item = running.pop(future)
            busy[key] -= 1
            yield item, future.result()

    try:
        with threadpool_limits(share, user_api="blas"):
            for item in items:
                waiting[queue_of(item)].append(item)
                while not start():
                    yield from finished()
            while running:
                yield from finished()
                start()
    finally:
        for pool in pools.values():
            pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
