"""Frames by Gram matrix and by SVD against numpy and scipy, one slice at a time."""

import numpy as np
import pytest
import scipy.linalg
import torch

from coram_hf.geometry.frame import FACTORS, GramFrame, SvdFrame
from coram_hf.geometry.products import Products

HEIGHT, WIDTH, SLICES = 6, 20, 3
WEIGHTS = np.array([0.5, 0.3, 0.2])
SPECTRUM = np.linspace(3, 1, HEIGHT)


def orthonormal(rng, rows, columns):
    return np.linalg.qr(rng.standard_normal((rows, columns)))[0]


def slices(spectrum=SPECTRUM, size=0.05):
    """(slices, 1 + experts, height, width): a base of the given spectrum and (I + A) W_0 (I + B)."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(SLICES):
        base = orthonormal(rng, HEIGHT, HEIGHT) * spectrum @ orthonormal(rng, WIDTH, HEIGHT).T
        near = [
            (np.eye(HEIGHT) + size * rng.standard_normal((HEIGHT, HEIGHT)))
            @ base
            @ (np.eye(WIDTH) + size * rng.standard_normal((WIDTH, WIDTH)))
            for _ in WEIGHTS
        ]
        found.append([base, *near])
    return np.array(found)


def factored(models):
    """U, S and V^T of base and experts, with the signs of pairs matched to the base's."""
    (u0, s0, v0), *others = (np.linalg.svd(model, full_matrices=False) for model in models)
    signs = [np.sign(np.diag(u0.T @ u) + np.diag(v0 @ v.T)) for u, _, v in others]
    return [(u0, s0, v0)] + [
        (u * sign, s, sign[:, None] * v) for sign, (u, s, v) in zip(signs, others, strict=True)
    ]


def rotations(factors):
    """Q_i = U_0^T U_i in SO(h)."""
    for u, _, _ in factors[1:]:
        q, _ = scipy.linalg.polar(factors[0][0].T @ u)
        q[:, -1] *= np.sign(np.linalg.det(q))
        yield q


def merged(models, branch):
    """W_merge of one slice, factor by factor."""
    factors = factored(models)
    u, s, v = factors[0]
    if "q" in FACTORS[branch]:
        logs = [scipy.linalg.logm(q).real for q in rotations(factors)]
        u = u @ scipy.linalg.expm(np.tensordot(WEIGHTS, logs, 1))
    if "s" in FACTORS[branch]:
        s = s * (1 + sum(w * (si / s - 1) for w, (_, si, _) in zip(WEIGHTS, factors[1:], strict=True)))
    if "v" in FACTORS[branch]:
        v, _ = scipy.linalg.polar(np.tensordot(WEIGHTS, [vi for _, _, vi in factors[1:]], 1))
    return u * s @ v


def gram_frame(stack, weights=WEIGHTS, rounded=False):
    """The frame of W_0 and the updates by their products, and the products themselves."""
    base, tau = stack[:, :1], stack[:, 1:] - stack[:, :1]
    found = [a @ b.swapaxes(-1, -2) for a, b in ((stack[:, 0], stack[:, 0]), (base, tau), (tau, tau))]
    return GramFrame(Products(*map(torch.from_numpy, found), rounded), torch.from_numpy(np.array(weights)))


def mixed(frame, stack):
    """Z = sum P_i tau_i."""
    tau = torch.from_numpy(stack[:, 1:] - stack[:, :1])
    return frame.P @ tau.flatten(1, 2)


def updated(frame, stack, branch):
    """A Z + L_0 W_0, and the slices that it is good for."""
    Z = mixed(frame, stack)
    L, trusted = frame.update(branch, Z @ Z.mT)
    rows = torch.cat([Z, torch.from_numpy(stack[:, 0])], 1)[:, -L.shape[2] :]
    return (L @ rows).numpy(), trusted


def svd_frame(stack):
    return SvdFrame(torch.from_numpy(stack), torch.from_numpy(WEIGHTS))


@pytest.mark.parametrize("branch", FACTORS)
def test_every_branch_by_gram_matrix(branch):
    stack = slices()
    update, trusted = updated(gram_frame(stack), stack, branch)
    assert trusted.all()
    found = update + stack[:, 0]
    np.testing.assert_allclose(found, [merged(models, branch) for models in stack], rtol=0, atol=1e-9)


