"""The merged model: a copy of the base's, placed as the base is, whose tensors are overwritten one by one."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coram_hf.inputs.inputs import Inputs, Parameter
from coram_hf.inputs.placement import placed_as
from coram_hf.inputs.weights import Target, Weights
from coram_hf.methods.protocol import Block, Work
from coram_hf.methods.record import Record
from coram_hf.outputs.layout import with_format
from coram_hf.outputs.place import KeptPlace, Place, kept_blocks
from coram_hf.outputs.placed import Outputs, placed_model


class ModelSink:
    """A model into which merged parameters are written; tied weights stay tied.

    keep: the parameters whose updates are also kept, in `updates`: in memory, or in files if a part of the
    model is on the disk.
    """

    def __init__(
        self, model: PreTrainedModel, targets: Mapping[str, Target], keep: Collection[str] = ()
    ) -> None:
        self.model = model
        self.updates: dict[str, Tensor] = {}
        self._targets = targets
        self._keep = keep
        self._outputs = Outputs(model)

    def place(self, name: str) -> Place:
        """Where a parameter goes; with `keep`, its update is stored first."""
        out, target = self._outputs[name], self._targets.get(name)
        if name in self._keep and name not in self.updates:
            return KeptPlace(out, target, self.updates, self._outputs.room)
        return Place(out, target)

    def keep(self, name: str) -> Place:
        """Where the update of one parameter is kept: the same place, which keeps it first."""
        return self.place(name)

    def kept(self, work: Work, records: Mapping[str, Record]) -> Work:
        """The work, with kept updates reused instead of merged again."""

        def from_kept(parameter: Parameter) -> Iterator[Block]:
            if parameter.name in self.updates:
                yield from kept_blocks(self.updates[parameter.name], records[parameter.name])
            else:
                yield from work(parameter)

        return from_kept


def new_model(inputs: Inputs, merged: Collection[str] = ()) -> PreTrainedModel:
    """A model with the base's weights, in the format and placement of the result, with rows of new tokens.

    Tensors named in `merged` are about to be overwritten, and may have any values.
    """
    placement = inputs.placement
    if placement is not None:
        return placed_model(inputs, placement, lambda name: inputs.parameter(name).base, merged)
    with torch.inference_mode(False):
        model = with_format(inputs.base.copy_model(), inputs)
        if inputs.new_size is not None:
            state = model.state_dict()
            for name in inputs.vocabulary.token_axis:
                state[name].copy_(inputs.parameter(name).base)
    return model


def expert_model(inputs: Inputs, expert: str, only: Collection[str] | None = None) -> PreTrainedModel:
    """One expert as a model in the format and placement of the result.

    With `only`, all tensors except the named ones are the base's.
    """

    def read(name: str) -> Tensor:
        own = only is None or name in only
        return inputs.expert_tensor(expert, name) if own else inputs.parameter(name).base

    if inputs.placement is not None:
        return placed_model(inputs, inputs.placement, read)
    model = new_model(inputs)
    state = model.state_dict()
    for name in inputs.base:
        state[name].copy_(read(name))
    return model


def copied_model(inputs: Inputs, model: PreTrainedModel, changed: Collection[str]) -> PreTrainedModel:
    """A copy of a merged model with the same placement; tensors named in `changed` may have any values."""
    placement = placed_as(model)
    if placement is None:
        return copy.deepcopy(model)
    return placed_model(inputs, placement, Weights(model).__getitem__, changed)
