"""How to load a merge, and how to make it again: code from its report."""

from __future__ import annotations

import shlex
from dataclasses import fields
from typing import Any

from coram_hf.config import CoramConfig
from coram_hf.report import MergeReport

AUTO = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForImageClassification": "AutoModelForImageClassification",
    "ForConditionalGeneration": "AutoModelForImageTextToText",
}
SEQUENCE_TO_SEQUENCE = ("T5ForConditionalGeneration", "BartForConditionalGeneration")


def load_code(report: MergeReport) -> str:
    """Python that loads the merged model."""
    name = next((auto for ending, auto in AUTO.items() if report.model_class.endswith(ending)), "AutoModel")
    if report.model_class.endswith(SEQUENCE_TO_SEQUENCE):
        name = "AutoModelForSeq2SeqLM"
    return f'from transformers import {name}\n\nmodel = {name}.from_pretrained("this/repository")'


def python_code(report: MergeReport) -> str:
    """Python that repeats the merge."""
    base, experts = _sources(report)
    lines = [f"    {name!r}: {source!r}," for name, source in experts.items()]
    options = "".join(f", {key}={value!r}" for key, value in _options(report).items())
    arguments = f"{base!r}, experts"
    if report.method == "coram":
        head = "from coram_hf import CoramConfig, CoramMerger"
        call = f"CoramMerger({arguments}, config{options}).merge_to('merged')"
        given = "".join(f", {key}={value!r}" for key, value in _changed(report).items())
        config = [f"config = CoramConfig.from_line({report.line!r}{given})"]
    else:
        head = "from coram_hf.baselines import merge"
        given = "".join(f", {key}={value!r}" for key, value in report.config.items() if value is not None)
        call = f"merge({arguments}, {report.method!r}{given}{options}).save_pretrained('merged')"
        config = []
    return "\n".join([head, "", "experts = {", *lines, "}", *config, call])


def command_line(report: MergeReport) -> str:
    """The command that repeats the merge."""
    base, experts = _sources(report)
    words = ["coram-hf", "merge", base, *(f"{name}={source}" for name, source in experts.items())]
    if report.method == "coram":
        words += ["--line", report.line]
        for key, value in _changed(report).items():
            option = f"--{'lambda' if key == 'lam' else key.replace('_', '-')}"
            for one in value if key == "target_modules" and not isinstance(value, str) else [value]:
                words += [option, ",".join(map(str, one)) if isinstance(one, list | tuple) else str(one)]
    else:
        words += ["--method", report.method]
        for key, value in report.config.items():
            if value is not None:
                words += ["--parameter", f"{key}={value}"]
    for key, value in _options(report).items():
        words += [f"--{key}", str(value)]
    return shlex.join([*words, "-o", "merged"])


def _sources(report: MergeReport) -> tuple[str, dict[str, str]]:
    """The base and the experts, as sources at the commit that was merged, where there is one."""
    found = {name: _source(name, values) for name, values in report.sources.items()}
    return found.get("", "base"), {name: found.get(name, name) for name in report.relative_updates}


def _source(name: str, values: dict[str, Any]) -> str:
    source, commit = values.get("source"), values.get("commit")
    if not source:
        return f"path/to/{name or 'base'}"
    if commit:
        return f"{source}@{commit}"
    return f"path/to/{source.rstrip('/').rpartition('/')[2]}"


def _changed(report: MergeReport) -> dict[str, Any]:
    """Fields of the config that the line does not say, and that are not at their defaults."""
    defaults = {f.name: f.default for f in fields(CoramConfig)}
    said = ("branch", "conflict", "spread", "residual", "slice_height")
    return {
        k: v for k, v in report.config.items() if k not in said and v is not None and v != defaults.get(k)
    }


def _options(report: MergeReport) -> dict[str, Any]:
    return {"dtype": report.dtype} if report.dtype else {}
