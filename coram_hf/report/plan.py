"""MergePlan: what a merge will do, known before any merging."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coram_hf.report.kinds import count_kinds, kind_lines
from coram_hf.report.tables import Facts, Shown, Table
from coram_hf.report.text import json_values

if TYPE_CHECKING:
    from coram_hf.inputs.transplant import Transplant


@dataclass(frozen=True, repr=False)
class MergePlan(Shown):
    """What becomes of every parameter, and what follows from the experts' update norms.

    `kappa` and `lam` are None where they cannot be known yet: the rule has no answer when an expert
    equals the base (`dispersion` is infinite), and c_RMS is measured during the merge.
    `surroundings` says whose tokenizer, chat template, generation config and special tokens the result has.
    `tied` maps the other names of a tied parameter to the name under which it is merged; `kinds` says what
    every parameter is: attention, mlp, norm and so on. `transplants` says for experts with a base of their
    own which tensors were matched, which stayed at the base, and which were left out.
    """

    line: str
    targets: tuple[str, ...]
    residual: tuple[str, ...]
    kept: tuple[str, ...]
    tied: Mapping[str, str]
    sizes: Mapping[str, int]
    kinds: Mapping[str, str]
    relative_updates: dict[str, float]
    balance_factors: dict[str, float]
    dispersion: float
    unbalanced_dispersion: float
    kappa: float | None
    lam: float | None
    outside_share: dict[str, float]
    vocabulary: dict[str, dict[str, int]]
    transplants: Mapping[str, Transplant]
    surroundings: dict[str, str]
    warnings: tuple[str, ...]

    @property
    def parameter_counts(self) -> dict[str, int]:
        """How many parameters are target, residual and kept, and how many have a tied second name."""
        parts = self._parts | {"tied": tuple(self.tied.values())}
        return {part: sum(self.sizes[name] for name in names) for part, names in parts.items()}

    @property
    def kind_counts(self) -> dict[str, dict[str, int]]:
        """By kind: the number of tensors, and of parameters that are target, residual and kept."""
        return count_kinds(self.kinds, self.sizes, self._parts)

    @property
    def _parts(self) -> dict[str, tuple[str, ...]]:
        return {"target": self.targets, "residual": self.residual, "kept": self.kept}

    @property
    def _amplitude(self) -> dict[str, float | None]:
        """Kappa and lambda, unless the method has neither."""
        found = {"kappa": self.kappa, "lambda": self.lam}
        return found if any(value is not None for value in found.values()) else {}

    @property
    def patterns(self) -> dict[str, int]:
        """The target names with layer numbers replaced by *, and how many targets each stands for."""
        found: dict[str, int] = {}
        for name in self.targets:
            pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
            found[pattern] = found.get(pattern, 0) + 1
        return found

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON values; targets are given by pattern."""
        names = ("line", "dispersion", "unbalanced_dispersion", "kappa", "lam", "relative_updates")
        more = ("balance_factors", "outside_share", "vocabulary", "surroundings", "warnings")
        return json_values(
            {name: getattr(self, name) for name in (*names, *more)}
            | {"parameters": self.parameter_counts, "kinds": self.kind_counts, "targets": self.patterns}
            | {"transplants": transplant_lines(self.transplants)}
        )

    def __str__(self) -> str:
        counts = self.parameter_counts
        amplitude = "".join(f", {name} {_known(value)}" for name, value in self._amplitude.items())
        lines = [
            f"{self.line}: D {self.dispersion:.3g}{amplitude}",
            *(
                f"  {part}: {len(names)} tensors, {counts[part]:,} parameters"
                for part, names in self._parts.items()
            ),
            *(
                f"  tied: {name} = {first}, {self.sizes[first]:,} parameters"
                for name, first in self.tied.items()
            ),
            *(f"  {kind}: {counted}" for kind, counted in kind_lines(self.kind_counts).items()),
            *(f"  {count} x {pattern}" for pattern, count in self.patterns.items()),
            *(f"  r({name}) = {r:.4g}" for name, r in self.relative_updates.items()),
            *(f"  {what}: {words}" for what, words in transplant_lines(self.transplants).items()),
            *(f"  {part}: {whose}" for part, whose in self.surroundings.items()),
            *(f"  warning: {warning}" for warning in self.warnings),
        ]
        return "\n".join(lines)

    def facts(self) -> Facts:
        counts = self.parameter_counts
        parts = {
            part: f"{len(names):,} tensors, {counts[part]:,} parameters"
            for part, names in self._parts.items()
        }
        return Facts(
            f"Plan: {self.line}",
            {"dispersion D": self.dispersion, **self._amplitude, **parts}
            | kind_lines(self.kind_counts)
            | transplant_lines(self.transplants)
            | self.surroundings,
            Table(
                "Experts",
                ("expert", "r_i", "balance f_i", "update outside targets"),
                [
                    (name, r, self.balance_factors[name], self.outside_share[name])
                    for name, r in self.relative_updates.items()
                ],
            ),
            self.warnings,
        )


def transplant_lines(transplants: Mapping[str, Transplant]) -> dict[str, str]:
    """What was matched, what stayed and what was left out, for every expert."""
    return {
        f"{name}, {what}": words
        for name, found in transplants.items()
        for what, words in found.lines().items()
    }


def _known(value: float | None) -> str:
    return "not known yet" if value is None else f"{value:.4g}"
