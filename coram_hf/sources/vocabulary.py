"""Vocabularies: which row of an expert's embeddings belongs to which row of the merged model's."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from torch import Tensor, nn
from transformers import AddedToken, PreTrainedModel, PreTrainedTokenizerBase

from coram_hf.errors import MergeError

Policy = Literal["base", "union", "error"]
ABSENT = -1


@dataclass(frozen=True)
class Vocabulary:
    """The merged vocabulary, and for every expert the row that it has for each merged row.

    tensors: parameters with one row a token. size: rows of the merged model.
    new_rows: merged rows that the base has no token for. rows: per expert, its row or ABSENT, for
    experts whose rows do not simply line up. counts: per expert, tokens matched, added and dropped.
    """

    tensors: frozenset[str] = frozenset()
    size: int = 0
    new_rows: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    tokenizer: PreTrainedTokenizerBase | None = None

    @property
    def grows(self) -> bool:
        """Whether the merged model has tokens that the base has not."""
        return len(self.new_rows) > 0

    def align(self, name: str, base: Tensor, experts: Mapping[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        """One tensor of the base and of every expert, with rows in the merged order.

        A token that the base lacks takes the mean of the experts that have it, everywhere; a token
        that an expert lacks takes the base's row there, and so does not move.
        """
        if name not in self.tensors or not (self.rows or self.grows):
            return base, list(experts.values())
        origin = base
        if self.grows:
            origin = base.new_empty(self.size, *base.shape[1:])
            origin[: len(base)] = base
            origin[self.new_rows] = self._mean_of_new(experts, origin)
        return origin, [self._in_order(origin, expert, tensor) for expert, tensor in experts.items()]

    def _in_order(self, origin: Tensor, expert: str, tensor: Tensor) -> Tensor:
        rows = self.rows.get(expert, torch.arange(min(len(tensor), self.size)))
        ordered = origin.to(tensor.dtype, copy=True)
        known = rows != ABSENT
        ordered[: len(rows)][known] = tensor[rows[known]].to(ordered.device)
        ordered[self.new_rows] = origin[self.new_rows].to(ordered.dtype)
        return ordered

    def _mean_of_new(self, experts: Mapping[str, Tensor], origin: Tensor) -> Tensor:
        total = torch.zeros(len(self.new_rows), *origin.shape[1:], dtype=torch.float64)
        owners = torch.zeros(len(self.new_rows), dtype=torch.float64)
        for expert, tensor in experts.items():
            rows = self.rows[expert][self.new_rows]
            known = rows != ABSENT
            total[known] += tensor[rows[known]].to("cpu", torch.float64)
            owners += known
        return (total / owners.view(-1, *[1] * (total.ndim - 1))).to(origin)


def match_vocabularies(
    base: PreTrainedModel,
    experts: Mapping[str, PreTrainedModel],
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase | None,
    expert_tokenizers: Mapping[str, PreTrainedTokenizerBase | None],
) -> tuple[Vocabulary, list[str]]:
    """Line up every expert's rows with the base's, by token where tokenizers are known, else by index.

    Also returns a warning for every expert whose rows do not line up by themselves.
    """
    names = _vocabulary_tensors(base)
    if not names:
        return Vocabulary(), []
    base_size = _rows(base)
    merged = _with_new_tokens(tokenizer, expert_tokenizers) if policy == "union" else tokenizer
    tokens = None if merged is None else merged.get_vocab()
    known = {} if tokenizer is None else tokenizer.get_vocab()
    new_rows = torch.tensor(sorted(r for t, r in (tokens or {}).items() if t not in known), dtype=torch.long)
    size = max(base_size, int(new_rows[-1]) + 1) if len(new_rows) else base_size

    rows: dict[str, Tensor] = {}
    counts: dict[str, dict[str, int]] = {}
    warnings: list[str] = []
    for name, expert in experts.items():
        own = expert_tokenizers.get(name)
        order, dropped = _line_up(tokens, None if own is None else own.get_vocab(), size, _rows(expert))
        added = int((order[new_rows] != ABSENT).sum())
        matched = int((order != ABSENT).sum()) - added
        counts[name] = {"matched": matched, "added": added, "dropped": dropped}
        if _rows(expert) == base_size and torch.equal(order, torch.arange(size)):
            continue
        how = "by index, for want of tokenizers" if tokens is None or own is None else "by token"
        difference = (
            f"expert {name!r} has another vocabulary than the base ({_rows(expert)} embedding rows, the base "
            f"{base_size}): {matched} rows matched {how}, {added} added, {dropped} dropped"
        )
        if policy == "error":
            raise MergeError(f'{difference}; vocabulary="base" or "union" would merge them')
        if policy == "union" and (tokens is None or own is None):
            raise MergeError(f'{difference}; vocabulary="union" needs tokenizer= and expert_tokenizers=')
        rows[name] = order
        warnings.append(difference)
    return Vocabulary(
        tensors=names,
        size=size,
        new_rows=new_rows,
        rows=rows,
        counts=counts if rows else {},
        tokenizer=merged if len(new_rows) else None,
    ), warnings


def _rows(model: PreTrainedModel) -> int:
    """Rows of the input embedding."""
    return len(cast(Tensor, model.get_input_embeddings().weight))


def _line_up(
    tokens: Mapping[str, int] | None, own: Mapping[str, int] | None, size: int, own_size: int
) -> tuple[Tensor, int]:
    """For each merged row the expert's row or ABSENT, and how many tokens of the expert are left out."""
    if tokens is not None and own is not None:
        return _by_token(tokens, own, size, own_size), sum(token not in tokens for token in own)
    order = torch.arange(size)
    order[own_size:] = ABSENT
    return order, max(0, own_size - size)


