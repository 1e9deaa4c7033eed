"""Which parameters are merged geometrically: the projection matrices of the transformer blocks.

Targets are found by a module's type and position, not by the name of its model: linear maps (and stacked
experts) inside repeated blocks and, in a multimodal model, inside its language model only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from coram_hf.errors import CoramError
from coram_hf.inputs.weights import Target

if TYPE_CHECKING:
    from coram_hf.inputs.inputs import Inputs

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Attributes of modules and configs that give the number of experts of a mixture layer."""

CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)

OTHER_MODALITIES = ("vision", "image", "audio", "speech", "video", "vq")
"""Words in the names of sub-configs for modalities other than language."""


Modules = str | tuple[str, ...] | None
"""A regular expression on whole names of modules, or suffixes of names."""


def with_targets(inputs: Inputs, target_modules: Modules, *, required: bool, keep: Modules = None) -> Inputs:
    """Inputs with other target matrices, and without what must stay at the base; nothing is opened again."""
    kept = find_kept(inputs, keep)
    found = {t.name: t for t in find_targets(inputs.model, target_modules, required=required)}
    targets = {name: target for name, target in found.items() if name not in kept}
    if found and not targets and required:
        raise CoramError(f"keep: {keep!r} leaves all target matrices at the base; keep fewer modules")
    others = {name: inputs.base.original(name) for name in inputs.base if name not in targets}
    outside = [name for name, like in others.items() if like.is_floating_point() and name not in kept]
    return replace(
        inputs,
        targets=targets,
        outside=tuple(outside),
        frozen=tuple(name for name in others if name not in set(outside)),
    )


def find_kept(inputs: Inputs, keep: Modules) -> set[str]:
    """The parameters in the modules to leave at the base, by any of their names."""
    if keep is None:
        return set()
    names = {**{name: name for name in inputs.base}, **inputs.base.tied}
    kept = {first for name, first in names.items() if any(matches(part, keep) for part in _parents(name))}
    if not kept:
        raise CoramError(
            f"keep: found no match for {keep!r} in {inputs.base.class_name}; name modules by a regular "
            "expression on their whole names, or by a list of suffixes"
        )
    return kept


def _parents(name: str) -> Iterator[str]:
    """The name of a parameter, and of all modules that it is in."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def matches(name: str, modules: str | tuple[str, ...]) -> bool:
    """Whether a name is chosen: by a regex on the whole name, or by suffixes, as in PEFT.

    A text without special characters, such as q_proj or layers.0, may be a suffix as well.
    """
    if isinstance(modules, str):
        plain = re.fullmatch(r"[\w.]+", modules) is not None
        return re.fullmatch(modules, name) is not None or (plain and matches(name, (modules,)))
    return any(f".{name}".endswith(f".{suffix}") for suffix in modules)


def find_targets(
    model: PreTrainedModel, target_modules: Modules = None, *, required: bool = True
) -> tuple[Target, ...]:
    """The target parameters of a model, in the order of its modules; tied parameters appear once."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    selected = _block_modules(model) if target_modules is None else _matching(model, target_modules)
    counts = expert_counts(model.config.get_text_config())
    targets = {
        names[id(weight)]: Target(names[id(weight)], transposed)
        for module in selected
        for weight, transposed in _projections(module, counts)
        if id(weight) in names and weight.is_floating_point()
    }
    if not targets and (required or target_modules is not None):
        sought = "attention or MLP projections" if target_modules is None else f"match for {target_modules!r}"
        raise CoramError(
            f"found no {sought} in {type(model).__name__}; name the modules to merge with target_modules= "
            "(--target-modules), a regular expression on module names, a list of suffixes, or 'all-linear'"
        )
    return tuple(targets.values())


def _projections(module: nn.Module, known: set[int]) -> Iterator[tuple[Tensor, bool]]:
    """The weight matrices that a module applies to its input, and whether they are stored transposed."""
    if isinstance(module, nn.Linear):
        yield module.weight, False
    elif isinstance(module, Conv1D):
        yield module.weight, True
    elif isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
        yield module.in_proj_weight, False
    elif not isinstance(module, CONVOLUTIONS):
        counts = known | expert_counts(module)
        stacks = {
            name: parameter
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.ndim == 3 and parameter.shape[0] in counts and min(parameter.shape[1:]) > 1
        }
        transposed = _stored_by_input(module, stacks)
        yield from ((stack, transposed) for stack in stacks.values())


