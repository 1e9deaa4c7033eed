"""The neutral scale of lambda: where a merge changes neutral text as much as a typical expert does.

kappa * sqrt(N) and kappa * c_RMS match the size of the merged update to the experts' in weight space. How far
an update of a given size moves a model depends on the kind of expert; this scale matches the effect itself:
the divergence from the base on a few sentences that ship with the package. Experts that change such text a
lot also disturb each other's answers, so there is a limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from coram_hf.amplitude import on_grid
from coram_hf.calibration.divergence import Passage, divergence
from coram_hf.calibration.merge import Merge
from coram_hf.calibration.search import rounded
from coram_hf.calibration.teachers import find_text, neutral_passages, placed
from coram_hf.config import CoramConfig
from coram_hf.errors import CoramError
from coram_hf.inputs.inputs import Inputs
from coram_hf.outputs.memory import expert_model

LIMIT = 0.13
"""The largest divergence to aim at, in nats per token, however far the experts are from the base. Chosen on
validation questions of the suites in examples/suite, whose AMPLITUDE.md shows the choice."""

PURPOSE = 'scale="neutral"'
REMEDY = 'pass scale="c_rms" to match the size of the updates instead'
TOLERANCE = 0.01
"""Relative error of the divergence at which the scale is found; that of the scale is half of it."""

EVALUATIONS, REACH = 12, 4.0
"""The largest number of divergences to measure, and the largest factor from one lambda to the next."""


def check_neutral(inputs: Inputs) -> None:
    """Raise unless the model continues text and has a tokenizer."""
    find_text(inputs, PURPOSE, REMEDY)


def settle(merge: Merge, inputs: Inputs) -> dict[str, Any]:
    """Reassemble a merge at lambda = kappa * c, and return what was measured, as a report keeps it.

    c solves KL(base || W_0 + c (W_merge - W_0)) = min(sum_i w_i f_i^2 KL(base || expert i), LIMIT), per token
    of the neutral sentences: a divergence grows with the square of a small update, so balancing scales it by
    f_i^2. Of each expert, only the weights that the merge also changes count.
    """
    config, kappa = CoramConfig.from_report(merge.report), merge.report.kappa
    only = None if config.residual is not None else inputs.targets
    sentences = neutral_passages(inputs, find_text(inputs, PURPOSE, REMEDY))
    experts = {name: _shift(expert_model(inputs, name, only), inputs, sentences) for name in inputs.experts}
    weights = config.expert_weights(len(experts))
    factors = [merge.report.balance_factors[name] for name in experts]
    typical = math.fsum(w * f * f * kl for w, f, kl in zip(weights, factors, experts.values(), strict=True))
    start = merge.report.c_rms
    if kappa is None or start is None or not 0 < typical < math.inf:
        raise CoramError(f"{PURPOSE}: the experts change neutral text by {typical:g} per token; {REMEDY}")
    target = min(typical, LIMIT)

    def at(c: float) -> float:
        merge.rescale_(c)
        return _shift(merge.model, inputs, sentences)

    scale = matching_scale(at, start, target)
    merge.rescale_(on_grid(rounded(kappa * scale), config.lambda_step))
    return {
        "scale": scale,
        "typical": typical,
        "target": target,
        "merged": _shift(merge.model, inputs, sentences),
        "experts": experts,
    }


def matching_scale(divergence_at: Callable[[float], float], start: float, target: float) -> float:
    """The c at which a divergence that grows about as c^2 hits the target: c <- c sqrt(target / KL(c))."""
    scale = start
    for _ in range(EVALUATIONS):
        found = divergence_at(scale)
        if abs(found - target) <= TOLERANCE * target:
            return rounded(scale)
        ratio = math.sqrt(target / found) if found > 0 else REACH
        scale *= min(REACH, max(1 / REACH, ratio))
    raise CoramError(f"{PURPOSE}: no lambda changes neutral text by {target:.3g} per token; {REMEDY}")


def _shift(model: Any, inputs: Inputs, sentences: list[Passage]) -> float:
    return divergence(placed(model, inputs), {"": sentences})[""]
