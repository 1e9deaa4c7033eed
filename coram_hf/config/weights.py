"""Weights of the experts: one number or setting per expert, of either sign.

w_i = |weight_i| / sum_j |weight_j|. An expert with a negative weight takes part as its mirror image
W_0 - tau_i, so that the merged model moves away from it. Weights may differ by layer and module.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from coram_hf.config.declared import Checked, check_number
from coram_hf.config.settings import Place, Setting, check_setting, setting_at, varies
from coram_hf.errors import CoramError


def check_weights(weights: Iterable[Any]) -> tuple[Setting, ...]:
    """Return expert weights as floats and settings; raise unless they are finite and not all zero."""
    if isinstance(weights, str | Mapping) or not isinstance(weights, Iterable):
        raise CoramError(f"weights must be a list of numbers in expert order, found {weights!r}")
    settings = tuple(check_setting(weight, _checked, "weights") for weight in weights)
    if not any(varies(weight) or weight != 0 for weight in settings):
        raise CoramError(f"weights must not all be zero, found {settings!r}")
    return settings


def _checked(weight: Any) -> float:
    check_number("weights", weight)
    return float(weight)


Weights = Annotated[
    tuple[Setting, ...] | None,
    Checked(check_weights),
    "One number per expert, divided by the sum of their magnitudes; uniform by default. A negative one moves "
    "away from the expert. In place of a number, a list is interpolated over the layers, and a list of "
    "{filter, value} selects by the names of tensors.",
]


class Weighing(NamedTuple):
    """The weights for one tensor.

    shares: w_i >= 0, summing to 1. signs: -1 for the experts to move away from, else 1; all 0 if all weights
    are 0 for this tensor, which then stays at the base. given: the weights as passed, if any.
    """

    shares: tuple[float, ...]
    signs: tuple[float, ...]
    given: tuple[float, ...] | None

    def signed(self, factors: Sequence[float]) -> tuple[float, ...]:
        """Factors f_i with the signs of the weights."""
        return tuple(sign * factor for sign, factor in zip(self.signs, factors, strict=True))


def weigh(weights: Sequence[Setting] | None, n_experts: int, place: Place | None = None) -> Weighing:
    """The weights of N experts for the tensor at a place; without one, they must be the same for all."""
    given = weights_at(weights, n_experts, place)
    if given is None:
        return Weighing((1 / n_experts,) * n_experts, (1.0,) * n_experts, None)
    total = math.fsum(map(abs, given))
    if total == 0:
        return Weighing((1 / n_experts,) * n_experts, (0.0,) * n_experts, given)
    return Weighing(tuple(abs(w) / total for w in given), tuple(-1.0 if w < 0 else 1.0 for w in given), given)


def weights_at(
    weights: Sequence[Setting] | None, n_experts: int, place: Place | None = None
) -> tuple[float, ...] | None:
    """The weights of one tensor as numbers; raises unless there is one per expert."""
    if weights is None:
        return None
    settings = check_weights(weights)
    if len(settings) != n_experts:
        raise CoramError(
            f"weights: found {len(settings)} for {n_experts} experts; pass one weight per expert"
        )
    if place is None and any(map(varies, settings)):
        raise CoramError("weights that differ by layer or module are not supported here; pass plain numbers")
    numbers = [setting_at(setting, place or Place()) for setting in settings]
    for number, setting in zip(numbers, settings, strict=True):
        if number is None:
            raise CoramError(
                f"weights: no filter of {list(setting)} applies to {place.name if place else ''!r}; "
                "add an entry without filter, {value: ...}, for all other tensors"
            )
    return tuple(number for number in numbers if number is not None)


def normalized_weights(weights: Sequence[Setting] | None, n_experts: int) -> tuple[float, ...]:
    """w_i >= 0 summing to 1, uniform for None; raises unless there is one number per expert."""
    return weigh(weights, n_experts).shares


def typical_weights(
    weights: Sequence[Setting] | None, n_experts: int, places: Iterable[Place]
) -> tuple[float, ...]:
    """w_i of a whole model: if weights differ by tensor, their root mean square over the given tensors.

    sum_i w_i^2, on which lambda depends, is then its mean over those of these tensors that have weights.
    """
    if weights is None or not any(map(varies, check_weights(weights))):
        return normalized_weights(weights, n_experts)
    found = [weighing.shares for place in places if any((weighing := weigh(weights, n_experts, place)).signs)]
    if not found:
        raise CoramError("weights: all are zero for every target matrix; change a filter or a gradient")
    return tuple(
        math.sqrt(math.fsum(w * w for w in column) / len(column)) for column in zip(*found, strict=True)
    )