def expert_counts(holder: object) -> set[int]:
    """The numbers of experts that a config or a module declares."""
    found = {getattr(holder, key, None) for key in EXPERT_COUNTS}
    return {count for count in found if isinstance(count, int) and not isinstance(count, bool)}


def _stored_by_input(module: nn.Module, stacks: dict[str, nn.Parameter]) -> bool:
    """Whether stacked experts are (expert, input, output): as declared, else by which axis has the width.

    Only down projections output the width of the model; all others take it as input.
    """
    declared = getattr(module, "is_transposed", None)
    if declared is not None:
        return bool(declared)
    width = getattr(module, "hidden_size", getattr(module, "hidden_dim", None))
    for name, stack in stacks.items():
        outputs, inputs = stack.shape[1:] if "down" not in name else stack.shape[:0:-1]
        if (outputs == width) != (inputs == width):
            return outputs == width
    return False


def _block_modules(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Modules inside the repeated blocks of the language model, except the gates of mixtures."""
    modules = dict(model.named_modules())
    blocks = tuple(f"{name}." for name, module in modules.items() if is_block_list(module))
    within = language_part(model, modules)
    for name, module in modules.items():
        if name.startswith(blocks) and within(name) and not _is_gate(name, modules):
            yield module


def is_block_list(module: nn.Module) -> bool:
    """Whether a module is a list of blocks with several linear maps each, not of single maps."""
    return isinstance(module, nn.ModuleList) and any(
        sum(p.ndim >= 2 for p in item.parameters()) > 1 and not isinstance(item, nn.Linear) for item in module
    )


def language_part(model: PreTrainedModel, modules: dict[str, nn.Module]) -> Callable[[str], bool]:
    """A function that tells by name whether a module belongs to the language model.

    That is the submodule `language_model` or, in a model that generates from other modalities too, the
    smallest one with the token embedding and blocks, without towers built from the other sub-configs.
    """
    roots = [name for name in modules if name.split(".")[-1] == "language_model"]
    others = [
        getattr(model.config, key, None)
        for key in model.config.sub_configs
        if any(word in key for word in OTHER_MODALITIES)
    ]
    foreign: tuple[str, ...] = ()
    if not roots and others and model.can_generate():
        roots = [_root_of_embedding(model, modules)]
        kinds = tuple(type(config) for config in others if config is not None)
        foreign = tuple(
            f"{n}." for n, m in modules.items() if n and isinstance(getattr(m, "config", 0), kinds)
        )
    inside = tuple(f"{root}." if root else "" for root in roots)
    return lambda name: (not roots or name.startswith(inside)) and not name.startswith(foreign)


def _root_of_embedding(model: PreTrainedModel, modules: dict[str, nn.Module]) -> str:
    embedding = model.get_input_embeddings()
    name = next(name for name, module in modules.items() if module is embedding)
    while name:
        name = name.rpartition(".")[0]
        if any(is_block_list(module) for module in modules[name].modules()):
            break
    return name


def _is_gate(name: str, modules: dict[str, nn.Module]) -> bool:
    """Whether a module is, or is inside, the router of a mixture or a gate next to its experts."""
    parts = name.split(".")
    return any(
        "router" in part
        or (re.fullmatch(r"(.*_)?gate", part) and hasattr(modules[".".join(parts[:i])], "experts"))
        for i, part in enumerate(parts)
    )


def _matching(model: PreTrainedModel, target_modules: str | tuple[str, ...]) -> Iterator[nn.Module]:
    """Modules by a regex on the whole name, by suffixes, or all but the head."""
    for name, module in model.named_modules():
        if target_modules == "all-linear":
            chosen = module is not model.get_output_embeddings()
        else:
            chosen = matches(name, target_modules)
        if chosen:
            yield module
