"""Options of a merge that are not the method's: vocabularies, tokenizers, dtype, trust, progress."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict, get_args

import torch
from transformers import PreTrainedTokenizerBase

from coram_hf.config import check_names
from coram_hf.errors import CoramError
from coram_hf.inputs.tokens import Policy


class MergeOptions(TypedDict, total=False):
    """Keyword arguments that every merger takes.

    vocabulary: "base" (default) keeps the base's tokens, "union" adds the experts' new ones, "error"
        refuses experts with another vocabulary.
    tokenizer, expert_tokenizers: for matching tokens; by default those beside the checkpoints.
    dtype: of the merged parameters; by default the base's.
    trust_remote_code: load tokenizers with custom code, and copy custom code to the result.
    allow_pickle: load pickled checkpoints, tensors only.
    device: where the geometry runs, "cpu", "cuda", "cuda:1", "mps" or "auto"; by default where the base is.
    progress: show progress bars (default).
    """

    vocabulary: Policy
    tokenizer: PreTrainedTokenizerBase
    expert_tokenizers: Mapping[str, PreTrainedTokenizerBase]
    dtype: str | torch.dtype | None
    trust_remote_code: bool
    allow_pickle: bool
    device: str | torch.device | None
    progress: bool


def check_options(options: Mapping[str, Any]) -> None:
    """Raise for an unknown option, with a suggestion, or for a vocabulary policy that does not exist."""
    check_names(options, list(MergeOptions.__annotations__), "merge option")
    policy = options.get("vocabulary", "base")
    if policy not in get_args(Policy):
        raise CoramError(
            f"vocabulary: unknown value {policy!r}; valid: {', '.join(map(repr, get_args(Policy)))}"
        )


def output_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A floating torch dtype by itself or by name."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is None or (isinstance(found, torch.dtype) and found.is_floating_point and found.itemsize > 1):
        return found
    raise CoramError(
        f"dtype: unknown value {dtype!r}; valid: 'float32', 'bfloat16', 'float16', 'float64', None"
    )
