"""Save a model that is not whole in memory: one parameter at a time, in the bytes of a merge to files."""

from __future__ import annotations

import re
from pathlib import Path

from transformers import PreTrainedModel

from coram_hf.inputs.inputs import Inputs
from coram_hf.inputs.weights import Weights
from coram_hf.outputs.folder import FolderSink
from coram_hf.outputs.layout import Layout, units, without_data
from coram_hf.outputs.model_files import save_model_files
from coram_hf.outputs.spool import Spool

WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""The names of weight files and their index."""


def is_partly_offloaded(model: PreTrainedModel) -> bool:
    """Whether hooks of accelerate hold a part of the parameters."""
    return any(tensor.is_meta for tensor in model.state_dict().values())


def save_offloaded(
    model: PreTrainedModel,
    inputs: Inputs,
    folder: Path,
    *,
    max_shard_size: int | str = "50GB",
    save_original_format: bool = True,
) -> None:
    """Write weights, config, generation config, tokenizer and processor into an empty folder."""
    skeleton, weights = without_data(model), Weights(model)
    layout = Layout(skeleton, [units(skeleton)], max_shard_size, original_format=save_original_format)
    with FolderSink(folder, layout, layout.files(0), {}, {}, Spool(folder / "kept")) as sink:
        for unit in layout.units:
            sink.write({name: sink.unchanged(name, weights[name]) for name in unit})
    save_model_files(folder, layout, inputs)
