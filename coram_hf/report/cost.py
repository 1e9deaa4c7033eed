"""The cost of a merge in words: seconds by phase, peak memory, evaluations saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PAPER_SWEEP = (10, 12)
"""How many full evaluations a sweep over lambda takes per configuration, by the paper's table of costs."""

WITHOUT_SCORES = ("rule", "neutral", "calibrated")
"""Where a lambda may come from that took no scored merge."""

SHORTEST = 0.005
"""Seconds below which a phase is not named."""


def cost_lines(cost: Mapping[str, Any], lam_source: str | None) -> dict[str, str]:
    """What a report says about its cost; nothing for reports of earlier versions."""
    if not cost:
        return {}
    seconds = cost["seconds"]
    phases = ", ".join(f"{name} {spent:.3g}" for name, spent in seconds.items() if spent >= SHORTEST)
    lines = {
        "time": f"{sum(seconds.values()):.3g} s: {phases}",
        "peak memory": f"{cost['peak_memory'] / 2**20:,.0f} MB",
    }
    if lam_source in WITHOUT_SCORES:
        low, high = PAPER_SWEEP
        lines["evaluations saved"] = f"{low} to {high}, what a sweep over lambda takes in the paper"
    return lines