@pytest.mark.parametrize("branch", FACTORS)
@pytest.mark.parametrize("spectrum", [SPECTRUM, np.geomspace(1, 1e-4, HEIGHT)], ids=["even", "steep"])
def test_every_branch_by_svd(branch, spectrum):
    stack = slices(spectrum, size=0.01)
    frame = svd_frame(stack)
    assert frame.framed.all()
    expected = [merged(models, branch) for models in stack]
    np.testing.assert_allclose(frame.merged(branch).numpy(), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("make", [gram_frame, svd_frame], ids=["gram", "svd"])
def test_spectra_left_vectors_and_rotations(make):
    stack = slices()
    frame = make(stack)
    for b, models in enumerate(stack):
        factors = factored(models)
        for i, (u, s, _) in enumerate(factors):
            np.testing.assert_allclose(frame.S[b, i], s, rtol=1e-9)
            own = np.sign(np.diag(frame.U0[b].numpy().T @ factors[0][0]))
            found = frame.U0[b] @ frame.Q[b, i - 1] if i else frame.U0[b]
            np.testing.assert_allclose(found, u * own, atol=1e-9)
        for i, q in enumerate(rotations(factors)):
            own_q = own[:, None] * q * own
            np.testing.assert_allclose(frame.turns.Q[b, i], own_q, atol=1e-9)
            np.testing.assert_allclose(frame.turns.K[b, i], scipy.linalg.logm(own_q).real, atol=1e-9)


def test_the_mean_right_factor_from_P_is_that_of_the_experts():
    stack = slices()
    frame = gram_frame(stack)
    V = frame.P.unflatten(2, (len(WEIGHTS), HEIGHT)).sum(2) @ torch.from_numpy(stack[:, 0]) + mixed(
        frame, stack
    )
    for b, models in enumerate(stack):
        factors = factored(models)
        own = np.sign(np.diag(frame.U0[b].numpy().T @ factors[0][0]))
        mean = np.tensordot(WEIGHTS, [own[:, None] * v for _, _, v in factors[1:]], 1)
        np.testing.assert_allclose(V[b], mean, atol=1e-9)
        np.testing.assert_allclose(
            svd_frame(stack).polar[b].abs(), np.abs(scipy.linalg.polar(mean)[0]), atol=1e-9
        )


def test_slices_that_products_cannot_tell_are_not_trusted():
    steep, good, broken = slices(np.geomspace(1, 1e-4, HEIGHT), 0.01)[0], *slices()[:2]
    broken[2, 0, 0] = np.nan
    stack = np.stack([steep, good, broken])
    frame = gram_frame(stack)
    for branch in FACTORS:
        L, trusted = frame.update(branch, torch.zeros(3, HEIGHT, HEIGHT, dtype=torch.float64))
        assert trusted.tolist() == [False, True, False]
        assert L.isfinite().all()


def test_float32_is_not_trusted_where_it_determines_no_frame():
    """A condition of 300, singular values closer than the update turns them, and a slice near underflow."""
    steep = slices(np.geomspace(1, 1 / 300, HEIGHT), 1e-4)[0]
    degenerate = slices(1 + 1e-6 * np.arange(HEIGHT)[::-1], 1e-5)[0]
    good = slices(size=0.005)[0]
    stack = np.stack([steep, degenerate, good, 1e-14 * good])
    assert gram_frame(stack).trusted.all()
    assert gram_frame(stack, rounded=True).trusted.tolist() == [False, False, True, False]


@pytest.mark.parametrize("size", [1e-3, 1e-6, 1e-12, 0])
def test_the_update_vanishes_with_those_of_the_experts(size):
    """The update of `full` is sum w_i tau_i up to second order, and rounding errors vanish, too."""
    rng = np.random.default_rng(2)
    base, noise = torch.from_numpy(slices()[:, 0]), rng.standard_normal((SLICES, len(WEIGHTS), HEIGHT, WIDTH))
    tau, weights = size * torch.from_numpy(noise), torch.from_numpy(WEIGHTS)
    frame = GramFrame(Products(base @ base.mT, base[:, None] @ tau.mT, tau @ tau.mT), weights)
    Z = frame.P @ tau.flatten(1, 2)
    found = frame.update("full", Z @ Z.mT).L @ torch.cat([Z, base], 1)
    mean = torch.einsum("n,bnhd->bhd", weights, tau)
    rounding = 3e-15 * base.norm() if size else 0
    assert (found - mean).norm() <= 10 * size * mean.norm() + rounding


def test_right_factors_that_cancel_are_only_distrusted_where_they_are_merged():
    rng = np.random.default_rng(1)
    right = orthonormal(rng, WIDTH, 3 * HEIGHT).T.reshape(3, HEIGHT, WIDTH)
    angle = np.geomspace(1, 1e-4, HEIGHT)[:, None]
    opposite = np.sin(angle) * right[2] - np.cos(angle) * right[1]
    left = orthonormal(rng, HEIGHT, HEIGHT) * SPECTRUM
    stack = np.stack([[left @ v for v in (right[0], right[1], opposite)]])
    frame = gram_frame(stack, [0.5, 0.5])
    for branch, factors in FACTORS.items():
        assert updated(frame, stack, branch)[1].tolist() == ["v" not in factors]


def test_slices_without_full_rank_or_with_too_few_columns_have_no_frame():
    stack = slices()
    stack[0, 1, 2] = stack[0, 1, 3]
    stack[2, 0, 0, 0] = np.inf
    frame = svd_frame(stack)
    assert frame.framed.tolist() == [False, True, False]
    np.testing.assert_allclose(frame.merged("full")[0], merged(stack[1], "full"), atol=1e-9)
    narrow = svd_frame(slices()[..., : HEIGHT - 1])
    assert not narrow.framed.any()
    assert narrow.merged("full").shape == (0, HEIGHT, HEIGHT - 1)


@pytest.mark.parametrize(("branch", "factors"), FACTORS.items())
@pytest.mark.parametrize("make", [gram_frame, svd_frame], ids=["gram", "svd"])
def test_nothing_is_computed_that_the_branch_leaves_out(branch, factors, make):
    frame = make(slices())
    if isinstance(frame, GramFrame):
        frame.update(
            branch, torch.zeros(SLICES, HEIGHT, HEIGHT, dtype=torch.float64) if "v" in factors else None
        )
    else:
        frame.merged(branch)
    computed = {"q": {"turns", "turn"}, "s": {"shift"}, "v": {"polar", "_turned_P"}}
    for factor, names in computed.items():
        found = names & vars(frame).keys()
        assert found if factor in factors else not found
