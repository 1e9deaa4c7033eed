"""The part of a card about what surrounds the weights: tokenizer, chat template, special tokens, heads."""

from __future__ import annotations

from coram_hf.hub.text import inline
from coram_hf.report import MergeReport
from coram_hf.report.tables import markdown


def surroundings_text(report: MergeReport) -> str:
    """A table of whose each part is; empty for an adapter, which has none of them."""
    rows = [(inline(part), inline(whose)) for part, whose in report.surroundings.items()]
    return markdown(["", ""], rows) if rows and not report.adapter else ""
