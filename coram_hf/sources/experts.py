"""The base and its experts side by side: naming them, and checking that they can be merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coram_hf.errors import MergeError
from coram_hf.sources.companions import find_tokenizer
from coram_hf.sources.loaded import LoadedModel
from coram_hf.sources.quantized import dequantized
from coram_hf.sources.tokens import Policy, embedding_rows, match_vocabularies
from coram_hf.sources.vocabulary import Vocabulary

Experts = Sequence[PreTrainedModel] | Mapping[str, PreTrainedModel]


@dataclass(frozen=True)
class Models:
    """A base and the named experts fine-tuned from it, tensor by tensor, rows of vocabularies lined up.

    tokenizer: of the merged model, where it is not simply the one beside the base.
    """

    base: LoadedModel
    experts: dict[str, LoadedModel]
    vocabulary: Vocabulary
    tokenizer: PreTrainedTokenizerBase | None = None
    warnings: list[str] = field(default_factory=list)

    def tensors(self, name: str) -> tuple[Tensor, list[Tensor]]:
        """One tensor of the base and of every expert."""
        experts = {expert: weights[name] for expert, weights in self.experts.items()}
        return self.vocabulary.align(name, self.base[name], experts)


def open_models(
    base: PreTrainedModel,
    experts: Experts,
    *,
    vocabulary: Policy = "base",
    tokenizer: PreTrainedTokenizerBase | None = None,
    expert_tokenizers: Mapping[str, PreTrainedTokenizerBase] | None = None,
    trust_remote_code: bool = False,
) -> Models:
    """Name the experts and check that each has the base's architecture, tensors and shapes."""
    _require_model("the base", base)
    if not isinstance(experts, Mapping | Sequence) or isinstance(experts, str):
        raise MergeError(
            f"experts is a {type(experts).__name__}; pass a list of models or a dict name -> model"
        )
    named = dict(experts) if isinstance(experts, Mapping) else _name(base, experts)
    if not named:
        raise MergeError("no experts: pass at least one model fine-tuned from the base")
    for name, expert in named.items():
        if not isinstance(name, str) or not name:
            raise MergeError(f"an expert's name must be a non-empty string, found {name!r}")
        _require_model(f"expert {name!r}", expert)
    unknown = set(expert_tokenizers or ()) - set(named)
    if unknown:
        raise MergeError(
            f"expert_tokenizers: no expert is called {sorted(unknown)[0]!r}; there are {list(named)}"
        )

    base = dequantized("the base", base)
    named = {name: dequantized(f"expert {name!r}", expert) for name, expert in named.items()}
    for name, expert in named.items():
        _check_same_architecture(base, name, expert)
    own = tokenizer or find_tokenizer(base, trust_remote_code)
    theirs = {
        name: (expert_tokenizers or {}).get(name) or find_tokenizer(expert, trust_remote_code)
        for name, expert in named.items()
    }
    rows, warnings = match_vocabularies(base, named, vocabulary, own, theirs)
    source = LoadedModel(base)
    opened = {name: LoadedModel(expert) for name, expert in named.items()}
    for name, weights in opened.items():
        warnings += _check_same_tensors(source, name, weights, rows.token_axis)
    return Models(source, opened, rows, rows.tokenizer or tokenizer, warnings)


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


def _check_same_architecture(base: PreTrainedModel, name: str, expert: PreTrainedModel) -> None:
    if expert.config.model_type != base.config.model_type:
        raise MergeError(
            f"expert {name!r} is a {type(expert).__name__} ({expert.config.model_type}), but the base is a "
            f"{type(base).__name__} ({base.config.model_type}); experts must be fine-tuned from the base"
        )


def _check_same_tensors(
    base: LoadedModel, name: str, expert: LoadedModel, token_axis: Mapping[str, int]
) -> list[str]:
    """Compare names, shapes and kinds of dtype; returns warnings about weights that only one side ties."""
    lacking = [tensor for tensor in base if tensor not in expert and tensor not in expert.tied]
    extra = [tensor for tensor in expert if tensor not in base and tensor not in base.tied]
    for absent, what in ((lacking, "lacks"), (extra, "has an extra")):
        if absent:
            more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
            raise MergeError(
                f"expert {name!r} {what} tensor {absent[0]!r}{more}, compared with the base; load base "
                f"and experts with the same class (base {base.class_name}, expert {expert.class_name})"
            )
    for tensor, weight in base.items():
        _check_tensor(name, tensor, weight, expert, token_axis.get(tensor))
    return [
        f"expert {name!r} has a {alias!r} of its own, which the base ties to {base.tied[alias]!r}: the "
        f"merged model stays tied, and what the expert changed in {alias!r} alone is left out"
        for alias in expert
        if alias in base.tied and not torch.equal(expert[alias], expert[base.tied[alias]])
    ] + [
        f"expert {name!r} ties {alias!r} to {expert.tied[alias]!r}, which the base does not: the merged "
        "model stays untied, and takes the expert's one tensor for both"
        for alias in base
        if alias in expert.tied
    ]


def _check_tensor(name: str, tensor: str, base: Tensor, expert: LoadedModel, token_axis: int | None) -> None:
    who, found = f"expert {name!r}, tensor {tensor!r}", expert[tensor]
    expected = list(base.shape)
    if token_axis is not None:
        expected[token_axis] = embedding_rows(expert.model)
    if list(found.shape) != expected:
        raise MergeError(
            f"{who}: shape {tuple(found.shape)}, but the base has {tuple(base.shape)}; "
            "experts must be fine-tuned from the base"
        )
    if found.is_floating_point() != base.is_floating_point():
        raise MergeError(
            f"{who}: dtype {found.dtype}, but the base has {base.dtype}; "
            "quantised weights must be dequantised before merging"
        )
    if not base.is_floating_point() and not _same_meaning(tensor, base, found):
        raise MergeError(
            f"{who}: its {found.dtype} values differ from the base's; "
            "integer tensors are kept from the base, so the experts must agree with it"
        )


def _same_meaning(name: str, base: Tensor, expert: Tensor) -> bool:
    """Whether two integer or bool tensors are interchangeable; counters of past batches always are."""
    return name.endswith("num_batches_tracked") or torch.equal(base.cpu(), expert.cpu())
