"""CoramConfig: every option of a CORAM merge."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Annotated, Any, Literal, Protocol, Self, get_args, get_type_hints

from coram_hf.config.declared import Checked, Declared, Range, check_names, declared
from coram_hf.config.factors import Factors, check_count, check_factors
from coram_hf.config.line import (
    DEFAULT_HEIGHT,
    PRESET,
    Branch,
    Conflict,
    Decorrelate,
    LineFields,
    Residual,
    Spread,
    read_line,
    write_line,
)
from coram_hf.config.residual import check_pathway, check_residual_parameters
from coram_hf.config.saved import Saved
from coram_hf.config.settings import Place
from coram_hf.config.weights import Weighing, Weights, normalized_weights, weigh
from coram_hf.errors import CoramError

Scale = Literal["sqrt_n", "c_rms", "neutral"]
Balance = Literal["damp", "root", "equal", "auto"]
ComputeDtype = Literal["auto", "float64", "float32"]


def check_modules(option: str, targets: str | Sequence[str]) -> str | tuple[str, ...]:
    """Return a regular expression, or name suffixes as a tuple; raise for anything else."""
    patterns = (targets,) if isinstance(targets, str) or not isinstance(targets, Iterable) else tuple(targets)
    if not patterns or not all(isinstance(p, str) and p for p in patterns):
        raise CoramError(f"{option} must be a regex or a list of names, found {targets!r}")
    if not isinstance(targets, str):
        return patterns
    try:
        re.compile(targets)
    except re.error as error:
        raise CoramError(f"{option}: {targets!r} is not a regular expression: {error}") from None
    return targets


BalanceOption = Annotated[
    Balance | None,
    "Rescale uneven experts first: damp shrinks those above the median update to it, root by the square root "
    "of that factor, equal brings all to the median; auto is root if D is at or above the threshold. Not "
    "part of the paper.",
]
FactorsOption = Annotated[
    Factors | None,
    Checked(check_factors),
    "Rescale every expert's update by a fixed factor, or by one per group of modules or layer, in place of "
    "balance; calibration fits them. Not part of the paper.",
]
TargetModules = Annotated[
    str | tuple[str, ...] | None,
    Checked(partial(check_modules, "target_modules")),
    "Modules to merge geometrically: a regular expression, name suffixes, or all-linear; by default the "
    "attention and MLP projections.",
]
Keep = Annotated[
    str | tuple[str, ...] | None,
    Checked(partial(check_modules, "keep")),
    "Modules to leave at the base, with everything in them: a regular expression, or name suffixes.",
]


ResidualParameters = Annotated[
    dict[str, Any] | None,
    Checked(check_residual_parameters),
    "Parameters of the residual pathway: scale; density and trim (tensor or global) of ties; rank of tsvm. "
    "On the command line as density=0.3,trim=global.",
]
AmplitudeOption = Annotated[
    float | None,
    Range("(0, inf)"),
    "Rescale a baseline's update of the target matrices to this multiple of the RMS of the experts' "
    "(balanced) updates.",
]


class Options:
    """A dataclass that checks its declared options on creation."""

    def __post_init__(self) -> None:
        for name, option in options_of(type(self)).items():
            object.__setattr__(self, name, option.checked(getattr(self, name)))


def options_of(cls: type) -> dict[str, Declared]:
    """The options declared by the fields of a dataclass."""
    if cls not in _OPTIONS:
        _OPTIONS[cls] = _read_options(cls)
    return _OPTIONS[cls]


_OPTIONS: dict[type, dict[str, Declared]] = {}


def _read_options(cls: Any) -> dict[str, Declared]:
    hints = get_type_hints(cls, include_extras=True)
    defaults = {f.name: f.default for f in fields(cls)}
    return declared({name: hints[name] for name in defaults}, defaults)


@dataclass(frozen=True)
class Shared(Options):
    """The options of every method; only CORAM has kappa and lambda in place of an amplitude."""

    weights: Weights = None
    balance: BalanceOption = None
    target_modules: TargetModules = None
    amplitude: AmplitudeOption = None
    keep: Keep = None

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain values."""
        plain: dict[str, Any] = as_plain(asdict(self))
        return plain


