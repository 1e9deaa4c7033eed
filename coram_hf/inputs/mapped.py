"""The tensors of a safetensors file as memory maps of which nothing is read until they are used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""The names of dtypes in safetensors files."""
BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


def mapped_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a file, which safetensors has checked, by its name.

    The tensors of safetensors itself come with a first page that has been read, and on some systems with
    megabytes around it, which on a large model are dropped again before they are used.
    """
    with safe_open(path, framework="pt") as checked:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        storage = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
        for name in checked.keys():  # noqa: SIM118
            entry = header[name]
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            dtype = BY_NAME.get(entry["dtype"])
            if dtype is None or begin == end or begin % dtype.itemsize:
                yield name, checked.get_tensor(name)
                continue
            strides = torch.empty(entry["shape"], device="meta").stride()
            yield name, torch.empty(0, dtype=dtype).set_(storage[begin:end], 0, entry["shape"], strides)
