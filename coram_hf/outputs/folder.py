"""A checkpoint folder as `save_pretrained` writes it, tensor by tensor at places known beforehand."""

from __future__ import annotations

import copy
import errno
import json
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, apply_converters, revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from coram_hf.errors import CoramError
from coram_hf.geometry.slices import as_rows
from coram_hf.outputs.file_tensor import FileTensor, Output, write_at
from coram_hf.outputs.files import sync_path
from coram_hf.outputs.pages import forget

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
ALIGNMENT = 8
ZEROS = 2**20
"""Bytes that are written at once where the file system cannot set them aside."""

SYNC_BYTES = 64 * 2**20
"""How much is copied, or merged and written, before waiting for the disk."""

Unit = tuple[str, ...]
"""Parameters that go to disk together: mostly one, several where the disk has them in one tensor."""


class Place(NamedTuple):
    """Where a tensor goes: its file, its offset there, and what it is like."""

    file: str
    offset: int
    like: Tensor


class Layout:
    """What a model is called on disk, and in which files and at which offsets its tensors are.

    `shares` deals the parameters out to processes, each of which writes files of its own.
    """

    def __init__(
        self,
        skeleton: PreTrainedModel,
        shares: Sequence[Sequence[Unit]],
        max_shard_size: int | str,
        *,
        original_format: bool = True,
    ) -> None:
        self.skeleton = skeleton
        state = skeleton.state_dict()
        every = {name: state[name] for share in shares for unit in share for name in unit}
        self._like = every
        whole = revert_weight_conversion(skeleton, every) if original_format else every
        called = {id(tensor): name for name, tensor in whole.items()}
        self.renamed = {name: called[id(tensor)] for name, tensor in every.items() if id(tensor) in called}
        self._owner = {
            disk: rank
            for rank, share in enumerate(shares)
            for unit in share
            for disk in self.to_disk({name: every[name] for name in unit})
        }
        on_disk: list[dict[str, Tensor]] = [{} for _ in shares]
        for disk, like in whole.items():
            on_disk[self._owner[disk]][disk] = like
        splits = [
            split_torch_state_dict_into_shards(
                tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
            ).filename_to_tensors
            for tensors in on_disk
            if tensors
        ]
        count = sum(len(split) for split in splits)
        self.places: dict[str, Place] = {}
        self.headers: dict[str, bytes] = {}
        self.sizes: dict[str, int] = {}
        self.total_bytes = 0
        shards = (names for split in splits for names in split.values())
        for i, names in enumerate(shards, start=1):
            file = "model.safetensors" if count == 1 else f"model-{i:05d}-of-{count:05d}.safetensors"
            self._place(file, {name: whole[name] for name in names})

    def to_disk(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters of one unit under the names and in the shapes that they have on disk."""
        if all(name in self.renamed for name in tensors):
            return {self.renamed[name]: tensor for name, tensor in tensors.items()}
        return cast(dict[str, Tensor], revert_weight_conversion(self.skeleton, dict(tensors)))

    def empty(self, parameter: str) -> Tensor:
        """New memory for a parameter."""
        return torch.empty_like(self._like[parameter], device="cpu")

    def files(self, rank: int) -> list[str]:
        """The files that a process writes."""
        return sorted({place.file for disk, place in self.places.items() if self._owner[disk] == rank})

    def index(self) -> dict[str, Any] | None:
        """The content of model.safetensors.index.json, or None for a single file."""
        if len(self.headers) < 2:
            return None
        weight_map = {name: place.file for name, place in self.places.items()}
        parameters = sum(place.like.numel() for place in self.places.values())
        return {
            "metadata": {"total_parameters": parameters, "total_size": self.total_bytes},
            "weight_map": dict(sorted(weight_map.items())),
        }

    def _place(self, file: str, tensors: Mapping[str, Tensor]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
        spans = {}
        for name, tensor in ordered:
            if tensor.dtype not in DTYPES:
                raise CoramError(f"tensor {name!r}: safetensors has no {tensor.dtype}")
            size = tensor.numel() * tensor.element_size()
            spans[name] = (offset, offset + size)
            header[name] = {
                "dtype": DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": list(spans[name]),
            }
            offset += size
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        self.headers[file] = len(text).to_bytes(8, "little") + text
        for name, tensor in ordered:
            self.places[name] = Place(file, len(self.headers[file]) + spans[name][0], tensor.to("meta"))
        self.sizes[file] = len(self.headers[file]) + offset
        self.total_bytes += offset


def without_data(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the modules whose tensors have shapes and dtypes, but no data, and no hooks."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to("meta"), requires_grad=False) for p in model.parameters()
    }
    memo |= {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    memo |= {id(hook): None for m in model.modules() if (hook := getattr(m, "_hf_hook", None)) is not None}
    return copy.deepcopy(model, memo)


def units(skeleton: PreTrainedModel) -> list[Unit]:
    """The parameters and buffers that are saved, grouped by what goes to disk together.

    Of tied parameters only the one that transformers reads back is saved.
    """
    groups: dict[int, list[str]] = {}
    tensors = skeleton.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor), []).append(name)
    chosen = {
        next((name for name in names if name not in skeleton.all_tied_weights_keys), names[0])
        for names in groups.values()
    }
    ignored = skeleton._keys_to_ignore_on_save or ()
    conversions: Any = getattr(skeleton, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(skeleton, add_legacy=False)
    reverse = [entry.reverse_transform() for entry in reversed(conversions)]
    converters = [entry for entry in reverse if isinstance(entry, WeightConverter)]
    together: dict[str, list[str]] = {}
    for name in (name for name in tensors if name in chosen and name not in ignored):
        on_disk, pattern = apply_converters(name, converters)
        together.setdefault(name if pattern is None else on_disk, []).append(name)
    return [tuple(names) for names in together.values()]


class FolderSink:
    """The files of one process: made at full length, then filled in any order.

    What was written by rows leaves the page cache once it is on the disk.
    """

    def __init__(self, folder: Path, layout: Layout, files: Iterable[str]) -> None:
        self._layout = layout
        self._files: dict[str, FileIO] = {}
        self._mapped: dict[str, Tensor] = {}
        for name in files:
            self._files[name] = file = FileIO(os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o644), "r+")
            _reserve(file, layout.sizes[name])
            write_at(file, layout.headers[name], 0)
        sync_path(folder)

    def output(self, parameter: str, *, by_rows: bool) -> Output:
        """Where a parameter goes: its place in its file, or new memory where it has another form there.

        What is not written by rows gets a memory map of its place.
        """
        disk = self._layout.renamed.get(parameter)
        if disk is None:
            return self._layout.empty(parameter)
        return self._place(disk) if by_rows else self._map(disk)

    def write(self, tensors: Mapping[str, Output]) -> int:
        """Put whole parameters in their places, unless they are there; returns how many bytes they take."""
        written = 0
        for name, tensor in self._on_disk(tensors).items():
            file, _, like = self._layout.places[name]
            if tensor.shape != like.shape or tensor.dtype != like.dtype:
                raise CoramError(
                    f"tensor {name!r}: {tensor.dtype} {tuple(tensor.shape)} does not fit its place in "
                    f"{file}, {like.dtype} {tuple(like.shape)}"
                )
            if isinstance(tensor, Tensor) and not self._is_mapped(file, tensor):
                self._copy(tensor, name)
            written += tensor.nbytes
        return written

    def sync(self) -> None:
        """Wait until all that was written is on the disk."""
        for file in self._files.values():
            _flush(file)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._mapped.clear()

    def _on_disk(self, tensors: Mapping[str, Output]) -> dict[str, Output]:
        placed = {self._layout.renamed[n]: t for n, t in tensors.items() if isinstance(t, FileTensor)}
        made = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
        return {**placed, **self._layout.to_disk(made)}

    def _copy(self, tensor: Tensor, disk: str) -> None:
        """Write a tensor some rows at a time, and wait for the disk in between."""
        values = as_rows(tensor)
        place = self._place(disk).view(values.shape)
        step = max(1, len(values) * SYNC_BYTES // max(1, values.nbytes))
        for start in range(0, len(values), step):
            place[start : start + step] = values[start : start + step]
            if values.nbytes > SYNC_BYTES:
                _flush(self._files[self._layout.places[disk].file])

    def _place(self, disk: str) -> FileTensor:
        file, offset, like = self._layout.places[disk]
        return FileTensor(self._files[file], offset, like.shape, like.dtype)

    def _map(self, disk: str) -> Tensor:
        file, offset, like = self._layout.places[disk]
        if file not in self._mapped:
            content = mmap.mmap(self._files[file].fileno(), self._layout.sizes[file])
            self._mapped.setdefault(file, torch.frombuffer(content, dtype=torch.uint8))
        return self._mapped[file][offset : offset + like.nbytes].view(like.dtype).view(like.shape)

    def _is_mapped(self, file: str, tensor: Tensor) -> bool:
        mapped = self._mapped.get(file)
        return mapped is not None and 0 <= tensor.data_ptr() - mapped.data_ptr() < mapped.nbytes


def write_index(folder: Path, layout: Layout) -> None:
    """Write model.safetensors.index.json, if there are several files."""
    index = layout.index()
    if index is not None:
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")


def _flush(file: FileIO) -> None:
    """Wait until a file is on the disk, and let go of its pages."""
    os.fsync(file.fileno())
    forget(file.fileno())


def _reserve(file: FileIO, size: int) -> None:
    """Have the disk set the file's bytes aside: a write to a map cannot say that there is no room left."""
    present = os.fstat(file.fileno()).st_size
    if present > size:
        file.truncate(size)
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        for start in range(present, size, ZEROS):
            write_at(file, bytes(min(ZEROS, size - start)), start)
