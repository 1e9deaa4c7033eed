"""mergekit's keys for dtype, tokenizer and chat template as options of a merge."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from coram_hf.errors import CoramError
from coram_hf.inputs.options import is_template_text, text_options

TEMPLATES = "mergekit._data.chat_templates"
"""Where an installed mergekit keeps the chat templates that recipes name."""


def read_options(content: Mapping[str, Any], base: str, experts: Mapping[str, str]) -> dict[str, Any]:
    """The options of a merge that a recipe sets; `experts` are sources by name."""
    dtype = content.get("out_dtype") or content.get("dtype")
    found = {} if dtype is None else {"dtype": str(dtype).removeprefix("torch.")}
    return {**found, **_tokenizer(content, base, experts), **_chat_template(content.get("chat_template"))}


def _tokenizer(content: Mapping[str, Any], base: str, experts: Mapping[str, str]) -> dict[str, Any]:
    """`tokenizer_source`, or `tokenizer: {source: ...}`: the base's, the union of all, or a model's."""
    source, given = content.get("tokenizer_source"), content.get("tokenizer")
    if given is not None:
        if source is not None:
            raise CoramError("tokenizer and tokenizer_source are mutually exclusive; remove one of them")
        if not isinstance(given, Mapping):
            raise CoramError(f"tokenizer must have a source, found {given!r}")
        for key in ("tokens", "pad_to_multiple_of"):
            if given.get(key) is not None:
                raise CoramError(
                    f"tokenizer: {key} is not supported: rows of the vocabulary are merged like those of any "
                    "tensor; resize the merged model afterwards"
                )
        source = given.get("source", "union")
    if source is None:
        return {}
    named = [name for name, expert in experts.items() if expert == source]
    if source == "union":
        return {"vocabulary": "union"}
    if source == "base" or (source == base and not named):
        return {"vocabulary": "base", **({"tokenizer": "base"} if "tokenizer" in text_options() else {})}
    if not named:
        valid = ["base", "union", base, *experts.values()]
        raise CoramError(
            f"tokenizer source {source!r} is not a model of this merge; valid: {', '.join(valid)}"
        )
    return _offered("tokenizer", named[0], "tokenizer_source")


def _chat_template(given: Any) -> dict[str, Any]:
    """`auto`, a template or the name of one of mergekit's, or, as in our recipes, an expert or a file."""
    if given is None:
        return {}
    if not isinstance(given, str):
        raise CoramError(f"chat_template must be text, found {given!r}")
    if is_template_text(given):
        return _offered("chat_template", given, "chat_template")
    return _offered("chat_template", _template_file(given) or given, "chat_template")


def _template_file(name: str) -> str | None:
    """The file of one of the chat templates of an installed mergekit; None if it has none of that name."""
    if not name.isidentifier():
        return None
    try:
        path = Path(str(resources.files(TEMPLATES).joinpath(f"{name}.jinja")))
    except ModuleNotFoundError:
        return None
    return str(path) if path.is_file() else None


def _offered(option: str, value: str, key: str) -> dict[str, Any]:
    """The value as an option of the merge; raises if there is no such option that takes text."""
    if option not in text_options():
        raise CoramError(f"{key}: {value!r} is not supported; remove it")
    return {option: value}
