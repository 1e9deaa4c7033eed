"""How a merged model generates: its sampling settings, and where it starts, ends and pads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from coram_hf.errors import CoramError, reason
from coram_hf.inputs.agreement import AUTO, BASE, Choice, choose
from coram_hf.inputs.files import read_json
from coram_hf.inputs.options import MergeOptions
from coram_hf.inputs.weights import Weights

IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
GENERATION_FILE = "generation_config.json"
OTHER_KEYS = (
    "transformers_version",
    "_from_model_config",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
)
"""Keys of a generation config that do not decide what is generated."""


class Ids(NamedTuple):
    """One special token in the two places where models have it: a number, several, or None."""

    config: Any
    generation: Any


class Generation(NamedTuple):
    """What changes in how the base generates; settings: None if they stay the base's."""

    settings: GenerationConfig | None
    ids: Mapping[str, Ids]
    said: Mapping[str, str]
    warnings: tuple[str, ...]

    def apply(self, model: PreTrainedModel) -> None:
        """Write what changes into the configs of a model."""
        if not model.can_generate():
            return
        if self.settings is not None:
            own: Any = model.generation_config
            model.generation_config = copy.deepcopy(self.settings)
            for key in IDS:
                setattr(model.generation_config, key, getattr(own, key, None))
        for key, ids in self.ids.items():
            for config in _configs(model):
                if hasattr(config, key):
                    setattr(config, key, ids.config)
            setattr(model.generation_config, key, ids.generation)


def choose_generation(
    base: PreTrainedModel,
    experts: Mapping[str, Weights],
    brought: Mapping[str, PreTrainedTokenizerBase],
    base_tokenizer: PreTrainedTokenizerBase | None,
    merged: PreTrainedTokenizerBase | None,
    rows: int | None,
    options: MergeOptions,
) -> Generation:
    """Sampling settings and special tokens as the options ask.

    An adapter has no config of its own; its special tokens are those of its tokenizer, if it has one. Token
    ids are translated to those of the `merged` tokenizer; `rows` is the size of its embedding.
    """
    asked = options.get("generation_config") or AUTO
    asked_ids = options.get("special_tokens") or asked
    if not base.can_generate():
        for option in ("generation_config", "special_tokens"):
            if options.get(option) not in (None, AUTO):
                raise CoramError(f"{option}: {type(base).__name__} does not generate; remove it")
        return Generation(None, {}, {}, ())
    full = {name: weights.model for name, weights in experts.items() if weights.kind == "full"}
    kept: dict[str, _Settings | None] = dict.fromkeys(experts)
    kept |= {name: _settings(model, even_default=name == asked) for name, model in full.items()}
    settings: Choice[_Settings] = choose("generation_config", asked, _settings(base), kept, _read_settings)
    said, warnings = {"generation config": settings.said}, [settings.warning]
    translate = {name: _translation(brought.get(name), merged, rows) for name in experts}
    ids: dict[str, Ids] = {}
    for key in IDS:
        own = _ids(base, key)
        theirs: dict[str, Ids | None] = {name: _ids(model, key) for name, model in full.items()}
        theirs |= dict(_by_tokenizer(key, experts.keys() - full.keys(), brought, base_tokenizer))
        lost: dict[str, str] = {}
        for name, found in theirs.items():
            theirs[name], missing = translate[name](found)
            lost |= {name: missing} if missing else {}
        for name, token in lost.items():
            warnings.append(
                f"{key} of expert {name!r} is {token}, which the merged vocabulary lacks; "
                'vocabulary="union" (--vocabulary union) would add it'
            )
        if key == "eos_token_id" and asked_ids == AUTO:
            theirs = _all_ends(theirs)
        asked_id = BASE if asked_ids in theirs and theirs[str(asked_ids)] is None else asked_ids
        known = {name: theirs.get(name) for name in experts}
        choice = choose("special_tokens", asked_id, own, known, partial(_read_ids, key, own), noun=key)
        if choice.owner != "" and choice.value is not None and choice.value != own:
            ids[key] = choice.value
        value = _shown(choice.value)
        said[key] = value if choice.said == value else f"{value}, {choice.said}"
        warnings.append(choice.warning)
    chosen = None if settings.owner == "" or settings.value is None else settings.value.whole
    return Generation(chosen, ids, said, tuple(warning for warning in warnings if warning))


