"""The processes of a merge: which of them this is, how they share work and wait for each other."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

logger = logging.getLogger("coram_hf")


@dataclass(frozen=True)
class Processes:
    """This process, number `rank` of `count`; a launcher starts several, otherwise there is one."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0

    @classmethod
    def find(cls) -> Processes:
        """Find out from the launcher, through accelerate."""
        if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
            if any(key.startswith("ACCELERATE_") for key in os.environ):
                logger.warning(
                    "accelerate launch started one process; to start several, also on CPU, use "
                    "`accelerate launch --multi_gpu --num_processes K -m coram_hf merge ...`, or "
                    "`torchrun --nproc_per_node K -m coram_hf merge ...`"
                )
            return cls()
        from accelerate import PartialState

        state = PartialState(cpu=not torch.cuda.is_available())
        return cls(state.process_index, state.num_processes, state.local_process_index)

    def wait(self) -> None:
        """Wait for all processes."""
        if self.count > 1:
            from accelerate import PartialState

            PartialState().wait_for_everyone()

    @property
    def first(self) -> bool:
        return self.rank == 0


def shares(costs: Mapping[str, int], count: int) -> list[list[str]]:
    """Assign names to processes, costliest first, each to the process with the least work so far."""
    loads = [0] * count
    owner = {}
    for name in sorted(costs, key=lambda name: -costs[name]):
        owner[name] = loads.index(min(loads))
        loads[owner[name]] += costs[name]
    return [[name for name in costs if owner[name] == rank] for rank in range(count)]
