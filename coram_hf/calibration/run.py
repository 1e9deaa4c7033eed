"""Calibrate a merge: lambda alone, or factors by the gradient of the same loss and then lambda once more."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from typing import Generic, NamedTuple

import torch
from torch import Tensor

from coram_hf.amplitude import balance_factors
from coram_hf.calibration.divergence import Taught, divergence, mean_divergence
from coram_hf.calibration.fit import Fitted, fit, hold_back
from coram_hf.calibration.merge import AnyMerge, Merge
from coram_hf.calibration.prompts import PromptSources
from coram_hf.calibration.search import EVALUATIONS, Curve, best, is_at_bound, rounded, search_lambda
from coram_hf.calibration.surrogate import Surrogate
from coram_hf.calibration.teachers import Lessons, placed
from coram_hf.config import GROUPS, CalibrationConfig, CoramConfig, Factors, Granularity
from coram_hf.config.factors import PARTS
from coram_hf.errors import CoramError
from coram_hf.execution.progress import Progress
from coram_hf.inputs.inputs import Inputs
from coram_hf.report.calibration import Calibration

REACH, REACH_AFTER_FIT = 4.0, 1.5
"""How far lambda is searched, as a factor each way: around the rule's, and around that of a fit."""

FEWER, FEWEST = 6, 4
"""Evaluations of a search before a fit, and after it."""

STEPS = {"expert": 18, "group": 30, "layer": 45}
RATES = {"expert": 0.15, "group": 0.12, "layer": 0.12}
"""Number of Adam's steps, and its initial learning rate."""

ENOUGH = 8
"""Answers per expert from which on layers are fitted, if requested; with fewer, groups."""

START = 0.5
"""Factors start from those of balance="root", times this, or from the best lambda, whichever is better."""

FACTOR_DIGITS = 4
"""Significant digits of fitted factors, so that they are short to write."""


class Calibrate(NamedTuple):
    """What a merge is calibrated on, and how."""

    prompts: PromptSources
    config: CalibrationConfig = CalibrationConfig()


class Candidate(NamedTuple, Generic[AnyMerge]):
    """A merge at its best lambda, the loss against lambda, and the loss on the answers held back."""

    granularity: Granularity
    merge: AnyMerge
    curve: Curve
    held_back: float


def calibrate(
    merge: AnyMerge,
    inputs: Inputs,
    lessons: Lessons,
    config: CalibrationConfig,
    again: Callable[[CoramConfig], AnyMerge],
    progress: bool = True,
) -> tuple[AnyMerge, Calibration]:
    """The merge with the lowest loss, found on the answers of its experts, and how it was found.

    `merge` is changed in place; `again` merges the same inputs with another configuration. A finer
    granularity is kept only if it lowers the loss on the answers that are held back.
    """
    merged_with = CoramConfig.from_report(merge.report)
    if min(merged_with.weighing(len(inputs.experts)).signs) < 0:
        raise CoramError("calibrate: the merge is fitted to every expert, so weights must not be negative")
    start = merge.report.lam
    assert start is not None
    taught = lessons.teach(progress)
    neutral = {"base": lessons.neutral()}
    fitted_to, held = hold_back(taught, config.seed)
    placed(merge.model, inputs)
    before, shift = divergence(merge.model, taught), divergence(merge.model, neutral)["base"]

    search = partial(_search, inputs=inputs, taught=taught, held=held or taught, progress=progress)
    alone = config.granularity == "lambda"
    found = [search("lambda", merge, start, REACH, EVALUATIONS if alone else FEWER)]
    if not alone:
        lam = best(found[0].curve)
        sum_of_updates = float(len(inputs.experts))
        with closing(_fits(merge, inputs, merged_with, config, fitted_to, held, lam, progress)) as fits:
            for granularity, factors in fits:
                fitted = replace(merged_with, balance=None, factors=factors, lam=sum_of_updates)
                found.append(search(granularity, again(fitted), sum_of_updates, REACH_AFTER_FIT, FEWEST))
                if found[-1].held_back < found[0].held_back:
                    break
    chosen = min(found, key=lambda one: one.held_back)
    lam = best(chosen.curve)
    chosen.merge.rescale_(lam)
    merged_with = CoramConfig.from_report(chosen.merge.report)
    return chosen.merge, Calibration(
        granularity=chosen.granularity,
        requested=config.granularity,
        prompts=lessons.prompts.counts,
        answer_tokens={name: sum(len(one.after) for one in passages) for name, passages in taught.items()},
        sha256=lessons.prompts.sha256,
        start=start,
        lam=lam,
        curves={one.granularity: _finite(one.curve) for one in found},
        before=before,
        after=divergence(chosen.merge.model, taught),
        held_back={one.granularity: one.held_back for one in found},
        neutral={"before": shift, "after": divergence(chosen.merge.model, neutral)["base"]},
        factors=_by_name(merged_with.factors, inputs),
        options=asdict(config),
        warnings=tuple(_warnings(chosen, found[0], start, held)),
    )


