"""CoramConfig: one merge configuration, and the paper's one-line names for it."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, get_args

from coram_hf.errors import CoramError

if TYPE_CHECKING:
    import torch

    from coram_hf.report import MergeReport

Branch = Literal["full", "lr", "q", "s", "v", "qs", "sv"]
Conflict = Literal["nca", "nca+ave", "ca", "ca+ave"]
Spread = Literal["mean", "energy", "variance", "owner", "margin"]
Residual = Literal["ta", "ties", "tsvm"]
Scale = Literal["sqrt_n", "c_rms"]
Balance = Literal["damp", "equal"]
ComputeDtype = Literal["float64", "float32"]

_CHOICES: dict[str, tuple[tuple[str, ...], bool]] = {
    "branch": (get_args(Branch), False),
    "conflict": (get_args(Conflict), True),
    "spread": (get_args(Spread), True),
    "residual": (get_args(Residual), True),
    "scale": (get_args(Scale), False),
    "balance": (get_args(Balance), True),
    "compute_dtype": (get_args(ComputeDtype), False),
}

DEFAULT_HEIGHT = 8


@dataclass(frozen=True)
class CoramConfig:
    """Every choice of a CORAM merge; the defaults are the paper's plain `full` line under its kappa rule.

    slice_height: rows per slice, h.
    branch: merged factors; `full` = Q, dS, V; `lr` = Q, V; the subsets `q s v qs sv` are diagnostic.
    conflict: columns merged geometrically; `nca` the agreeing ones, `ca` the conflicting ones;
        `+ave` adds the weighted mean of the others back.
    spread: priority by which rows are dealt over slices; None keeps them contiguous.
    residual: how non-target parameters are merged; None leaves them at the base.
    kappa: restoration strength; None applies the dispersion rule.
    scale: contraction scale, `sqrt_n` (the paper's default) or the measured `c_rms`.
    lam: amplification coefficient; None means kappa * scale.
    dispersion_threshold: D at which the rule changes from kappa 1.15 to 0.5.
    weights: one non-negative number an expert, normalised to sum 1; None is uniform.
    balance: rescale uneven experts first; `damp` shrinks those above the median update, `equal`
        brings all to the median. Not part of the paper.
    target_modules: regex or list of name suffixes of the modules to merge geometrically, or
        "all-linear"; None selects the attention and MLP projections.
    compute_dtype: precision of the geometry.
    """

    slice_height: int = DEFAULT_HEIGHT
    branch: Branch = "full"
    conflict: Conflict | None = None
    spread: Spread | None = None
    residual: Residual | None = None
    kappa: float | None = None
    scale: Scale = "sqrt_n"
    lam: float | None = None
    dispersion_threshold: float = 7.5
    weights: tuple[float, ...] | None = None
    balance: Balance | None = None
    target_modules: str | tuple[str, ...] | None = None
    compute_dtype: ComputeDtype = "float64"

    def __post_init__(self) -> None:
        for name, (choices, optional) in _CHOICES.items():
            _check_choice(name, getattr(self, name), choices, optional)
        if not isinstance(self.slice_height, Integral) or self.slice_height is True or self.slice_height < 1:
            raise CoramError(f"slice_height must be a positive integer, found {self.slice_height!r}")
        if self.kappa is not None:
            check_number("kappa", self.kappa, above=0.0)
        if self.lam is not None:
            check_number("lam", self.lam)
        check_number("dispersion_threshold", self.dispersion_threshold, above=0.0)
        if self.weights is not None:
            object.__setattr__(self, "weights", check_weights(self.weights))
        if self.target_modules is not None:
            object.__setattr__(self, "target_modules", _check_targets(self.target_modules))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CoramConfig:
        """A config from named values; an unknown name is an error that suggests the nearest one."""
        check_names(values, [f.name for f in fields(cls)], "CoramConfig option")
        return cls(**values)

    @classmethod
    def from_report(cls, report: MergeReport) -> CoramConfig:
        """The config of a merge by its report, so that it can be repeated."""
        if report.method != "coram":
            raise CoramError(f"the merge was made by {report.method}, which has no CoramConfig")
        return cls.from_dict(report.config)

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain values, the inverse of `from_dict`."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_line(cls, line: str, **options: Any) -> CoramConfig:
        """A config from the paper's name for it, e.g. `SS(ca+ave,variance).ties` or `full (h=16)`."""
        match = _LINE.fullmatch(line.strip()) if isinstance(line, str) else None
        if match is None:
            raise CoramError(f"cannot read the line {line!r}; {_GRAMMAR}")
        branch, conflict = _read_core(match["spread_core"] or match["core"], line)
        stated = {"branch": branch, "conflict": conflict}
        for name, value in (("spread", match["mode"]), ("residual", match["residual"])):
            if value is not None:
                _check_choice(name, value, _CHOICES[name][0], False)
                stated[name] = value
        height = {"slice_height": int(match["height"])} if match["height"] else {}
        repeated = (stated.keys() | height.keys()) & options.keys()
        if repeated:
            raise CoramError(f"{', '.join(sorted(repeated))}: already given by the line {line!r}")
        return cls.from_dict({**stated, **height, **options})

    @property
    def line(self) -> str:
        """The paper's name for this configuration, the inverse of `from_line`."""
        if self.conflict is None:
            line: str = self.branch
        else:
            line = self.conflict if self.branch == "full" else f"{self.branch}-{self.conflict}"
        if self.spread is not None:
            line = f"SS({line},{self.spread})"
        if self.residual is not None:
            line += f".{self.residual}"
        return line if self.slice_height == DEFAULT_HEIGHT else f"{line} (h={self.slice_height})"

    @property
    def residual_lines(self) -> tuple[str, ...]:
        """The lines that differ from this one in the residual pathway only."""
        return tuple(replace(self, residual=residual).line for residual in get_args(Residual))

    @property
    def lam_source(self) -> str:
        """How lambda comes about: "given", "kappa" (a given kappa) or "rule" (kappa from D)."""
        return "given" if self.lam is not None else "kappa" if self.kappa is not None else "rule"

    def expert_weights(self, n_experts: int) -> tuple[float, ...]:
        """w_i for N experts, summing to 1."""
        return normalized_weights(self.weights, n_experts)

    @property
    def torch_compute_dtype(self) -> torch.dtype:
        import torch

        return {"float64": torch.float64, "float32": torch.float32}[self.compute_dtype]


def check_names(given: Iterable[str], valid: Sequence[str], what: str) -> None:
    """Raise for the first name that is not valid, with the nearest valid one."""
    for name in given:
        if name not in valid:
            near = difflib.get_close_matches(str(name), valid, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise CoramError(f"unknown {what} {name!r}; {hint}valid: {', '.join(valid)}")


def normalized_weights(weights: Sequence[float] | None, n_experts: int) -> tuple[float, ...]:
    """w_i summing to 1: uniform for None; the number of weights must be that of the experts."""
    if weights is None:
        return (1 / n_experts,) * n_experts
    numbers = check_weights(weights)
    if len(numbers) != n_experts:
        raise CoramError(f"weights: found {len(numbers)} for {n_experts} experts; give one an expert")
    total = math.fsum(numbers)
    return tuple(w / total for w in numbers)


def check_number(name: str, value: object, above: float = -math.inf) -> None:
    """Raise unless the value is a finite number above a bound."""
    if isinstance(value, bool) or not isinstance(value, Real) or not above < float(value) < math.inf:
        expected = "a finite number" + (f" above {above:g}" if above > -math.inf else "")
        raise CoramError(f"{name} must be {expected}, found {value!r}")


def check_weights(weights: Iterable[float]) -> tuple[float, ...]:
    """Expert weights as floats: finite, not negative, not all zero."""
    if isinstance(weights, str | Mapping) or not isinstance(weights, Iterable):
        raise CoramError(f"weights must be a list of numbers in expert order, found {weights!r}")
    given = tuple(weights)
    for weight in given:
        check_number("weights", weight)
        if weight < 0:
            raise CoramError(f"weights must not be negative, found {weight!r}")
    numbers = tuple(float(weight) for weight in given)
    if not math.fsum(numbers) > 0:
        raise CoramError(f"weights must not all be zero, found {numbers!r}")
    return numbers


_LINE = re.compile(
    r"(?:SS\(\s*(?P<spread_core>[^\s,()]+)\s*,\s*(?P<mode>\w+)\s*\)|(?P<core>[^\s.,()]+))"
    r"(?:\.(?P<residual>\w+))?(?:\s*\(\s*h\s*=\s*(?P<height>[1-9]\d*)\s*\))?"
)

_GRAMMAR = (
    "a line is X, SS(X,mode), X.rp or SS(X,mode).rp, then optionally (h=N); "
    f"X: {', '.join(get_args(Branch) + get_args(Conflict))}; "
    f"mode: {', '.join(get_args(Spread))}; rp: {', '.join(get_args(Residual))}"
)


def _read_core(core: str, line: str) -> tuple[str, str | None]:
    """`full` -> (full, None); `nca` -> (full, nca); `lr-nca` (not in the paper) -> (lr, nca)."""
    branch, _, conflict = core.partition("-") if "-" in core else ("full", "", core)
    if core in get_args(Branch):
        return core, None
    if branch not in get_args(Branch) or conflict not in get_args(Conflict):
        raise CoramError(f"unknown X {core!r} in the line {line!r}; {_GRAMMAR}")
    return branch, conflict


def _check_choice(name: str, value: object, choices: tuple[str, ...], optional: bool) -> None:
    if value in choices or (optional and value is None):
        return
    valid = ", ".join(map(repr, choices)) + (", None" if optional else "")
    raise CoramError(f"{name}: unknown value {value!r}; valid: {valid}")


def _check_targets(targets: str | Sequence[str]) -> str | tuple[str, ...]:
    patterns = (targets,) if isinstance(targets, str) or not isinstance(targets, Iterable) else tuple(targets)
    if not patterns or not all(isinstance(p, str) and p for p in patterns):
        raise CoramError(f"target_modules must be a regex or a list of names, found {targets!r}")
    if not isinstance(targets, str):
        return patterns
    try:
        re.compile(targets)
    except re.error as error:
        raise CoramError(f"target_modules: {targets!r} is not a regular expression: {error}") from None
    return targets
