"""CalibrationConfig: how a merge is calibrated on unlabelled prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from coram_hf.config.coram import Options, describe, options_of
from coram_hf.config.declared import Range, check_names

Granularity = Literal["lambda", "expert", "group", "layer"]
"""What is fitted, from coarse to fine."""


@dataclass(frozen=True)
class CalibrationConfig(Options):
    """Every option of a calibration; the prompts themselves are given apart."""

    granularity: Annotated[
        Granularity,
        "What is fitted: lambda alone, a factor per expert, one per expert and group of modules (attention "
        "and MLP in each third of the depth), or one per expert for attention and MLP of every layer.",
    ] = "layer"
    answer_tokens: Annotated[int, Range("[1, inf)"), "Longest answer of an expert, in tokens."] = 32
    answer_line: Annotated[bool, "End answers at the end of their first line."] = False
    chat: Annotated[bool, "Send plain prompts as a user's message through the chat template."] = False
    prompt_limit: Annotated[
        int | None, Range("[1, inf)"), "Largest number of prompts per expert; the first ones are used."
    ] = None
    seed: Annotated[int, Range("[0, inf)"), "Chooses the answers that calibration holds back."] = 0

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CalibrationConfig:
        """A config from named values; the error for an unknown name suggests the closest valid one."""
        check_names(values, list(options_of(cls)), "calibration option")
        return cls(**values)


describe(CalibrationConfig)
