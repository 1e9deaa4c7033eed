"""Mergers of tiny models."""

from helpers.models import fine_tuned, tiny_llama

from coram_hf import CoramConfig, CoramMerger
from coram_hf.baselines import open_merger


def merged(names=("math", "code"), sizes=(0.03, 0.05), config=None, **options):
    base = tiny_llama()
    experts = {
        name: fine_tuned(base, size, i) for i, (name, size) in enumerate(zip(names, sizes, strict=True))
    }
    return CoramMerger(base, experts, config or CoramConfig.from_line("SS(ca+ave,variance).ties"), **options)


def baseline_merger(base, experts, method, **options):
    """A baseline from any sources to a folder."""
    return open_merger(base, experts, method, **options)
