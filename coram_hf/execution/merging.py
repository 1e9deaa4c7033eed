"""The whole merge: norms, lambda, every parameter into a sink, and lambda once more from the exact norms."""

from __future__ import annotations

import logging
from typing import NamedTuple, TypeVar

from coram_hf.amplitude import Amplitude, Strength, balanced_contraction, choose, require_kappa, wanted
from coram_hf.errors import CoramError
from coram_hf.execution.cost import timed
from coram_hf.execution.protocol import Runner, Sink
from coram_hf.execution.survey import Survey
from coram_hf.execution.tasks import merge_task
from coram_hf.geometry.cores import one_core
from coram_hf.inputs.inputs import Inputs
from coram_hf.methods.protocol import Method
from coram_hf.methods.record import Record, total

logger = logging.getLogger("coram_hf")
SinkType = TypeVar("SinkType", bound=Sink)


class Outcome(NamedTuple):
    """A finished merge: a record of every parameter, the exact amplitude, and the norms behind it."""

    records: dict[str, Record]
    amplitude: Amplitude
    survey: Survey


def merge_into(
    sink: SinkType, run: Runner[SinkType], inputs: Inputs, method: Method, strength: Strength
) -> Outcome:
    """Merge every parameter into a sink, with the lambda that follows from the norms."""
    names = method.names(inputs)
    known = run.norms(wanted(strength))
    known = known and known.with_factors(strength.factors, inputs)
    amplitude = choose(None if known is None else known.measured, strength)
    require_kappa(amplitude, strength)
    with timed("preparing"), one_core():
        work, c_rms = method.bind(inputs, amplitude.balance, measure=run.measures), None

    if amplitude.lam is None or run.keeps_updates:
        amplified = [name for name, how in names.items() if how.amplified]
        task = merge_task(work, names, None, inputs, run.measures)
        measured = run.keep("geometry", amplified, task, sink)
        work = sink.kept(work, measured)

    if amplitude.lam is None:
        known = known or Survey.of(measured, inputs).with_factors(strength.factors, inputs)
        amplitude = choose(known.measured, strength)
        require_kappa(amplitude, strength)
        merged_square = total(measured.values()).slices.squared_norm
        c_rms = balanced_contraction(known.measured, amplitude.factors, merged_square)
        amplitude = choose(known.measured, strength, c_rms)
        if amplitude.lam is None:
            raise CoramError(
                "the merged update is zero, so c_RMS, and with it lambda, is undefined; pass lam= (--lambda) "
                "to CORAM, or remove amplitude= from a baseline"
            )

    while True:
        logger.debug("merging %d tensors with lambda %s", len(names), amplitude.lam)
        task = merge_task(work, names, amplitude.lam, inputs, run.measures)
        records = run.each(f"write {amplitude.lam!r}", list(names), task, sink)
        survey = known
        if run.measures or survey is None:
            survey = Survey.of(records, inputs).with_factors(strength.factors, inputs)
        exact = choose(survey.measured, strength, c_rms)
        if exact.lam == amplitude.lam:
            return Outcome(records, exact, survey)
        logger.warning(
            "the dispersion over all targets is %.3g, on the other side of the threshold from the sample's: "
            "merging again with lambda %s instead of %s",
            exact.dispersion,
            exact.lam,
            amplitude.lam,
        )
        amplitude = exact
