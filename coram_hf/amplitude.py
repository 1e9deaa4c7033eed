"""Amplitude restoration: by how much the geometric update is amplified, lambda = kappa * c."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from statistics import median
from typing import Literal

from coram_hf.config import Balance, CoramConfig, Factors, Place, Scale, typical_weights
from coram_hf.errors import CoramError

KAPPA_LOW_DISPERSION = 1.15
KAPPA_HIGH_DISPERSION = 0.5
UNEXPLORED_DISPERSION = (3.5, 16.0)
"""The paper tests four bases with D <= 3.5, one with D = 16, and none in between."""

FOREIGN_UPDATE = 0.7
"""Relative update above which an expert was probably not fine-tuned from the base (unrelated: 1.4)."""

Wanted = Literal["nothing", "side", "exact"]


@dataclass(frozen=True)
class UpdateNorms:
    """Squared Frobenius norms over a set of tensors: |W_0|^2, and |W_i - W_0|^2 per expert.

    rescaled: |f_i (W_i - W_0)|^2 per expert with the configured factors, if there are any.
    """

    base: float
    updates: Mapping[str, float]
    rescaled: Mapping[str, float] | None = None

    def relative(self) -> dict[str, float]:
        """r_i = |dW_i| / |W_0|."""
        if self.base == 0:
            raise CoramError(
                "the base's target matrices are all zero, so relative updates are undefined; check the base"
            )
        return {name: math.sqrt(square / self.base) for name, square in self.updates.items()}

    def factors(self) -> dict[str, float] | None:
        """|f_i dW_i| / |dW_i| of the configured factors: f_i, or its mean over groups of modules."""
        if self.rescaled is None:
            return None
        squares = ((name, square, self.rescaled[name]) for name, square in self.updates.items())
        return {name: math.sqrt(scaled / square) if square else 1.0 for name, square, scaled in squares}


@dataclass(frozen=True)
class Strength:
    """The requested strength of a merge; a method without amplification has lam = 1.

    weights: w_i, summing to 1. threshold: D at which the kappa rule changes. step: lambda = kappa * scale is
    rounded to a multiple of it. factors: f_i as given, in place of a balance. amplitude: a for
    lambda = a * c_RMS, in place of kappa and lambda. members: experts that are deliberately the base itself.
    """

    weights: tuple[float, ...]
    balance: Balance | None = None
    kappa: float | None = None
    scale: Scale = "sqrt_n"
    lam: float | None = None
    threshold: float = 7.5
    step: float | None = None
    factors: Factors | None = None
    amplitude: float | None = None
    members: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: CoramConfig, n_experts: int, targets: Iterable[Place] = ()) -> Strength:
        """The strength requested by a configuration; after decorrelation, the scale is always c_RMS.

        It is c_RMS for the neutral scale as well, which is measured later, on the finished merge. `targets`:
        the places of the targets, for weights that differ by layer or module.
        """
        by_size = config.scale == "sqrt_n" and config.decorrelate is None
        return cls(
            typical_weights(config.weights, n_experts, targets),
            config.balance,
            config.kappa,
            "sqrt_n" if by_size else "c_rms",
            config.lam,
            config.dispersion_threshold,
            config.lambda_step,
            config.expert_factors(n_experts),
        )

    @property
    def source(self) -> str:
        """How lambda is determined: "given", "amplitude", "kappa" (given) or "rule" (kappa from D)."""
        if self.amplitude is not None:
            return "amplitude"
        return "given" if self.lam is not None else "kappa" if self.kappa is not None else "rule"

    @property
    def measures_contraction(self) -> bool:
        """Whether lambda depends on c_RMS, which takes a pass over all targets to measure."""
        return self.amplitude is not None or (self.lam is None and self.scale == "c_rms")


def wanted(strength: Strength) -> Wanted:
    """What must be known before merging: exact update norms, the side of D's threshold, or nothing."""
    if strength.balance is not None:
        return "exact"
    by_rule = strength.source == "rule" and strength.scale == "sqrt_n"
    return "side" if by_rule else "nothing"


@dataclass(frozen=True)
class Amplitude:
    """What follows from strength and update norms: dispersion, factors, kappa, and lambda.

    balance: f_i of the balance, in expert order; factors: these, or the mean of given ones over the targets.
    Without norms the dispersion is NaN and nothing is balanced.
    lam: None while unknown, because D is infinite under the rule or c_RMS is not measured yet.
    """

    relative_updates: dict[str, float]
    balance: tuple[float, ...]
    factors: tuple[float, ...]
    dispersion: float
    unbalanced_dispersion: float
    kappa: float | None
    sqrt_n: float
    lam: float | None
    warnings: tuple[str, ...] = ()


def choose(norms: UpdateNorms | None, strength: Strength, c_rms: float | None = None) -> Amplitude:
    """Determine lambda: as given, amplitude * c_RMS, or kappa times sqrt(N) or c_RMS, on a grid if asked."""
    n_experts, ideal = len(strength.weights), ideal_contraction(strength.weights)
    relative = {} if norms is None else norms.relative()
    balance = balance_factors(relative, strength.balance, strength.threshold)
    factors = (norms and norms.factors()) or balance
    apart = {name: r for name, r in relative.items() if name not in strength.members} or relative
    balanced = {name: factors[name] * r for name, r in apart.items()}
    D = dispersion(balanced) if balanced else math.nan
    kappa = strength.kappa
    if kappa is None and math.isfinite(D):
        kappa = kappa_rule(D, strength.threshold)
    lam = strength.lam
    if strength.amplitude is not None:
        kappa, lam = None, None if c_rms is None else strength.amplitude * c_rms
    elif lam is None:
        scale = ideal if strength.scale == "sqrt_n" else c_rms
        lam = None if kappa is None or scale is None else on_grid(kappa * scale, strength.step)
    return Amplitude(
        relative_updates=relative,
        balance=tuple(balance.values()) or (1.0,) * n_experts,
        factors=tuple(factors.values()) or (1.0,) * n_experts,
        dispersion=D,
        unbalanced_dispersion=dispersion(apart) if apart else math.nan,
        kappa=kappa,
        sqrt_n=ideal,
        lam=lam,
        warnings=tuple(_warnings(apart, D, strength)) if apart else (),
    )


