"""Tensors on the disk: the offloaded part of a placed model, and kept updates that memory has no room for."""

from __future__ import annotations

import logging
import shutil
import tempfile
import weakref
from collections.abc import Collection, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coram_hf.errors import CoramError, reason
from coram_hf.inputs.weights import Target
from coram_hf.outputs.folder import FolderSink, reserve
from coram_hf.outputs.layout import Layout, without_data
from coram_hf.outputs.place import Output
from coram_hf.outputs.spool import Spool

logger = logging.getLogger("coram_hf")


class Offloaded(dict[str, dict[str, str]]):
    """The files of a model's offloaded tensors, as the index that `accelerate.dispatch_model` takes.

    They are in a folder of their own inside the offload folder, `parent`, in the names of the model in
    memory. The folder is removed with the last model that uses it; a copy of the model uses the same files.
    """

    def __init__(
        self,
        parent: Path | None,
        model: PreTrainedModel,
        names: Collection[str],
        aliases: Mapping[str, str],
        targets: Mapping[str, Target],
    ) -> None:
        """`aliases`: other names of the offloaded tensors, and the name of each in `names`."""
        super().__init__()
        self.parent = parent or Path(tempfile.gettempdir())
        folder = _own_folder(self.parent)
        layout = Layout(without_data(model), [[(name,) for name in names]], "50GB", original_format=False)
        self._sink = FolderSink(folder, layout, layout.files(0), aliases, targets, Spool(folder / "kept"))
        self._sink.__enter__()
        weakref.finalize(self, _remove, self._sink, folder)
        if parent is None and names:
            logger.warning(
                "%.2f GB of the merged model are offloaded to %s; "
                "pass offload_folder= (--offload-folder) to choose where",
                layout.total_bytes / 2**30,
                folder,
            )
        for name in (*names, *aliases):
            file, _, like = layout.places[aliases.get(name, name)]
            self[name] = {
                "safetensors_file": str(folder / file),
                "weight_name": aliases.get(name, name),
                "dtype": str(like.dtype).removeprefix("torch."),
            }

    def __deepcopy__(self, memo: dict[int, Any]) -> Offloaded:
        return self

    def output(self, name: str) -> Output:
        """Where the rows of a tensor are written."""
        return self._sink.output(self[name]["weight_name"])

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a whole tensor, in the dtype of the model."""
        self._sink.write({name: self._sink.unchanged(name, tensor)})


def _own_folder(parent: Path) -> Path:
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="coram-", dir=parent)).absolute()
    except OSError as error:
        raise CoramError(f"offload_folder: cannot write to {parent} ({reason(error)})") from error


def _remove(sink: FolderSink, folder: Path) -> None:
    sink.__exit__()
    shutil.rmtree(folder, ignore_errors=True)


def mapped_tensor(folder: Path, like: Tensor, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor in a file of the folder, which is gone once the tensor is."""
    handle, name = tempfile.mkstemp(dir=folder)
    try:
        with FileIO(handle, "r+") as file:
            reserve(file, max(1, like.numel() * dtype.itemsize))
        return torch.from_file(name, shared=True, size=like.numel(), dtype=dtype).view(like.shape)
    finally:
        Path(name).unlink()
