"""CORAM on decorrelated experts: every matrix of a target as a whole, then its rows as always."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from coram_hf.config import CoramConfig
from coram_hf.geometry import merge_rows
from coram_hf.geometry.decorrelated import decorrelate_experts
from coram_hf.inputs.inputs import Inputs, Parameter
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
    for i, (_, base, experts) in enumerate(parameter.matrices()):
        found = decorrelate_experts(base, experts, config, factors, inputs.device)
        numbers = found.measured.flat()
        for merged in merge_rows(base, found.experts, config, device=inputs.device):
            yield Block(i, merged.rows, merged.update, merged.stats, squares, numbers)
            squares, numbers = None, []


def memory_of(inputs: Inputs, name: str) -> int:
    """The bytes that the decorrelation of one target holds, apart from its rows."""
    target, like = inputs.targets[name], inputs.base.original(name)
    m, n = target.matrices(like)[0].shape
    copies = EXPERT_COPIES * len(inputs.experts) + OTHER_COPIES
    return 8 * (copies * m * n + SQUARES * n * min(n, m * len(inputs.experts)))
