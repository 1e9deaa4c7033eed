"""MergeReport: the record of one merge, written beside the merged weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

from coram_hf.amplitude import effective_kappa
from coram_hf.config.saved import REPORT_FILE
from coram_hf.errors import CoramError
from coram_hf.outputs.files import write_whole
from coram_hf.report.calibration import Calibration
from coram_hf.report.cost import cost_lines
from coram_hf.report.kinds import kind_lines
from coram_hf.report.tables import Facts, Shown, Table
from coram_hf.report.text import json_values, numbers_again

NOTABLE_ROUNDING = 0.25
"""A warning is given if rounding loses more than this share of the update's norm."""

REPORT_NAME = REPORT_FILE
MEASURED = (
    "relative_updates",
    "balance_factors",
    "outside_share",
    "retention",
    "orthogonality_errors",
    "adapter_errors",
    "decorrelation",
)
"""Fields that map names to numbers."""

DECORRELATION = {
    "c_rms_ratio": "c_RMS / sqrt(N) after decorrelation",
    "overlap_before": "overlap of the experts' inputs before",
    "overlap_after": "overlap of the experts' inputs after",
}
"""What the numbers about decorrelation are called in tables and cards."""

LIBRARIES = (
    "coram-hf",
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "safetensors",
    "huggingface-hub",
    "numpy",
)


FINDING = "finding lambda"
"""The phase of a merge's cost in which models are asked for its lambda."""


