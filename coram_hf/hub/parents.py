"""The base and the experts on a card: where they come from, how much they differ, and their licenses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coram_hf.hub.metadata import is_hub_source
from coram_hf.hub.text import inline, number
from coram_hf.report import MergeReport
from coram_hf.report.tables import markdown as table


def parents_table(report: MergeReport) -> str:
    """A row for the base and for every expert."""
    header = ["", "source", "commit, or hash of files", "relative update r", "kind"]
    balanced = any(factor != 1 for factor in report.balance_factors.values())
    rows = []
    for name, found in report.sources.items():
        size = number(report.relative_updates[name]) if name else ""
        kind = report.expert_kinds[name] if name else "base"
        version = found.get("commit") or found.get("files") or "in memory"
        own = f", fine-tuned from {source_text(found['base'])}" if found.get("base") else ""
        row = [inline(name or "base"), source_text(found) + own, inline(version[:16]), size, inline(kind)]
        rows.append(row + ([number(report.balance_factors.get(name, 1.0))] if balanced else []))
    return table(header + (["balance f"] if balanced else []), rows)


def transplants_table(report: MergeReport) -> str:
    """For experts with a base of their own, what of their updates was matched with the base of the merge."""
    rows = [
        (inline(name), inline(what), inline(words))
        for name, found in report.transplants.items()
        for what, words in found.items()
    ]
    head = "Updates transplanted from another base:\n\n"
    return head + table(["expert", "", "tensors"], rows) if rows else ""


def source_text(found: Mapping[str, Any]) -> str:
    """A Hub id as it is, a folder by its name only: local paths are omitted for privacy."""
    source = found.get("source")
    if not source:
        return "a model in memory"
    return inline(source) if is_hub_source(found) else f"a folder called {inline(Path(source).name)}"


def license_list(report: MergeReport) -> str:
    """The known licenses, by parent."""
    rows = {name or "base": found.get("license") for name, found in report.sources.items()}
    known = [f"{inline(name)}: {inline(', '.join(value))}" for name, value in rows.items() if value]
    return "; ".join(known)
