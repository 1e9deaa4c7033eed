"""The base and its experts side by side: naming them, and checking that they can be merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coram_hf.errors import MergeError
from coram_hf.sources.loaded import LoadedModel


@dataclass(frozen=True)
class Models:
    """A base and the named experts fine-tuned from it, tensor by tensor."""

    base: LoadedModel
    experts: dict[str, LoadedModel]

    def tensors(self, name: str) -> tuple[Tensor, list[Tensor]]:
        """One tensor of the base and of every expert."""
        return self.base[name], [expert[name] for expert in self.experts.values()]


def open_models(
    base: PreTrainedModel, experts: Sequence[PreTrainedModel] | Mapping[str, PreTrainedModel]
) -> Models:
    """Name the experts and check that each has the base's architecture, tensors and shapes."""
    _require_model("the base", base)
    named = dict(experts) if isinstance(experts, Mapping) else _name(base, experts)
    if not named:
        raise MergeError("no experts: pass at least one model fine-tuned from the base")
    for name, expert in named.items():
        if not isinstance(name, str) or not name:
            raise MergeError(f"an expert's name must be a non-empty string, found {name!r}")
        _require_model(f"expert {name!r}", expert)
    source = LoadedModel(base)
    opened = {name: LoadedModel(expert) for name, expert in named.items()}
    for name, weights in opened.items():
        _check_same_tensors(source, name, weights)
    return Models(source, opened)


def _require_model(who: str, model: object) -> None:
    if not isinstance(model, PreTrainedModel):
        raise MergeError(
            f"{who} is a {type(model).__name__}; pass a transformers PreTrainedModel, "
            "for example AutoModelForCausalLM.from_pretrained(...)"
        )


def _name(base: PreTrainedModel, experts: Sequence[PreTrainedModel]) -> dict[str, PreTrainedModel]:
    """Name the experts of a list by where they were loaded from, or expert_1, expert_2, ..."""
    named: dict[str, PreTrainedModel] = {}
    for i, expert in enumerate(experts, start=1):
        _require_model(f"expert {i}", expert)
        origin = expert.name_or_path or ""
        name = Path(origin).name if Path(origin).is_dir() else origin
        if not origin or origin == base.name_or_path:
            name = f"expert_{i}"
        if name in named:
            raise MergeError(f"two experts are called {name!r}; pass a dict name -> model to tell them apart")
        named[name] = expert
    return named


def _check_same_tensors(base: LoadedModel, name: str, expert: LoadedModel) -> None:
    if expert.model_type != base.model_type:
        raise MergeError(
            f"expert {name!r} is a {expert.class_name} ({expert.model_type}), but the base is a "
            f"{base.class_name} ({base.model_type}); experts must be fine-tuned from the base"
        )
    for found, expected, what in ((expert, base, "lacks"), (base, expert, "has an extra")):
        absent = [tensor for tensor in expected if tensor not in found]
        if absent:
            more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
            raise MergeError(
                f"expert {name!r} {what} tensor {absent[0]!r}{more}, compared with the base; load base "
                f"and experts with the same class (base {base.class_name}, expert {expert.class_name})"
            )
    for tensor, weight in base.items():
        other = expert[tensor]
        if other.shape != weight.shape:
            raise MergeError(
                f"expert {name!r}, tensor {tensor!r}: shape {tuple(other.shape)}, "
                f"but the base has {tuple(weight.shape)}"
            )
        if other.is_floating_point() != weight.is_floating_point():
            raise MergeError(
                f"expert {name!r}, tensor {tensor!r}: dtype {other.dtype}, but the base has {weight.dtype}; "
                "quantised weights must be dequantised before merging"
            )
        if not weight.is_floating_point() and not _same_meaning(tensor, weight, other):
            raise MergeError(
                f"expert {name!r}, tensor {tensor!r}: its {other.dtype} values differ from the base's; "
                "integer tensors are kept from the base, so the experts must agree with it"
            )


def _same_meaning(name: str, base: Tensor, expert: Tensor) -> bool:
    """Whether two integer or bool tensors are interchangeable; counters of past batches always are."""
    return name.endswith("num_batches_tracked") or torch.equal(base.cpu(), expert.cpu())
