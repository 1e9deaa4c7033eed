"""One sentence on whether a merge is ready to go ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coram_hf.amplitude import FOREIGN_UPDATE, UNEXPLORED_DISPERSION

REMEDIES = {
    "foreign": "pass the right base, or name their own bases with --bases",
    "uneven": "merge with --balance root, so that it does not drown out the others",
    "untested": "compare a few values of lambda with coram-hf sweep if you can",
}
"""What to do about it, on the command line."""


def verdict(dispersion: Mapping[str, Any], remedies: Mapping[str, str] = REMEDIES) -> str:
    """What the numbers of the section `dispersion` mean: ready or merged, uneven, untested, or not ready."""
    sizes, D, lam = dispersion["relative_updates"], float(dispersion["D"]), dispersion["lam"]
    unchanged = [name for name, r in sizes.items() if r == 0]
    if unchanged:
        return f"Not ready: {_are(unchanged, 'equals', 'equal')} the base, so there is no update to merge."
    foreign = [name for name, r in sizes.items() if r >= FOREIGN_UPDATE]
    if foreign:
        return (
            f"Not ready: {_are(foreign, 'differs', 'differ')} from the base about as much as unrelated "
            f"weights do; {remedies['foreign']}."
        )
    ratio = f"the largest update is {D:.3g} times the smallest"
    if D >= dispersion["threshold"]:
        return f"Uneven: {ratio}; {remedies['uneven']}."
    strength = "with a lambda that is measured while merging" if lam is None else f"with lambda {lam:.4g}"
    done = "Merged" if dispersion.get("merged") else "Ready to merge"
    low, high = UNEXPLORED_DISPERSION
    if low < D < high:
        return (
            f"{done} {strength}, but {ratio}, where the rule for lambda has not been tested: "
            f"{remedies['untested']}."
        )
    even = "one expert" if len(sizes) == 1 else f"{len(sizes)} experts of similar size ({ratio})"
    return f"{done} {strength}: {even}, where the rule for lambda was tested."


def _are(names: Sequence[str], one: str, several: str) -> str:
    """The experts as the subject of a sentence, with its verb."""
    return f"expert {names[0]} {one}" if len(names) == 1 else f"experts {', '.join(names)} {several}"
