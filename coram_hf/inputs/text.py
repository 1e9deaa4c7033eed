"""Text as a causal language model reads it: tokens, and batches of them, padded on the right."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coram_hf.inputs.dense import fast_layers


def text_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokens of a text that continues."""
    return without_end(tokenizer, tokenizer(text).input_ids, text)


def without_end(tokenizer: PreTrainedTokenizerBase, tokens: list[int], text: str) -> list[int]:
    """The tokens of a text that continues: without the end-of-text token that some tokenizers add."""
    if tokens and tokens[-1] == tokenizer.eos_token_id and not text.endswith(str(tokenizer.eos_token)):
        return tokens[:-1]
    return tokens


def context_length(model: PreTrainedModel) -> int | None:
    """The most tokens that a model takes, if its config says so."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return most if isinstance(most, int) else None


def batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Indices in batches of at most so many tokens and similar length, so that little of one is padding."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > most:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def padded(rows: Sequence[Sequence[int]], *, left: bool = False) -> tuple[Tensor, Tensor]:
    """The rows as one tensor of tokens, and the mask of those that are not padding."""
    width = max(map(len, rows))
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for place, row in enumerate(rows):
        held = slice(width - len(row), width) if left else slice(len(row))
        tokens[place, held] = torch.tensor(row, dtype=torch.long)
        mask[place, held] = 1
    return tokens, mask


def logits_at(model: PreTrainedModel, tokens: Tensor, mask: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The logits at some places of a batch (places x vocabulary); the head is not asked about the others."""
    head, picked = model.get_output_embeddings(), []

    def pick(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not args:
            return None
        picked.append(True)
        return (args[0][rows.to(args[0].device), columns.to(args[0].device)][None], *args[1:])

    hook = None if head is None else head.register_forward_pre_hook(pick)
    try:
        with fast_layers():
            output = model(
                input_ids=tokens.to(model.device), attention_mask=mask.to(model.device), use_cache=False
            )
    finally:
        if hook is not None:
            hook.remove()
    logits = cast(Tensor, output.logits)
    return logits[0] if picked else logits[rows.to(logits.device), columns.to(logits.device)]


def last_logits(model: PreTrainedModel, tokens: Tensor, mask: Tensor, last: int) -> Tensor:
    """The logits of the last positions; if a model cannot skip the others, they are cut off."""
    leaves_out = "logits_to_keep" in inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"logits_to_keep": last} if leaves_out else {}
    device = model.device
    with fast_layers():
        output = model(
            input_ids=tokens.to(device), attention_mask=mask.to(device), use_cache=False, **options
        )
    return cast(Tensor, output.logits)[:, -last:]
