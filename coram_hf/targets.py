"""Which parameters are merged geometrically: the projection matrices of the transformer blocks.

Targets are found by what a module is and where it stands, not by the name of its model: linear maps
(and stacked experts) inside repeated blocks and, in a model that holds a language model beside towers
for other modalities, inside that language model only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from coram_hf.errors import MergeError

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What model configs call the number of experts of a mixture layer."""


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
    model: PreTrainedModel, target_modules: str | tuple[str, ...] | None = None, *, required: bool = True
) -> tuple[Target, ...]:
    """The target parameters of a model, in the order of its modules; tied parameters appear once."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    selected = _in_language_blocks(model) if target_modules is None else _matching(model, target_modules)
    targets = {
        names[id(weight)]: Target(names[id(weight)], transposed)
        for module in selected
        for weight, transposed in _projections(module)
        if id(weight) in names and weight.is_floating_point()
    }
    if not targets and (required or target_modules is not None):
        sought = "attention or MLP projections" if target_modules is None else f"match for {target_modules!r}"
        raise MergeError(
            f"found no {sought} in {type(model).__name__}; name the modules to merge with target_modules=, "
            "a regular expression on module names, a list of suffixes, or 'all-linear'"
        )
    return tuple(targets.values())


def _projections(module: nn.Module) -> Iterator[tuple[Tensor, bool]]:
    """The weight matrices that a module applies to its input, and whether they are stored transposed."""
    if isinstance(module, nn.Linear):
        yield module.weight, False
    elif isinstance(module, Conv1D):
        yield module.weight, True
    elif isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
        yield module.in_proj_weight, False
    elif not isinstance(module, nn.modules.conv._ConvNd):
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 3:
                yield parameter, _is_transposed(module, name, parameter)


def _is_transposed(module: nn.Module, name: str, stack: Tensor) -> bool:
    """Whether stacked experts are stored as (expert, input, output); told by the module or by its width."""
    declared = getattr(module, "is_transposed", None)
    if declared is not None:
        return bool(declared)
    width = getattr(module, "hidden_size", getattr(module, "hidden_dim", None))
    outward, inward = (2, 1) if "down" in name else (1, 2)
    return stack.shape[outward] == width and stack.shape[inward] != width


def _in_language_blocks(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Modules below an `nn.ModuleList` of the language model (or of the model, if it has no other part)."""
    modules = dict(model.named_modules())
    lists = tuple(f"{name}." for name, module in modules.items() if isinstance(module, nn.ModuleList))
    languages = tuple(f"{name}." for name in modules if name.split(".")[-1] == "language_model")
    config = model.config.get_text_config()
    gate_sizes = {1} | {getattr(config, key) for key in EXPERT_COUNTS if hasattr(config, key)}
    for name, module in modules.items():
        if name.startswith(lists) and (not languages or name.startswith(languages)):
            parent = modules[name.rpartition(".")[0]]
            if not (hasattr(parent, "experts") and getattr(module, "out_features", 0) in gate_sizes):
                yield module


def _matching(model: PreTrainedModel, target_modules: str | tuple[str, ...]) -> Iterator[nn.Module]:
    """Modules by PEFT's rules: a regex on the whole name, a list of suffixes, or all but the head."""
    for name, module in model.named_modules():
        if target_modules == "all-linear":
            chosen = module is not model.get_output_embeddings()
        elif isinstance(target_modules, str):
            chosen = re.fullmatch(target_modules, name) is not None
        else:
            chosen = any(f".{name}".endswith(f".{suffix}") for suffix in target_modules)
        if chosen:
            yield module
