"""The merged model in memory: a copy of the base's model whose tensors are overwritten one by one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coram_hf.geometry import SliceStats
from coram_hf.geometry.slices import as_rows, row_blocks
from coram_hf.inputs.inputs import Inputs, Parameter
from coram_hf.inputs.weights import Target
from coram_hf.methods.protocol import Block, Work
from coram_hf.methods.record import Record
from coram_hf.outputs.place import InMemory, KeptPlace, Place


class ModelSink:
    """A model into which merged parameters are written; tied weights stay tied.

    keep: the parameters whose updates are also kept, in `updates`.
    """

    keeps = True

    def __init__(
        self, model: PreTrainedModel, targets: Mapping[str, Target], keep: Collection[str] = ()
    ) -> None:
        self.model = model
        self.updates: dict[str, Tensor] = {}
        self._targets = targets
        self._keep = keep
        self._tensors = model.state_dict()

    def place(self, name: str) -> Place:
        """Where a parameter goes; with `keep`, its update is stored first."""
        out, target = InMemory(self._tensors[name]), self._targets.get(name)
        if name in self._keep and name not in self.updates:
            return KeptPlace(out, target, self.updates)
        return Place(out, target)

    def kept(self, work: Work, records: Mapping[str, Record]) -> Work:
        """The work, with kept updates reused instead of merged again."""

        def from_kept(parameter: Parameter) -> Iterator[Block]:
            if parameter.name in self.updates:
                yield from kept_blocks(self.updates[parameter.name], records[parameter.name])
            else:
                yield from work(parameter)

        return from_kept


def kept_blocks(update: Tensor, record: Record) -> Iterator[Block]:
    """A kept update, a few rows at a time; the first block carries what was recorded when it was merged."""
    whole = as_rows(update)
    squares = torch.tensor([record.base, *record.updates], dtype=torch.float64) if record.updates else None
    stats, decorrelation = record.slices, record.decorrelation
    for rows in row_blocks(update):
        yield Block(None, rows, whole[rows], stats, squares, decorrelation)
        stats, squares, decorrelation = SliceStats(), None, []


def new_model(inputs: Inputs) -> PreTrainedModel:
    """A copy of the base's model in the format of the result, including the rows of new tokens."""
    with torch.inference_mode(False):
        model = with_format(inputs.base.copy_model(), inputs.dtype, inputs.new_size)
        if inputs.new_size is not None:
            state = model.state_dict()
            for name in inputs.vocabulary.token_axis:
                state[name].copy_(inputs.parameter(name).base)
    return model


def expert_model(inputs: Inputs, expert: str) -> PreTrainedModel:
    """One expert as a model in the format of the result."""
    model = new_model(inputs)
    state = model.state_dict()
    for name in inputs.base:
        state[name].copy_(inputs.expert_tensor(expert, name))
    return model


def with_format(
    model: PreTrainedModel, dtype: torch.dtype | None, vocabulary_size: int | None
) -> PreTrainedModel:
    """Convert the model in place to the dtype and vocabulary size of the result; buffers keep their dtype."""
    if vocabulary_size is not None:
        model.resize_token_embeddings(vocabulary_size, mean_resizing=False)
    if dtype is not None:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    return model
