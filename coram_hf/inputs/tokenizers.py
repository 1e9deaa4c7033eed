"""The tokenizers of base and experts, and which of them a merged model gets."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from coram_hf.errors import CoramError, reason
from coram_hf.inputs.agreement import AUTO, BASE, Choice, choose, listed
from coram_hf.inputs.companions import companion_folder, find_tokenizer, has_tokenizer
from coram_hf.inputs.gguf import gguf_tokenizer
from coram_hf.inputs.options import MergeOptions
from coram_hf.inputs.tokens import embedding_rows, has_tokens
from coram_hf.inputs.weights import Weights

Tokenizer = PreTrainedTokenizerBase
LENGTHS = re.compile(r'"(?:truncation|padding)":\{(?:[^{}]|\{[^{}]*\})*\}|"(?:truncation|padding)":null')
"""The settings of a tokenizer that say how long texts become; both come before all others."""


class Tokenizers(NamedTuple):
    """The base's tokenizer, those of all experts, and those that experts bring along.

    An expert without one, such as most adapters, uses the base's. given: the base's was passed by the caller.
    """

    base: Tokenizer | None
    experts: Mapping[str, Tokenizer | None]
    brought: Mapping[str, Tokenizer]
    given: bool


class ChosenTokenizer(NamedTuple):
    """The tokenizer of the merged model, if it is not the base's, and the folder of its files, if any."""

    tokenizer: Tokenizer | None
    folder: Path | None
    owner: str | None
    said: str
    warnings: tuple[str, ...] = ()


def find_tokenizers(base: Weights, experts: Mapping[str, Weights], options: MergeOptions) -> Tokenizers:
    """The given tokenizers, and those beside the checkpoints."""
    trust, given = options.get("trust_remote_code", False), options.get("expert_tokenizers") or {}
    unknown = set(given) - set(experts)
    if unknown:
        raise CoramError(
            f"expert_tokenizers: no expert is called {sorted(unknown)[0]!r}; valid: {list(experts)}"
        )
    passed = _passed(base, options)
    beside = None if passed is not None else find_tokenizer(base, trust)
    every: dict[str, Tokenizer | None] = {}
    brought: dict[str, Tokenizer] = {}
    for name, weights in experts.items():
        if weights.transplant is not None:
            every[name] = None
            continue
        brings = name in given or has_tokenizer(weights.folder) or _elsewhere(weights.model, base.model)
        found = given.get(name) or (tokenizer_of(weights, trust) if brings or passed is not None else beside)
        every[name] = found
        if brings and found is not None:
            brought[name] = found
    return Tokenizers(passed or beside, every, brought, passed is not None)


def _passed(base: Weights, options: MergeOptions) -> Tokenizer | None:
    """The tokenizer that the caller passed; that of a GGUF file counts as passed, because it has no files."""
    own = options.get("tokenizer")
    given = None if own is None or isinstance(own, str | Path) else own
    return given or gguf_tokenizer(base)


def base_tokenizer(base: Weights, options: MergeOptions) -> Tokenizer | None:
    """The base's tokenizer: as passed, or beside its checkpoint."""
    return _passed(base, options) or find_tokenizer(base, options.get("trust_remote_code", False))


def tokenizer_of(weights: Weights, trust_remote_code: bool) -> Tokenizer | None:
    """The tokenizer in a model's GGUF file, or beside its checkpoint."""
    return gguf_tokenizer(weights) or find_tokenizer(weights, trust_remote_code)


def choose_tokenizer(
    base: PreTrainedModel, experts: Mapping[str, Weights], found: Tokenizers, options: MergeOptions
) -> ChosenTokenizer:
    """The tokenizer that the options ask for; raises if it does not fit the merged model's rows."""
    if found.given:
        return ChosenTokenizer(found.base, None, "", "the given one")
    asked: Any = options.get("tokenizer") or AUTO
    signatures = {name: _signature(tokenizer) for name, tokenizer in found.brought.items()}
    own = None if found.base is None else _signature(found.base)
    known = {name: signatures.get(name) for name in experts}
    named = asked not in (AUTO, BASE, *experts)
    choice: Choice[Any] = choose(
        "tokenizer", asked, own, known, lambda path: _load(path, options.get("trust_remote_code", False))
    )
    warnings = () if choice.warning is None else (choice.warning,)
    if choice.owner == "":
        return ChosenTokenizer(None, None, "", choice.said, warnings)
    tokenizer: Any = found.brought.get(str(choice.owner), choice.value)
    policy = options.get("vocabulary")
    if policy == "union":
        if asked != AUTO:
            raise CoramError(
                f'tokenizer={str(asked)!r} and vocabulary="union" are mutually exclusive; pass one of them'
            )
        return ChosenTokenizer(None, None, "", "the base's, with the experts' new tokens", warnings)
    models = [base, *(weights.model for weights in experts.values())]
    rows = max((embedding_rows(model) for model in models if has_tokens(model)), default=0)
    wrong = _misfit(found.base, tokenizer, policy, rows)
    if wrong is not None:
        if asked != AUTO:
            raise CoramError(f"tokenizer={str(asked)!r}: {wrong}")
        names = listed(list(found.brought))
        return ChosenTokenizer(None, None, "", f"the base's; that of {names} does not fit: {wrong}")
    folder = Path(asked).expanduser() if named else _folder(experts[str(choice.owner)])
    folder = folder.parent if folder is not None and folder.is_file() else folder
    kept = folder if folder is not None and has_tokenizer(folder) else None
    if not named and str(choice.owner) in (options.get("expert_tokenizers") or {}):
        kept = None
    return ChosenTokenizer(tokenizer, kept, choice.owner, choice.said, warnings)


def _elsewhere(expert: PreTrainedModel, base: PreTrainedModel) -> bool:
    """Whether a model was loaded from a different place from the base."""
    return (expert.name_or_path or "") != (base.name_or_path or "")


def _folder(weights: Weights) -> Path | None:
    return weights.folder if has_tokenizer(weights.folder) else companion_folder(weights.model)


def _load(path: Path, trust_remote_code: bool) -> Tokenizer:
    """The tokenizer in a folder, or in that of a file."""
    folder = path if path.is_dir() else path.parent
    try:
        found: Tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        return found
    except Exception as error:  # loading fails in many ways
        raise CoramError(f"tokenizer: {folder} has no tokenizer that loads ({reason(error)})") from error


def _misfit(base: Tokenizer | None, chosen: Tokenizer, policy: str | None, rows: int) -> str | None:
    """Why a tokenizer does not fit the merged model, whose rows are in the base's order; None if it does."""
    vocabulary = chosen.get_vocab()
    known = {} if base is None else base.get_vocab()
    moved = [token for token, row in vocabulary.items() if known.get(token, row) != row]
    if moved:
        return f"its token {moved[0]!r} is number {vocabulary[moved[0]]}, but {known[moved[0]]} in the base's"
    new = [token for token in vocabulary if token not in known] if base is not None else []
    if new and policy is not None:
        return f'it has {len(new)} new tokens such as {new[0]!r}, and vocabulary is "{policy}"'
    beyond = [token for token, row in vocabulary.items() if row >= rows]
    return f"no model has an embedding row for its token {beyond[0]!r}" if beyond else None


def _signature(tokenizer: Tokenizer) -> str:
    """A hash of everything that affects the tokens of a text, and of the special tokens."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        text = repr((type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())))
    else:
        text = LENGTHS.sub("", backend.to_str(), count=2)
    return hashlib.sha256(f"{text}{tokenizer.special_tokens_map!r}".encode()).hexdigest()
