"""Frames by Gram matrix and by SVD against numpy and scipy, one slice at a time."""

import numpy as np
import pytest
import scipy.linalg
import torch

from coram_hf.geometry.frame import FACTORS, GramFrame, SvdFrame

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


def gram_frame(stack):
    X = torch.from_numpy(stack).flatten(1, 2)
    return GramFrame(X @ X.mT, stack.shape[1], torch.from_numpy(WEIGHTS)), X


def svd_frame(stack):
    return SvdFrame(torch.from_numpy(stack), torch.from_numpy(WEIGHTS))


@pytest.mark.parametrize("branch", FACTORS)
def test_every_branch_by_gram_matrix(branch):
    stack = slices()
    frame, X = gram_frame(stack)
    L, trusted = frame.update(branch)
    assert trusted.all()
    found = (L.flatten(2) @ X).numpy() + stack[:, 0]
    np.testing.assert_allclose(found, [merged(models, branch) for models in stack], rtol=0, atol=1e-9)


@pytest.mark.parametrize("branch", FACTORS)
@pytest.mark.parametrize("spectrum", [SPECTRUM, np.geomspace(1, 1e-4, HEIGHT)], ids=["even", "steep"])
def test_every_branch_by_svd(branch, spectrum):
    stack = slices(spectrum, size=0.01)
    frame = svd_frame(stack)
    assert frame.framed.all()
    expected = [merged(models, branch) for models in stack]
    np.testing.assert_allclose(frame.merged(branch).numpy(), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("make", [lambda stack: gram_frame(stack)[0], svd_frame], ids=["gram", "svd"])
def test_spectra_left_vectors_and_rotations(make):
    stack = slices()
    frame = make(stack)
    for b, models in enumerate(stack):
        factors = factored(models)
        for i, (u, s, _) in enumerate(factors):
            np.testing.assert_allclose(frame.S[b, i], s, rtol=1e-9)
            own = np.sign(np.diag(frame.U[b, 0].numpy().T @ factors[0][0]))
            np.testing.assert_allclose(frame.U[b, i], u * own, atol=1e-9)
        for i, q in enumerate(rotations(factors)):
            own_q = own[:, None] * q * own
            np.testing.assert_allclose(frame.turns.Q[b, i], own_q, atol=1e-9)
            np.testing.assert_allclose(frame.turns.K[b, i], scipy.linalg.logm(own_q).real, atol=1e-9)


def test_the_polar_factor_by_gram_matrix_is_that_of_the_mean_right_factor():
    stack = slices()
    frame, X = gram_frame(stack)
    found = frame.polar.coefficients @ X[:, HEIGHT:]
    for b, models in enumerate(stack):
        factors = factored(models)
        own = np.sign(np.diag(frame.U[b, 0].numpy().T @ factors[0][0]))
        mean = np.tensordot(WEIGHTS, [own[:, None] * v for _, _, v in factors[1:]], 1)
        np.testing.assert_allclose(found[b], scipy.linalg.polar(mean)[0], atol=1e-9)
    np.testing.assert_allclose(svd_frame(stack).polar.abs(), found.abs(), atol=1e-9)


def test_slices_that_a_gram_matrix_cannot_tell_are_not_trusted():
    steep, good, broken = slices(np.geomspace(1, 1e-4, HEIGHT), 0.01)[0], *slices()[:2]
    broken[2, 0, 0] = np.nan
    stack = np.stack([steep, good, broken])
    frame, _ = gram_frame(stack)
    for branch in FACTORS:
        L, trusted = frame.update(branch)
        assert trusted.tolist() == [False, True, False]
        assert L.isfinite().all()


def test_right_factors_that_cancel_are_only_distrusted_where_they_are_merged():
    rng = np.random.default_rng(1)
    right = orthonormal(rng, WIDTH, 3 * HEIGHT).T.reshape(3, HEIGHT, WIDTH)
    angle = np.geomspace(1, 1e-4, HEIGHT)[:, None]
    opposite = np.sin(angle) * right[2] - np.cos(angle) * right[1]
    left = orthonormal(rng, HEIGHT, HEIGHT) * SPECTRUM
    stack = np.stack([[left @ v for v in (right[0], right[1], opposite)]])
    X = torch.from_numpy(stack).flatten(1, 2)
    frame = GramFrame(X @ X.mT, 3, torch.tensor([0.5, 0.5], dtype=torch.float64))
    for branch, factors in FACTORS.items():
        assert frame.update(branch)[1].tolist() == ["v" not in factors]


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
@pytest.mark.parametrize("make", [lambda stack: gram_frame(stack)[0], svd_frame], ids=["gram", "svd"])
def test_nothing_is_computed_that_the_branch_leaves_out(branch, factors, make):
    frame = make(slices())
    frame.update(branch) if isinstance(frame, GramFrame) else frame.merged(branch)
    computed = {"q": {"turns", "turned"}, "s": {"shifted"}, "v": {"polar"}}
    for factor, names in computed.items():
        assert names <= vars(frame).keys() if factor in factors else not names & vars(frame).keys()
