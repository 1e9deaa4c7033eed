"""Names and numbers as text for a reader."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

VISIBLE = 80
"""Longest name that a report shows, in characters."""


def readable(name: object, limit: int = VISIBLE) -> str:
    """A name without unprintable characters, cut at `limit`."""
    text = "".join(c if c.isprintable() else " " for c in str(name))
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def show(value: object, limit: int = VISIBLE) -> str:
    """A value for a table: numbers to four digits, None as a dash, names cut at `limit`."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else readable(value, limit)


def json_values(value: Any) -> Any:
    """JSON values; infinite and undefined numbers become the strings "inf", "-inf" and "nan"."""
    if isinstance(value, Mapping):
        return {key: json_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def numbers_again(value: Any) -> Any:
    """The inverse of `json_values` for a single value or a mapping: its strings as numbers."""
    if isinstance(value, Mapping):
        return {key: numbers_again(item) for key, item in value.items()}
    return float(value) if value in ("inf", "-inf", "nan") else value
