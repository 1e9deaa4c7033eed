"""Heads that differ: experts of other classes than the base, matched by their backbones.

A backbone is what `base_model_prefix` names; everything outside it, and poolers inside it, is the head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from coram_hf.errors import CoramError
from coram_hf.inputs.agreement import grouped, listed
from coram_hf.inputs.checkpoint import stored_names
from coram_hf.inputs.kinds import head_names
from coram_hf.inputs.options import Heads
from coram_hf.inputs.placement import placed_as
from coram_hf.inputs.tokens import token_axis
from coram_hf.inputs.weights import Renamed, Weights, backbone_prefix

CLASSIFIES = re.compile("Classification|Detection|Segmentation")
"""What the classes of transformers are called whose heads have named classes."""


class Head(NamedTuple):
    """The head of one expert: the class and config of its model, and its parameters by name."""

    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    weights: Weights
    names: tuple[str, ...]

    def tensors(self) -> dict[str, Tensor]:
        """The parameters of the head."""
        return {name: self.weights[name] for name in self.names}


class Matched(NamedTuple):
    """Base and experts under the names of the result, the heads to keep, and what the plan says of them.

    labels: names of the merged head's classes, if they are not the base's.
    """

    base: Weights
    experts: dict[str, Weights]
    heads: dict[str, Head]
    said: dict[str, str]
    warnings: list[str]
    labels: Mapping[int, str] = {}


def match_heads(base: Weights, experts: Mapping[str, Weights], policy: Heads) -> Matched:
    """Set aside the heads that base and experts do not share, or all of them with drop and keep.

    Experts that differ in more than their heads are returned as they are, for the checks that follow.
    """
    if policy != "base":
        return _backbones(base, experts, policy)
    base.fresh = tuple(_fresh(base))
    names = {name: _names(base, weights) for name, weights in experts.items()}
    aside = _set_aside(base, experts, names)
    own = {name: _own_head(base, weights, names[name], aside) for name, weights in experts.items()}
    fresh = _start_from_experts(base, experts, names, aside)
    if not aside and not any(own.values()):
        labels, named, differing = _labels(base, experts)
        return Matched(base, dict(experts), {}, named, [*differing, *fresh], labels)
    warnings = [
        f"the head of expert {name!r} ({weights.class_name}: {_shown(own[name])}) is set aside: the merge is "
        f'a {base.class_name}; heads="keep" (--heads keep) keeps the head of every expert'
        for name, weights in experts.items()
        if own[name]
    ]
    if set(aside) - set(base.fresh):
        warnings.append(
            f"the head of the base ({base.class_name}: {_shown(aside)}) stays as it is, because not "
            "every expert has one like it"
        )
    having = [name for name in experts if own[name]]
    said = f"the base's; those of {listed(having)} are set aside" if having else "the base's"
    return Matched(base, _seen(base, experts, names, aside), {}, {"heads": said}, [*warnings, *fresh])


def _backbones(base: Weights, experts: Mapping[str, Weights], policy: Heads) -> Matched:
    """Base and experts without their heads, and with `keep` the heads."""
    if placed_as(base.model) is not None:
        raise CoramError(
            f'heads="{policy}" needs a base that accelerate has not placed: load it without device_map, or '
            "pass its folder or Hub id, and the device_map to the merge"
        )
    base = base.backbone()
    names = {name: _names(base, weights) for name, weights in experts.items()}
    aside = _set_aside(base, experts, names)
    own = {name: _own_head(base, weights, names[name], aside) for name, weights in experts.items()}
    said, heads = f"dropped; the merge is a {base.class_name}", {}
    if policy == "keep":
        heads = {name: _head(weights, own[name]) for name, weights in experts.items() if own[name]}
        said = f"the merge is a {base.class_name}; heads/ holds those of {listed(list(heads)) or 'no expert'}"
    lost = [
        f"the head of expert {name!r} lacks {_shown(head.weights.fresh)}, which no checkpoint holds: it must "
        "be trained again before use"
        for name, head in heads.items()
        if head.weights.fresh
    ]
    return Matched(base, _seen(base, experts, names, aside), heads, {"heads": said}, lost)


def _names(base: Weights, expert: Weights) -> dict[str, str]:
    """The expert's name of every tensor of the base that it also has."""
    prefixes = backbone_prefix(base.model), backbone_prefix(expert.model)
    found = {}
    for name in base:
        inside = name.startswith(prefixes[0])
        own = prefixes[1] + name.removeprefix(prefixes[0]) if inside else name
        if own in expert and own not in expert.fresh:
            found[name] = own
    return found


