"""One tensor of the base and of its experts, as the updates that a Euclidean method combines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from coram_hf.config import Weighing
from coram_hf.geometry.merge import update_dtype
from coram_hf.geometry.slices import as_rows, row_blocks, scratch

Known = TypeVar("Known")


@dataclass(frozen=True)
class Updates:
    """tau_i = f_i (W_i - W_0) of one tensor, computed on demand in float32 (float64 for float64 weights).

    weights: w_i >= 0, summing to 1; given: the weights as the caller passed them, if any.
    factors: the balance factors f_i, negative for an expert with a negative weight.
    name: the tensor's name, which seeds methods that draw random numbers.
    prepared: the result of the method's preparation over all tensors.
    whole: those of the whole tensor, if these are of some of its rows; known: what was found there by `once`.
    """

    base: Tensor
    experts: Sequence[Tensor]
    weights: tuple[float, ...]
    factors: tuple[float, ...]
    name: str = ""
    given: tuple[float, ...] | None = None
    prepared: Any = None
    whole: Updates | None = None
    known: dict[str, Any] = field(default_factory=dict, init=False, compare=False)

    @classmethod
    def weighed(
        cls,
        base: Tensor,
        experts: Sequence[Tensor],
        weighing: Weighing,
        factors: Sequence[float],
        **more: Any,
    ) -> Updates:
        """Updates with the weights of one tensor, whose signs go to the factors."""
        signed = weighing.signed(factors)
        return cls(base, experts, weighing.shares, signed, given=weighing.given, **more)

    @classmethod
    def of(cls, deltas: Sequence[Tensor], like: Updates) -> Updates:
        """Updates from given differences, with everything else taken from `like`."""
        origin = deltas[0].new_zeros(()).expand(deltas[0].shape)
        return replace(like, base=origin, experts=deltas, factors=(1.0,) * len(deltas), whole=None)

    def transposed(self) -> Updates:
        """These updates with rows and columns exchanged."""
        return replace(self, base=self.base.mT, experts=[expert.mT for expert in self.experts], whole=None)

    def on(self, device: torch.device | None) -> Updates:
        """These updates on a device; None: where the base is."""
        device = self.base.device if device is None else device
        return replace(self, base=self.base.to(device), experts=[e.to(device) for e in self.experts])

    def part(self, rows: slice) -> Updates:
        """These updates restricted to some rows of `as_rows`."""
        base, *experts = (as_rows(t)[rows] for t in (self.base, *self.experts))
        return replace(self, base=base, experts=experts, whole=self.whole or self)

    def once(self, key: str, find: Callable[[Updates], Known]) -> Known:
        """What a method must know of the whole tensor, found when its first rows are merged."""
        whole = self.whole or self
        if key not in whole.known:
            whole.known[key] = find(whole)
        found: Known = whole.known[key]
        return found

    def __len__(self) -> int:
        return len(self.experts)

    @property
    def dtype(self) -> torch.dtype:
        return update_dtype(self.base)

    @property
    def amounts(self) -> tuple[float, ...]:
        """|weight_i| as the caller passed them, in place of w_i; 1 by default."""
        return (1.0,) * len(self) if self.given is None else tuple(map(abs, self.given))

    def each(self, value: float | Sequence[float]) -> tuple[float, ...]:
        """A parameter that may differ by expert, as one number per expert."""
        return (value,) * len(self) if isinstance(value, int | float) else tuple(value)

    def expert(self, i: int) -> Tensor:
        """W_0 + tau_i in the shape of `as_rows`; the stored weights if f_i = 1."""
        if self.factors[i] == 1:
            return as_rows(self.experts[i]).to(self.base.device, self.dtype)
        return self.tau(i).add_(as_rows(self.base))

    def tau(self, i: int, rows: slice = slice(None)) -> Tensor:
        """f_i (W_i - W_0) in the shape of `as_rows`, or some of its rows."""
        base, expert = (as_rows(t)[rows] for t in (self.base, self.experts[i]))
        update = expert.to(base.device, self.dtype) - base.to(self.dtype)
        return update if self.factors[i] == 1 else update.mul_(self.factors[i])

    def blocks(self) -> Iterator[tuple[slice, list[Tensor]]]:
        """All tau_i, a block of rows at a time, in memory that this thread's next block overwrites."""
        for rows in row_blocks(self.base):
            base = self._loaded("base", self.base, rows)
            taus = [self._loaded(f"tau {i}", t, rows).sub_(base) for i, t in enumerate(self.experts)]
            yield rows, [t if f == 1 else t.mul_(f) for t, f in zip(taus, self.factors, strict=True)]

    def sum(self, weights: Sequence[float]) -> Tensor:
        """sum w_i tau_i as rows, with one expert at a time in reused memory."""
        out = self.empty()
        for rows in row_blocks(self.base):
            base = self._loaded("base", self.base, rows)
            for i, (tensor, weight, factor) in enumerate(
                zip(self.experts, weights, self.factors, strict=True)
            ):
                tau = self._loaded("tau", tensor, rows).sub_(base)
                tau = tau if factor == 1 else tau.mul_(factor)
                if i == 0:
                    torch.mul(tau, weight, out=out[rows])
                else:
                    out[rows].add_(tau, alpha=weight)
        return out

    def _loaded(self, use: str, tensor: Tensor, rows: slice) -> Tensor:
        some = as_rows(tensor)[rows]
        return scratch(use, some.numel(), self.dtype, self.base.device).view(some.shape).copy_(some)

    def empty(self) -> Tensor:
        """A new tensor for the merged update, as rows; `shaped` gives it the tensor's own shape."""
        return self.base.new_empty(as_rows(self.base).shape, dtype=self.dtype)

    def shaped(self, update: Tensor) -> Tensor:
        """The update in the shape of the tensor."""
        return update.reshape(self.base.shape)
