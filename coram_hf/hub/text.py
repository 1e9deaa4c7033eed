"""Text from file names and from other people's cards, escaped for Markdown and HTML."""

from __future__ import annotations

import re

SPECIAL = re.compile(r"[&<>\"'`*_{}\[\]()#|~!\\$@^]|https?:")
VISIBLE = 200
"""Longest name that a card shows, in characters."""


def inline(value: object) -> str:
    """A value as plain text in Markdown, in a table cell or in HTML: any markup in it is escaped."""
    text = " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())
    if len(text) > VISIBLE:
        text = f"{text[: VISIBLE - 3]}..."
    return SPECIAL.sub(lambda m: "".join(f"&#{ord(c)};" for c in m[0]), text)


def number(value: float | None, digits: int = 4) -> str:
    """A number to `digits` significant digits, or "not defined"."""
    return "not defined" if value is None else f"{value:.{digits}g}"


def fenced(code: str, language: str) -> str:
    """A code block whose fence is longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall(r"`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{code}\n{fence}"
