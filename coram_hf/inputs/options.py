"""Options of a merge, whatever its method: vocabularies, tokenizers, dtype, trust, device, progress."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, get_type_hints

from coram_hf.config import Declared, PythonOnly, check_names, declared
from coram_hf.errors import CoramError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    Tokenizer = PreTrainedTokenizerBase
    Dtype = str | torch.dtype | None
    Device = str | torch.device | None
else:  # read at run time by the command line, which starts without torch
    Tokenizer = Any
    Dtype = Device = str | None

Policy = Literal["base", "union", "error"]


class MergeOptions(TypedDict, total=False):
    """Keyword arguments of every merger."""

    vocabulary: Annotated[
        Policy,
        "Tokens of the result: base keeps the base's, union adds the experts' new ones, error refuses "
        "experts with another vocabulary.",
    ]
    tokenizer: Annotated[Tokenizer, PythonOnly(), "The base's, by default the one beside its checkpoint."]
    expert_tokenizers: Annotated[
        Mapping[str, Tokenizer], PythonOnly(), "By expert; by default those beside the checkpoints."
    ]
    dtype: Annotated[Dtype, "Dtype of the merged parameters; by default the base's."]
    device: Annotated[
        Device, "Where the geometry runs: cpu, cuda, cuda:1, mps or auto; by default where the base is."
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


def check_options(options: Mapping[str, Any]) -> None:
    """Raise for an unknown option, with a suggestion, or for an invalid value."""
    known = merge_options()
    check_names(options, list(known), "merge option")
    for name in ("vocabulary", "trust_remote_code", "allow_pickle", "progress"):
        if name in options:
            known[name].checked(options[name])


def output_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A floating-point torch dtype, given as such or by name."""
    import torch

    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is None or (isinstance(found, torch.dtype) and found.is_floating_point and found.itemsize > 1):
        return found
    raise CoramError(
        f"dtype: unknown value {dtype!r}; valid: 'float32', 'bfloat16', 'float16', 'float64', None"
    )
