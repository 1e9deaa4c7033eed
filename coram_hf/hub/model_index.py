"""Evaluation results in the metadata of a card, where the Hub looks for them: `model-index`."""

from __future__ import annotations

from typing import Any

from huggingface_hub import EvalResult, ModelCard

from coram_hf.report.eval_results import EvalResults, Result

MARK = "coram_scorer"
"""The metric argument that marks a result as ours."""


def with_results(text: str, found: EvalResults | None) -> str:
    """A card with these results in place of our earlier ones; results from elsewhere are kept."""
    if found is None and MARK not in text:
        return text
    card = ModelCard(text)
    data: Any = card.data
    earlier = data.eval_results or []
    kept = [result for result in earlier if MARK not in (result.metric_args or {})]
    results = kept + [_entry(result) for result in (found.results if found is not None else ())]
    data.eval_results = results or None
    name = data.model_name or (found.model if found is not None else None)
    data.model_name = name if results else None
    return str(card.content)


def _entry(result: Result) -> EvalResult:
    return EvalResult(
        task_type="text-generation",
        dataset_type=result.task,
        dataset_name=result.task,
        metric_type=result.metric,
        metric_name=result.metric,
        metric_value=round(result.value, 6),
        metric_args={
            "questions": result.questions,
            "standard_error": None if result.standard_error is None else round(result.standard_error, 6),
            "interval_95": None if result.interval is None else [round(b, 6) for b in result.interval],
            MARK: result.scorer,
        },
    )
