"""OFT adapters: W R^T block by block, for the adapter files of every version of PEFT.

A rotation R is block-diagonal, so W R^T takes one small product per block, not one of the layer's width:
for Llama-3.1-8B that is minutes instead of hours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coram_hf.errors import CoramError
from coram_hf.inputs.files import read_json
from coram_hf.inputs.internals.adapters import is_oft_linear, rotation_blocks
from coram_hf.inputs.internals.marks import KEY_PREFIX
from coram_hf.inputs.weights import Weights

DENSE_WIDTH = 1024
"""The widest input for which PEFT's own merge, a dense product, is fast enough."""


def is_wide_oft(layer: nn.Module) -> bool:
    """Whether a layer is an unmerged OFT layer around a plain linear one wider than DENSE_WIDTH."""
    if not is_oft_linear(layer) or layer.merged:
        return False
    inner: Any = layer.base_layer
    return type(inner) is nn.Linear and inner.in_features > DENSE_WIDTH


def rotated_weight(layer: Any, adapter: str, key: str) -> Tensor:
    """A parameter of an OFT layer with one adapter merged: W R^T for the weight, others unchanged."""
    parameter: Tensor = layer.base_layer.get_parameter(key).detach()
    if key != "weight":
        return parameter
    wide = torch.promote_types(parameter.dtype, torch.float32)
    return _rotate_inputs(parameter, rotation_blocks(layer.oft_R[adapter], wide))


def orthogonality_error(blocks: Tensor) -> float:
    """max |R^T R - I|."""
    return float((blocks.mT @ blocks - torch.eye(blocks.shape[-1], device=blocks.device)).abs().max())


def is_legacy(state: dict[str, Tensor]) -> bool:
    """Whether the tensors are from an OFT adapter of PEFT before 0.16, which PEFT no longer reads."""
    return any(key.endswith(".oft_r") for key in state)


def open_legacy(who: str, origin: Weights, folder: Path, state: dict[str, Tensor]) -> Weights:
    """An OFT adapter of PEFT before 0.16 as an expert.

    Since 0.14 it rotates inputs and scales outputs, W' = diag(s) W R^T with `oft_r` and `oft_s`; before
    that it rotates outputs, W' = R^T W. In both, R is the Cayley transform of the skew part of `oft_r`.
    """
    settings = read_json(folder / "adapter_config.json")
    for key in ("r", "eps"):
        if not isinstance(settings, dict) or not isinstance(settings.get(key), int | float):
            raise CoramError(f"{who}: {folder / 'adapter_config.json'} must contain a number {key!r}")
    overrides: dict[str, Callable[[], Tensor]] = {}
    worst = 0.0
    for key, tensor in state.items():
        module, _, kind = key.removeprefix(KEY_PREFIX).rpartition(".")
        name = f"{module}.weight"
        if kind == "oft_s":
            continue
        if kind != "oft_r":
            name = f"{module}.{kind}"
            overrides[name] = tensor.detach
            if name in origin:
                _check_shape(who, name, tensor, origin[name].shape)
        elif name in origin:
            scale = state.get(f"{key.removesuffix('oft_r')}oft_s")
            d_out, d_in = origin[name].shape
            if scale is not None:
                _check_shape(who, f"{module}.oft_s", scale, (d_out, 1))
            _check_cover(who, name, tensor, d_out if scale is None else d_in)
            ranks = settings["r"] if scale is None else d_in // tensor.shape[-1]
            blocks = _legacy_blocks(tensor.float(), settings, math.ceil(d_out / ranks))
            worst = max(worst, orthogonality_error(blocks))
            overrides[name] = partial(_legacy_weight, origin, name, blocks, scale)
        if name not in origin:
            raise CoramError(f"{who}: tensor {key!r} belongs to no parameter of {origin.class_name}")
    return Weights(origin.model, overrides, kind="OFT", orthogonality_error=worst)


def _legacy_weight(origin: Weights, name: str, blocks: Tensor, scale: Tensor | None) -> Tensor:
    if scale is not None:
        return _rotate_inputs(origin[name], blocks) * scale.float()
    weight = origin[name]
    rows = math.ceil(weight.shape[0] / blocks.shape[-1]) * blocks.shape[-1]
    padded = nn.functional.pad(weight, (0, 0, 0, rows - weight.shape[0]))
    return _rotate_inputs(padded.mT, blocks.mT).mT[: weight.shape[0]].contiguous()


def _legacy_blocks(generator: Tensor, settings: dict[str, Any], rows: int) -> Tensor:
    """R = (I - S)(I + S)^-1, with S the skew part of the generator.

    COFT first limits the norm of the generator to eps * rows^2 / sqrt(blocks).
    """
    if settings.get("coft"):
        limit = settings["eps"] * rows**2 / math.sqrt(len(generator))
        norms = torch.linalg.matrix_norm(generator, keepdim=True)
        generator = torch.where(norms <= limit, generator, limit * generator / norms)
    skew = 0.5 * (generator - generator.mT)
    eye = torch.eye(skew.shape[-1])
    return torch.linalg.solve(eye + skew, eye - skew, left=False)


def _check_cover(who: str, name: str, blocks: Tensor, width: int) -> None:
    """Raise unless the blocks cover the side of the matrix that they rotate; a single block may be shared."""
    size = blocks.shape[-1]
    if size > width or (len(blocks) != 1 and not width <= len(blocks) * size < width + len(blocks)):
        raise CoramError(
            f"{who}, tensor {name!r}: {len(blocks)} OFT blocks of size {size} do not fit a width of {width}"
        )


def _check_shape(who: str, name: str, found: Tensor, expected: Sequence[int]) -> None:
    if tuple(found.shape) != tuple(expected):
        raise CoramError(
            f"{who}, tensor {name!r}: shape {tuple(found.shape)}, but the base requires {tuple(expected)}"
        )


def _rotate_inputs(weight: Tensor, blocks: Tensor) -> Tensor:
    """W R^T, in float32 or wider; a single block is shared by all groups of inputs."""
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    groups = wide.unflatten(1, (-1, blocks.shape[-1])).transpose(0, 1)
    return (groups @ blocks.mT.to(groups)).transpose(0, 1).flatten(1)
