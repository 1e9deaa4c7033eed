"""Names and numbers for a reader."""

from __future__ import annotations

VISIBLE = 80
"""Characters of a name that a report shows."""


def readable(name: object, limit: int = VISIBLE) -> str:
    """A name without characters that cannot be printed, cut where it is too long."""
    text = "".join(c if c.isprintable() else " " for c in str(name))
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def show(value: object) -> str:
    """A value for a table: numbers to four digits, nothing as a dash."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else readable(value)
