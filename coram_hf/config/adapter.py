"""AdapterOptions: how a merged update is stored as a LoRA adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from coram_hf.config.coram import Options
from coram_hf.config.declared import Range
from coram_hf.errors import CoramError

DEFAULT_ENERGY = 0.99


@dataclass(frozen=True)
class AdapterOptions(Options):
    """The rank of every matrix: one for all, or the lowest that keeps a share of its squared norm."""

    rank: Annotated[int | None, Range("[1, inf)"), "Rank of the LoRA adapter."] = None
    energy: Annotated[
        float | None,
        Range("(0, 1]"),
        f"Share of every matrix's squared norm that the LoRA adapter keeps; {DEFAULT_ENERGY} without a rank.",
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank is not None and self.energy is not None:
            raise CoramError("rank and energy are mutually exclusive; pass one of them")
        if self.rank is None and self.energy is None:
            object.__setattr__(self, "energy", DEFAULT_ENERGY)
