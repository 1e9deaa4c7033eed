"""How adapters are recognised without importing PEFT, which takes a second or more."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import TypeIs

if TYPE_CHECKING:
    from peft import PeftModel

KEY_PREFIX = "base_model.model."
"""The prefix of module names in PEFT's adapter files."""

ADAPTER_CONFIG = "adapter_config.json"


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter."""
    return (folder / ADAPTER_CONFIG).is_file()


def is_peft_model(model: object) -> TypeIs[PeftModel]:
    """Whether this is a PeftModel, of which there is none before PEFT is imported."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)
