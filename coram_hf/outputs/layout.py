"""The files of a checkpoint, as `save_pretrained` names them, and the position of each tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from coram_hf.errors import CoramError
from coram_hf.inputs.inputs import Inputs
from coram_hf.inputs.internals.hooks import without_hooks
from coram_hf.inputs.internals.models import not_saved, saved_together, tied_on_load, to_disk
from coram_hf.inputs.mapped import DTYPES
from coram_hf.inputs.offloaded import tied_names

ALIGNMENT = 8

Unit = tuple[str, ...]
"""Parameters that are written together: usually one, several if they share a tensor on disk."""


class Span(NamedTuple):
    """Where a tensor goes: its file, its offset there, and a meta tensor of the same shape and dtype."""

    file: str
    offset: int
    like: Tensor


class Layout:
    """The names of a model's tensors on disk, and the file and offset of each.

    `shares` are the units of each process; every process writes its own files.
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
        self.units = [unit for share in shares for unit in share]
        state = skeleton.state_dict()
        every = {name: state[name] for share in shares for unit in share for name in unit}
        self._like = every
        whole = to_disk(skeleton, every) if original_format else every
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
        self.places: dict[str, Span] = {}
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
        return to_disk(self.skeleton, tensors)

    def like(self, parameter: str) -> Tensor:
        """A meta tensor with the shape and dtype of a parameter of the result."""
        return self._like[parameter]

    def empty(self, parameter: str) -> Tensor:
        """An uninitialised tensor for a parameter."""
        return torch.empty_like(self._like[parameter], device="cpu")

    def files(self, rank: int) -> list[str]:
        """The files that a process writes."""
        return sorted({place.file for disk, place in self.places.items() if self._owner[disk] == rank})

    def position(self, unit: Unit) -> tuple[str, int]:
        """Where the first tensor of a unit is on disk."""
        disk = self.to_disk({name: self._like[name] for name in unit})
        return min((self.places[name].file, self.places[name].offset) for name in disk)

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
                raise CoramError(f"tensor {name!r}: safetensors cannot store {tensor.dtype}")
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
            self.places[name] = Span(file, len(self.headers[file]) + spans[name][0], tensor.to("meta"))
        self.sizes[file] = len(self.headers[file]) + offset
        self.total_bytes += offset


def without_data(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the modules with meta tensors and without accelerate's hooks; tied parameters stay tied."""
    every, tied = dict(model.named_parameters(remove_duplicate=False)), tied_names(model)
    bare = {
        name: nn.Parameter(p.detach().to("meta"), requires_grad=False)
        for name, p in every.items()
        if name not in tied
    }
    memo: dict[int, Any] = {id(p): bare[tied.get(name, name)] for name, p in every.items()}
    memo |= {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    return cast(PreTrainedModel, without_hooks(model, memo))


def units(skeleton: PreTrainedModel) -> list[Unit]:
    """The parameters and buffers to save, in groups that are written together.

    Of tied parameters, only the one that transformers loads is saved.
    """
    groups: dict[int, list[str]] = {}
    tensors = skeleton.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor), []).append(name)
    aliases = tied_on_load(skeleton)
    chosen = {next((name for name in names if name not in aliases), names[0]) for names in groups.values()}
    left_out = not_saved(skeleton)
    return saved_together(skeleton, [name for name in tensors if name in chosen and name not in left_out])


def write_index(folder: Path, layout: Layout) -> None:
    """Write model.safetensors.index.json if there are several files."""
    index = layout.index()
    if index is not None:
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")


def with_format(model: PreTrainedModel, inputs: Inputs) -> PreTrainedModel:
    """Give the model the result's dtype, vocabulary size, special tokens and class names.

    Buffers keep their dtype.
    """
    if inputs.new_size is not None:
        model.resize_token_embeddings(inputs.new_size, mean_resizing=False)
    if inputs.dtype is not None:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(inputs.dtype)
    inputs.surroundings.generation.apply(model)
    if labels := inputs.surroundings.labels:
        model.config.id2label = dict(labels)
        model.config.label2id = {label: number for number, label in labels.items()}
    return model


def skeleton(inputs: Inputs) -> PreTrainedModel:
    """The merged model without its data."""
    return with_format(without_data(inputs.model), inputs)
