"""Code that repeats a merge, from its report."""

from __future__ import annotations

import re
import shlex
from typing import Any

from torch import Tensor

from coram_hf.errors import CoramError
from coram_hf.methods.baseline import Baseline
from coram_hf.methods.entry import Entry
from coram_hf.methods.registry import find_method, method_names
from coram_hf.methods.updates import Updates
from coram_hf.report import MergeReport


def python_code(report: MergeReport) -> str:
    """Python that repeats the merge."""
    base, experts = sources_of(report)
    lines = [f"    {name!r}: {source!r}," for name, source in experts.items()]
    options = "".join(f", {key}={value!r}" for key, value in options_of_merge(report).items())
    entry = entry_of(report)
    if report.adapter:
        given = {k: v for k, v in report.config.items() if v is not None and v != _default(entry, k)}
        words = "".join(f", {key}={value!r}" for key, value in given.items())
        head = "from coram_hf.baselines import open_merger"
        made = f"merger = open_merger({base!r}, experts, {report.method!r}{words}{options})"
        kept = ", ".join(["'merged'", *(f"{key}={value!r}" for key, value in _rank(report).items())])
        return "\n".join([head, "", "experts = {", *lines, "}", made, f"merger.merge_adapter_to({kept})"])
    head, *statements = entry.python(f"{base!r}, experts", options, report.line, report.config)
    return "\n".join([head, "", "experts = {", *lines, "}", *statements])


def command_line(report: MergeReport) -> str:
    """The command that repeats the merge."""
    base, experts = sources_of(report)
    words = ["coram-hf", "merge", base, *(_named(name, source) for name, source in experts.items())]
    words += entry_of(report).words(report.line, report.config)
    for key, value in options_of_merge(report).items():
        if key == "bases":
            for name, source in value.items():
                words += ["--bases", f"{_plain(name)}={source}"]
            continue
        words += [f"--{key.replace('_', '-')}", *([] if value is True else [str(value)])]
    if not report.adapter:
        return shlex.join([*words, "-o", "merged"])
    kept = [word for key, value in _rank(report).items() for word in (f"--{key}", str(value))]
    return shlex.join([*words, "--adapter-out", "merged", *kept])


def _rank(report: MergeReport) -> dict[str, Any]:
    """The requested rank or energy of a LoRA adapter."""
    asked = {key: report.adapter.get(key) for key in ("rank", "energy")}
    return {key: value for key, value in asked.items() if value is not None}


def _default(entry: Entry, name: str) -> Any:
    return entry.options[name].default if name in entry.options else None


def entry_of(report: MergeReport) -> Entry:
    """The method of a merge; one that is not installed is written like a baseline."""
    if report.method in method_names():
        return find_method(report.method)

    def absent(updates: Updates) -> Tensor:
        raise CoramError(f"method {report.method!r} is not installed; install its package")

    absent.__name__ = report.method
    return Baseline(absent)


def _named(name: str, source: str) -> str:
    """`name=source`, or the source alone if it is the name; special characters in names are replaced."""
    if source.partition("@")[0] == name:
        return source
    return f"{_plain(name)}={source}"


def _plain(name: str) -> str:
    """A name that the command line accepts."""
    return re.sub(r"[^A-Za-z0-9_. -]+", "_", name).strip("- ") or "expert"


def _own_bases(report: MergeReport) -> dict[str, str]:
    """The bases of experts that were fine-tuned from another base than the merge's."""
    found = {name: values["base"] for name, values in report.sources.items() if values.get("base")}
    return {name: _source(f"base-of-{name}", values) for name, values in found.items()}


def sources_of(report: MergeReport) -> tuple[str, dict[str, str]]:
    """The base and the experts as sources, at the merged commit where there is one."""
    found = {name: _source(name, values) for name, values in report.sources.items()}
    return found.get("", "base"), {name: found.get(name, name) for name in report.relative_updates}


def _source(name: str, values: dict[str, Any]) -> str:
    source, commit = values.get("source"), values.get("commit")
    if not source:
        return f"path/to/{name or 'base'}"
    if commit or values.get("hub"):
        return f"{source}@{commit}" if commit else str(source)
    return f"path/to/{source.rstrip('/').rpartition('/')[2]}"


def options_of_merge(report: MergeReport) -> dict[str, Any]:
    """The options of a merge that do not belong to its method."""
    own = _own_bases(report)
    dtype = {"dtype": report.dtype} if report.dtype else {}
    return {**dtype, **report.options, **({"bases": own} if own else {})}
