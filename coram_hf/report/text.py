"""Names and numbers for a reader, and files that are whole or absent."""

from __future__ import annotations

import os
from pathlib import Path

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


def write_whole(path: Path, text: str) -> None:
    """Write a file under a temporary name, and give it its own once it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
