"""The weights of a model by name: in memory, on disk, or computed on demand."""

from __future__ import annotations

import copy
import ctypes
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coram_hf.inputs.internals.models import hub_commit
from coram_hf.inputs.offloaded import offloaded_tensors, tied_names

if TYPE_CHECKING:
    from peft import PeftModel

    from coram_hf.inputs.transplant import Transplant

T = TypeVar("T")
Make = Callable[[], Tensor]
MakeFactors = Callable[[], tuple[Tensor, Tensor]]
"""Makes B (outputs x r) and A (r x inputs) of an update B A of low rank."""


@dataclass(frozen=True)
class Target:
    """A parameter that holds one projection matrix, or a stack of them."""

    name: str
    transposed: bool = False

    def matrices(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Views of the parameter as (output neurons x inputs) matrices."""
        rows = tensor.mT if self.transposed else tensor
        return rows.unbind(0) if rows.ndim == 3 else (rows,)


class Weights(Mapping[str, Tensor]):
    """Parameters and persistent buffers by name; a tied parameter appears once, under its first name.

    tied: maps the other names of tied parameters to their first; lookup accepts all names.
    overrides: parameters computed on demand: by an adapter, from several tensors on disk, or from where
    accelerate has offloaded them.
    load: loads the model into memory, if its weights are on disk; buffers: computes its other buffers.
    location, commit: the folder or Hub repository of the weights, and the commit there, if known;
    folder: its local folder, if the weights were opened from one.
    files: the files that are read. pieces: the memory maps behind each parameter.
    kind: "full", or the PEFT type of the adapter; adapter: the model with the adapter, and its name there.
    orthogonality_error: max |R^T R - I| of an OFT adapter.
    factors: of an adapter, those parameters whose update is of low rank.
    transplant: how an expert with a base of its own was matched with the base of the merge.
    fresh: parameters of the head that the checkpoint lacks, so that nothing has trained them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        overrides: Mapping[str, Make] | None = None,
        *,
        load: Callable[[], PreTrainedModel] | None = None,
        buffers: Callable[[], dict[str, Tensor]] | None = None,
        files: Sequence[Path] = (),
        pieces: Mapping[str, list[Tensor]] | None = None,
        warnings: Sequence[str] = (),
        kind: str = "full",
        adapter: tuple[PeftModel, str] | None = None,
        orthogonality_error: float | None = None,
        factors: Mapping[str, MakeFactors] | None = None,
        fresh: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.files = list(files)
        self.warnings = list(warnings)
        self.kind = kind
        self.adapter = adapter
        self.orthogonality_error = orthogonality_error
        self.factors = factors
        self.fresh = tuple(fresh)
        self.location: str | None = model.name_or_path or None
        self.commit: str | None = hub_commit(model)
        self.folder: Path | None = None
        self.tied = tied_names(model)
        parameters = {k: p.detach() for k, p in model.named_parameters() if k not in self.tied}
        stored = {k: v for k, v in model.state_dict().items() if k not in {*parameters, *self.tied}}
        self._tensors: dict[str, Tensor] = parameters | stored
        self.overrides = {**offloaded_tensors(model), **(overrides or {})}
        self.class_name = type(model).__name__
        self._load, self._buffers = load, buffers
        self.pieces = pieces or {}
        self.transplant: Transplant | None = None

    def __getitem__(self, name: str) -> Tensor:
        if name in self.overrides:
            return self.overrides[name]()
        first = self.tied.get(name, name)
        if first in self.overrides:
            return self.overrides[first]()
        tensor = self.original(name)
        return tensor.to(torch.float32) if _is_float8(tensor) else tensor

    @property
    def place(self) -> str | None:
        """The source that opens these weights again; None for a model that was passed in memory."""
        if self.folder is None or self.location is None:
            return None
        if self.commit is not None:
            return f"{self.location}@{self.commit}"
        parts = self.location.split("+") if not Path(self.location).exists() else [self.location]
        return "+".join(str(Path(part).resolve()) if Path(part).exists() else part for part in parts)

    def original(self, name: str) -> Tensor:
        """The tensor without overrides, with the same shape and dtype; nothing is computed."""
        return self._tensors[self.tied.get(name, name)]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors or name in self.tied or name in self.overrides

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def read_from(self) -> tuple[Weights, ...]:
        """The weights that these are computed from: those of an expert and its own base, or these."""
        return (self,) if self.transplant is None else (self.transplant.expert, self.transplant.own)

    def copy_model(self) -> PreTrainedModel:
        """A new model in memory, with these weights; for a model that accelerate has not placed."""
        model = copy.deepcopy(self.model) if self._load is None else self._load()
        state = model.state_dict(keep_vars=True)
        for name, tensor in self._tensors.items():
            if state[name].dtype != tensor.dtype or name in self.fresh:
                state[name].data = self[name].to(state[name].device, copy=True)
        return model

    def backbone(self) -> Weights:
        """The weights without the model's head, as a model of its own."""
        inner, prefix = cast(PreTrainedModel, self.model.base_model), backbone_prefix(self.model)
        load, buffers = self._load, self._buffers
        found = Weights(
            inner,
            _without(prefix, self.overrides),
            load=None if load is None else lambda: cast(PreTrainedModel, load().base_model),
            buffers=None if buffers is None else lambda: _without(prefix, buffers()),
            files=self.files,
            pieces=_without(prefix, self.pieces),
            warnings=self.warnings,
            kind=self.kind,
            fresh=list(_without(prefix, dict.fromkeys(self.fresh))),
        )
        inner.name_or_path = self.model.name_or_path
        found.location, found.commit, found.folder = self.location, self.commit, self.folder
        return found

    def other_buffers(self) -> dict[str, Tensor]:
        """The buffers that no checkpoint has, such as rotary frequencies, as the model was built with."""
        if self._buffers is not None:
            return self._buffers()
        return {name: b for name, b in self.model.named_buffers() if name not in self._tensors}

    def prefetch(self, name: str) -> None:
        """Start reading a tensor from the disk, without waiting for it."""
        for piece in self.pieces.get(self.tied.get(name, name), ()):
            start = piece.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
            length = piece.data_ptr() + piece.numel() * piece.element_size() - start
            _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_WILLNEED)


