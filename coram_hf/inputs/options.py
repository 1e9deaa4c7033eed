"""Options of a merge, whatever its method: vocabularies, tokenizers, dtype, devices, trust, progress."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, get_type_hints

from coram_hf.config import Declared, PythonOnly, check_names, declared
from coram_hf.errors import CoramError

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    Tokenizer = PreTrainedTokenizerBase
    Source = PreTrainedModel | str | Path
    AnyTokenizer = str | Path | PreTrainedTokenizerBase | None
    Dtype = str | torch.dtype | None
    Device = str | torch.device | None
    DeviceMap = str | int | torch.device | Mapping[str, str | int | torch.device] | None
    MaxMemory = str | Mapping[int | str, int | str] | None
    Folder = str | Path | None
else:  # read at run time by the command line, which starts without torch
    Tokenizer = Source = Any
    AnyTokenizer = Dtype = Device = DeviceMap = MaxMemory = Folder = str | None

Policy = Literal["base", "union", "error"]
Heads = Literal["base", "drop", "keep"]


class PlacementOptions(TypedDict, total=False):
    """Where accelerate keeps a merged model, in the words of `from_pretrained`."""

    device_map: Annotated[
        DeviceMap,
        "Where accelerate keeps the merged model, and so on which device each matrix is merged: auto, "
        "balanced, balanced_low_0, sequential, a device, or (in Python and recipes) a mapping from modules "
        "to devices or disk; by default as the base. Merges into folders only use the devices.",
    ]
    max_memory: Annotated[
        MaxMemory, "The most memory for the merged model by device, such as 0=20GiB,cpu=4GiB."
    ]
    offload_folder: Annotated[Folder, "Where the parts of merged models that are kept on the disk go."]


class MergeOptions(PlacementOptions, total=False):
    """Keyword arguments of every merger."""

    vocabulary: Annotated[
        Policy,
        "Tokens of the result: base keeps the base's, union adds the experts' new ones, error refuses "
        "experts with another vocabulary. By default, those of the chosen tokenizer.",
    ]
    tokenizer: Annotated[
        AnyTokenizer,
        "The result's tokenizer: auto (default) takes the experts' if those that have one agree and it fits "
        "the base's rows; base; an expert; or a folder with one. In Python also a tokenizer, as the base's.",
    ]
    chat_template: Annotated[
        Folder,
        "The result's chat template: auto (default) takes the experts' if those that have one agree; base; "
        "an expert; a file; or the text of a Jinja template.",
    ]
    generation_config: Annotated[
        Folder,
        "The result's sampling settings: auto (default) takes the experts' if they agree; base; an expert; "
        "or a file.",
    ]
    special_tokens: Annotated[
        Folder,
        "The result's bos, eos and pad tokens: auto takes the experts' if they agree; base; an expert; or a "
        "JSON file with eos_token_id and so on. By default the same as generation_config.",
    ]
    expert_tokenizers: Annotated[
        Mapping[str, Tokenizer], PythonOnly(), "By expert; by default those beside the checkpoints."
    ]
    bases: Annotated[
        Mapping[str, Source],
        "The bases of experts that were fine-tuned from another base, by the expert's name: their updates "
        "are transplanted onto the base of the merge where names and shapes agree.",
    ]
    heads: Annotated[
        Heads,
        "Where heads differ: base (default) keeps the base's and sets the experts' aside, drop merges the "
        "backbones alone, keep also saves the head of every expert in a subfolder.",
    ]
    allow_config_differences: Annotated[
        bool,
        "Merge experts whose config makes the same weights compute something else (rope, activation, heads); "
        "the merge has the base's config.",
    ]
    dtype: Annotated[Dtype, "Dtype of the merged parameters; by default the base's."]
    device: Annotated[
        Device,
        "Where all matrices are merged: cpu, cuda, cuda:1, mps or auto; by default on the devices that "
        "compute with the base, or where it is.",
    ]
    trust_remote_code: Annotated[bool, "Load tokenizers and models with custom code, and copy that code."]
    allow_pickle: Annotated[bool, "Read pickled checkpoints, tensors only."]
    progress: Annotated[bool, PythonOnly(), "Show progress bars (default)."]


@cache
def merge_options() -> dict[str, Declared]:
    """The declared options, by name."""
    return declared(get_type_hints(MergeOptions, include_extras=True))


def text_options() -> dict[str, Declared]:
    """The options that recipes and the command line offer as well."""
    return {name: option for name, option in merge_options().items() if not option.python_only}


def is_template_text(given: object) -> bool:
    """Whether the option chat_template is the text of a template and not a name or a file."""
    return isinstance(given, str) and ("{{" in given or "{%" in given)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise for an unknown option, with a suggestion, or for an invalid value."""
    known = merge_options()
    check_names(options, list(known), "merge option")
    switches = [name for name, option in known.items() if option.kind is bool]
    for name in ("vocabulary", "heads", *switches):
        if name in options:
            known[name].checked(options[name])


def read_max_memory(given: Any) -> dict[int | str, int | str] | None:
    """The most memory by device, from a mapping or from text such as 0=20GiB,cpu=4GiB."""
    if given is None:
        return None
    pairs = [part.partition("=") for part in given.split(",")] if isinstance(given, str) else []
    entries = {key.strip(): size.strip() for key, _, size in pairs} if pairs else given
    if not isinstance(entries, Mapping) or not all(_is_size(size) for size in entries.values()):
        raise CoramError(
            "max_memory must be sizes by device, such as {0: '20GiB', 'cpu': '4GiB'} or 0=20GiB,cpu=4GiB; "
            f"found {given!r}"
        )
    return {int(key) if str(key).isdigit() else key: size for key, size in entries.items()}


def _is_size(value: object) -> bool:
    if isinstance(value, str):
        return re.fullmatch(r"\d+(\.\d+)?\s*[KMGT]i?B", value, re.IGNORECASE) is not None
    return isinstance(value, int | float) and value >= 0


def output_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A floating-point torch dtype, given as such or by name."""
    import torch

    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is None or (isinstance(found, torch.dtype) and found.is_floating_point and found.itemsize > 1):
        return found
    raise CoramError(
        f"dtype: unknown value {dtype!r}; valid: 'float32', 'bfloat16', 'float16', 'float64', None"
    )
