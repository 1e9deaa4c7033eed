"""The paper's one-line names for configurations, such as `SS(ca+ave,variance).ties` or `full (h=16)`.

`DEC(...)` is ours: `DEC(full)` decorrelates by `tsv`, `DEC(full,ridge)` by `ridge`, and so on.
"""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple, get_args

from coram_hf.config.declared import suggestion
from coram_hf.errors import CoramError

Branch = Literal["full", "lr", "q", "s", "v", "qs", "sv"]
Conflict = Literal["nca", "nca+ave", "ca", "ca+ave"]
Spread = Literal["mean", "energy", "variance", "owner", "margin"]
Residual = Literal["ta", "ties", "tsvm"]
Decorrelate = Literal["tsv", "ridge", "wudi", "auto"]

DEFAULT_HEIGHT = 8
DEFAULT_DECORRELATION = "tsv"
"""The way to decorrelate that a line does not spell out."""

_LINE = re.compile(
    r"(?:SS\(\s*(?P<spread_core>[^\s,()]+)\s*,\s*(?P<mode>\w+)\s*\)|(?P<core>[^\s.,()]+))"
    r"(?:\.(?P<residual>\w+))?(?:\s*\(\s*h\s*=\s*(?P<height>[1-9]\d*)\s*\))?"
)

_DECORRELATED = re.compile(
    r"DEC\(\s*(?P<line>SS\([^()]*\)|[^\s.,()]+)\s*(?:,\s*(?P<how>\w+)\s*)?\)(?P<rest>.*)"
)

PRESET = "recommended"
"""The line of the preset that goes further than the paper."""

_GRAMMAR = (
    f"a line is {PRESET!r}, or X, SS(X,mode), X.rp or SS(X,mode).rp, then optionally (h=N); "
    "DEC(X), DEC(X,how), "
    "DEC(SS(X,mode)) or DEC(SS(X,mode),how) decorrelate the experts first; "
    f"X: {', '.join(get_args(Branch) + get_args(Conflict))}; "
    f"mode: {', '.join(get_args(Spread))}; rp: {', '.join(get_args(Residual))}; "
    f"how: {', '.join(get_args(Decorrelate))}"
)


class LineFields(NamedTuple):
    """The fields of a configuration that its line encodes."""

    slice_height: int
    branch: str
    conflict: str | None
    spread: str | None
    residual: str | None
    decorrelate: str | None


def read_line(line: str) -> dict[str, Any]:
    """Parse a line into its fields, by name."""
    outer = _DECORRELATED.fullmatch(line.strip()) if isinstance(line, str) else None
    plain = f"{outer['line']}{outer['rest']}" if outer else line
    match = _LINE.fullmatch(plain.strip()) if isinstance(plain, str) else None
    if match is None:
        raise CoramError(f"cannot read the line {line!r}; {_GRAMMAR}")
    branch, conflict = _read_core(match["spread_core"] or match["core"], line)
    optional = {"spread": match["mode"], "residual": match["residual"]}
    if outer:
        optional["decorrelate"] = outer["how"] or DEFAULT_DECORRELATION
    if match["height"]:
        optional["slice_height"] = int(match["height"])
    return {"branch": branch, "conflict": conflict} | {k: v for k, v in optional.items() if v is not None}


def write_line(fields: LineFields) -> str:
    """Format fields as a line, the inverse of `read_line`."""
    height, branch, conflict, spread, residual, decorrelate = fields
    masked = conflict if branch == "full" else f"{branch}-{conflict}"
    line = branch if conflict is None else str(masked)
    if spread is not None:
        line = f"SS({line},{spread})"
    if decorrelate is not None:
        line = f"DEC({line})" if decorrelate == DEFAULT_DECORRELATION else f"DEC({line},{decorrelate})"
    if residual is not None:
        line += f".{residual}"
    return line if height == DEFAULT_HEIGHT else f"{line} (h={height})"


def _read_core(core: str, line: str) -> tuple[str, str | None]:
    """`full` -> (full, None); `nca` -> (full, nca); `lr-nca` (not in the paper) -> (lr, nca)."""
    branch, _, conflict = core.partition("-") if "-" in core else ("full", "", core)
    if core in get_args(Branch):
        return core, None
    if branch not in get_args(Branch) or conflict not in get_args(Conflict):
        hint = suggestion(core, (PRESET, *get_args(Branch), *get_args(Conflict)))
        raise CoramError(f"unknown branch or conflict mode {core!r} in the line {line!r}; {hint}{_GRAMMAR}")
    return branch, conflict
