"""Amplitude restoration: how far the geometric update is amplified, lambda = kappa * c."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from coram_hf.config import Balance, CoramConfig
from coram_hf.errors import CoramError

KAPPA_LOW_DISPERSION = 1.15
KAPPA_HIGH_DISPERSION = 0.5
UNEXPLORED_DISPERSION = (3.5, 16.0)
"""The paper has four bases with D <= 3.5, one with D = 16, and none in between."""

FOREIGN_UPDATE = 0.7
"""Relative update above which an expert was hardly fine-tuned from this base; unrelated weights have 1.4."""


@dataclass(frozen=True)
class UpdateNorms:
    """Squared Frobenius norms over a set of tensors: |W_0|^2, and |W_i - W_0|^2 by expert."""

    base: float
    updates: Mapping[str, float]

    def relative(self) -> dict[str, float]:
        """r_i = |dW_i| / |W_0|."""
        if self.base == 0:
            raise CoramError("the base's target matrices are all zero: relative updates are undefined")
        return {name: math.sqrt(square / self.base) for name, square in self.updates.items()}


@dataclass(frozen=True)
class Amplitude:
    """What the update norms say before merging: dispersion, balance factors, kappa, and lambda."""

    relative_updates: dict[str, float]
    factors: dict[str, float]
    dispersion: float
    unbalanced_dispersion: float
    kappa: float | None
    sqrt_n: float
    warnings: tuple[str, ...]

    def coefficient(self, config: CoramConfig, c_rms: float | None) -> float | None:
        """lambda: as given, or kappa times the scale; None while either is unknown."""
        if config.lam is not None:
            return config.lam
        scale = self.sqrt_n if config.scale == "sqrt_n" else c_rms
        return None if self.kappa is None or scale is None else self.kappa * scale


def measure_amplitude(norms: UpdateNorms, config: CoramConfig) -> Amplitude:
    """Everything about lambda that the experts' update norms decide."""
    relative = norms.relative()
    factors = balance_factors(relative, config.balance)
    balanced = {name: factors[name] * r for name, r in relative.items()}
    D = dispersion(balanced)
    weights = config.expert_weights(len(relative))
    kappa = config.kappa
    if kappa is None and math.isfinite(D):
        kappa = kappa_rule(D, config.dispersion_threshold)
    return Amplitude(
        relative_updates=relative,
        factors=factors,
        dispersion=D,
        unbalanced_dispersion=dispersion(relative),
        kappa=kappa,
        sqrt_n=ideal_contraction(weights),
        warnings=tuple(_warnings(relative, D, config)),
    )


def ideal_contraction(weights: Sequence[float]) -> float:
    """sqrt(N) for uniform weights, 1 / sqrt(sum w_i^2) in general."""
    return 1 / math.sqrt(math.fsum(w * w for w in weights))


def dispersion(relative: Mapping[str, float]) -> float:
    """D = max r / min r; infinite when an expert does not differ from the base."""
    smallest = min(relative.values())
    return max(relative.values()) / smallest if smallest > 0 else math.inf


def kappa_rule(D: float, threshold: float) -> float:
    """kappa = 1.15 if D < threshold else 0.5."""
    return KAPPA_LOW_DISPERSION if D < threshold else KAPPA_HIGH_DISPERSION


def balance_factors(relative: Mapping[str, float], balance: Balance | None) -> dict[str, float]:
    """f_i for W_i <- W_0 + f_i dW_i with m the median r_i: `damp` min(1, m / r_i), `equal` m / r_i.

    Experts equal to the base have nothing to scale: their f_i is 1, and they do not enter the median.
    """
    changed = [r for r in relative.values() if r > 0]
    if balance is None or not changed:
        return dict.fromkeys(relative, 1.0)
    middle = median(changed)
    factors = {name: middle / r if r > 0 else 1.0 for name, r in relative.items()}
    return {name: min(1.0, f) for name, f in factors.items()} if balance == "damp" else factors


def contraction(update_norms: Sequence[float], merged_norm: float) -> float | None:
    """c_RMS = RMS_i |dW_i| / |dW_merge|; None when either vanishes."""
    rms = math.sqrt(math.fsum(n * n for n in update_norms) / len(update_norms))
    return rms / merged_norm if rms > 0 and merged_norm > 0 else None


def require_coefficient(amplitude: Amplitude, config: CoramConfig) -> None:
    """Refuse to merge where the kappa rule has no answer and the caller gave none."""
    if config.lam is None and amplitude.kappa is None:
        raise CoramError(f"{_unchanged(amplitude.relative_updates)}; drop it, or pass kappa= or lam=")


def _unchanged(relative: Mapping[str, float]) -> str:
    names = ", ".join(repr(name) for name, r in relative.items() if r == 0)
    return (
        f"expert {names} does not differ from the base on the target matrices: the dispersion D is infinite"
    )


def _warnings(relative: Mapping[str, float], D: float, config: CoramConfig) -> list[str]:
    foreign = [f"{name!r} (r = {r:.2f})" for name, r in relative.items() if r >= FOREIGN_UPDATE]
    warnings = []
    if foreign:
        warnings.append(
            f"expert {', '.join(foreign)} differs from the base by about as much as unrelated weights do: "
            "the experts do not seem to share this base"
        )
    by_rule = config.lam_source == "rule"
    if math.isinf(D):
        return [*warnings, _unchanged(relative) + (" and the kappa rule does not apply" if by_rule else "")]
    low, high = UNEXPLORED_DISPERSION
    if low < D < high and by_rule:
        warnings.append(
            f"dispersion D = {D:.2f} lies between {low:g} and {high:g}, where the paper has no base: "
            f"kappa = {kappa_rule(D, config.dispersion_threshold):g} is an extrapolation; "
            "compare it with a lambda sweep if you can"
        )
    if D >= config.dispersion_threshold and config.balance is None:
        warnings.append(
            f"dispersion D = {D:.2f} is at or above the threshold {config.dispersion_threshold:g}: "
            'the experts are uneven; balance="damp" is recommended'
        )
    return warnings
