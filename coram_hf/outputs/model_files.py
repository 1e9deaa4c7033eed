"""The files of a merged folder other than weights: config, generation config, tokenizer, custom code."""

from __future__ import annotations

import logging
from pathlib import Path

from coram_hf.inputs.chat import write_template
from coram_hf.inputs.companions import (
    CODE_FILES,
    PROCESSOR_FILES,
    TOKENIZER_FILES,
    companion_folder,
    copy_companions,
)
from coram_hf.inputs.inputs import Inputs
from coram_hf.inputs.sentence_modules import copy_modules
from coram_hf.outputs.heads import save_heads
from coram_hf.outputs.layout import Layout, write_index

logger = logging.getLogger("coram_hf")


def save_model_files(folder: Path, layout: Layout, inputs: Inputs) -> None:
    """Write index, config, generation config and companions, in place of an earlier attempt's."""
    for path in folder.iterdir():
        if path.is_file() and path.name not in layout.headers:
            path.unlink()
    model = layout.skeleton
    write_index(folder, layout)
    parts = (getattr(model.config, key, None) for key in model.config.sub_configs)
    for config in (model.config, *parts):
        if config is not None:
            config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    save_companions(inputs, folder)


def save_companions(inputs: Inputs, folder: Path) -> None:
    """Write tokenizer, chat template, processor and, if it is trusted, custom code."""
    source, beside = companion_folder(inputs.model), inputs.surroundings
    patterns = (*PROCESSOR_FILES, *(CODE_FILES if inputs.trust_remote_code else ()))
    if source is not None:
        copy_companions(source, folder, patterns if beside.replaces_files else (*TOKENIZER_FILES, *patterns))
    if beside.tokenizer_folder is not None:
        copy_companions(beside.tokenizer_folder, folder, TOKENIZER_FILES)
    elif beside.replaces_files and beside.tokenizer is not None:
        beside.tokenizer.save_pretrained(folder)
    if beside.new_template:
        write_template(folder, beside.template)
    if beside.modules is not None:
        copy_modules(beside.modules, folder)
    save_heads(inputs, folder)
    if getattr(inputs.model.config, "auto_map", None) and not inputs.trust_remote_code:
        logger.warning(
            "custom code of the base was not copied; pass trust_remote_code=True (--trust-remote-code) "
            "to copy it"
        )
