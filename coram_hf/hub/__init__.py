"""Publishing: model cards, pushes to the Hub, and reports read back from it."""

from coram_hf.hub.card import PUBLISHED, render_card, write_card
from coram_hf.hub.publish import publish_report
from coram_hf.hub.push import PUSH_OPTIONS, load_report, push_folder, push_new

__all__ = [
    "PUBLISHED",
    "PUSH_OPTIONS",
    "load_report",
    "publish_report",
    "push_folder",
    "push_new",
    "render_card",
    "write_card",
]
