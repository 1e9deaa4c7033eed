"""The suites: sets of experts of one base, their tasks, and the prompts that a merge may be calibrated on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from train import EVEN, EXPERTS, UNEVEN

HERE = Path(__file__).parent
PROMPTS = 16
"""Validation questions per task that are only used as prompts, without their answers: the last ones."""


class Suite(NamedTuple):
    """Experts of one base, by the folders that hold them."""

    title: str
    folder: Path
    names: list[str]

    @property
    def experts(self) -> dict[str, Path]:
        return {name: self.folder / name for name in self.names}

    @property
    def tasks(self) -> dict[str, str]:
        """The task of every expert."""
        return {name: EXPERTS[name].task for name in self.names}

    def prompts(self, count: int = PROMPTS) -> dict[str, list[str]]:
        """Unlabelled prompts of every expert's task."""
        files = {name: HERE / "data" / task / "validation.jsonl" for name, task in self.tasks.items()}
        read = {name: [json.loads(line) for line in file.open()] for name, file in files.items()}
        return {name: [row["prompt"] for row in rows[-count:]] for name, rows in read.items()}


ADAPTERS, FULL = HERE / "adapters", HERE / "full"
SUITES = {
    "lora-even": Suite("LoRA, even", ADAPTERS, EVEN),
    "lora-uneven": Suite("LoRA, uneven", ADAPTERS, UNEVEN),
    "lora-2": Suite("LoRA, two experts", ADAPTERS, EVEN[:2]),
    "lora-3": Suite("LoRA, three experts", ADAPTERS, EVEN[:3]),
    "full-even": Suite("full fine-tunes, even", FULL, EVEN),
    "full-uneven": Suite("full fine-tunes, uneven", FULL, UNEVEN),
    "full-2": Suite("full fine-tunes, two experts", FULL, EVEN[:2]),
    "full-3": Suite("full fine-tunes, three experts", FULL, EVEN[:3]),
}
