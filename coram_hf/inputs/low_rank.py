"""Updates of low rank, B A, as their LoRA adapters store them, without a dense matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from coram_hf.inputs.inputs import Inputs, Parameter
from coram_hf.inputs.weights import Weights

Factors = tuple[Tensor, Tensor]


def low_rank_updates(inputs: Inputs, parameter: Parameter) -> list[Factors] | None:
    """B (outputs x r) and A (r x inputs) of every expert's update of one matrix.

    An expert whose adapter leaves the matrix alone has r = 0. None if any update is not known to be of low
    rank: that of a full model, of another kind of adapter, or of one over other weights than the base's.
    """
    target, name = parameter.target, parameter.name
    if target is None or name in inputs.base.overrides or name in inputs.vocabulary.token_axis:
        return None
    matrices = target.matrices(inputs.base.original(name))
    if len(matrices) != 1:
        return None
    found = []
    for weights in inputs.experts.values():
        factors = _factors(weights, name, inputs.base, matrices[0])
        if factors is None:
            return None
        found.append(factors)
    return found


def _factors(weights: Weights, name: str, base: Weights, matrix: Tensor) -> Factors | None:
    if weights.factors is None or name in weights.tied:
        return None
    if not _same(weights.original(name), base.original(name)):
        return None
    if name not in weights.factors:
        return None if name in weights.overrides else (matrix[:, :0], matrix[:0])
    return weights.factors[name]()


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same values; a view of the same memory is not read."""
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride() and one.shape == other.shape:
        return True
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