def _search(
    granularity: Granularity,
    merge: AnyMerge,
    start: float,
    reach: float,
    evaluations: int,
    *,
    inputs: Inputs,
    taught: Taught,
    held: Taught,
    progress: bool,
) -> Candidate[AnyMerge]:
    """Search lambda on all answers: a single number hardly overfits."""
    placed(merge.model, inputs)
    with Progress("calibrate: lambda", evaluations, progress, unit="merges") as bar:

        def loss(lam: float) -> float:
            merge.rescale_(lam)
            loss = mean_divergence(divergence(merge.model, taught))
            bar.add()
            return loss

        curve = search_lambda(loss, start, reach, evaluations)
    if not math.isfinite(min(curve.values())):
        raise CoramError(
            "calibrate: the merge's probabilities are not finite at any lambda; check the experts"
        )
    merge.rescale_(best(curve))
    return Candidate(granularity, merge, curve, mean_divergence(divergence(merge.model, held)))


def _fits(
    merge: Merge,
    inputs: Inputs,
    merged_with: CoramConfig,
    config: CalibrationConfig,
    fitted_to: Taught,
    held: Taught,
    lam: float,
    progress: bool,
) -> Generator[tuple[Granularity, Factors], None, None]:
    """Yield fitted factors from the granularity requested to coarser ones, should the finer not help.

    This changes the merged model, which must be reassembled afterwards.
    """
    root = balance_factors(merge.report.relative_updates, "root")
    starts = [[START * f for f in root.values()], [lam / len(root)] * len(root)]
    plain = replace(merged_with, balance=None, factors=None)
    with Surrogate(merge.model, inputs, plain, progress) as surrogate:

        def fitted(how: str, start: Tensor) -> Fitted:
            with Progress("calibrate: factors", STEPS[how], progress, unit="steps") as bar:
                return fit(surrogate, start, STEPS[how], RATES[how], fitted_to, held, bar.add)

        logs = [torch.tensor(start, dtype=torch.float64).log() for start in starts]
        losses = [surrogate.loss(surrogate.columns(log_c), fitted_to) for log_c in logs]
        first = logs[losses.index(min(losses))]
        fewest = min(len(fitted_to[name]) + len(held.get(name, ())) for name in fitted_to)
        groups: dict[Granularity, int] = {"layer": len(PARTS) * surrogate.depth, "group": len(GROUPS)}
        if config.granularity != "layer" or fewest < ENOUGH:
            del groups["layer"]
        for how, count in groups.items():
            if count and held and config.granularity != "expert":
                several = fitted(how, first[:, None].repeat(1, count))
                yield how, tuple(_numbers(row) for row in several.log_c)
        yield "expert", _numbers(fitted("expert", first).log_c)


def _finite(curve: Curve) -> list[tuple[float, float]]:
    return [(lam, loss) for lam, loss in curve.items() if math.isfinite(loss)]


def _numbers(logarithms: Tensor) -> tuple[float, ...]:
    return tuple(rounded(math.exp(x), FACTOR_DIGITS) for x in logarithms.tolist())


def _by_name(factors: Factors | None, inputs: Inputs) -> dict[str, float | list[float]]:
    each = [list(of) if isinstance(of, tuple) else of for of in factors or ()]
    return dict(zip(inputs.experts, each, strict=factors is not None))


def _warnings(
    chosen: Candidate[AnyMerge], first: Candidate[AnyMerge], start: float, held: Taught
) -> list[str]:
    """What a reader of the report should know about the choice."""
    found = []
    if chosen is first and is_at_bound(first.curve, start, REACH):
        found.append(
            f"calibrate: the best lambda, {best(first.curve):g}, lies at the end of the searched range "
            f"({start / REACH:.3g} to {start * REACH:.3g}); calibrate the result again"
        )
    if not held:
        found.append("calibrate: with one prompt per expert no answer could be held back; give a few more")
    return found
