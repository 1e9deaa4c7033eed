"""A checkpoint on disk as a model whose parameters are memory maps, read only when they are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from coram_hf.errors import CoramError, reason
from coram_hf.inputs.files import read_json, read_tensors, weight_files
from coram_hf.inputs.internals.models import Conversion, custom_class, disk_names, put, without_initialization
from coram_hf.inputs.kinds import find_kinds, head_names
from coram_hf.inputs.offloaded import tied_names
from coram_hf.inputs.quantized import dequantized, scheme
from coram_hf.inputs.weights import Weights


@dataclass(frozen=True)
class Stored:
    """One tensor of a model on disk.

    like: a meta tensor of the same shape and dtype. pieces: the memory maps that it is built from.
    """

    like: Tensor
    pieces: list[Tensor]
    make: Callable[[], Tensor]


def open_checkpoint(
    who: str, folder: Path, *, trust_remote_code: bool = False, allow_pickle: bool = False
) -> Weights:
    """The weights in a folder, under the names of the model in memory, not those on disk.

    Parameters that transformers builds from several tensors on disk (stacked experts) are built on demand.
    A quantised checkpoint is loaded and dequantised.
    """
    config = read_config(who, folder, trust_remote_code)
    files = weight_files(folder, allow_pickle)
    cls = model_class(who, folder, config, trust_remote_code)
    load = partial(_load, cls, folder)
    source_files = [folder / "config.json", *files]
    if getattr(config, "quantization_config", None) is not None:
        return Weights(_loaded_quantized(who, load, config), files=source_files)
    model = _skeleton(who, folder, cls, config)
    stored, unexpected = _by_memory_name(model, read_tensors(folder, files))
    fresh = _fresh_head(model, stored)
    _fill(who, folder, model, stored | fresh)
    warnings = []
    if unexpected:
        warnings.append(
            f"{who}: {len(unexpected)} tensors of its files, such as {unexpected[0]!r}, belong to no "
            f"parameter of {cls.__name__} and are left out"
        )
    return Weights(
        model,
        {name: found.make for name, found in stored.items() if len(found.pieces) > 1},
        load=load,
        buffers=partial(_other_buffers, cls, model),
        files=source_files,
        pieces={name: found.pieces for name, found in stored.items()},
        warnings=warnings,
        fresh=list(fresh),
    )


def stored_names(model: PreTrainedModel) -> set[str] | None:
    """The parameters of a loaded model that its local checkpoint has; None if that is not known."""
    folder = Path(model.name_or_path or "/nowhere")
    if not folder.is_dir():
        return None
    try:
        tensors = read_tensors(folder, weight_files(folder, False))
        bare = _skeleton("the base", folder, type(model), model.config)
    except CoramError:
        return None
    found, tied = disk_names(bare, tensors), tied_names(bare)
    names = {*found.keys, *(conversion.target for conversion in found.conversions)}
    return names | {tied.get(name, name) for name in names}


def read_config(who: str, folder: Path, trust_remote_code: bool) -> PreTrainedConfig:
    """The config of a checkpoint folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise CoramError(
            f"{who}: {folder} contains neither a model (config.json) nor an adapter (adapter_config.json)"
        )
    read_json(path)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # a damaged config fails in many ways
        raise CoramError(
            f"{who}: {path} is not a config that transformers can read ({reason(error)})"
        ) from error


def model_class(
    who: str, folder: Path, config: PreTrainedConfig, trust_remote_code: bool
) -> type[PreTrainedModel]:
    """The model class named in a config; custom code is used only if it is trusted."""
    names = config.architectures
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    known = getattr(transformers, name, None) if name else None
    if isinstance(known, type) and issubclass(known, PreTrainedModel):
        return known
    auto_map = getattr(config, "auto_map", None)
    entries = auto_map.values() if isinstance(auto_map, dict) else ()
    custom = [str(path) for path in entries if str(path).endswith(f".{name}")]
    if not name or not custom:
        raise CoramError(
            f"{who}: {folder / 'config.json'} must name an architecture of transformers, found {name!r}"
        )
    if not trust_remote_code:
        raise CoramError(
            f"{who}: {name} is custom code in {folder}; "
            "pass trust_remote_code=True (--trust-remote-code) to run it"
        )
    return custom_class(custom[0], str(folder))


def _load(cls: type[PreTrainedModel], folder: Path) -> PreTrainedModel:
    """Load the checkpoint as an ordinary model, in the dtype in which it is stored."""
    return cls.from_pretrained(folder, dtype="auto", weights_only=True)