def _vocabulary_tensors(model: PreTrainedModel) -> frozenset[str]:
    """Names of the parameters with one row a token: those of the input and the output embedding."""
    try:
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    except (NotImplementedError, AttributeError):
        return frozenset()
    if not isinstance(embedding, nn.Embedding):
        return frozenset()
    modules = [embedding] if head is None else [embedding, head]
    rows = embedding.weight.shape[0]
    wanted = {id(p) for module in modules for p in module.parameters() if p.shape[0] == rows}
    return frozenset(name for name, p in model.named_parameters() if id(p) in wanted)


def _by_token(tokens: Mapping[str, int], own: Mapping[str, int], size: int, own_size: int) -> Tensor:
    """For each merged row the expert's row of the same token; padding rows match padding rows by index."""
    order = torch.full((size,), ABSENT, dtype=torch.long)
    padding = torch.arange(min(size, own_size))
    taken = torch.zeros(max(size, own_size), dtype=torch.bool)
    taken[[row for row in (*tokens.values(), *own.values()) if row < len(taken)]] = True
    padding = padding[~taken[: len(padding)]]
    order[padding] = padding
    shared = [(row, own[token]) for token, row in tokens.items() if token in own]
    shared = [(row, theirs) for row, theirs in shared if row < size and theirs < own_size]
    if shared:
        ours, theirs = zip(*shared, strict=True)
        order[list(ours)] = torch.tensor(theirs)
    return order


def _with_new_tokens(
    tokenizer: PreTrainedTokenizerBase | None,
    expert_tokenizers: Mapping[str, PreTrainedTokenizerBase | None],
) -> PreTrainedTokenizerBase | None:
    """A copy of the base's tokenizer with the tokens that experts have added, in the order they are met."""
    if tokenizer is None:
        return None
    known = tokenizer.get_vocab()
    found: dict[str, AddedToken] = {}
    for name, other in expert_tokenizers.items():
        vocabulary = {} if other is None else other.get_vocab()
        added = {} if other is None else other.added_tokens_decoder
        for token in sorted(vocabulary.keys() - known.keys(), key=vocabulary.__getitem__):
            if vocabulary[token] not in added:
                raise MergeError(
                    f"expert {name!r}: the base lacks its token {token!r}, which is not an added token; "
                    'vocabulary="union" cannot join tokenizers that were trained apart'
                )
            found.setdefault(token, added[vocabulary[token]])
    extended = copy.deepcopy(tokenizer)
    extended.add_tokens(list(found.values()))
    return extended
