"""Score the model in a folder, and write the results beside it and on its card."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import yaml
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from coram_hf.errors import CoramError, reason
from coram_hf.evaluation.readers import Readers, load_processor
from coram_hf.evaluation.tasks import TaskSource, open_tasks
from coram_hf.execution.device import compute_device
from coram_hf.hub.model_index import with_results
from coram_hf.outputs.files import write_whole
from coram_hf.outputs.hashing import file_hashes
from coram_hf.report.eval_results import EvalResults, Result


def evaluate_folder(
    folder: str | Path,
    tasks: Sequence[TaskSource],
    *,
    limit: int | None = None,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    write: bool | None = None,
) -> list[Result]:
    """Score the model of a folder, and write the results to eval_results.json and the card's `model-index`.

    `write`: whether to write them; by default only without `limit`, so that all questions were asked.

    `tasks`: .jsonl files, datasets (see `dataset_task`) and their addresses, or lm-eval tasks. Results of the
    same tasks are replaced; all others stay, unless the weights have changed since.
    """
    folder = Path(folder)
    if (folder / "adapter_config.json").is_file():
        whole = f"coram-hf merge BASE {folder} --lambda 1 -o whole"
        raise CoramError(f"{folder} is an adapter; make a model of it and its base first: {whole}")
    if not (folder / "config.json").is_file():
        raise CoramError(f"{folder} is not a model folder: it has no config.json")
    scorers = open_tasks(tasks, limit)
    place = compute_device(device)
    tokenizer = load_tokenizer(folder, trust_remote_code)
    readers = Readers(tokenizer, lambda: load_processor(folder, trust_remote_code))
    readers.check(scorers)
    model = load_model(folder, trust_remote_code)
    if place is not None:
        model.to(place)  # type: ignore[arg-type]
    results = [result for scorer in scorers for result in scorer(model, readers.of(scorer))]
    if write is False or (write is None and limit is not None):
        return results
    files = file_hashes(folder)
    earlier = EvalResults.load(folder, files) or EvalResults(folder.resolve().name, files)
    found = earlier.replaced(results)
    found.save(folder)
    _put_on_card(found, folder / "README.md")
    return results


def load_model(folder: Path, trust_remote_code: bool) -> PreTrainedModel:
    """A model that generates text, from images too if its config says so."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        model: PreTrainedModel = auto.from_pretrained(
            folder, dtype="auto", trust_remote_code=trust_remote_code
        )
        return model
    except Exception as error:  # other people's files fail in many ways
        raise CoramError(f"{folder} does not load as a causal language model: {reason(error)}") from error


def load_tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder."""
    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code
        )
        return found
    except Exception as error:
        raise CoramError(
            f"{folder} has no tokenizer that loads ({reason(error)}), which tasks need; copy the base's "
            "tokenizer files into it"
        ) from error


def _put_on_card(found: EvalResults, path: Path) -> None:
    text = path.read_text(encoding="utf-8") if path.is_file() else "---\n{}\n---\n"
    try:
        write_whole(path, with_results(text, found))
    except (ValueError, yaml.YAMLError) as error:
        raise CoramError(
            f"the results are saved, but not on the card: the metadata of {path} cannot be read "
            f"({reason(error)}); correct it and evaluate again"
        ) from error
