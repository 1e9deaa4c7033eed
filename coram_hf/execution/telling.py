"""Warnings of plans and reports as log messages, each only once."""

from __future__ import annotations

import logging
from collections.abc import Iterable

logger = logging.getLogger("coram_hf")


class Teller:
    """Logs warnings that it has not logged before."""

    def __init__(self, told: Iterable[str] = ()) -> None:
        self._told = set(told)

    def __call__(self, warnings: Iterable[str]) -> None:
        for warning in warnings:
            if warning not in self._told:
                self._told.add(warning)
                logger.warning(warning)
