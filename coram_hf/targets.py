"""Which parameters are merged geometrically: the projection matrices of the transformer blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from coram_hf.errors import MergeError


@dataclass(frozen=True)
class Target:
    """A parameter that holds one projection matrix, or a stack of them."""

    name: str
    transposed: bool = False

    def matrices(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Views of the parameter as (output neurons x inputs) matrices."""
        rows = tensor.mT if self.transposed else tensor
        return rows.unbind(0) if rows.ndim == 3 else (rows,)


def find_targets(
    model: PreTrainedModel, target_modules: str | tuple[str, ...] | None = None
) -> tuple[Target, ...]:
    """The target parameters of a model, in the order of its modules; tied parameters appear once."""
    parameters = {id(p): name for name, p in model.named_parameters()}
    targets = {
        parameters[id(weight)]: transposed
        for name, module in model.named_modules()
        for weight, transposed in _projections(module)
        if id(weight) in parameters and weight.is_floating_point() and _selected(model, name, target_modules)
    }
    if not targets:
        wanted = (
            "no attention or MLP projections" if target_modules is None else f"nothing for {target_modules!r}"
        )
        raise MergeError(
            f"found {wanted} in {type(model).__name__}; name the modules to merge with target_modules=, "
            "a regular expression on module names, a list of suffixes, or 'all-linear'"
        )
    return tuple(Target(name, transposed) for name, transposed in targets.items())


def _projections(module: nn.Module) -> Iterator[tuple[Tensor, bool]]:
    """The weight matrices that a module applies to its input, and whether they are stored transposed."""
    if isinstance(module, nn.Linear):
        yield module.weight, False
    elif isinstance(module, Conv1D):
        yield module.weight, True


def _selected(model: PreTrainedModel, name: str, target_modules: str | tuple[str, ...] | None) -> bool:
    if target_modules is None:
        return _in_block(model, name)
    if target_modules == "all-linear":
        return model.get_submodule(name) is not model.get_output_embeddings()
    if isinstance(target_modules, str):
        return re.fullmatch(target_modules, name) is not None
    return any(name == suffix or name.endswith(f".{suffix}") for suffix in target_modules)


def _in_block(model: PreTrainedModel, name: str) -> bool:
    """Whether a module lies inside a repeated block, that is, below an `nn.ModuleList`."""
    parts = name.split(".")
    return any(
        part.isdigit() and isinstance(model.get_submodule(".".join(parts[:i])), nn.ModuleList)
        for i, part in enumerate(parts)
    )