@dataclass(frozen=True, repr=False)
class MergeReport(Shown):
    """What was merged, how its amplitude was chosen, and what happened during the merge.

    method: "coram" or the name of a baseline; line: the paper's name of the configuration.
    config: every option of the method. Lambda, kappa and the slice height are CORAM's alone.
    dispersion: D of the updates that were merged; unbalanced_dispersion: D before `balance`.
    relative_updates: r_i by expert; balance_factors: f_i.
    sqrt_n: the ideal contraction scale, sqrt(N), or 1 / sqrt(sum w_i^2) with weights.
    kappa: given, or by the rule; lam_source: "rule" (kappa from D), "kappa" (given), "amplitude" (a given),
    "neutral" (kappa times the neutral scale), "given" (lambda was passed, and kappa was not used) or
    "calibrated" (found from unlabelled prompts). calibration: how, as the fields of a `Calibration`.
    neutral: for the neutral scale, its value, and the divergences from the base per token of neutral text:
    of the experts, of the typical one that balance and weights make of them, the target, which has a limit,
    and that of the merge.
    amplitude: a = |lambda (W_merge - W_0)| / RMS_i |W_i - W_0| on the targets, of the balanced updates before
    any decorrelation, so that a decorrelated merge has a = kappa.
    decorrelation: c_rms_ratio, RMS_i |tau~_i| / |W_merge - W_0| / sqrt(N) of the decorrelated updates, is 1
    if they are at right angles; overlap_before and overlap_after are the mean over pairs of experts
    of <G_i, G_j> / (|G_i| |G_j|), with G_i = tau_i^T tau_i and sums over all targets; for matrices with more
    than 256 inputs they are estimated from 16 random directions. Empty without decorrelation.
    counts: targets, residual, slices, det_flips, near_pi, and slices that were merged from products in
    float32, had to take float64 or an SVD in their place, or have no frame.
    float32_difference: |update in float32 - update in float64| / |update| of the first and the last slice of
    every matrix's first chunk, if any were merged in float32.
    outside_share: per expert, the norm of its update outside the targets over that of its whole update;
    left_at_base: this share over all experts together, as far as it stayed at the base.
    rounding_loss: |error of rounding to the model's dtype| / |update|, over all written tensors.
    expert_kinds: "full", or the PEFT type of an adapter.
    orthogonality_errors: max |R^T R - I| of the rotations of OFT adapters.
    adapter: if the merge is stored as an adapter, its PEFT type, and for LoRA the requested rank or energy
    and the relative error over all matrices; adapter_ranks, adapter_errors: by module.
    vocabulary: per expert, tokens matched, added and dropped, where vocabularies differ.
    surroundings: whose tokenizer, chat template, generation config and special tokens the result has.
    sources: for the base ("") and every expert, the folder or Hub repository, its commit, a hash of its files
    (names, sizes, first megabytes), and the license, languages and datasets of its card, where known.
    companions: which of tokenizer, chat_template and processor were saved beside the weights.
    transplants: per expert with a base of its own, the tensors that were matched, stayed and were left out.
    retention: |W_merge - W_0| / RMS_i |W_i - W_0| by kind of parameter (attention, mlp, norm and so on).
    kinds: per kind, the number of tensors, and of parameters that were target, residual and kept.
    worst_condition: the largest condition number of a slice of the base that has a frame.
    model_class: that of the result; library: the one that loads it; dtype, options: as requested; files: size
    and sha256 of the weight files.
    cost: seconds by phase of the run that finished the merge, and its peak memory in bytes; no two runs take
    the same, so reports are equal without it.
    """

    method: str
    line: str
    config: dict[str, Any]
    n_experts: int
    slice_height: int | None
    dispersion: float
    unbalanced_dispersion: float
    relative_updates: dict[str, float]
    balance_factors: dict[str, float]
    kappa: float | None
    lam: float | None
    lam_source: str | None
    sqrt_n: float
    c_rms: float | None
    counts: dict[str, int]
    outside_share: dict[str, float]
    left_at_base: float
    rounding_loss: float
    vocabulary: dict[str, dict[str, int]]
    expert_kinds: dict[str, str]
    orthogonality_errors: dict[str, float]
    warnings: tuple[str, ...]
    versions: dict[str, str]
    model_class: str = ""
    dtype: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)
    retention: dict[str, float] = field(default_factory=dict)
    kinds: dict[str, dict[str, int]] = field(default_factory=dict)
    worst_condition: float | None = None
    float32_difference: float | None = None
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    adapter: dict[str, Any] = field(default_factory=dict)
    adapter_ranks: dict[str, int] = field(default_factory=dict)
    adapter_errors: dict[str, float] = field(default_factory=dict)
    amplitude: float | None = None
    decorrelation: dict[str, float | None] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)
    neutral: dict[str, Any] = field(default_factory=dict)
    transplants: dict[str, dict[str, str]] = field(default_factory=dict)
    companions: tuple[str, ...] = ()
    surroundings: dict[str, str] = field(default_factory=dict)
    library: str = "transformers"
    cost: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def effective_kappa(self) -> float | None:
        """lambda / scale, which differs from kappa where lambda was given or rounded; also in `to_dict`."""
        return effective_kappa(self.lam, self.scale[1])

    @property
    def scale(self) -> tuple[str, float | None]:
        """What lambda is a multiple of, by name, and its value."""
        if self.neutral:
            return "neutral scale", self.neutral["scale"]
        return ("c_RMS", self.c_rms) if self.by_contraction else ("sqrt(N)", self.sqrt_n)

    @property
    def by_contraction(self) -> bool:
        """Whether the scale of lambda is c_RMS: as asked for, after decorrelation, or for an amplitude."""
        asked = self.config.get("scale") in ("c_rms", "neutral")
        return asked or any(self.config.get(key) is not None for key in ("decorrelate", "amplitude"))

    def with_rounding(self, loss: float, dtype: torch.dtype) -> MergeReport:
        """The report with the share of the update that rounding to `dtype` lost, and a warning if large."""
        warnings = [warning for warning in self.warnings if not warning.startswith("rounding")]
        if loss > NOTABLE_ROUNDING and dtype.itemsize < 4:
            warnings.append(
                f"rounding to {dtype} lost {loss:.0%} of the merged update; "
                'dtype="float32" (--dtype float32) would keep it'
            )
        return replace(self, rounding_loss=loss, warnings=tuple(warnings))

    def with_calibration(self, found: Calibration) -> MergeReport:
        """The report of a merge whose lambda, and factors if any, come from a calibration."""
        warnings = (*self.warnings, *found.warnings)
        return replace(self, lam_source="calibrated", calibration=found.to_dict(), warnings=warnings)

    def with_neutral(self, found: dict[str, Any]) -> MergeReport:
        """The report of a merge whose lambda is a multiple of the neutral scale."""
        return replace(self, lam_source="neutral", neutral=found)

    def with_search(self, cost: Mapping[str, Any]) -> MergeReport:
        """The report of a merge whose lambda was found at this cost; the opening is known already."""
        if not (self.cost and cost):
            return self
        spent = sum(seconds for phase, seconds in cost["seconds"].items() if phase != "opening")
        peak = max(self.cost["peak_memory"], cost["peak_memory"])
        return replace(self, cost={"seconds": {**self.cost["seconds"], FINDING: spent}, "peak_memory": peak})

    def chosen_as(self, other: MergeReport) -> MergeReport:
        """The report of the same merge, made again with the lambda that the other one found."""
        warnings = (*self.warnings, *other.calibration.get("warnings", ()))
        return replace(
            self.with_search(other.cost),
            lam_source=other.lam_source,
            calibration=other.calibration,
            neutral=other.neutral,
            warnings=warnings,
        )

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values; an infinite dispersion becomes the string "inf"."""
        plain: dict[str, Any] = json_values({**asdict(self), "effective_kappa": self.effective_kappa})
        return plain

    @classmethod
    def load(cls, folder: str | Path) -> MergeReport:
        """Read coram_report.json from a folder."""
        path = Path(folder) / REPORT_NAME
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            known = {f.name for f in fields(cls)}
            read: dict[str, Any] = {
                k: numbers_again(v) if k in MEASURED or not isinstance(v, dict) else v
                for k, v in values.items()
                if k in known
            }
            read |= {key: tuple(read[key]) for key in ("warnings", "companions") if key in read}
            return cls(**read)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CoramError(f"{path} is damaged: {type(error).__name__}: {error}") from error

    def save(self, folder: str | Path) -> Path:
        """Write coram_report.json into a folder."""
        path = Path(folder) / REPORT_NAME
        write_whole(path, json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n")
        return path

    def facts(self) -> Facts:
        counts = self.counts
        return Facts(
            f"Merge: {self.line}",
            {
                "dispersion D": self.dispersion,
                "kappa": self.kappa,
                "lambda": self.lam,
                "effective kappa": self.effective_kappa,
                "c_RMS": self.c_rms,
                "sqrt(N)": self.sqrt_n,
                "amplitude a": self.amplitude,
                **{DECORRELATION[key]: value for key, value in self.decorrelation.items()},
                "merged tensors": counts.get("targets", 0) + counts.get("residual", 0),
                "slices without a frame": counts.get("frameless"),
                "slices merged in float32": counts.get("float32"),
                "update left at the base": self.left_at_base,
                "lost by rounding": self.rounding_loss,
                **kind_lines(self.kinds),
                **self.surroundings,
                **cost_lines(self.cost, self.lam_source),
            },
            Table(
                "Experts",
                ("expert", "kind", "r_i", "balance f_i", "update outside targets"),
                [
                    (
                        name,
                        self.expert_kinds.get(name),
                        r,
                        self.balance_factors.get(name),
                        self.outside_share.get(name),
                    )
                    for name, r in self.relative_updates.items()
                ],
            ),
            self.warnings,
        )


def library_versions() -> dict[str, str]:
    """Versions of the installed libraries that a merge depends on."""
    found = {}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found
