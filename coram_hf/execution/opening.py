"""Open inputs for the devices of this process."""

from __future__ import annotations

import logging
import time

from coram_hf.execution.device import compute_device
from coram_hf.execution.placing import with_placement
from coram_hf.execution.processes import Processes
from coram_hf.geometry.cores import one_core
from coram_hf.inputs.inputs import Inputs
from coram_hf.inputs.opening import ModelSource, ModelSources, open_inputs
from coram_hf.inputs.options import MergeOptions, check_options
from coram_hf.inputs.targets import Modules
from coram_hf.methods.entry import Choice

logger = logging.getLogger("coram_hf")


def open_here(
    base: ModelSource,
    experts: ModelSources,
    options: MergeOptions,
    target_modules: Modules = None,
    *,
    keep: Modules = None,
    need_targets: bool = True,
) -> Inputs:
    """Open base and experts, with the options of device and placement resolved for this process."""
    check_options(options)
    device = compute_device(options.get("device"), Processes.find().local_rank)
    with one_core():
        inputs = open_inputs(
            base,
            experts,
            options,
            target_modules=target_modules,
            keep=keep,
            need_targets=need_targets,
            device=device,
        )
    return with_placement(inputs, options)


def open_timed(
    base: ModelSource, experts: ModelSources, choice: Choice, options: MergeOptions
) -> tuple[Inputs, float]:
    """The inputs of a merge by a chosen method, and how many seconds it took to open them."""
    started = time.perf_counter()
    inputs = open_here(
        base, experts, options, choice.target_modules, keep=choice.keep, need_targets=choice.need_targets
    )
    seconds = time.perf_counter() - started
    logger.debug(
        "opened the base (%s) and %d experts in %.1f s: %d target matrices, %d other tensors",
        inputs.base.class_name,
        len(inputs.experts),
        seconds,
        len(inputs.targets),
        len(inputs.outside),
    )
    return inputs, seconds
