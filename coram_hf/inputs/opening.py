"""Open the base and its experts, name them, and check that they can be merged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from transformers import PreTrainedModel

from coram_hf.errors import CoramError
from coram_hf.inputs.checkpoint import open_checkpoint
from coram_hf.inputs.checks import check_same_architecture, check_same_tensors
from coram_hf.inputs.config_differences import config_differences
from coram_hf.inputs.gguf import open_gguf
from coram_hf.inputs.heads import match_heads
from coram_hf.inputs.inputs import Inputs
from coram_hf.inputs.internals.marks import is_adapter, is_peft_model
from coram_hf.inputs.locate import Located, Source, fetch, gguf_in, parse_source, split_adapter
from coram_hf.inputs.options import MergeOptions, check_options, output_dtype
from coram_hf.inputs.placement import placed_as
from coram_hf.inputs.quantized import dequantized
from coram_hf.inputs.sentence_modules import checkpoint_folder
from coram_hf.inputs.surroundings import choose_surroundings, told_choices, told_files
from coram_hf.inputs.targets import Modules, with_targets
from coram_hf.inputs.tokenizers import base_tokenizer, choose_tokenizer, find_tokenizers, tokenizer_of
from coram_hf.inputs.tokens import match_vocabularies
from coram_hf.inputs.transplant import OwnBases, check_transplanted_targets, transplanted
from coram_hf.inputs.weights import Weights

if TYPE_CHECKING:
    from peft import PeftModel

ModelSource: TypeAlias = "PreTrainedModel | PeftModel | str | Path"
"""A loaded model, a model with adapters (each is an expert), or the folder or Hub id of either."""

ModelSources: TypeAlias = "Sequence[ModelSource] | Mapping[str, ModelSource] | PeftModel"
TOLD = ("vocabulary", "heads", "allow_config_differences", "trust_remote_code", "allow_pickle")
"""Options that the report repeats."""
OpenFolder = Callable[[str, Path], Weights]


def open_inputs(
    base: ModelSource | Weights,
    experts: ModelSources,
    options: MergeOptions,
    *,
    target_modules: Modules = None,
    keep: Modules = None,
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
    open_folder = partial(_open_model, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
    if is_peft_model(experts):
        experts = [experts]
    if not isinstance(experts, Mapping | Sequence) or isinstance(experts, str):
        raise CoramError(
            f"experts is a {type(experts).__name__}; pass a list of models or a dict name -> model"
        )
    own_bases = OwnBases(options.get("bases"), partial(_open_base, open_folder))
    named = experts.values() if isinstance(experts, Mapping) else experts
    for given in (base, *named, *own_bases.sources):
        if isinstance(given, str | Path):
            for part in filter(None, split_adapter(str(given))):
                parse_source(part)
    source = _open_base(open_folder, "the base", base)
    origin = source.model
    opened: dict[str, Weights] = {}
    warnings = list(source.warnings)
    pairs = list(experts.items() if isinstance(experts, Mapping) else ((None, expert) for expert in experts))
    unnamed = [expert for given, expert in pairs if given is None]
    if not any(is_peft_model(expert) or isinstance(expert, PreTrainedModel) for expert in unnamed):
        own_bases.require([str(_label(given, expert)) for given, expert in pairs], adapters=True)
    for position, (given, expert) in enumerate(pairs, start=1):
        trained_on = own_bases.find(_label(given, expert))
        start = trained_on or source
        for name, weights in _open_expert(start, given, expert, position, open_folder, allow_pickle):
            start = trained_on or own_bases.find(name) or source
            warnings += weights.warnings
            if name in opened:
                raise CoramError(
                    f"two experts are called {name!r}; give them distinct names with a dict name -> expert, "
                    "or name=source on the command line"
                )
            check_same_architecture(start.model, name, weights.model)
            if start is not source:
                weights, more = _transplant(source, start, name, weights, options)
                warnings += [warning for warning in (*start.warnings, *more) if warning not in warnings]
            opened[name] = weights
    if not opened:
        raise CoramError("no experts: pass at least one model fine-tuned from the base")
    own_bases.require(list(opened))
    differing, insisted = config_differences(source, opened, options.get("allow_config_differences", False))
    matched = match_heads(source, opened, options.get("heads", "base"))
    source, opened, origin = matched.base, matched.experts, matched.base.model
    tokenizers = find_tokenizers(source, opened, options)
    speaking = {name: weights for name, weights in opened.items() if weights.transplant is None}
    chosen = choose_tokenizer(origin, speaking, tokenizers, options)
    models = {name: weights.model for name, weights in opened.items()}
    policy, another = options.get("vocabulary", "base"), None if tokenizers.given else chosen.tokenizer
    rows, differences = match_vocabularies(
        origin, models, policy, tokenizers.base, tokenizers.experts, another
    )
    surroundings = choose_surroundings(source, speaking, tokenizers, chosen, rows, options)
    for name, weights in opened.items():
        warnings += check_same_tensors(source, name, weights, rows.token_axis)
    told = {key: value for key in TOLD if (value := cast(Any, options).get(key)) not in (None, False)}
    told |= told_choices(options, speaking)
    inputs = Inputs(
        source,
        opened,
        rows,
        targets={},
        outside=(),
        frozen=(),
        surroundings=replace(
            surroundings, labels=matched.labels, said={**differing, **matched.said, **surroundings.said}
        ),
        heads=matched.heads,
        warnings=(*insisted, *matched.warnings, *differences, *surroundings.warnings, *warnings),
        dtype=dtype,
        device=device,
        placement=placed_as(origin),
        trust_remote_code=trust_remote_code,
        told=told,
        files_told=told_files(options, speaking),
    )
    found = with_targets(inputs, target_modules, required=need_targets, keep=keep)
    return replace(found, warnings=(*found.warnings, *check_transplanted_targets(found)))


def _open_base(open_folder: OpenFolder, who: str, base: ModelSource | Weights) -> Weights:
    """The weights of a base, without any adapters in it; unchanged if they are already open."""
    if isinstance(base, Weights):
        return base
    if isinstance(base, str | Path):
        found = fetch(parse_source(str(base)))
        if is_adapter(found.folder):
            raise CoramError(f"{who} {str(base)!r} is an adapter; pass the model that it was trained on")
        return _located(open_folder(who, checkpoint_folder(found.folder)), found)
    from coram_hf.inputs.adapters import without_adapters

    model = base.get_base_model() if is_peft_model(base) else base
    _require_model(who, model)
    return Weights(without_adapters(dequantized(who, cast(PreTrainedModel, model))))


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
        model, adapter = split_adapter(str(expert))
        source = parse_source(model)
        label = label or source.name
        if adapter is not None:
            yield label, _open_adapted(f"expert {label!r}", source, adapter, open_folder, allow_pickle)
            return
        found = fetch(source)
        open_this, folder = open_folder, found.folder
        if is_adapter(folder):
            from coram_hf.inputs.adapter_folder import open_adapter

            open_this = partial(open_adapter, base, allow_pickle=allow_pickle)
        else:
            folder = checkpoint_folder(folder)
        yield label, _located(open_this(f"expert {label!r}", folder), found)
        return
    from coram_hf.inputs.adapters import is_adapted, open_adapters

    if is_peft_model(expert):
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


def _label(given: object, expert: ModelSource) -> object:
    """The name of an expert, as far as it is known before it is opened."""
    if given or not isinstance(expert, str | Path):
        return given
    return parse_source(split_adapter(str(expert))[0]).name


def _transplant(
    base: Weights, own: Weights, name: str, expert: Weights, options: MergeOptions
) -> tuple[Weights, list[str]]:
    """An expert with its own base, checked against it and moved onto the base of the merge; and warnings."""
    trust, given = options.get("trust_remote_code", False), options.get("expert_tokenizers") or {}
    tokenizer = given.get(name) or tokenizer_of(expert, trust)
    ours, own_tokenizer = base_tokenizer(base, options), tokenizer_of(own, trust)
    models, tokenizers = {name: expert.model}, {name: tokenizer}
    within, differences = match_vocabularies(own.model, models, "base", own_tokenizer, tokenizers)
    differences += check_same_tensors(own, name, expert, within.token_axis)
    onto, _ = match_vocabularies(base.model, {name: own.model}, "base", ours, {name: own_tokenizer})
    return transplanted(base, own, name, expert, onto, within), differences


def _open_adapted(
    who: str, source: Source, adapter: str, open_folder: OpenFolder, allow_pickle: bool
) -> Weights:
    """A checkpoint with an adapter added to it, `model+adapter`, as one expert."""
    found, added = fetch(source), fetch(parse_source(adapter))
    if not is_adapter(added.folder):
        raise CoramError(
            f"{who}: {adapter!r} is not an adapter; a source `model+adapter` adds one to a model"
        )
    from coram_hf.inputs.adapter_folder import open_adapter

    model = open_folder(who, found.folder)
    weights = open_adapter(model, who, added.folder, allow_pickle=allow_pickle)
    weights.files = [*model.files, *weights.files]
    weights.adapter, weights.factors, weights.kind = None, None, f"full+{weights.kind}"
    return _located(weights, Located(found.folder, f"{found.location}+{added.location}"))


def _located(weights: Weights, found: Located) -> Weights:
    folder = found.folder.parent if found.folder.is_file() else found.folder
    weights.location, weights.commit, weights.folder = found.location, found.commit, folder
    return weights


def _open_model(who: str, found: Path, *, trust_remote_code: bool, allow_pickle: bool) -> Weights:
    """The weights of a full model: of a GGUF file, or of a checkpoint."""
    if (path := gguf_in(found)) is not None:
        return open_gguf(who, path)
    return open_checkpoint(who, found, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)


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
