"""The license of a merge: the strictest of its parents', where that can be determined."""

from __future__ import annotations

from collections.abc import Iterable

KNOWN = (
    "unlicense",
    "cc0-1.0",
    "mit",
    "bsd-3-clause",
    "apache-2.0",
    "cc-by-4.0",
    "cc-by-sa-4.0",
    "gpl-3.0",
    "agpl-3.0",
    "cc-by-nc-4.0",
    "cc-by-nc-sa-4.0",
    "cc-by-nc-nd-4.0",
)
"""Licenses from the freest to the strictest; those of single models (llama3.1, gemma) are not ranked."""

FREE = KNOWN[: KNOWN.index("apache-2.0") + 1]
"""Licenses that require no more than a notice."""


def strictest(licenses: Iterable[str]) -> str | None:
    """The license that covers a merge of models under these; "other" where none of them does."""
    found = sorted(set(licenses))
    if not found:
        return None
    if all(name in KNOWN for name in found):
        return max(found, key=KNOWN.index)
    binding = [name for name in found if name not in FREE]
    return binding[0] if len(binding) == 1 else "other"