class Renamed(Weights):
    """Weights under the names of a base; `names` maps those to the own names, all others are the base's."""

    def __init__(self, own: Weights, base: Weights, names: Mapping[str, str]) -> None:
        self.__dict__.update(vars(own))
        first = {name: own.tied.get(found, found) for name, found in names.items()}
        made = [n for n, found in names.items() if found in own.overrides or first[n] in own.overrides]
        self.tied = dict(base.tied)
        self._tensors = {n: own.original(names[n]) if n in names else base.original(n) for n in base}
        self.overrides = {n: make for n, make in base.overrides.items() if n not in names}
        self.overrides |= {name: partial(own.__getitem__, names[name]) for name in made}
        self.pieces = {n: self.pieces[found] for n, found in first.items() if found in self.pieces}
        if own.factors is not None:
            self.factors = {n: own.factors[found] for n, found in first.items() if found in own.factors}


def backbone_prefix(model: PreTrainedModel) -> str:
    """The prefix of the names in a model's backbone; empty if it has no head."""
    inner = model.base_model
    return "" if inner is model else next(f"{name}." for name, m in model.named_modules() if m is inner)


def _without(prefix: str, values: Mapping[str, T]) -> dict[str, T]:
    """The values whose names start with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


MADV_WILLNEED = 3


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _is_float8(tensor: Tensor) -> bool:
    """Whether a tensor has 8-bit floats: torch has no arithmetic for them, and float32 holds them exactly."""
    return tensor.is_floating_point() and tensor.element_size() == 1
