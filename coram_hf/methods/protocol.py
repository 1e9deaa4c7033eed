"""The protocol of merge methods: which parameters they change, and their updates, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from coram_hf.geometry import SliceStats
from coram_hf.inputs.inputs import Inputs, Parameter


class How(NamedTuple):
    """How a parameter is merged: amplified by lambda or not, a few rows at a time or as a whole.

    memory: the bytes that this takes beyond some rows or, as a whole, some copies.
    """

    amplified: bool
    by_rows: bool
    memory: int = 0


class Block(NamedTuple):
    """Some rows of W_merge - W_0, in memory that the thread's next block may overwrite.

    matrix: the index of the matrix that the rows belong to; None for rows of the parameter as stored.
    squares: |W_0|^2 and |W_i - W_0|^2 of the rows, if they were measured along the way.
    decorrelation: the numbers of a `Decorrelation`, of those matrices whose rows begin here.
    """

    matrix: int | None
    rows: slice | Tensor
    update: Tensor
    stats: SliceStats
    squares: Tensor | None = None
    decorrelation: Sequence[float] = ()


Work = Callable[[Parameter], Iterator[Block]]
"""Computes the merged update of one parameter, block by block."""


class Method(Protocol):
    """A merge method with all its options.

    settings: "method" and everything else that determines the bytes of the result, as plain values.
    """

    @property
    def settings(self) -> Mapping[str, Any]: ...

    def names(self, inputs: Inputs) -> Mapping[str, How]:
        """The parameters that are merged; all others stay at the base."""
        ...

    def bind(self, inputs: Inputs, factors: Sequence[float], *, measure: bool = False) -> Work:
        """The work on one parameter, for W_i <- W_0 + f_i (W_i - W_0), after any preparation over all.

        `measure` requests the norms of the experts' updates, if they come at no extra cost.
        """
        ...


@dataclass(frozen=True)
class OnlyAmplified:
    """A method restricted to what it amplifies, or to all if it amplifies nothing."""

    method: Method

    @property
    def settings(self) -> Mapping[str, Any]:
        """Those of the method."""
        return self.method.settings

    def names(self, inputs: Inputs) -> Mapping[str, How]:
        """The amplified parameters, or all if there are none."""
        every = self.method.names(inputs)
        return {name: how for name, how in every.items() if how.amplified} or every

    def bind(self, inputs: Inputs, factors: Sequence[float], *, measure: bool = False) -> Work:
        """The method's own work."""
        return self.method.bind(inputs, factors, measure=measure)


@dataclass(frozen=True)
class OnlyOutside:
    """A method restricted to the parameters outside the targets."""

    method: Method

    @property
    def settings(self) -> Mapping[str, Any]:
        """Those of the method."""
        return self.method.settings

    def names(self, inputs: Inputs) -> Mapping[str, How]:
        """Those of the method outside the targets."""
        return {name: how for name, how in self.method.names(inputs).items() if name not in inputs.targets}

    def bind(self, inputs: Inputs, factors: Sequence[float], *, measure: bool = False) -> Work:
        """The method's own work."""
        return self.method.bind(inputs, factors, measure=measure)
