"""Experts with a base of their own: their updates are transplanted onto the base of the merge.

W_i' = W_0 + (W_i - W_base_i) for every tensor that both bases have, with the same shape; all others stay as
in the base. The names of the two bases may differ in where their blocks are: those of a text model are found
in the language model of a vision-language model.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coram_hf.errors import CoramError
from coram_hf.inputs.targets import find_targets, is_block_list
from coram_hf.inputs.vocabulary import Vocabulary
from coram_hf.inputs.weights import Make, Weights

if TYPE_CHECKING:
    from coram_hf.inputs.inputs import Inputs

CHUNK = 2**20
"""How many numbers are computed at a time."""


@dataclass(frozen=True)
class Transplant:
    """Which parts of an expert's update were matched with the base of the merge.

    own: the expert's own base. matched: names in the base of the merge, and those of the expert.
    stayed: floating-point tensors of the base that the expert does not change. left_out: tensors of the
    expert that have no counterpart. rows: how many rows of the own base's vocabulary were matched, and how
    many it has. alignment: a hash of how they were matched.
    """

    own: Weights
    expert: Weights
    matched: Mapping[str, str]
    stayed: tuple[str, ...]
    left_out: tuple[str, ...]
    rows: tuple[int, int]
    alignment: str

    def lines(self) -> dict[str, str]:
        """The three lists in words: blocks in the same list as one entry, with * for layer numbers."""
        ours = _listed({"matched": list(self.matched), "stayed": self.stayed})
        theirs = _listed({"matched": list(self.matched.values()), "left out": self.left_out})
        if self.rows[0] != self.rows[1]:
            ours["matched"] += f", {self.rows[0]} of {self.rows[1]} rows of the vocabulary"
        return {**theirs, **ours}


class OwnBases:
    """The bases that experts were fine-tuned from, if not that of the merge; each is opened once."""

    def __init__(self, given: Mapping[str, Any] | None, open_base: Callable[[str, Any], Weights]) -> None:
        if given is not None and not isinstance(given, Mapping):
            raise CoramError(f"bases must map names of experts to their bases, found {given!r}")
        self._given, self._open = dict(given or {}), open_base
        self._opened: dict[object, Weights] = {}

    @property
    def sources(self) -> tuple[Any, ...]:
        """The bases as they were given."""
        return tuple(self._given.values())

    def find(self, expert: object) -> Weights | None:
        """The own base of an expert, if it has one."""
        if expert not in self._given:
            return None
        source = self._given[str(expert)]
        key = str(source) if isinstance(source, str | Path) else id(source)
        if key not in self._opened:
            self._opened[key] = self._open(f"the base of expert {expert!r}", source)
        return self._opened[key]

    def require(self, names: Sequence[str], *, adapters: bool = False) -> None:
        """Raise if a base is given for an expert that does not exist; it may be an adapter of one of them."""
        for name in self._given:
            if name not in names and not (adapters and str(name).partition("/")[0] in names):
                raise CoramError(f"bases: no expert is called {name!r}; valid: {list(names)}")


def transplanted(
    base: Weights, own: Weights, name: str, expert: Weights, onto: Vocabulary, within: Vocabulary
) -> Weights:
    """An expert with its own base as an expert of `base`.

    onto: the rows of the own base's tokens in the base, under the expert's name; within: those of the
    expert's tokens in its own base.
    """
    pairs = match_names(own, base, within.token_axis, onto.token_axis)
    if not pairs:
        raise CoramError(
            f"expert {name!r}: its own base ({own.class_name}) and the base of the merge ({base.class_name}) "
            "have no tensor of the same name and shape, so its update cannot be transplanted"
        )
    made: dict[str, Make] = {
        ours: partial(_moved, base, own, name, expert, ours, theirs, onto, within)
        for ours, theirs in pairs.items()
    }
    result = Weights(
        base.model,
        {**base.overrides, **made},
        files=[*expert.files, *own.files] if expert.files and own.files else (),
        pieces={
            ours: [*expert.pieces.get(theirs, ()), *own.pieces.get(theirs, ())]
            for ours, theirs in pairs.items()
        },
        warnings=expert.warnings,
        kind=expert.kind,
    )
    used = {own.tied.get(theirs, theirs) for theirs in pairs.values()}
    rows = onto.counts.get(name, {"matched": onto.size})["matched"]
    result.location, result.commit = expert.location, expert.commit
    result.transplant = Transplant(
        own,
        expert,
        pairs,
        stayed=tuple(n for n in _floating(base) if n not in pairs),
        left_out=tuple(n for n in _floating(own) if n not in used),
        rows=(rows, within.size),
        alignment=_hash(within, onto),
    )
    return result


def _floating(weights: Weights) -> Iterator[str]:
    return (name for name in weights if weights.original(name).is_floating_point())


def check_transplanted_targets(inputs: Inputs) -> list[str]:
    """Warnings about target matrices that an expert has no update for; raise if it has none at all."""
    warnings = []
    for name, transplant in inputs.transplants.items():
        missing = [target for target in inputs.targets if target not in transplant.matched]
        if missing and len(missing) == len(inputs.targets):
            raise CoramError(
                f"expert {name!r}: none of the {len(missing)} target matrices of the base "
                f"({inputs.base.class_name}) has the name and shape of one in its own base "
                f"({transplant.own.class_name}); {_shapes(inputs, transplant)}"
            )
        if missing:
            warnings.append(
                f"expert {name!r}: {len(missing)} of {len(inputs.targets)} target matrices, such as "
                f"{missing[0]!r}, have no counterpart in its own base, so it does not change them"
            )
    return warnings


def _shapes(inputs: Inputs, transplant: Transplant) -> str:
    """The shapes of the first target of each, to tell why they do not match."""
    ours = next(iter(inputs.targets))
    theirs = next((t.name for t in find_targets(transplant.own.model, required=False)), None)
    there = "no projections" if theirs is None else f"{theirs} {tuple(transplant.own.original(theirs).shape)}"
    return f"the base has {ours} {tuple(inputs.base.original(ours).shape)}, the own base {there}"


def match_names(
    own: Weights, base: Weights, own_axis: Mapping[str, int], base_axis: Mapping[str, int]
) -> dict[str, str]:
    """The names of floating-point tensors in `base`, each with that of the tensor of `own` in its place.

    Everything below one module of `own` is matched with what is below one module of `base`; of all modules
    that hold blocks, those two under which the most tensors agree. The rest is matched under its own name.
    """

    def fits(ours: str, theirs: str) -> bool:
        if theirs not in own or not base.original(ours).is_floating_point():
            return False
        axis = base_axis.get(ours)
        if axis != own_axis.get(own.tied.get(theirs, theirs)):
            return False
        return _shape(base.original(ours), axis) == _shape(own.original(theirs), axis)

    best = {ours: ours for ours in base if fits(ours, ours)}
    for there in _holders_of_blocks(base.model):
        for here in _holders_of_blocks(own.model):
            renamed = ((ours, here + ours.removeprefix(there)) for ours in base if ours.startswith(there))
            found = {ours: theirs for ours, theirs in renamed if fits(ours, theirs)}
            if len(found) > len(best):
                taken = set(found.values())
                same = {n: n for n in base if n not in found and n not in taken and fits(n, n)}
                best = found | same
    return {ours: best[ours] for ours in base if ours in best}


def _shape(tensor: Tensor, without: int | None) -> list[int]:
    """The shape of a tensor, without the axis of the tokens."""
    return [size for axis, size in enumerate(tensor.shape) if axis != without]


def _holders_of_blocks(model: PreTrainedModel) -> list[str]:
    """The prefixes of all modules that hold a list of blocks, from the outermost on."""
    found: dict[str, None] = {}
    for name, module in model.named_modules():
        if is_block_list(module):
            parts = name.split(".")[:-1]
            found |= dict.fromkeys("".join(f"{part}." for part in parts[:i]) for i in range(len(parts) + 1))
    return sorted(found, key=len)


def _moved(
    base: Weights,
    own: Weights,
    name: str,
    expert: Weights,
    ours: str,
    theirs: str,
    onto: Vocabulary,
    within: Vocabulary,
) -> Tensor:
    """W_0 + (W_i - W_base_i) in float32 (float64 for float64 weights), computed in float64."""
    origin, start, end = base[ours], own[theirs], expert[theirs]
    wide = torch.promote_types(torch.promote_types(origin.dtype, torch.float32), end.dtype)
    if ours in onto.token_axis:
        first = own.tied.get(theirs, theirs)
        end = within.align(first, start, {name: end})[1][0]
        tau = torch.empty(end.shape, dtype=wide)
        _add(tau, ((end, 1.0), (start, -1.0)))
        origin_like = torch.zeros((), dtype=wide).expand(origin.shape)
        terms = [(origin, 1.0), (onto.align(ours, origin_like, {name: tau})[1][0], 1.0)]
    else:
        terms = [(end, 1.0), (start, -1.0), (origin, 1.0)]
    out = torch.empty(origin.shape, dtype=wide, device=origin.device)
    _add(out, terms)
    return out


def _add(out: Tensor, terms: Iterable[tuple[Tensor, float]]) -> None:
    """Write the sum of tensors times signs, some rows at a time in float64."""
    rows = max(1, CHUNK * max(1, len(torch.atleast_1d(out))) // max(1, out.numel()))
    parts = [(torch.atleast_1d(tensor).split(rows), sign) for tensor, sign in terms]
    for i, place in enumerate(torch.atleast_1d(out).split(rows)):
        total = torch.zeros(place.shape, dtype=torch.float64)
        for chunks, sign in parts:
            total.add_(chunks[i].to("cpu", torch.float64), alpha=sign)
        place.copy_(total)


def _hash(*vocabularies: Vocabulary) -> str:
    rows = [[order.tolist() for order in vocabulary.rows.values()] for vocabulary in vocabularies]
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def _listed(lists: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Lists of one model's tensors in words; blocks are written out only if they are in several lists."""
    layer = re.compile(r"(?<=\.)\d+(?=\.)")
    blocks = [{layer.split(name)[0] for name in names} for names in lists.values()]
    divided = set.intersection(*blocks)

    def entry(name: str) -> str:
        start, *rest = layer.split(name, 1)
        return layer.sub("*", name) if start in divided or not rest else f"{start}*"

    return {
        what: f"{len(names)} tensors ({', '.join(dict.fromkeys(map(entry, names)))})"
        for what, names in lists.items()
        if names
    }