def require_kappa(amplitude: Amplitude, strength: Strength) -> None:
    """Raise if the kappa rule does not apply and neither kappa nor lambda is given."""
    if strength.lam is None and amplitude.kappa is None and amplitude.relative_updates:
        raise CoramError(
            f"{_unchanged(amplitude.relative_updates)}; drop it, or pass kappa= (--kappa) or lam= (--lambda)"
        )


def ideal_contraction(weights: Sequence[float]) -> float:
    """1 / sqrt(sum w_i^2), which is sqrt(N) for uniform weights."""
    return 1 / math.sqrt(math.fsum(w * w for w in weights))


def on_grid(lam: float, step: float | None) -> float:
    """The multiple of `step` nearest to lambda, at least one step; lambda itself without a step.

    In decimals, so that 26 steps of 0.1 are 2.6 and not 2.6000000000000005.
    """
    if step is None:
        return lam
    width = Decimal(str(float(step)))
    count = (Decimal(lam) / width).to_integral_value(ROUND_HALF_UP)
    return float(max(count, Decimal(1)) * width)


def effective_kappa(lam: float | None, scale: float | None) -> float | None:
    """lambda / scale, the kappa that this lambda stands for; None where either is unknown."""
    return lam / scale if lam is not None and scale else None


def dispersion(relative: Mapping[str, float]) -> float:
    """D = max r / min r; infinite when an expert does not differ from the base."""
    smallest = min(relative.values())
    return max(relative.values()) / smallest if smallest > 0 else math.inf


def kappa_rule(D: float, threshold: float) -> float:
    """kappa = 1.15 if D < threshold else 0.5."""
    return KAPPA_LOW_DISPERSION if D < threshold else KAPPA_HIGH_DISPERSION


def balance_factors(
    relative: Mapping[str, float], balance: Balance | None, threshold: float = 7.5
) -> dict[str, float]:
    """f_i for W_i <- W_0 + f_i dW_i with m the median r_i.

    `damp`: min(1, m / r_i); `root`: min(1, sqrt(m / r_i)); `equal`: m / r_i; `auto`: as `root` where D is at
    or above the threshold, else 1. Experts equal to the base have f_i = 1 and enter neither the median nor D.
    """
    changed = [r for r in relative.values() if r > 0]
    if balance is None or not changed or (balance == "auto" and max(changed) / min(changed) < threshold):
        return dict.fromkeys(relative, 1.0)
    middle = median(changed)
    factors = {name: middle / r if r > 0 else 1.0 for name, r in relative.items()}
    if balance == "equal":
        return factors
    return {name: min(1.0, f if balance == "damp" else math.sqrt(f)) for name, f in factors.items()}


def contraction(update_norms: Sequence[float], merged_norm: float) -> float | None:
    """c_RMS = RMS_i |dW_i| / |dW_merge|; None when either vanishes."""
    rms = math.sqrt(math.fsum(n * n for n in update_norms) / len(update_norms))
    return rms / merged_norm if rms > 0 and merged_norm > 0 else None


def balanced_contraction(norms: UpdateNorms, factors: Sequence[float], merged_square: float) -> float | None:
    """c_RMS of the balanced updates f_i dW_i, for a merged update with the given squared norm."""
    balanced = [f * square**0.5 for f, square in zip(factors, norms.updates.values(), strict=True)]
    return contraction(balanced, merged_square**0.5)


def relative_size(lam: float | None, c_rms: float | None) -> float | None:
    """a = |lambda dW_merge| / RMS_i |dW_i| = lambda / c_RMS; without amplification, lambda is 1."""
    return None if c_rms is None else (1.0 if lam is None else lam) / c_rms


def _unchanged(relative: Mapping[str, float]) -> str:
    names = [repr(name) for name, r in relative.items() if r == 0]
    who = f"expert {names[0]} does" if len(names) == 1 else f"experts {', '.join(names)} do"
    return f"{who} not differ from the base on the target matrices: the dispersion D is infinite"


def _warnings(relative: Mapping[str, float], D: float, strength: Strength) -> list[str]:
    foreign = [f"{name!r} (r = {r:.2f})" for name, r in relative.items() if r >= FOREIGN_UPDATE]
    warnings = []
    if foreign:
        who = f"expert {foreign[0]} differs" if len(foreign) == 1 else f"experts {', '.join(foreign)} differ"
        warnings.append(
            f"{who} from the base by about as much as unrelated weights do: "
            "the experts do not seem to share this base"
        )
    by_rule = strength.source == "rule"
    if math.isinf(D):
        return [*warnings, _unchanged(relative) + (" and the kappa rule does not apply" if by_rule else "")]
    low, high = UNEXPLORED_DISPERSION
    if low < D < high and by_rule:
        warnings.append(
            f"dispersion D = {D:.2f} lies between {low:g} and {high:g}, where the paper has no base: "
            f"kappa = {kappa_rule(D, strength.threshold):g} is an extrapolation; "
            "compare it with a lambda sweep if you can"
        )
    if D >= strength.threshold and strength.balance is None and strength.factors is None:
        warnings.append(
            f"dispersion D = {D:.2f} is at or above the threshold {strength.threshold:g}: "
            'the experts are uneven; balance="root" (--balance root) is recommended'
        )
    return warnings