def _set_aside(
    base: Weights, experts: Mapping[str, Weights], names: Mapping[str, Mapping[str, str]]
) -> list[str]:
    """The tensors of the base's head that an expert lacks, or has in another shape."""
    axis, heads = token_axis(base.model), _head_names(base)
    return [
        name
        for name in heads
        if any(
            name not in names[expert]
            or (name not in axis and weights.original(names[expert][name]).shape != base.original(name).shape)
            for expert, weights in experts.items()
        )
    ]


def _own_head(base: Weights, expert: Weights, names: Mapping[str, str], aside: Sequence[str]) -> list[str]:
    """The tensors of an expert's head that the merge does not have."""
    used = {expert.tied.get(own, own) for name, own in names.items() if name not in aside}
    known = {*used, *expert.fresh, *base.tied}
    return [name for name in _head_names(expert) if name not in known]


def _seen(
    base: Weights,
    experts: Mapping[str, Weights],
    names: Mapping[str, Mapping[str, str]],
    aside: Sequence[str],
) -> dict[str, Weights]:
    seen = {}
    for expert, weights in experts.items():
        matched = {name: own for name, own in names[expert].items() if name not in aside}
        whole = set(base) == matched.keys() | set(aside)
        extra = set(weights) - {weights.tied.get(own, own) for own in matched.values()}
        fits = whole and extra <= {*_head_names(weights), *weights.fresh}
        seen[expert] = Renamed(weights, base, matched) if fits else weights
    return seen


def _head_names(weights: Weights) -> list[str]:
    """The tensors of the head, each once."""
    names = head_names(weights.model)
    return [name for name in weights if name in names]


def _head(weights: Weights, names: Sequence[str]) -> Head:
    return Head(type(weights.model), weights.model.config, weights, tuple(names))


def _fresh(base: Weights) -> list[str]:
    """The tensors of the base's head that are not in its checkpoint, so that nothing has trained them."""
    if base.fresh or base.files or base.model.can_generate():
        return list(base.fresh)
    stored = stored_names(base.model)
    return [] if stored is None else [name for name in _head_names(base) if name not in stored]


def _start_from_experts(
    base: Weights,
    experts: Mapping[str, Weights],
    names: Mapping[str, Mapping[str, str]],
    aside: Sequence[str],
) -> list[str]:
    """Let a fresh head start from the experts' mean; warn about that, and about one that no expert has."""
    shared = [name for name in base.fresh if name not in aside]
    for name in shared:
        owners = [(weights, names[expert][name]) for expert, weights in experts.items()]
        base.overrides[name] = partial(_mean, owners, base.original(name).dtype)
    alone = [n for n in base.fresh if n in aside and not any(n in found for found in names.values())]
    who = f"the head of the base ({base.class_name}: "
    return [
        f"{who}{_shown(these)}) is {what}"
        for these, what in (
            (shared, "not in its checkpoint: it starts from the mean of the experts' heads"),
            (
                alone,
                "in no expert and not in its checkpoint: it is freshly initialised, and must be trained "
                'before use; heads="drop" (--heads drop) leaves it out',
            ),
        )
        if these
    ]


def _mean(owners: Sequence[tuple[Weights, str]], dtype: torch.dtype) -> Tensor:
    """The mean of one tensor over experts, each under its own name."""
    total = sum((weights[name].to("cpu", torch.float64) for weights, name in owners), torch.zeros(()))
    return (total / len(owners)).to(dtype)


def _labels(
    base: Weights, experts: Mapping[str, Weights]
) -> tuple[Mapping[int, str], dict[str, str], list[str]]:
    """The class names of experts that agree if the base has none, what the plan says, and warnings."""
    if not CLASSIFIES.search(base.class_name):
        return {}, {}, []
    full = {name: weights for name, weights in experts.items() if weights.transplant is None}
    every = {"the base": base, **full}
    given = {name: weights.model.config.id2label or {} for name, weights in every.items()}
    named = {name: {int(n): str(label) for n, label in own.items()} for name, own in given.items()}
    groups = grouped({name: labels for name, labels in named.items() if not _numbered(labels)})
    if len(groups) == 1 and _numbered(named["the base"]):
        labels, names = groups[0]
        return labels, {"class names": f"those of {listed(names)}; the base has none"}, []
    if len(groups) < 2:
        return {}, {}, []
    shown = [f"{', '.join(names)}: {list(labels.values())[:4]}" for labels, names in groups]
    warning = (
        f"the class names differ ({' | '.join(shown)}): heads are merged class by class in the order "
        'of their numbers; heads="keep" (--heads keep) keeps them apart'
    )
    return {}, {}, [warning]


def _numbered(labels: Mapping[Any, str]) -> bool:
    """Whether classes only have the default names of transformers."""
    return all(str(label).startswith("LABEL_") for label in labels.values())


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
