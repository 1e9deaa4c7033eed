"""Adapter folders: read, checked, and loaded into a shadow of the base."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, PeftType, load_peft_weights, set_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from torch import Tensor
from transformers import PreTrainedModel

from coram_hf.errors import CoramError, reason
from coram_hf.inputs.adapters import open_adapters, require_mergeable, shadow
from coram_hf.inputs.files import pickle_refused
from coram_hf.inputs.internals.adapters import parameter_mark
from coram_hf.inputs.internals.marks import ADAPTER_CONFIG, KEY_PREFIX
from coram_hf.inputs.internals.models import put
from coram_hf.inputs.oft import is_legacy, open_legacy
from coram_hf.inputs.qlora import quantised_warning, trained_quantised
from coram_hf.inputs.task_heads import with_task_head
from coram_hf.inputs.weights import Weights

KEEPS_BASE = ("gaussian", "orthogonal", "eva")
"""Named LoRA initialisations that leave the base unchanged; all others subtract something from it."""


def open_adapter(base: Weights, who: str, folder: Path, *, allow_pickle: bool = False) -> Weights:
    """An adapter folder as an expert."""
    state = _read(folder, who, allow_pickle)
    if is_legacy(state):
        opened = open_legacy(who, base, folder, state)
    else:
        config = _config(folder, who)
        base = with_task_head(base, config, state)
        model = _load(base, folder, config, state, who)
        opened = next(iter(open_adapters(who, model, base).values()))
        opened.warnings += _other_base(base, who, folder, model)
        opened.fresh = tuple(name for name in base.fresh if name not in opened.overrides)
    opened.files += [folder / ADAPTER_CONFIG, *folder.glob("adapter_model.*")]
    return opened


def _read(folder: Path, who: str, allow_pickle: bool) -> dict[str, Tensor]:
    """The tensors of an adapter folder."""
    if not any((folder / name).is_file() for name in (SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME)):
        raise CoramError(f"{who}: {folder} contains {ADAPTER_CONFIG}, but no {SAFETENSORS_WEIGHTS_NAME}")
    if not (folder / SAFETENSORS_WEIGHTS_NAME).is_file() and not allow_pickle:
        raise pickle_refused(f"{who}: {folder}", WEIGHTS_NAME)
    try:
        state = load_peft_weights(str(folder), device="cpu")
    except Exception as error:  # safetensors and pickles fail in many ways
        raise CoramError(f"{who}: the weights in {folder} cannot be read ({reason(error)})") from error
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise CoramError(f"{who}: the weights in {folder} are not a dictionary of tensors")
    if not state:
        raise CoramError(f"{who}: the weights in {folder} are empty")
    for key, tensor in state.items():
        if ".lora_" in key and not tensor.is_floating_point():
            raise CoramError(
                f"{who}, tensor {key!r}: dtype {tensor.dtype}, but adapter weights must be floating-point"
            )
    return state


def _config(folder: Path, who: str) -> PeftConfig:
    """The config of an adapter that changes weights."""
    try:
        config = PeftConfig.from_pretrained(str(folder))
        PeftType(config.peft_type)
        require_mergeable(who, config)
        return config
    except CoramError:
        raise
    except Exception as error:  # PEFT fails in many ways on damaged or foreign files
        raise CoramError(
            f"{who}: {folder / ADAPTER_CONFIG} is not a PEFT config ({reason(error)})"
        ) from error


def _load(base: Weights, folder: Path, config: PeftConfig, state: dict[str, Tensor], who: str) -> PeftModel:
    """The adapter in a shadow of the base, with the embeddings resized to the adapter's if they differ.

    Parameters that the base builds on demand are replaced by zeros that take no memory; those that the
    adapter replaces, or that its initialisation writes to, are copied.
    """
    skeleton = shadow(base.model, hooks=False)  # with hooks, PEFT would write files to offload it anew
    for name in base.overrides:
        like = base.original(name)
        put(skeleton, name, torch.zeros((), dtype=like.dtype).expand(like.shape))
    _resize_for(skeleton, state)
    rewrites = _rewrites_base(config)
    own = dict(skeleton.named_parameters())
    for key in state:
        name = key.removeprefix(KEY_PREFIX).replace(".base_layer.", ".")
        changed = [own.get(name), own.get(f"{name.partition('.lora_')[0]}.weight") if rewrites else None]
        for parameter in changed:
            if parameter is not None:
                parameter.data = parameter.data.clone()
    try:
        model = PeftModel.from_pretrained(skeleton, str(folder), config=config)
        loaded = set_peft_model_state_dict(model, dict(state), adapter_name="default")
    except Exception as error:  # mismatched shapes, names and options fail in many ways
        trained_on = config.base_model_name_or_path
        hint = f"; was it trained on {trained_on!r}?" if trained_on else ""
        found = _misfit(state, own) or reason(error)
        raise CoramError(f"{who}: the adapter in {folder} does not fit the base ({found}){hint}") from error
    _check_keys(who, folder, config, loaded)
    return model


def _misfit(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str | None:
    """The first factor of LoRA that is wider or narrower than its layer, in words."""
    for key, factor in state.items():
        module, _, part = key.removeprefix(KEY_PREFIX).partition(".lora_")
        axis, side = {"A.weight": (1, "inputs"), "B.weight": (0, "outputs")}.get(part, (0, ""))
        layer = own.get(f"{module}.weight")
        if side and layer is not None and layer.ndim == 2 and factor.shape[axis] not in layer.shape:
            wanted = layer.shape[axis]
            return f"{module} has {factor.shape[axis]} {side} in the adapter and {wanted} in the base"
    return None


def _check_keys(who: str, folder: Path, config: PeftConfig, loaded: Any) -> None:
    """Raise if a tensor of the adapter was not loaded, or one of its parameters is missing.

    PEFT writes some trained embeddings twice and reads them once, so such leftovers are allowed.
    """
    mark = parameter_mark(config)
    missing = [key for key in loaded.missing_keys if mark in key and ".default" in key]
    foreign = [key for key in loaded.unexpected_keys if ".modules_to_save." not in key]
    for keys, what in ((missing, "lack"), (foreign, "do not fit the base:")):
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise CoramError(
                f"{who}: the weights in {folder} {what} {keys[0].removeprefix(KEY_PREFIX)!r}{more}; "
                "the adapter is damaged, or was trained on another base"
            )


def _rewrites_base(config: PeftConfig) -> bool:
    """Whether the initialisation of an adapter, which PEFT repeats on loading, writes to the base."""
    start = getattr(config, "init_lora_weights", True)
    return isinstance(start, str) and start not in KEEPS_BASE


def _resize_for(model: PreTrainedModel, state: dict[str, Tensor]) -> None:
    """Resize the embeddings if the adapter contains embeddings of a different size."""
    embedding: Any = model.get_input_embeddings()
    path = next((name for name, module in model.named_modules() if module is embedding), None)
    names = [f"{path}.{inner}weight" for inner in ("", "modules_to_save.", "base_layer.")]
    for key, tensor in state.items():
        if key.removeprefix(KEY_PREFIX) in names and len(tensor) != len(embedding.weight):
            model.resize_token_embeddings(len(tensor), mean_resizing=False)


def _other_base(base: Weights, who: str, folder: Path, adapter: PeftModel) -> list[str]:
    """A warning if the adapter was trained on a quantised base, or its config names a different one."""
    config = next(iter(adapter.peft_config.values()))
    trained_on, ours = config.base_model_name_or_path, base.location
    if (found := trained_quantised(folder, config)) is not None:
        return [quantised_warning(who, trained_on, found)]
    if not trained_on or not ours or Path(trained_on).name == Path(ours).name:
        return []
    names = [Path(name).name if name.startswith(("/", "~", ".")) else name for name in (trained_on, ours)]
    return [f"{who} is an adapter of {names[0]!r}, but the base is {names[1]!r}"]
