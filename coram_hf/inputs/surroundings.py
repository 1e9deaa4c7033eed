"""What surrounds the weights of a merged model: tokenizer, template, generation config, special tokens."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from coram_hf.inputs.agreement import AUTO, BASE, Choice, choose
from coram_hf.inputs.chat import Template, find_template, read_template, tokens_in
from coram_hf.inputs.companions import left_out
from coram_hf.inputs.generation import Generation, choose_generation
from coram_hf.inputs.options import MergeOptions, is_template_text
from coram_hf.inputs.sentence_modules import MODULE_FILES, choose_modules, read_modules
from coram_hf.inputs.tokenizers import ChosenTokenizer, Tokenizers
from coram_hf.inputs.vocabulary import Vocabulary
from coram_hf.inputs.weights import Weights

CHOICES = ("tokenizer", "chat_template", "generation_config", "special_tokens")
"""Options that name the owner of a part, or a file."""


@dataclass(frozen=True)
class Surroundings:
    """What a merged folder holds besides its weights, as far as it is not a copy of the base's files.

    tokenizer: of the merged model, with its chat template; None: the base's own. replaces_files: whether its
    files take the place of the base's; tokenizer_folder: where they are, if they can be copied.
    template: the chat template, if `new_template` says that it is not the one of these files.
    modules: the folder of sentence-transformers whose modules are copied. labels: names of classes, if they
    are not the base's. said: what the plan says about each part.
    """

    tokenizer: PreTrainedTokenizerBase | None = None
    replaces_files: bool = False
    tokenizer_folder: Path | None = None
    template: Template | None = None
    new_template: bool = False
    generation: Generation = field(default_factory=lambda: Generation(None, {}, {}, ()))
    modules: Path | None = None
    labels: Mapping[int, str] = field(default_factory=dict)
    said: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def choose_surroundings(
    base: Weights,
    experts: Mapping[str, Weights],
    found: Tokenizers,
    chosen: ChosenTokenizer,
    vocabulary: Vocabulary,
    options: MergeOptions,
) -> Surroundings:
    """Everything beside the weights, as the options request; `chosen` and `vocabulary` must fit together."""
    tokenizer = vocabulary.tokenizer or chosen.tokenizer
    merged = tokenizer or found.base
    own = find_template(found.base, _folder(base))
    theirs = {
        name: find_template(found.brought.get(name), weights.folder or _folder(weights))
        for name, weights in experts.items()
        if name in found.brought or weights.folder is not None
    }
    asked = options.get("chat_template") or AUTO
    template: Choice[Template] = (
        Choice(str(asked), None, "as given")
        if is_template_text(asked)
        else choose("chat_template", asked, own, {name: theirs.get(name) for name in experts}, read_template)
    )
    warnings = [*chosen.warnings, *([template.warning] if template.warning else [])]
    known = {} if merged is None else merged.get_vocab()
    source = found.brought.get(template.owner or "")
    absent = [token for token in tokens_in(template.value, source) if token not in known]
    if merged is not None and absent:
        warnings.append(
            f"the chat template of {template.owner!r} uses the token {absent[0]!r}, which the merged "
            'vocabulary lacks; vocabulary="union" (--vocabulary union) would add it'
        )
    held = own if tokenizer is None else find_template(tokenizer, chosen.folder)
    changed = template.value != held
    if merged is not None and merged.chat_template != template.value:
        tokenizer = copy.deepcopy(merged)
        tokenizer.chat_template = template.value
    rows = vocabulary.size or None
    generation = choose_generation(base.model, experts, found.brought, found.base, merged, rows, options)
    said = {"tokenizer": chosen.said} if merged is not None else {}
    changes = generation.settings is not None or generation.ids or generation.warnings
    if merged is not None or changes:
        said |= generation.said
    if own is not None or template.value is not None or any(theirs.values()):
        said["chat template"] = template.said
    modules, steps, differing = choose_modules(base, experts)
    folder = _folder(base)
    copied = () if modules is None else (*MODULE_FILES, *(f"{m.path}/*" for m in read_modules(modules)))
    lost = [] if folder is None else left_out(folder, copied)
    said |= steps | ({"left out": f"{', '.join(lost)}, beside the base's weights"} if lost else {})
    return Surroundings(
        tokenizer,
        replaces_files=chosen.tokenizer is not None or vocabulary.tokenizer is not None,
        tokenizer_folder=chosen.folder,
        template=template.value,
        new_template=changed,
        generation=generation,
        modules=modules,
        said=said,
        warnings=(*warnings, *generation.warnings, *differing),
    )


def told_choices(options: MergeOptions, experts: Mapping[str, Weights]) -> dict[str, str]:
    """The options as given, for the report; only the names of files, because local paths are private."""
    files = told_files(options, experts)
    return {
        key: f"path/to/{files[key].name}" if key in files else str(asked)
        for key, asked in _told(options).items()
    }


def told_files(options: MergeOptions, experts: Mapping[str, Weights]) -> dict[str, Path]:
    """The files and folders that options name."""
    return {
        key: Path(asked).expanduser().absolute()
        for key, asked in _told(options).items()
        if str(asked) not in (BASE, *experts) and not is_template_text(asked)
    }


def _told(options: MergeOptions) -> dict[str, str | Path]:
    """The options that choose by a name or a file, and were given."""
    given: dict[str, object] = {key: cast(Any, options).get(key) for key in CHOICES}
    return {key: asked for key, asked in given.items() if isinstance(asked, str | Path) and asked != AUTO}


def _folder(weights: Weights) -> Path | None:
    """The local folder of a full model."""
    path = weights.folder or Path(weights.model.name_or_path or "/nowhere")
    return path if path.is_dir() else None
