"""Open the base and its experts, name them, and check that they can be merged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from coram_hf.errors import CoramError
from coram_hf.inputs.adapter_folder import is_adapter, open_adapter
from coram_hf.inputs.adapters import is_adapted, open_adapters, without_adapters
from coram_hf.inputs.checkpoint import open_checkpoint
from coram_hf.inputs.config_differences import config_differences
from coram_hf.inputs.heads import match_heads
from coram_hf.inputs.inputs import Inputs
from coram_hf.inputs.locate import Located, fetch, parse_source
from coram_hf.inputs.options import MergeOptions, check_options, output_dtype
from coram_hf.inputs.placement import placed_as
from coram_hf.inputs.quantized import dequantized
from coram_hf.inputs.sentence_modules import checkpoint_folder
from coram_hf.inputs.surroundings import choose_surroundings, told_choices
from coram_hf.inputs.targets import with_targets
from coram_hf.inputs.tokenizers import choose_tokenizer, find_tokenizers
from coram_hf.inputs.tokens import embedding_rows, match_vocabularies
from coram_hf.inputs.weights import Weights

ModelSource = PreTrainedModel | PeftModel | str | Path
"""A loaded model, a model with adapters (each is an expert), or the folder or Hub id of either."""

ModelSources = Sequence[ModelSource] | Mapping[str, ModelSource]
TOLD = ("vocabulary", "heads", "allow_config_differences", "trust_remote_code", "allow_pickle")
"""Options that the report repeats."""
OpenFolder = Callable[[str, Path], Weights]


def open_inputs(
    base: ModelSource | Weights,
    experts: ModelSources,
    options: MergeOptions,
    *,
    target_modules: str | tuple[str, ...] | None = None,
    need_targets: bool = True,
    device: torch.device | None = None,
) -> Inputs:
    """Open base and experts, check that architectures, tensors and shapes agree, and find the targets.

    `device` is the option of that name, resolved for this machine.
    """
    check_options(options)
    trust_remote_code = options.get("trust_remote_code", False)
    allow_pickle = options.get("allow_pickle", False)
    dtype = output_dtype(options.get("dtype"))
    open_folder = partial(open_checkpoint, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
    source = _open_base(base, open_folder)
    origin = source.model
    if not isinstance(experts, Mapping | Sequence) or isinstance(experts, str):
        raise CoramError(
            f"experts is a {type(experts).__name__}; pass a list of models or a dict name -> model"
        )
    opened: dict[str, Weights] = {}
    warnings = list(source.warnings)
    pairs = experts.items() if isinstance(experts, Mapping) else ((None, expert) for expert in experts)
    for position, (given, expert) in enumerate(pairs, start=1):
        for name, weights in _open_expert(source, given, expert, position, open_folder, allow_pickle):
            warnings += weights.warnings
            if name in opened:
                raise CoramError(
                    f"two experts are called {name!r}; give them distinct names with a dict name -> expert, "
                    "or name=source on the command line"
                )
            _check_same_architecture(origin, name, weights.model)
            opened[name] = weights
    if not opened:
        raise CoramError("no experts: pass at least one model fine-tuned from the base")
    differing, insisted = config_differences(source, opened, options.get("allow_config_differences", False))
    matched = match_heads(source, opened, options.get("heads", "base"))
    source, opened, origin = matched.base, matched.experts, matched.base.model
    tokenizers = find_tokenizers(source, opened, options)
    chosen = choose_tokenizer(origin, opened, tokenizers, options)
    models = {name: weights.model for name, weights in opened.items()}
    policy, another = options.get("vocabulary", "base"), None if tokenizers.given else chosen.tokenizer
    rows, differences = match_vocabularies(
        origin, models, policy, tokenizers.base, tokenizers.experts, another
    )
    surroundings = choose_surroundings(source, opened, tokenizers, chosen, rows, options)
    for name, weights in opened.items():
        warnings += _check_same_tensors(source, name, weights, rows.token_axis)
    told = {key: value for key in TOLD if (value := cast(Any, options).get(key)) not in (None, False)}
    told |= told_choices(options, opened)
    inputs = Inputs(
        source,
        opened,
        rows,
        targets={},
        outside=(),
        frozen=(),
        surroundings=replace(surroundings, said={**differing, **matched.said, **surroundings.said}),
        heads=matched.heads,
        warnings=(*insisted, *matched.warnings, *differences, *surroundings.warnings, *warnings),
        dtype=dtype,
        device=device,
        placement=placed_as(origin),
        trust_remote_code=trust_remote_code,
        told=told,
    )
    return with_targets(inputs, target_modules, required=need_targets)


def _open_base(base: ModelSource | Weights, open_folder: OpenFolder) -> Weights:
    """The weights of the base, without any adapters in it; as they are if they are open already."""
    if isinstance(base, Weights):
        return base
    if isinstance(base, str | Path):
        found = fetch(parse_source(str(base)))
        if is_adapter(found.folder):
            raise CoramError(f"the base {str(base)!r} is an adapter; pass the model that it was trained on")
        return _located(open_folder("the base", checkpoint_folder(found.folder)), found)
    model = base.get_base_model() if isinstance(base, PeftModel) else base
    _require_model("the base", model)
    return Weights(without_adapters(dequantized("the base", cast(PreTrainedModel, model))))


def _open_expert(
    base: Weights,
    given: object,
    expert: ModelSource,
    position: int,
    open_folder: OpenFolder,
    allow_pickle: bool,
) -> Iterator[tuple[str, Weights]]:
    """One expert, or each of its adapters, under the given name or that of adapter, folder or repository."""
    if given is not None and (not isinstance(given, str) or not given):
        raise CoramError(f"an expert's name must be a non-empty string, found {given!r}")
    label = given
    if isinstance(expert, str | Path):
        source = parse_source(str(expert))
        label = label or source.name
        found = fetch(source)
        open_this, folder = open_folder, found.folder
        if is_adapter(folder):
            open_this = partial(open_adapter, base, allow_pickle=allow_pickle)
        else:
            folder = checkpoint_folder(folder)
        yield label, _located(open_this(f"expert {label!r}", folder), found)
        return
    if isinstance(expert, PeftModel):
        adapters = open_adapters(f"expert {label or position!r}", expert)
        for adapter, weights in adapters.items():
            if len(adapters) == 1:
                yield label or (f"expert_{position}" if adapter == "default" else adapter), weights
            else:
                yield f"{label}/{adapter}" if label else adapter, weights
        return
    _require_model(f"expert {label or position!r}", expert)
    if is_adapted(expert):
        raise CoramError(
            f"expert {label or position!r} contains adapters; pass it as a PeftModel, or merge them first"
        )
    name = label or _name_by_origin(base.model, expert, position)
    yield name, Weights(dequantized(f"expert {name!r}", expert))


def _located(weights: Weights, found: Located) -> Weights:
    weights.location, weights.commit, weights.folder = found.location, found.commit, found.folder
    return weights


def _require_model(who: str, model: object) -> None:
    if not isinstance(model, PreTrainedModel):
        raise CoramError(
            f"{who} is a {type(model).__name__}; pass a transformers PreTrainedModel, "
            "for example AutoModelForCausalLM.from_pretrained(...), a PeftModel, or a folder or Hub id"
        )


def _name_by_origin(base: PreTrainedModel, expert: PreTrainedModel, position: int) -> str:
    """Where an expert was loaded from, or expert_1, expert_2, ..."""
    origin = expert.name_or_path or ""
    if not origin or origin == base.name_or_path:
        return f"expert_{position}"
    return Path(origin).name if Path(origin).is_dir() else origin


def _check_same_architecture(base: PreTrainedModel, name: str, expert: PreTrainedModel) -> None:
    if expert.config.model_type != base.config.model_type:
        raise CoramError(
            f"expert {name!r} is a {type(expert).__name__} ({expert.config.model_type}), but the base is a "
            f"{type(base).__name__} ({base.config.model_type}); experts must be fine-tuned from the base"
        )


def _check_same_tensors(
    base: Weights, name: str, expert: Weights, token_axis: Mapping[str, int]
) -> list[str]:
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
        f"expert {name!r} has a {alias!r} of its own, which the base ties to {base.tied[alias]!r}: the "
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
