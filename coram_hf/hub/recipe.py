"""coram_recipe.yaml: the recipe beside a merge; `coram-hf merge --config` repeats the merge from it."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from coram_hf.hub.again import entry_of, options_of_merge, sources_of
from coram_hf.inputs.inputs import base_of, file_of
from coram_hf.report import MergeReport

RECIPE_NAME = "coram_recipe.yaml"


def recipe_text(report: MergeReport, places: Mapping[str, str] | None = None) -> str:
    """The recipe of a merge; `places` are the real sources by name, with the base's under an empty name.

    Without them, local folders are written as path/to/name, because their paths are private.
    """
    base, experts = sources_of(report)
    known, options = places or {}, options_of_merge(report)
    if "bases" in options:
        own = {name: known.get(base_of(name), source) for name, source in options["bases"].items()}
        options = {**options, "bases": own}
    options = {key: known.get(file_of(key), value) for key, value in options.items()}
    content = {
        "base": known.get("", base),
        "experts": {name: known.get(name, source) for name, source in experts.items()},
        **entry_of(report).recipe(report.line, report.config),
        **options,
    }
    head = "# Repeats this merge: coram-hf merge --config coram_recipe.yaml -o merged\n"
    return head + yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