@dataclass(frozen=True)
class _Settings:
    """The sampling settings of a generation config, without special tokens, by which they are compared."""

    values: Mapping[str, Any]
    whole: GenerationConfig = field(compare=False)

    @classmethod
    def of(cls, whole: GenerationConfig) -> _Settings:
        found = whole.to_diff_dict()
        return cls({k: v for k, v in found.items() if k not in (*IDS, *OTHER_KEYS)}, whole)


def _settings(model: PreTrainedModel, *, even_default: bool = False) -> _Settings | None:
    """The sampling settings of a model, or None if it only has the defaults."""
    found = _Settings.of(model.generation_config)
    return found if found.values or even_default else None


def _read_settings(path: Path) -> _Settings:
    file = path / GENERATION_FILE if path.is_dir() else path
    read_json(file)
    try:
        return _Settings.of(GenerationConfig.from_pretrained(file.parent, file.name))
    except Exception as error:  # invalid values fail in many ways
        raise CoramError(f"generation_config: {file} is not a generation config ({reason(error)})") from error


def _read_ids(key: str, own: Ids | None, path: Path) -> Ids | None:
    """The special token in a JSON file such as generation_config.json; the base's if it has none."""
    content = read_json(path / GENERATION_FILE if path.is_dir() else path)
    found = _plain(content.get(key)) if isinstance(content, dict) else None
    return own if found is None else Ids(found, found)


def _configs(model: PreTrainedModel) -> Iterator[PreTrainedConfig]:
    yield model.config
    text = model.config.get_text_config()
    if text is not model.config:
        yield text


def _ids(model: PreTrainedModel, key: str) -> Ids | None:
    held = [getattr(config, key, None) for config in _configs(model)]
    config = next((found for found in reversed(held) if found is not None), None)
    ids = Ids(_plain(config), _plain(getattr(model.generation_config, key, None)))
    return None if ids == Ids(None, None) else ids


def _by_tokenizer(
    key: str,
    names: Iterable[str],
    brought: Mapping[str, PreTrainedTokenizerBase],
    base: PreTrainedTokenizerBase | None,
) -> Iterator[tuple[str, Ids | None]]:
    """The special token of adapters whose tokenizer has a different one from the base's."""
    own = None if base is None else getattr(base, key.removesuffix("_id"), None)
    for name in names:
        found = brought.get(name)
        token = None if found is None else getattr(found, key.removesuffix("_id"), None)
        if found is not None and token is not None and token != own:
            number = getattr(found, key)
            yield name, Ids(number, number)
        else:
            yield name, None


def _translation(
    own: PreTrainedTokenizerBase | None, merged: PreTrainedTokenizerBase | None, rows: int | None
) -> Callable[[Ids | None], tuple[Ids | None, str]]:
    """A function from an expert's token ids to the merged model's, or to the token that it lacks."""
    known = None if own is None or merged is None else merged.get_vocab()

    def number(found: Any) -> Any:
        if isinstance(found, list):
            return [number(one) for one in found]
        if found is None or found < 0 or own is None or known is None:
            if found is not None and rows is not None and found >= rows:
                raise KeyError(f"row {found}")
            return found
        token = own.convert_ids_to_tokens(found)
        if token is None:
            return found
        if token not in known:
            raise KeyError(repr(token))
        return known[token]

    def both(ids: Ids | None) -> tuple[Ids | None, str]:
        if ids is None:
            return None, ""
        try:
            return Ids(number(ids.config), number(ids.generation)), ""
        except KeyError as error:
            return None, str(error.args[0])

    return both


def _all_ends(experts: Mapping[str, Ids | None]) -> dict[str, Ids | None]:
    """The experts' end tokens; if those differ but all have one in common, each expert gets all of them."""
    ends = {name: _several(ids.generation) or _several(ids.config) for name, ids in experts.items() if ids}
    if not ends or not set.intersection(*map(set, ends.values())):
        return dict(experts)
    if len({frozenset(own) for own in ends.values()}) == 1:
        return {name: experts[next(iter(ends))] if ids else None for name, ids in experts.items()}
    every = list(dict.fromkeys(token for own in ends.values() for token in own))
    return {name: Ids(every, every) if ids else None for name, ids in experts.items()}


def _several(found: Any) -> list[int]:
    return found if isinstance(found, list) else [] if found is None else [found]


def _plain(found: Any) -> Any:
    """A list of one token id as that id."""
    return found[0] if isinstance(found, list) and len(found) == 1 else found


def _shown(ids: Ids | None) -> str:
    if ids is None:
        return "none"
    return str(ids.config if ids.generation is None else ids.generation)
