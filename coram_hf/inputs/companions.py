"""Files that accompany a checkpoint's weights: tokenizer, processor, chat template, custom code."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import snapshot_download, try_to_load_from_cache
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from coram_hf.inputs.internals.models import hub_commit
from coram_hf.inputs.sentence_modules import MODULE_FILES
from coram_hf.inputs.weights import Weights

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "normalizer.json",
    "vocab*",
    "merges.txt",
    "bpe.codes",
    "*.model",
    "*.spm",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*",
)
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
CODE_FILES = ("*.py",)
WRITTEN = (
    *("config.json", "generation_config.json", "*.index.json", "coram_*.json", "heads/*"),
    *("trainer_state.json", "all_results.json", "train_results.json", "eval_results.json"),
)
"""Settings that every merge writes, and records of training that no library reads."""
READ = (".json", ".jinja", ".py", ".onnx", ".xml", ".gguf", ".h5", ".msgpack")
"""Endings of files that libraries read beside safetensors: settings, code, and weights in other formats."""

logger = logging.getLogger("coram_hf")


def companion_folder(model: PreTrainedModel) -> Path | None:
    """The folder that a model was loaded from, or one with its files from the Hub, or None."""
    origin, commit = model.name_or_path or "", _hub_commit(model)
    if origin and Path(origin).is_dir():
        return Path(origin)
    if commit is None:
        return None
    try:
        patterns = [*TOKENIZER_FILES, *PROCESSOR_FILES, *CODE_FILES, *MODULE_FILES]
        return Path(snapshot_download(origin, revision=commit, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        logger.warning(
            "cannot download the tokenizer and processor files of %s: %s",
            origin,
            str(error).partition("\n")[0],
        )
        return None


def left_out(folder: Path, copied: Sequence[str]) -> list[str]:
    """Files beside a checkpoint's weights that libraries read, and a merge neither copies nor rewrites."""
    found = []
    known = (*TOKENIZER_FILES, *PROCESSOR_FILES, *WRITTEN, *copied)
    for path in sorted(folder.iterdir()):
        inside = [path] if path.is_file() else list(path.glob("*"))
        names = {file.relative_to(folder).as_posix() for file in inside if file.suffix in READ}
        code = {name for name in names if name.endswith(".py") and "/" not in name}
        if any(not any(fnmatch(name, pattern) for pattern in known) for name in names - code):
            found.append(path.name if path.is_file() else f"{path.name}/")
    return [name for name in found if not name.startswith(".")]


def has_tokenizer(folder: Path | None) -> bool:
    """Whether a folder holds files of a tokenizer."""
    return folder is not None and any(folder.glob("tokenizer*"))


def copy_companions(source: Path, folder: Path, patterns: Sequence[str]) -> None:
    """Copy the files that match one of the patterns."""
    for path in sorted({path for pattern in patterns for path in source.glob(pattern) if path.is_file()}):
        target = folder / path.relative_to(source)
        if target.exists() and target.samefile(path):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def find_tokenizer(weights: Weights, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer in an adapter's folder or a model's checkpoint, or None if none can be loaded."""
    model = weights.model
    origin, commit = model.name_or_path or "", _hub_commit(model)
    if has_tokenizer(weights.folder):
        origin, commit = str(weights.folder), None
    if not origin or (commit is None and not any(Path(origin).glob("tokenizer*"))):
        return None
    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            origin, trust_remote_code=trust_remote_code, **({} if commit is None else {"revision": commit})
        )
        return found
    except Exception as error:  # loading fails in many ways, and a merge can do without a tokenizer
        logger.warning("cannot load the tokenizer of %s: %s", origin, str(error).partition("\n")[0])
        return None


def _hub_commit(model: PreTrainedModel) -> str | None:
    """The commit of a model from the Hub, as recorded by transformers or by the local cache."""
    known = hub_commit(model)
    origin = model.name_or_path or ""
    if known is not None or origin.count("/") != 1 or Path(origin).is_dir():
        return known
    try:
        cached = try_to_load_from_cache(origin, "config.json")
    except ValueError:
        return None
    return Path(cached).parent.name if isinstance(cached, str) else None
