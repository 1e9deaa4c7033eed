"""What a merge method is: which parameters it changes, and how it makes their updates, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from coram_hf.geometry import SliceStats
from coram_hf.inputs.inputs import Inputs, Parameter


class How(NamedTuple):
    """How a parameter is merged: with its update amplified by lambda or not, some rows at a time or whole."""

    amplified: bool
    by_rows: bool


class Block(NamedTuple):
    """Some rows of W_merge - W_0, in memory that the next block of the same thread may overwrite.

    matrix: which matrix of the parameter the rows are of; None for the rows of the parameter as it is stored.
    squares: |W_0|^2 and |W_i - W_0|^2 of the rows, where they were measured on the way.
    """

    matrix: int | None
    rows: slice | Tensor
    update: Tensor
    stats: SliceStats
    squares: Tensor | None = None


Work = Callable[[Parameter], Iterator[Block]]
"""The merged update of one parameter, block by block."""


class Method(Protocol):
    """A merge method with all its options.

    settings: "method" and everything else that decides the bytes of the result, as plain values.
    """

    @property
    def settings(self) -> Mapping[str, Any]: ...

    def names(self, inputs: Inputs) -> Mapping[str, How]:
        """The parameters that are merged; all others stay at the base."""
        ...

    def bind(self, inputs: Inputs, factors: Sequence[float], *, measure: bool = False) -> Work:
        """The work on one parameter, for W_i <- W_0 + f_i (W_i - W_0); whatever needs all is done first.

        `measure` asks for the norms of the experts' updates, where they come at no cost.
        """
        ...