@dataclass(frozen=True)
class CoramConfig(Options, Saved):
    """Every option of a CORAM merge; the defaults are the paper's plain `full` line with its kappa rule."""

    slice_height: Annotated[int, Range("[1, inf)"), "Rows per slice, h."] = DEFAULT_HEIGHT
    branch: Annotated[
        Branch,
        "Merged factors: full is Q, dS and V, lr is Q and V; the other subsets are diagnostic.",
    ] = "full"
    conflict: Annotated[
        Conflict | None,
        "Columns merged geometrically: nca the agreeing ones, ca the conflicting ones; +ave adds the "
        "weighted mean of the others back.",
    ] = None
    spread: Annotated[
        Spread | None, "Priority by which rows are dealt over slices; by default rows stay contiguous."
    ] = None
    residual: Annotated[
        Residual | None, "Merge of the non-target parameters; by default they stay at the base."
    ] = None
    residual_parameters: ResidualParameters = None
    decorrelate: Annotated[
        Decorrelate | None,
        "Change the experts' updates first so that they use different directions: tsv by their singular "
        "vectors, ridge by regression in the input space, wudi by regression on the inputs that they use "
        "most, auto by tsv where its rank keeps the updates and else by wudi; lambda is then "
        "kappa * c_RMS. Not part of the paper.",
    ] = None
    kappa: Annotated[
        float | None, Range("(0, inf)"), "Restoration strength; by default from the dispersion D."
    ] = None
    scale: Annotated[
        Scale,
        "What kappa multiplies: sqrt(N); the measured c_RMS, as always after decorrelation; or neutral (not "
        "part of the paper), the lambda at which the merge changes neutral text as much as a typical expert, "
        "within a limit.",
    ] = "sqrt_n"
    lam: Annotated[float | None, "Amplification coefficient; by default kappa * scale."] = None
    lambda_step: Annotated[
        float | None,
        Range("(0, 1]"),
        "Round kappa * scale to a multiple of this, as the paper does with 0.1; a given lambda is kept.",
    ] = None
    dispersion_threshold: Annotated[
        float, Range("(0, inf)"), "D at which the rule changes from kappa 1.15 to 0.5."
    ] = 7.5
    weights: Weights = None
    balance: BalanceOption = None
    factors: FactorsOption = None
    target_modules: TargetModules = None
    keep: Keep = None
    compute_dtype: Annotated[
        ComputeDtype,
        "Precision of the large products: auto is float32 where base, experts and result have 16 bits "
        "(slices that could differ by 1e-5 of the update take float64), and float64 elsewhere.",
    ] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pathway(self.residual, self.residual_parameters)
        if self.factors is not None and self.balance is not None:
            raise CoramError(
                f"factors and balance={self.balance!r} are mutually exclusive; factors replace the balance"
            )

    @classmethod
    def recommended(cls, **options: Any) -> CoramConfig:
        """The configuration that we recommend for experts in general; `options` override its fields."""
        return cls.from_dict({**RECOMMENDED, **options})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """A config from named values; the error for an unknown name suggests the closest valid one."""
        check_names(values, list(options_of(cls)), "CoramConfig option")
        return cls(**values)

    @classmethod
    def from_report(cls, report: Report) -> CoramConfig:
        """The config recorded in a report, to repeat its merge."""
        if report.slice_height is None:
            raise CoramError(f"the merge was made by {report.method}, which has no CoramConfig")
        return cls.from_dict(report.config)

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain values, the inverse of `from_dict`."""
        plain: dict[str, Any] = as_plain(asdict(self))
        return plain

    @classmethod
    def from_line(cls, line: str, **options: Any) -> CoramConfig:
        """A config from the paper's name for it, e.g. `SS(ca+ave,variance).ties`, or from `recommended`."""
        if line == PRESET:
            return cls.recommended(**options)
        stated = read_line(line)
        repeated = stated.keys() & options.keys()
        if repeated:
            raise CoramError(f"{', '.join(sorted(repeated))}: already given by the line {line!r}")
        return cls.from_dict({**stated, **options})

    @property
    def line(self) -> str:
        """The paper's name for this configuration, the inverse of `from_line`."""
        return write_line(LineFields(*(getattr(self, name) for name in LineFields._fields)))

    @property
    def residual_lines(self) -> tuple[str, ...]:
        """This line with each of the residual pathways."""
        return tuple(
            replace(self, residual=residual, residual_parameters=None).line for residual in get_args(Residual)
        )

    @property
    def shared(self) -> Shared:
        """The options shared with other methods."""
        return Shared(self.weights, self.balance, self.target_modules, keep=self.keep)

    def expert_weights(self, n_experts: int) -> tuple[float, ...]:
        """w_i for N experts, summing to 1."""
        return normalized_weights(self.weights, n_experts)

    def weighing(self, n_experts: int, place: Place | None = None) -> Weighing:
        """The weights of N experts for the tensor at a place, and their signs."""
        return weigh(self.weights, n_experts, place)

    def at(self, place: Place, n_experts: int) -> CoramConfig:
        """This configuration with the weights of one tensor, as plain numbers without signs."""
        return self if self.weights is None else replace(self, weights=self.weighing(n_experts, place).shares)

    def expert_factors(self, n_experts: int) -> Factors | None:
        """The factors, if any; raises unless there are some for every expert."""
        if self.factors is not None:
            check_count(self.factors, n_experts)
        return self.factors


RECOMMENDED = {"decorrelate": "auto", "balance": "auto", "scale": "neutral", "kappa": 1.15}
"""Chosen on the validation questions of examples/suite, whose README has the numbers."""


class Report(Protocol):
    """The part of a MergeReport that `from_report` reads."""

    @property
    def method(self) -> str: ...
    @property
    def slice_height(self) -> int | None: ...
    @property
    def config(self) -> dict[str, Any]: ...


def as_plain(values: Any) -> Any:
    """JSON values: dictionaries, and lists in place of tuples."""
    if isinstance(values, dict):
        return {key: as_plain(value) for key, value in values.items()}
    return [as_plain(value) for value in values] if isinstance(values, tuple) else values


def describe(cls: type) -> None:
    """Add the help of the declared options to the docstring of a dataclass."""
    lines = [f"    {name}: {option.summary}" for name, option in options_of(cls).items()]
    cls.__doc__ = "\n".join([f"{cls.__doc__}\n", *lines])


describe(Shared)
describe(CoramConfig)
