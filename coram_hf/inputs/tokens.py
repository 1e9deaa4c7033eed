"""Which rows of the base's and the experts' embeddings belong to the same token."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from transformers import AddedToken, PreTrainedModel, PreTrainedTokenizerBase

from coram_hf.errors import CoramError
from coram_hf.inputs.options import Policy
from coram_hf.inputs.vocabulary import ABSENT, Vocabulary

Tokens = Mapping[str, int]


def match_vocabularies(
    base: PreTrainedModel,
    experts: Mapping[str, PreTrainedModel],
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase | None,
    expert_tokenizers: Mapping[str, PreTrainedTokenizerBase | None],
    chosen: PreTrainedTokenizerBase | None = None,
) -> tuple[Vocabulary, list[str]]:
    """Match every expert's rows with the base's, by token if the tokenizers are known, else by index.

    `chosen`: the merged model's tokenizer, if it is not the base's; the tokens that it has in common with the
    base's have the same numbers. Also returns a warning for every expert whose rows differ from the base's.
    """
    axis = token_axis(base)
    if not axis:
        return Vocabulary(), []
    if policy == "union" and tokenizer is None:
        raise CoramError('vocabulary="union" needs the base\'s tokenizer; pass tokenizer=')
    base_size = embedding_rows(base)
    merged = _with_new_tokens(tokenizer, expert_tokenizers) if policy == "union" else chosen or tokenizer
    tokens = None if merged is None else merged.get_vocab()
    grows = policy == "union" or chosen is not None
    new_rows = _new_rows(tokenizer, tokens, base_size) if grows else []
    size = max([base_size, *(row + 1 for row in new_rows)])

    rows: dict[str, Tensor] = {}
    counts: dict[str, dict[str, int]] = {}
    warnings: list[str] = []
    for name, expert in experts.items():
        own = expert_tokenizers.get(name)
        n_rows, by_token = embedding_rows(expert), tokens is not None and own is not None
        if tokens is not None and own is not None:
            rows[name] = rows_by_token(tokens, own.get_vocab(), size, n_rows)
            dropped = len(own.get_vocab().keys() - tokens.keys())
        else:
            rows[name] = rows_by_index(size, n_rows)
            rows[name][new_rows] = ABSENT
            dropped = max(0, n_rows - base_size)
        added = int((rows[name][new_rows] != ABSENT).sum())
        matched = int((rows[name] != ABSENT).sum()) - added
        counts[name] = {"matched": matched, "added": added, "dropped": dropped}
        if n_rows == base_size and not (added or dropped) and _in_place(rows[name], new_rows):
            continue
        how = "by token" if by_token else "by index, because no tokenizers were found"
        difference = (
            f"expert {name!r} has a different vocabulary from the base ({n_rows} embedding rows; the base "
            f"has {base_size}): {matched} rows matched {how}, {added} added, {dropped} dropped"
        )
        if policy == "error":
            raise CoramError(f'{difference}; pass vocabulary="base" or "union" (--vocabulary) to merge them')
        if policy == "union" and not by_token:
            raise CoramError(
                f'{difference}; vocabulary="union" needs tokenizers: pass tokenizer= and expert_tokenizers='
            )
        warnings.append(difference)
    _require_owners(tokens, rows, new_rows)
    differs = bool(warnings or new_rows)
    return Vocabulary(
        token_axis=axis,
        size=size,
        new_rows=torch.tensor(new_rows, dtype=torch.long),
        rows=rows if differs else {},
        counts=counts if differs else {},
        tokenizer=merged if new_rows and chosen is None else None,
    ), warnings


def embedding_rows(model: PreTrainedModel) -> int:
    """The number of rows of the input embedding."""
    return len(cast(Tensor, model.get_input_embeddings().weight))


def has_tokens(model: PreTrainedModel) -> bool:
    """Whether a model has an embedding of tokens."""
    return bool(token_axis(model))


def rows_by_index(size: int, own_size: int) -> Tensor:
    """Match row i of the expert with row i of the merged model; ABSENT if the expert has fewer rows."""
    rows = torch.arange(size)
    rows[own_size:] = ABSENT
    return rows


def rows_by_token(tokens: Tokens, own: Tokens, size: int, own_size: int) -> Tensor:
    """Match the expert's rows by token; rows that are padding on both sides match by index."""
    rows = rows_by_index(size, own_size)
    in_use = [row for row in (*tokens.values(), *own.values()) if row < size]
    rows[in_use] = ABSENT
    for token, row in tokens.items():
        theirs = own.get(token, own_size)
        if row < size and theirs < own_size:
            rows[row] = theirs
    return rows


def token_axis(model: PreTrainedModel) -> dict[str, int]:
    """The tensors with one entry per token: input and output embeddings, and BART's logit bias."""
    try:
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    except (NotImplementedError, AttributeError):
        return {}
    if not isinstance(embedding, nn.Embedding):
        return {}
    modules = [embedding] if head is None else [embedding, head]
    rows = len(embedding.weight)
    wanted = {id(p) for module in modules for p in module.parameters() if p.shape[0] == rows}
    axis = {name: 0 for name, p in model.named_parameters() if id(p) in wanted}
    biases = {n: b for n, b in model.named_buffers() if b.shape == (1, rows) and b.is_floating_point()}
    return axis | dict.fromkeys(biases, 1)


def _new_rows(tokenizer: PreTrainedTokenizerBase | None, tokens: Tokens | None, base_size: int) -> list[int]:
    """Merged rows of tokens that the base's tokenizer or embedding lacks."""
    known = tokens or {} if tokenizer is None else tokenizer.get_vocab()
    return sorted(row for token, row in (tokens or {}).items() if token not in known or row >= base_size)


def _in_place(rows: Tensor, new_rows: list[int]) -> bool:
    """Whether every row except the new ones has the same index as in the base."""
    expected = torch.arange(len(rows))
    expected[new_rows] = ABSENT
    return torch.equal(rows, expected)


def _require_owners(tokens: Tokens | None, rows: Mapping[str, Tensor], new_rows: list[int]) -> None:
    """Raise if no expert has a row for a new token."""
    names = {row: token for token, row in (tokens or {}).items()}
    for row in new_rows:
        if all(order[row] == ABSENT for order in rows.values()):
            raise CoramError(
                f"token {names[row]!r} is in a tokenizer, but neither the base nor any expert has an "
                "embedding row for it; resize the embeddings of the model whose tokenizer has it"
            )


def _with_new_tokens(
    tokenizer: PreTrainedTokenizerBase | None,
    expert_tokenizers: Mapping[str, PreTrainedTokenizerBase | None],
) -> PreTrainedTokenizerBase | None:
    """A copy of the base's tokenizer with the tokens that the experts added, expert by expert."""
    if tokenizer is None:
        return None
    known = tokenizer.get_vocab()
    found: dict[str, AddedToken] = {}
    for name, other in expert_tokenizers.items():
        vocabulary = {} if other is None else other.get_vocab()
        added = {} if other is None else other.added_tokens_decoder
        for token in sorted(vocabulary.keys() - known.keys(), key=vocabulary.__getitem__):
            if vocabulary[token] not in added:
                raise CoramError(
                    f"expert {name!r}: the base lacks its token {token!r}, which is not an added token; "
                    'vocabulary="union" cannot join tokenizers that were trained separately'
                )
            found.setdefault(token, added[vocabulary[token]])
    extended = copy.deepcopy(tokenizer)
    extended.add_tokens(list(found.values()))
    return extended
