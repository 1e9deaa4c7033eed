"""How to load a merge, and how to make it again: code from its report."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from typing import Any

from coram_hf.config import CoramConfig
from coram_hf.report import MergeReport


def load_code(report: MergeReport) -> str:
    """Python that loads the merged model."""
    name = report.model_class or "AutoModel"
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
    elif "space" in report.config:
        head = "from coram_hf.baselines import merge_oft"
        given = f", weights={report.config['weights']!r}" if report.config.get("weights") else ""
        call = f"merge_oft({arguments}{given}{options}).save_pretrained('merged')"
        config = []
    else:
        head = "from coram_hf.baselines import merge"
        given = "".join(f", {key}={value!r}" for key, value in report.config.items() if value is not None)
        call = f"merge({arguments}, {report.method!r}{given}{options}).save_pretrained('merged')"
        config = []
    return "\n".join([head, "", "experts = {", *lines, "}", *config, call])


def command_line(report: MergeReport) -> str:
    """The command that repeats the merge."""
    base, experts = _sources(report)
    words = ["coram-hf", "merge", base, *(_named(name, source) for name, source in experts.items())]
    if report.method == "coram":
        words += ["--line", report.line]
        for key, value in _changed(report).items():
            option = f"--{'lambda' if key == 'lam' else key.replace('_', '-')}"
            several = key == "target_modules" and not isinstance(value, str)
            for one in [*value, *value[:1]] if several else [value]:
                words += [option, ",".join(map(str, one)) if isinstance(one, list | tuple) else str(one)]
    else:
        words += ["--method", report.method]
        for key, value in report.config.items():
            if value is not None:
                words += ["--parameter", f"{key}={_yaml(value)}"]
    for key, value in _options(report).items():
        words += [f"--{key.replace('_', '-')}", *([] if value is True else [str(value)])]
    return shlex.join([*words, "-o", "merged"])


def _named(name: str, source: str) -> str:
    """`name=source`, or the source alone where it says the name; odd characters cannot stand in a name."""
    if source.partition("@")[0] == name:
        return source
    return f"{re.sub(r'[^A-Za-z0-9_. -]+', '_', name).strip('- ') or 'expert'}={source}"


def _yaml(value: Any) -> str:
    """A value as YAML reads it; its floats need a point."""
    text = str(value)
    return text.replace("e", ".0e") if isinstance(value, float) and "e" in text and "." not in text else text


def _sources(report: MergeReport) -> tuple[str, dict[str, str]]:
    """The base and the experts, as sources at the commit that was merged, where there is one."""
    found = {name: _source(name, values) for name, values in report.sources.items()}
    return found.get("", "base"), {name: found.get(name, name) for name in report.relative_updates}


def _source(name: str, values: dict[str, Any]) -> str:
    source, commit = values.get("source"), values.get("commit")
    if not source:
        return f"path/to/{name or 'base'}"
    if commit or values.get("hub"):
        return f"{source}@{commit}" if commit else str(source)
    return f"path/to/{source.rstrip('/').rpartition('/')[2]}"


def _changed(report: MergeReport) -> dict[str, Any]:
    """Fields of the config that the line does not say, and that are not at their defaults."""
    defaults = {f.name: f.default for f in fields(CoramConfig)}
    said = ("branch", "conflict", "spread", "residual", "slice_height")
    return {
        k: v for k, v in report.config.items() if k not in said and v is not None and v != defaults.get(k)
    }


def _options(report: MergeReport) -> dict[str, Any]:
    return {**({"dtype": report.dtype} if report.dtype else {}), **report.options}
