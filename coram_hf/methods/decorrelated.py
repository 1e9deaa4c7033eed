"""CORAM on decorrelated experts: every matrix of a target as a whole, then its rows as always."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from coram_hf.config import CoramConfig
from coram_hf.geometry import merge_rows
from coram_hf.geometry.decorrelated import Decorrelated, decorrelate_experts, decorrelate_factors
from coram_hf.inputs.inputs import Inputs, Parameter
from coram_hf.inputs.low_rank import low_rank_updates
from coram_hf.methods.protocol import Block
from coram_hf.methods.record import Record, measure

EXPERT_COPIES, OTHER_COPIES, SQUARES = 2, 3, 3
"""Float64 copies of a matrix per expert and besides, and square matrices of its inputs, held at once."""


def decorrelated_blocks(
    parameter: Parameter, inputs: Inputs, config: CoramConfig, factors: Sequence[float], *, measured: bool
) -> Iterator[Block]:
    """The merged update of one target from the experts W_0 + tau~_i.

    `measured` requests the norms of the updates before decorrelation, which the first block then carries;
    weights are checked, because no decomposition of them may meet a NaN.
    """
    squares = None
    if measured:
        record = measure(parameter, Record(), list(inputs.experts))
        squares = torch.tensor([record.base, *record.updates], dtype=torch.float64)
    for i, (base, found) in enumerate(_decorrelated(parameter, inputs, config, factors)):
        numbers = found.measured.flat()
        for merged in merge_rows(base, found.experts, config, device=parameter.device):
            yield Block(i, merged.rows, merged.update, merged.stats, squares, numbers)
            squares, numbers = None, []


def _decorrelated(
    parameter: Parameter, inputs: Inputs, config: CoramConfig, factors: Sequence[float]
) -> Iterator[tuple[Tensor, Decorrelated]]:
    """The base and the decorrelated experts of every matrix; updates of low rank are not made dense first."""
    low_rank = low_rank_updates(inputs, parameter)
    if low_rank is not None and parameter.target is not None:
        (base,) = parameter.target.matrices(parameter.base)
        yield base, decorrelate_factors(base, low_rank, config, factors, parameter.device)
        return
    for _, base, experts in parameter.matrices():
        yield base, decorrelate_experts(base, experts, config, factors, parameter.device)


def memory_of(inputs: Inputs, name: str) -> int:
    """The bytes that the decorrelation of one target holds, apart from its rows."""
    target, like, count = inputs.targets[name], inputs.base.original(name), len(inputs.experts)
    m, n = target.matrices(like)[0].shape
    if all(weights.factors is not None for weights in inputs.experts.values()):
        return 8 * (count + 2) * m * n
    return 8 * ((EXPERT_COPIES * count + OTHER_COPIES) * m * n + SQUARES * min(n, m * count) ** 2)