def _loaded_quantized(
    who: str, load: Callable[[], PreTrainedModel], config: PreTrainedConfig
) -> PreTrainedModel:
    """Load and dequantise a quantised checkpoint; raise if its backend is not installed."""
    try:
        model = load()
    except Exception as error:  # every backend raises its own type if it is not installed
        name = scheme(getattr(config, "quantization_config", None))
        raise CoramError(
            f"{who} is quantised ({name}) and cannot be loaded here ({reason(error)}); "
            "merge the unquantised checkpoint"
        ) from error
    return dequantized(who, model)


def _skeleton(
    who: str, folder: Path, cls: type[PreTrainedModel], config: PreTrainedConfig
) -> PreTrainedModel:
    """The model on the meta device, built from its config, with the generation config of its folder."""
    try:
        with torch.device("meta"), without_initialization():
            model = cls(config)
            model.tie_weights()
    except Exception as error:  # invalid values of a config fail in many ways
        raise CoramError(
            f"{who}: no {cls.__name__} can be built from {folder / 'config.json'} ({reason(error)})"
        ) from error
    model.eval()
    model.name_or_path = str(folder)
    if model.can_generate() and (folder / "generation_config.json").is_file():
        read_json(folder / "generation_config.json")
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _other_buffers(cls: type[PreTrainedModel], model: PreTrainedModel) -> dict[str, Tensor]:
    """The buffers that are not in checkpoints, as `from_pretrained` computes them in the model's dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(model.dtype)
    try:
        with init_empty_weights(include_buffers=False), without_initialization():
            built = cls(model.config)
    finally:
        torch.set_default_dtype(before)
    stored = model.state_dict()
    return {name: buffer for name, buffer in built.named_buffers() if name not in stored}


def _by_memory_name(model: PreTrainedModel, disk: dict[str, Tensor]) -> tuple[dict[str, Stored], list[str]]:
    """The tensors on disk by the model's parameter names, and the keys that match no parameter."""
    keys, conversions, unexpected = disk_names(model, disk)
    stored = {name: Stored(disk[key].to("meta"), [disk[key]], disk[key].detach) for name, key in keys.items()}
    for conversion in conversions:
        sources = {key: disk[key] for key in conversion.patterns}
        likes = conversion.run({key: tensor.to("meta") for key, tensor in sources.items()})
        for name, like in likes.items():
            stored[name] = Stored(
                like, list(sources.values()), partial(_converted, conversion, sources, name)
            )
    return stored, unexpected


def _fresh_head(model: PreTrainedModel, stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """What a checkpoint lacks of a head, as zeros or, for a norm, ones; not of a head that generates."""
    if model.can_generate():
        return {}
    tied, kinds = tied_names(model), find_kinds(model)
    lacking = head_names(model) - {tied.get(name, name) for name in stored}
    found = {}
    for name, like in model.named_parameters():
        if name in lacking:
            value = 1.0 if kinds[name] == "norm" and name.endswith("weight") else 0.0
            tensor = torch.full(like.shape, value, dtype=next(iter(stored.values())).like.dtype)
            found[name] = Stored(tensor.to("meta"), [tensor], tensor.detach)
    return found


def _converted(conversion: Conversion, sources: dict[str, Tensor], name: str) -> Tensor:
    return conversion.run(sources)[name]


def _fill(who: str, folder: Path, model: PreTrainedModel, stored: dict[str, Stored]) -> None:
    """Replace the model's meta tensors with memory maps.

    Tied parameters stay tied, unless the files contain different tensors for them.
    """
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    for names in groups.values():
        own = {name: _parameter(who, model, name, stored[name]) for name in names if name in stored}
        if not own:
            raise CoramError(f"{who}: no weight file in {folder} contains the tensor {names[0]!r}")
        first = next(iter(own.values()))
        for name in names:
            differs = name in own and own[name] is not first and not torch.equal(own[name], first)
            put(model, name, own[name] if differs else first)
    persistent = model.state_dict()
    for name, _ in list(model.named_buffers()):
        if name in stored:
            put(model, name, stored[name].make())
        elif name in persistent:
            raise CoramError(f"{who}: no weight file in {folder} contains the buffer {name!r}")


def _parameter(who: str, model: PreTrainedModel, name: str, stored: Stored) -> nn.Parameter:
    """A parameter over its memory map, or on the meta device if it is built from several."""
    expected = model.get_parameter(name).shape
    if stored.like.shape != expected:
        raise CoramError(
            f"{who}, tensor {name!r}: shape {tuple(stored.like.shape)} in the file, but config.json requires "
            f"{tuple(expected)}"
        )
    return nn.Parameter(stored.make() if len(stored.pieces) == 1 else stored.like, requires_grad=False)
