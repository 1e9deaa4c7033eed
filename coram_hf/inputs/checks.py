"""Whether an expert fits a base: the same architecture, and tensors of the same names, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coram_hf.errors import CoramError
from coram_hf.inputs.tokens import embedding_rows
from coram_hf.inputs.weights import Weights


def check_same_architecture(base: PreTrainedModel, name: str, expert: PreTrainedModel) -> None:
    """Raise unless an expert is a model of the same type as its base."""
    if expert.config.model_type != base.config.model_type:
        raise CoramError(
            f"expert {name!r} is a {type(expert).__name__} ({expert.config.model_type}), but the base is a "
            f"{type(base).__name__} ({base.config.model_type}); experts must be fine-tuned from the base, or "
            f"come with their own: bases={{{name!r}: ...}} (--bases {name}=...) transplants their updates"
        )


def check_same_tensors(base: Weights, name: str, expert: Weights, token_axis: Mapping[str, int]) -> list[str]:
    """Raise unless names, shapes and kinds of dtype agree; return warnings about differently tied weights."""
    lacking = [tensor for tensor in base if tensor not in expert and tensor not in expert.tied]
    extra = [tensor for tensor in expert if tensor not in base and tensor not in base.tied]
    for absent, what in ((lacking, "lacks"), (extra, "has an extra")):
        if absent:
            more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
            raise CoramError(
                f"expert {name!r} {what} tensor {absent[0]!r}{more}, compared with the base; load base "
                f"and experts with the same class (base {base.class_name}, expert {expert.class_name})"
            )
    for tensor in base:
        _check_tensor(name, tensor, base.original(tensor), expert, token_axis.get(tensor))
    return [
        f"expert {name!r} has its own {alias!r}, which the base ties to {base.tied[alias]!r}: the "
        f"merged model stays tied, and what the expert changed in {alias!r} alone is left out"
        for alias in dict.fromkeys((*expert, *expert.overrides))
        if alias in base.tied and not torch.equal(expert[alias], expert[base.tied[alias]])
    ] + [
        f"expert {name!r} ties {alias!r} to {expert.tied[alias]!r}, which the base does not: the merged "
        "model stays untied, and takes the expert's one tensor for both"
        for alias in base
        if alias in expert.tied
    ]


def _check_tensor(name: str, tensor: str, base: Tensor, expert: Weights, token_axis: int | None) -> None:
    who, found = f"expert {name!r}, tensor {tensor!r}", expert.original(tensor)
    expected = list(base.shape)
    if token_axis is not None:
        expected[token_axis] = embedding_rows(expert.model)
    if list(found.shape) != expected:
        raise CoramError(
            f"{who}: shape {tuple(found.shape)}, but the base has {tuple(base.shape)}; "
            "experts must be fine-tuned from the base"
        )
    if found.is_floating_point() != base.is_floating_point():
        raise CoramError(
            f"{who}: dtype {found.dtype}, but the base has {base.dtype}; "
            "quantised weights must be dequantised before merging"
        )
    if not base.is_floating_point() and not _same_meaning(tensor, base, found):
        raise CoramError(
            f"{who}: its {found.dtype} values differ from the base's; "
            "integer tensors are kept from the base, so the experts must agree with it"
        )


def _same_meaning(name: str, base: Tensor, expert: Tensor) -> bool:
    """Whether two integer or bool tensors are interchangeable; counters of past batches always are."""
    return name.endswith("num_batches_tracked") or torch.equal(base.cpu(), expert.cpu())
