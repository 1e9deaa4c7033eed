"""OrthoMerge: one rotation of the input space per matrix, and a Euclidean merge of what remains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from coram_hf.config import Declared, Residual
from coram_hf.errors import CoramError
from coram_hf.methods.baseline import Baseline, Tensors
from coram_hf.methods.entry import Choice
from coram_hf.methods.linear import weighted_mean
from coram_hf.methods.residual import DENSITY, merge_residual
from coram_hf.methods.ties import every_tau, global_cuts
from coram_hf.methods.updates import Updates

RANK_TOLERANCE = 1e-12
RIGHT_ANGLE = 1e-8
"""Squared cosine below which two ranges have orthogonal directions, where the short formula fails."""
HALF_TURN = 1e8
"""Size of a Cayley generator above which its rotation is by pi, up to rounding."""


def orthomerge(
    updates: Updates,
    *,
    residual: Annotated[Residual, "Merge of what the rotations leave over."] = "ta",
    conflict: Annotated[bool, "Rotate towards the rows that oppose the mean row (C) or all (G)."] = False,
    scale: Annotated[float | None, "Coefficient of the residual merge."] = None,
    trim: Annotated[
        Literal["tensor", "global"], "Where TIES seeks the largest entries of the residuals."
    ] = "tensor",
) -> Tensor:
    """W = W_0 R + merge of (W_i - W_0 R_i), with R_i = polar(W_0^T T_i) averaged in the Lie algebra

    T_i is W_i, or with `conflict` W_0 plus the rows of tau_i that oppose the mean row. The Cayley
    generators are averaged as A = (sum A_i) * mean|A_i| / |sum A_i|, so identical experts are reproduced
    if the residual merge reproduces them (`ta`). `scale` multiplies the residual merge: by default the
    mean (`ta`), TIES at 0.2 and 1.0, or TSV-M at 1.0. Tensors that are not matrices get the residual
    merge alone. With `trim` global, the cut of TIES is that of an expert's whole residual, as in the authors'
    scripts; finding it takes every rotation three times.
    """
    parameters = {"trim": trim} if residual == "ties" else None
    if updates.base.ndim != 2:
        return merge_residual(updates, residual, scale, parameters)
    W0 = updates.base.double()
    direction, magnitude = W0.new_zeros(W0.shape[1], W0.shape[1]), 0.0
    residuals = []
    for weight, (R, rest) in zip(updates.weights, rotations(updates, conflict), strict=True):
        residuals.append(rest)
        A = cayley(R)
        direction.add_(A, alpha=weight)
        magnitude += weight * float(A.norm())
    rotated = W0 @ inverse_cayley(with_norm(direction, magnitude)) - W0
    left_over = merge_residual(Updates.of(residuals, like=updates), residual, scale, parameters)
    return (rotated + left_over).to(updates.dtype)


def rotations(updates: Updates, conflict: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """R_i and the residual W_i - W_0 R_i of every expert."""
    W0 = updates.base.double()
    mean = weighted_mean(updates).double() if conflict else None
    for i in range(len(updates)):
        tau = updates.tau(i).double()
        R = procrustes(W0, W0 + (tau if mean is None else opposed_rows(tau, mean)))
        yield R, (W0 + tau - W0 @ R).to(updates.dtype)


def residual_cuts(tensors: Tensors, parameters: Mapping[str, Any]) -> tuple[float, ...] | None:
    """The cut of each expert over all its residuals, for TIES with trim="global"; else None."""
    conflict = parameters["conflict"]

    def residuals(updates: Updates) -> Iterable[Tensor]:
        turned = updates.base.ndim == 2 and updates.base.numel()
        return (rest for _, rest in rotations(updates, conflict)) if turned else every_tau(updates)

    return global_cuts(tensors, {"trim": parameters["trim"], "density": DENSITY}, residuals)


def opposed_rows(tau: Tensor, mean: Tensor) -> Tensor:
    """The rows of tau whose cosine with the mean row is negative; the others are zero."""
    return torch.where((tau * mean).sum(-1, keepdim=True) < 0, tau, 0.0)


def procrustes(W0: Tensor, T: Tensor) -> Tensor:
    """The rotation R of the input space that brings W_0 R closest to T: polar(W_0^T T), made proper.

    A reflection, which has no Cayley transform, is flipped in the direction of the smallest singular value.
    A wide W_0 is factored through its smaller side. If W_0^T T lacks full rank, R = X Y^T on its
    range is completed by the smallest rotation between the two null spaces; with C = X^T Y and
    F = X - Y C^T that is (I - X X^T)(I - Y Y^T + F H F^T), H = f(C C^T), f(c^2) = 1 / (c (1 + c)).
    """
    d_out, d_in = W0.shape
    if d_out < d_in:
        Q0, L0 = torch.linalg.qr(W0.mT)
        Q1, L1 = torch.linalg.qr(T.mT)
        U, S, Vh = torch.linalg.svd(L0 @ L1.mT)
        X, Y = Q0 @ U, Q1 @ Vh.mT
    else:
        X, S, Vh = torch.linalg.svd(W0.mT @ T)
        Y = Vh.mT
    if S[0] == 0:
        return torch.eye(d_in, dtype=W0.dtype, device=W0.device)
    rank = int((S > RANK_TOLERANCE * S[0]).sum())
    X, Y = X[:, :rank], Y[:, :rank]
    R = X @ Y.mT if rank == d_in else X @ Y.mT + _smallest_rotation_of_null_spaces(X, Y)
    if torch.linalg.det(R) < 0:
        R = R - 2 * X[:, -1:] @ Y[:, -1:].mT
    return R


def _smallest_rotation_of_null_spaces(X: Tensor, Y: Tensor) -> Tensor:
    C = X.mT @ Y
    squares, E = torch.linalg.eigh(C @ C.mT)
    if squares[0] < RIGHT_ANGLE:
        x, y = (torch.linalg.qr(basis, mode="complete")[0][:, basis.shape[1] :] for basis in (X, Y))
        U, _, Vh = torch.linalg.svd(x.mT @ y)
        return x @ U @ Vh @ y.mT
    c = squares.clamp_max(1.0).sqrt()
    H = (E / (c * (1 + c))) @ E.mT
    F = X - Y @ C.mT
    onto = torch.eye(len(X), dtype=X.dtype, device=X.device) - Y @ Y.mT + F @ H @ F.mT
    return onto - X @ (X.mT @ onto)


def cayley(R: Tensor) -> Tensor:
    """The skew generator A = (R - I) (R + I)^-1 of a rotation; raises if it turns by pi."""
    eye = torch.eye(len(R), dtype=R.dtype, device=R.device)
    A, failure = torch.linalg.solve_ex(R + eye, R - eye, left=False)
    if failure.any() or not A.abs().max() < HALF_TURN:
        raise CoramError(
            "orthomerge: the rotation from the base to an expert turns some direction by 180 degrees, where "
            "its Cayley transform does not exist; this expert was probably not fine-tuned from this base"
        )
    return (A - A.mT) / 2


def inverse_cayley(A: Tensor) -> Tensor:
    """The rotation R = (I + A) (I - A)^-1."""
    eye = torch.eye(len(A), dtype=A.dtype, device=A.device)
    return torch.linalg.solve(eye - A, eye + A, left=False)


def with_norm(direction: Tensor, magnitude: float) -> Tensor:
    """The direction scaled to the given norm; zero stays zero."""
    size = float(direction.norm())
    return direction * (magnitude / size) if size > 0 else direction


class OrthoMerge(Baseline):
    """OrthoMerge on weights, or with `space: oft` on the generators of OFT adapters."""

    @cached_property
    def options(self) -> dict[str, Declared]:
        """The parameters of the function, and `space`."""
        space = "Merge the generators of OFT adapters, not weights."
        return {**super().options, "space": Declared("space", str, choices=("oft",), help=space)}

    def complete(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters of the function, without `space`."""
        found = {key: value for key, value in super().complete(parameters).items() if key != "space"}
        if found["trim"] == "global" and found["residual"] != "ties":
            raise CoramError(f"orthomerge: trim is of residual 'ties', found {found['residual']!r}")
        return found

    def choose(self, parameters: Mapping[str, Any]) -> Choice:
        """OrthoMerge in the space that the parameters name."""
        from coram_hf.methods.oft import choose_oft

        return choose_oft(parameters) if "space" in parameters else super().choose(parameters)

    def python(self, sources: str, options: str, line: str, config: Mapping[str, Any]) -> list[str]:
        """Python code that repeats a merge."""
        if "space" not in config:
            return super().python(sources, options, line, config)
        given = f", weights={config['weights']!r}" if config.get("weights") else ""
        call = f"merge_oft({sources}{given}{options}).save_pretrained('merged')"
        return ["from coram_hf.baselines import merge_oft", call]


ORTHOMERGE = OrthoMerge(
    orthomerge,
    prepare=residual_cuts,
    presets={
        f"OrthoMerge {title}+{way}": {**residual, **({"conflict": True} if way == "C" else {})}
        for way in "GC"
        for title, residual in (
            ("TA", {"residual": "ta"}),
            ("TIES", {"residual": "ties", "trim": "global"}),
            ("TSV-M", {"residual": "tsvm"}),
        )
    },
)
