"""The suites: sets of experts of one base, their tasks, and the prompts that a merge may be calibrated on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from train import EVEN, EXPERTS, FAMILIES, UNEVEN, Family

HERE = Path(__file__).parent
PROMPTS = 16
"""Validation questions per task that are only used as prompts, without their answers: the last ones."""


class Suite(NamedTuple):
    """Some experts of a family."""

    title: str
    family: Family
    names: list[str]

    @property
    def experts(self) -> dict[str, Path]:
        """The folder of every expert."""
        return {name: self.family.folder / name for name in self.names}

    @property
    def tasks(self) -> dict[str, str]:
        """The task of every expert."""
        return {name: EXPERTS[name].task for name in self.names}

    @property
    def is_full(self) -> bool:
        """Whether the experts are full fine-tunes."""
        return self.family.recipes[self.names[0]].method == "full"

    def make(self) -> Path:
        """The folder of the base, after training what is missing."""
        for name in self.names:
            self.family.make(name)
        return self.family.base.build(self.family.base.folder)

    def prompts(self, count: int = PROMPTS) -> dict[str, list[str]]:
        """Unlabelled prompts of every expert's task."""
        files = {name: HERE / "data" / task / "validation.jsonl" for name, task in self.tasks.items()}
        read = {name: [json.loads(line) for line in file.open()] for name, file in files.items()}
        return {name: [row["prompt"] for row in rows[-count:]] for name, rows in read.items()}


def _of(family: str, title: str) -> dict[str, Suite]:
    """The suites of a family: all five experts, even and uneven, and the first two and three."""
    found = FAMILIES[family]
    return {
        "even": Suite(f"{title}, even", found, EVEN),
        "uneven": Suite(f"{title}, uneven", found, UNEVEN),
        "2": Suite(f"{title}, two experts", found, EVEN[:2]),
        "3": Suite(f"{title}, three experts", found, EVEN[:3]),
    }


KINDS = {"lora": _of("adapters", "LoRA"), "full": _of("full", "full fine-tunes")}
SUITES = {f"{kind}-{name}": suite for kind, suites in KINDS.items() for name, suite in suites.items()}
SUITES |= {f"gemma3-{name}": _of("gemma3", "Gemma 3, LoRA")[name] for name in ("even", "uneven")}
