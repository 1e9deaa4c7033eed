"""The metadata of a card, which the Hub reads: parents, task, license, languages, datasets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub import ModelCardData

from coram_hf.hub.license import strictest
from coram_hf.inputs.parent_card import HUB_ID
from coram_hf.report import MergeReport

PIPELINES = {
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForImageClassification": "image-classification",
    "ForSpeechSeq2Seq": "automatic-speech-recognition",
    "WhisperForConditionalGeneration": "automatic-speech-recognition",
    "ForConditionalGeneration": "text-generation",
}
SEEING = ("VL", "Llava", "Gemma3", "Idefics", "PaliGemma", "Mllama", "Blip", "Vision", "InternVL", "Pixtral")
"""Parts of the class names of models that read images and generate text."""


def card_metadata(report: MergeReport, given: ModelCardData | None) -> ModelCardData:
    """The metadata of a card; fields of `given` replace those that follow from the report."""
    licenses = licenses_of(report)
    license_name = strictest(licenses)
    kind = [str(report.adapter["type"]).lower()] if report.adapter else []
    embeds = [] if report.library == "transformers" else [report.library, "feature-extraction"]
    parents = dict(list(report.sources.items())[:1]) if kind else report.sources
    fields: dict[str, Any] = {
        "base_model": _hub_ids(parents) or None,
        "base_model_relation": "adapter" if kind else "merge",
        "library_name": "peft" if kind else report.library,
        "pipeline_tag": "sentence-similarity" if embeds else pipeline_tag(report.model_class),
        "tags": list(dict.fromkeys(["merge", "model-merging", report.method, "coram", *kind, *embeds])),
        "license": license_name,
        "license_name": "see-parents" if license_name == "other" else None,
        "language": _together(report, "language"),
        "datasets": _together(report, "datasets"),
    }
    if given is not None:
        own = given.to_dict()
        if "model-index" in own:
            fields["model_name"], fields["eval_results"] = given.model_name, given.eval_results
            del own["model-index"]
        own["tags"] = list(dict.fromkeys([*fields["tags"], *own.get("tags", [])]))
        fields |= own
    return ModelCardData(**{key: value for key, value in fields.items() if value is not None})


def pipeline_tag(model_class: str) -> str:
    """The Hub's pipeline tag for a model of this class."""
    if model_class.endswith("ForConditionalGeneration") and any(word in model_class for word in SEEING):
        return "image-text-to-text"
    matching = [ending for ending in PIPELINES if model_class.endswith(ending)]
    return PIPELINES[max(matching, key=len)] if matching else "feature-extraction"


def is_hub_source(found: Mapping[str, Any]) -> bool:
    """Whether a source is a repository on the Hub, or a folder in one."""
    repository = str(found.get("source") or "").partition(":")[0]
    known = found.get("hub") or found.get("commit") is not None
    return bool(known) and HUB_ID.fullmatch(repository) is not None


def _hub_ids(sources: Mapping[str, Mapping[str, Any]]) -> list[str]:
    found = [s for s in sources.values() if is_hub_source(s)]
    return list(dict.fromkeys(str(source["source"]).partition(":")[0] for source in found))


def licenses_of(report: MergeReport) -> set[str]:
    """The licenses of the parents, as far as they are known."""
    return {str(name) for found in report.sources.values() for name in found.get("license") or ()}


def _together(report: MergeReport, key: str) -> list[str] | None:
    """The values of one key in the parents' cards, each once."""
    values = [value for found in report.sources.values() for value in found.get(key) or ()]
    return list(dict.fromkeys(values)) or None
