"""Publishing: the model card, and the way to the Hub and back."""

from coram_hf.hub.card import publish_report, render_card, write_card
from coram_hf.hub.push import load_report, push_folder

__all__ = ["load_report", "publish_report", "push_folder", "render_card", "write_card"]
