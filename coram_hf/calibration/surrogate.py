"""The sum W_0 + sum_i c_i tau~_i in place of the merge: linear in the factors c, so its gradient is simple.

Dense updates are added to the weights, and dL/dc_i = <dL/dW, tau~_i>. Updates of low rank stay beside them,
as branches c_i B_i (A_i x) of their layers, and need no gradient of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coram_hf.calibration.divergence import Taught, divergences, passage_weights
from coram_hf.config import CoramConfig
from coram_hf.execution.memory import MemoryRunner
from coram_hf.geometry import update_dtype
from coram_hf.geometry.decorrelated import decorrelate_experts, decorrelated_factors
from coram_hf.inputs.inputs import Inputs, Parameter
from coram_hf.inputs.low_rank import low_rank_updates


@dataclass(frozen=True)
class Dense:
    """N w_i tau~_i of one parameter, in its stored layout, for every expert."""

    updates: list[Tensor]


@dataclass(frozen=True)
class Branches:
    """N w_i tau~_i = B_i A_i of one linear layer, with all A_i stacked and all B_i side by side."""

    A: Tensor
    B: Tensor
    ranks: list[int]

    def __call__(self, x: Tensor, c: Tensor) -> Tensor:
        """sum_i c_i B_i (A_i x)."""
        scale = torch.cat([one.expand(rank) for one, rank in zip(c, self.ranks, strict=True)])
        return ((x @ self.A.mT) * scale.to(x.dtype)) @ self.B.mT


def surrogate_updates(
    parameter: Parameter, inputs: Inputs, config: CoramConfig, module: nn.Module | None
) -> Dense | Branches:
    """N w_i tau~_i of one target: in factors if they are of low rank and its layer is linear."""
    weights = [len(inputs.experts) * w for w in config.expert_weights(len(inputs.experts))]
    low_rank = low_rank_updates(inputs, parameter) if type(module) is nn.Linear else None
    if low_rank is not None:
        factors = decorrelated_factors(parameter.base, low_rank, config, inputs.device)
        lefts = [weight * left for weight, (left, _) in zip(weights, factors, strict=True)]
        A, B = torch.cat([right for _, right in factors]), torch.cat(lefts, 1)
        return Branches(A, B, [right.shape[0] for _, right in factors])
    updates = [torch.empty_like(parameter.base, dtype=update_dtype(parameter.base)) for _ in inputs.experts]
    assert parameter.target is not None
    for i, (_, base, experts) in enumerate(parameter.matrices()):
        if config.decorrelate is not None:
            experts = decorrelate_experts(base, experts, config, None, inputs.device).experts
        for weight, update, expert in zip(weights, updates, experts, strict=True):
            wide = torch.promote_types(expert.dtype, torch.float32)
            tau = expert.to(wide) - base.to(expert.device, wide)
            parameter.target.matrices(update)[i].copy_(tau.mul_(weight))
    return Dense(updates)


class Surrogate(AbstractContextManager["Surrogate"]):
    """A model with the weights W_0 + sum_i c_i tau~_i on the targets, for any factors c.

    The model is changed: its targets are overwritten, and its layers have branches until `close`.
    """

    def __init__(
        self, model: PreTrainedModel, inputs: Inputs, config: CoramConfig, progress: bool = True
    ) -> None:
        self._model, self._inputs = model, inputs
        places = {name: inputs.positions.get(name) for name in inputs.targets}
        self._positions = list(dict.fromkeys(places.values()))
        self._columns = {name: self._positions.index(place) for name, place in places.items()}
        self._c = torch.ones(len(inputs.experts), len(self._positions))
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        modules = dict(model.named_modules(remove_duplicate=False))

        def find(name: str) -> Dense | Branches:
            module = modules.get(name.removesuffix(".weight"))
            return surrogate_updates(inputs.parameter(name), inputs, config, module)

        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        model.requires_grad_(False)
        updates = MemoryRunner(inputs, "calibrate", progress).map("updates", list(inputs.targets), find)
        self._dense = {name: found for name, found in updates.items() if isinstance(found, Dense)}
        self._hooks = []
        for name, found in updates.items():
            if isinstance(found, Branches):
                self._parameters[name].data.copy_(inputs.parameter(name).base)
                layer = modules[name.removesuffix(".weight")]
                self._hooks.append(layer.register_forward_hook(self._branches(name, found)))

    @property
    def depth(self) -> int:
        """The largest number of layers in a list of blocks; 0 if no target is in one."""
        return max((place.layers for place in self._positions if place is not None), default=0)

    def columns(self, log_c: Tensor) -> Tensor:
        """Factors at every position from logarithms per expert, or per expert and group of modules.

        What is in no layer takes the mean over the groups.
        """
        if log_c.ndim == 1:
            return log_c.exp()[:, None].expand(-1, len(self._positions))
        count = log_c.shape[1]
        index = [count if place is None else place.group(count) for place in self._positions]
        return torch.cat([log_c, log_c.mean(1, keepdim=True)], 1)[:, index].exp()

    def loss(self, c: Tensor, taught: Taught) -> float:
        """The mean divergence of the teachers from the sum with these factors (experts x positions)."""
        self._assume(c)
        with torch.inference_mode():
            return self._pass(taught, lambda loss: None)

    def gradient(self, c: Tensor, taught: Taught) -> tuple[float, Tensor]:
        """The loss, and its derivative by each factor."""
        self._assume(c)
        self._c.requires_grad_(True)
        for name in self._dense:
            self._parameters[name].requires_grad_(True)
        loss = self._pass(taught, lambda part: part.backward())
        found = torch.zeros_like(self._c) if self._c.grad is None else self._c.grad.clone()
        for name, dense in self._dense.items():
            parameter, column = self._parameters[name], self._columns[name]
            if parameter.grad is not None:
                along = [(parameter.grad.to(tau) * tau).sum().cpu() for tau in dense.updates]
                found[:, column] += torch.stack(along).double()
            parameter.requires_grad_(False)
            parameter.grad = None
        return loss, found

    def close(self) -> None:
        """Remove the branches; the weights stay as they are."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self._trained:
            parameter.requires_grad_(True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _assume(self, c: Tensor) -> None:
        self._c = c.detach().double().clone()
        for name, dense in self._dense.items():
            base = self._inputs.parameter(name).base
            total = base.to(update_dtype(base), copy=True)
            for one, tau in zip(self._c[:, self._columns[name]].tolist(), dense.updates, strict=True):
                total.add_(tau, alpha=one)
            self._parameters[name].data.copy_(total)

    def _branches(self, name: str, found: Branches) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        like, column = self._parameters[name], self._columns[name]
        branches = Branches(found.A.to(like), found.B.to(like), found.ranks)

        def add(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            return output + branches(args[0], self._c[:, column].to(output.device))

        return add

    def _pass(self, taught: Taught, use: Callable[[Tensor], None]) -> float:
        """The loss over all passages; `use` gets its part of every batch."""
        every = [passage for passages in taught.values() for passage in passages]
        weights, loss = passage_weights(taught), 0.0
        for batch in divergences(self._model, every):
            part = torch.stack([weights[i] * total for i, total in batch]).sum()
            use(part)
            loss += float(part.detach())
        return loss
