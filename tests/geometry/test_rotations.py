"""log and exp on SO(h) against scipy and by reconstruction."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch

from coram_hf.geometry import rotations


def rotation(rng, angles):
    """A rotation with the given plane angles (and a fixed axis left over in odd dimension), and its log."""
    h = 2 * len(angles) + int(rng.integers(2))
    basis = np.linalg.qr(rng.standard_normal((h, h)))[0]
    generator = np.zeros((h, h))
    for j, angle in enumerate(angles):
        generator[2 * j, 2 * j + 1], generator[2 * j + 1, 2 * j] = -angle, angle
    generator = basis @ generator @ basis.T
    q = basis @ scipy.linalg.expm(basis.T @ generator @ basis) @ basis.T
    return torch.from_numpy(q), generator


def reconstruction_error(q):
    rebuilt = rotations.exp(rotations.log(q.unsqueeze(0))[0])[0]
    return float((rebuilt - q).norm() / q.norm())


def test_typical_rotations_are_rebuilt_to_rounding():
    rng = np.random.default_rng(0)
    errors = [reconstruction_error(rotation(rng, rng.uniform(0, 2.9, 4))[0]) for _ in range(200)]
    assert max(errors) <= 1e-13


@pytest.mark.parametrize("h", [2, 3, 4, 8, 16, 64])
def test_log_and_exp_equal_scipy(h):
    rng = np.random.default_rng(h)
    generator = rng.standard_normal((h, h))
    generator = generator - generator.T
    generator *= 2.0 / np.abs(np.linalg.eigvals(generator)).max()
    q = scipy.linalg.expm(generator)
    for batch in (1, 3):
        found = rotations.exp(torch.from_numpy(generator).expand(batch, h, h))
        np.testing.assert_allclose(found[-1].numpy(), q, atol=1e-13)
        logs, near_pi = rotations.log(torch.from_numpy(q).expand(batch, h, h))
        np.testing.assert_allclose(logs[-1].numpy(), np.real(scipy.linalg.logm(q)), atol=1e-12)
        assert not near_pi.any()


@pytest.mark.parametrize("angle", [0.0, 1e-9, 1e-3, 0.2, 0.49, 0.58, 0.61, 0.8])
def test_the_series_of_small_rotations_ends_where_the_eigenvectors_take_over(angle):
    rng = np.random.default_rng(2)
    rotated = [rotation(rng, [angle, angle / 2, angle / 3, angle / 5]) for _ in range(20)]
    for q, generator in rotated:
        log, near_pi = rotations.log(q.unsqueeze(0))
        np.testing.assert_allclose(log[0].numpy(), generator, atol=2e-15 * (1 + len(q)))
        exp = rotations.exp(torch.from_numpy(generator).unsqueeze(0))
        np.testing.assert_allclose(exp[0].numpy(), q.numpy(), atol=2e-15 * (1 + len(q)))
        assert not near_pi.any()


def test_a_batch_gives_every_rotation_what_it_gets_alone():
    rng = np.random.default_rng(3)
    basis = np.linalg.qr(rng.standard_normal((4, 4)))[0]
    angles = ([0.01, 0.02], [1.0, 0.1], [3.1, 0.1], [0.3, 0.3])
    blocks = [scipy.linalg.block_diag(*([[0, -a], [a, 0]] for a in pair)) for pair in angles]
    q = torch.from_numpy(np.stack([scipy.linalg.expm(basis @ block @ basis.T) for block in blocks]))
    together, near_pi = rotations.log(q)
    assert near_pi.tolist() == [False, False, True, False]
    for i in range(len(q)):
        torch.testing.assert_close(together[i], rotations.log(q[i : i + 1])[0][0], rtol=0, atol=1e-15)


@pytest.mark.parametrize("distance", [1e-1, 1e-3, 1e-6, 1e-8])
def test_angles_near_pi_take_the_second_path(distance):
    rng = np.random.default_rng(1)
    for _ in range(50):
        q, generator = rotation(rng, [math.pi - distance, *rng.uniform(0, 2.9, 3)])
        log, near_pi = rotations.log(q.unsqueeze(0))
        assert near_pi.all()
        np.testing.assert_allclose(log[0].numpy(), generator, atol=1e-9)
        assert reconstruction_error(q) <= 1e-9


def test_several_and_equal_angles_near_pi():
    rng = np.random.default_rng(2)
    for angles in ([math.pi - 1e-6] * 2, [3.1, 3.1, 3.1, 0.0], [math.pi - 1e-6, 3.05, 1.0, 1.0]):
        q, generator = rotation(rng, angles)
        np.testing.assert_allclose(rotations.log(q.unsqueeze(0))[0][0].numpy(), generator, atol=1e-9)


@pytest.mark.parametrize("signs", [[-1, -1], [-1, -1, 1], [-1, -1, -1, -1, 1, 1], [-1] * 8])
def test_exact_half_turns_are_rebuilt(signs):
    rng = np.random.default_rng(3)
    basis = np.linalg.qr(rng.standard_normal((len(signs), len(signs))))[0]
    for q in (np.diag(np.array(signs, dtype=float)), basis @ np.diag(signs) @ basis.T):
        log, near_pi = rotations.log(torch.from_numpy(q).unsqueeze(0))
        assert near_pi.all()
        assert log.isfinite().all()
        assert reconstruction_error(torch.from_numpy(q)) <= 1e-9
        assert reconstruction_error(torch.from_numpy(q).float()) <= 1e-3


def test_both_paths_agree(monkeypatch):
    rng = np.random.default_rng(4)
    batch = torch.stack([rotation(np.random.default_rng(7), rng.uniform(0, 3.0, 4))[0] for _ in range(50)])
    cayley, none = rotations.log(batch)
    monkeypatch.setattr(rotations, "NEAR_PI", 0.0)
    general, every = rotations.log(batch)
    assert not none.any()
    assert every.all()
    torch.testing.assert_close(general, cayley, rtol=0, atol=1e-10)


def test_reflections_lose_their_last_column_sign():
    rng = np.random.default_rng(5)
    q = torch.from_numpy(np.linalg.qr(rng.standard_normal((6, 6)))[0])
    for matrix in (q, q @ torch.diag(torch.tensor([-1.0, 1, 1, 1, 1, 1]).double())):
        special, reflected = rotations.to_special(matrix.unsqueeze(0))
        assert np.isclose(np.linalg.det(special[0].numpy()), 1.0)
        assert torch.equal(special[0, :, :-1], matrix[:, :-1])
        assert bool(reflected) == (np.linalg.det(matrix.numpy()) < 0)
