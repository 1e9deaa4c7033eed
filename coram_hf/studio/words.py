"""What a plan means, in the words of somebody who uses the studio and has not read the paper."""

from __future__ import annotations

from coram_hf.amplitude import UNEXPLORED_DISPERSION
from coram_hf.report import MergePlan

REMEDIES = {
    "foreign": "choose the base that was fine-tuned into them",
    "uneven": "choose the recommended way to merge, so that it does not drown out the others",
    "untested": "move lambda after merging, and compare the answers",
}
"""What to do about a verdict."""


def plain_warnings(plan: MergePlan) -> list[str]:
    """The warnings of a plan, for somebody who has not read the paper."""
    low, high = UNEXPLORED_DISPERSION
    found = []
    for warning in plan.warnings:
        if "where the paper has no base" in warning:
            found.append(
                f"The largest update is {plan.dispersion:.2g} times the smallest. The rule for lambda was "
                f"tested up to {low:g} and at {high:g}, not here: move the slider after merging, "
                "and compare answers."
            )
        elif "the experts are uneven" in warning:
            found.append(
                f"The experts are uneven: one changed {plan.dispersion:.2g} times as much as another and may "
                "drown it out. Choose the recommended line, which evens them out."
            )
        elif "do not seem to share this base" in warning:
            found.append(
                "An expert differs from the base as much as unrelated weights do. Is this really the base "
                f"that it was fine-tuned from? ({warning.partition(' from the base')[0]})"
            )
        elif "lies outside the target matrices" in warning:
            found.append(
                f"{warning.partition(' ')[0]} of what the experts changed lies outside the matrices that are "
                "merged, and stays at the base. A line that ends in .ties merges it as well."
            )
        else:
            found.append(warning[:1].upper() + warning[1:])
    return found
