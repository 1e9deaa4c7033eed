"""A stand-in for an accelerator: tensors that say they are on `cuda:0` and hold their data on the CPU.

It computes as the CPU does, and refuses what a real device would: operations on tensors of both devices, and
copies from pageable memory that claim not to block. What a stream of its own does happens late, when an event
of it is waited for, so that memory that is reused too early shows as wrong numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cuda", 0)
INDEXING = {"__getitem__", "__setitem__", "index_put_"}
"""Operations whose indices may be on the CPU."""


class OnDevice(torch.Tensor):
    """A tensor of the accelerator."""

    held: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        if name == "__get__" and func == torch.Tensor.device.__get__:
            return DEVICE
        if name in ("numpy", "data_ptr", "__array__"):
            raise TypeError(f"{name} of a tensor on {DEVICE}")
        if name in ("to", "cpu", "double", "float"):
            given = {"cpu": ("cpu",), "double": (torch.float64,), "float": (torch.float32,)}.get(
                name, args[1:]
            )
            return moved(args[0], *given, **kwargs)
        if name == "copy_":
            return copy(*args, **kwargs)
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        on_cpu = [tensor for tensor in tensors if not isinstance(tensor, OnDevice) and tensor.ndim]
        if on_cpu and name not in INDEXING:
            raise RuntimeError(f"{name}: found tensors on {DEVICE} and on the CPU")
        kwargs = {key: value for key, value in kwargs.items() if key != "device"}
        made = func(*tree_map(bare, args), **tree_map(bare, kwargs))
        own = {id(tensor.held): tensor for tensor in tensors if isinstance(tensor, OnDevice)}

        def wrapped(value: Any) -> Any:
            known = own.get(id(value))
            if known is not None or not isinstance(value, Tensor):
                return value if known is None else known
            return on_device(value)

        return tree_map(wrapped, made)


def on_device(held: Tensor) -> OnDevice:
    found = held.as_subclass(OnDevice)
    found.held = held
    return found


def bare(value: Any) -> Any:
    return value.held if isinstance(value, OnDevice) else value


def copy(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy between devices, or on one; on a stream of its own, later."""
    between = isinstance(to, OnDevice) != isinstance(source, OnDevice)
    if between and non_blocking and not is_pinned(source if isinstance(to, OnDevice) else to):
        raise RuntimeError("a copy that does not block needs pinned memory")
    target, data = bare(to), bare(source)
    if between and non_blocking and Stream.current is not Stream.work:
        Stream.current.waiting.append(lambda: target.copy_(data))
    else:
        target.copy_(data)
    return to


def moved(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`tensor.to(...)`: a device, a dtype, both, or another tensor that has them."""
    there, dtype = isinstance(tensor, OnDevice), tensor.dtype
    for value in (*args, *(kwargs[name] for name in ("device", "dtype") if name in kwargs)):
        if isinstance(value, Tensor):
            there, dtype = isinstance(value, OnDevice), value.dtype
        elif isinstance(value, torch.dtype):
            dtype = value
        elif value is not None and not isinstance(value, bool):
            there = is_here(value)
    if there == isinstance(tensor, OnDevice) and dtype == tensor.dtype and not kwargs.get("copy"):
        return tensor
    found = bare(tensor).to(dtype, copy=True)
    return on_device(found) if there else found


def is_here(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE.type


PINNED: list[Tensor] = []


def is_pinned(tensor: Tensor) -> bool:
    start = tensor.untyped_storage().data_ptr()
    return any(start == pinned.untyped_storage().data_ptr() for pinned in PINNED)


class Stream:
    """A queue of copies that run when they are waited for.

    work: the stream of everything else, which runs at once; current: the one that is being used.
    late: the number of copies, on any stream, that ran after they were issued.
    """

    work: Stream
    current: Stream
    late = 0

    def __init__(self, device: Any = None) -> None:
        self.waiting: list[Callable[[], object]] = []

    def wait_event(self, event: Event) -> None:
        event.synchronize()

    def run(self, works: list[Callable[[], object]]) -> None:
        for work in works:
            if work in self.waiting:
                self.waiting.remove(work)
                work()
                Stream.late += 1


class Event:
    """A point in a stream."""

    def __init__(self, device: Any = None) -> None:
        self._works: list[Callable[[], object]] = []
        self._stream = Stream()

    def record(self, stream: Stream) -> None:
        self._stream, self._works = stream, list(stream.waiting)

    def synchronize(self) -> None:
        self._stream.run(self._works)


class Accelerator(TorchFunctionMode):
    """Makes the stand-in available inside a `with` block, in this thread."""

    def __init__(self, monkeypatch: Any) -> None:
        super().__init__()
        Stream.work = Stream.current = Stream()
        monkeypatch.setattr(torch, "Stream", Stream)
        monkeypatch.setattr(torch, "Event", Event)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: Stream.current)
        monkeypatch.setattr(torch.accelerator, "set_stream", self._set_stream)
        monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: None)
        Stream.late = 0
        PINNED.clear()

    @staticmethod
    def _set_stream(stream: Stream) -> None:
        Stream.current = stream

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.pop("pin_memory", False):
            PINNED.append(func(*args, **kwargs))
            return PINNED[-1]
        if any(isinstance(value, OnDevice) for value in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        if func is torch.Tensor.to:
            return moved(*args, **kwargs)
        if is_here(kwargs.get("device")):
            return on_device(func(*args, **{**kwargs, "device": "cpu"}))
        return func(*args, **kwargs)
