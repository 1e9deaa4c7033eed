"""Products in float32: how far the update is from float64's, and which slices take float64 instead."""

import numpy as np
import pytest
import torch
from helpers import reference
from helpers.matrices import additive_experts, multiplicative_experts, tensors, with_spectrum

from coram_hf import CoramConfig
from coram_hf.geometry import merge_matrix, merge_update

BRANCHES = ("full", "lr", "q", "s", "v", "qs", "sv")
LINES = (*BRANCHES, "nca", "nca+ave", "ca", "ca+ave", "SS(ca+ave,variance)", "SS(full,owner)")
BOUND = 1e-5


def both(base, experts, line="full", **options):
    """The update in float64 and in float32, and what happened to the slices in float32."""
    float64, float32 = (
        merge_update(base, experts, CoramConfig.from_line(line, compute_dtype=dtype, **options))
        for dtype in ("float64", "float32")
    )
    return float64[0].double(), float32[0].double(), float32[1]


def bfloat16(w0, experts):
    base, *others = tensors([w0, *experts], torch.bfloat16)
    return base, others


SPECTRA = {
    "random": None,
    "condition 30": np.logspace(0, -1.5, 8),
    "condition 1e6": np.logspace(0, -6, 8),
    "nearly degenerate": 1 + 1e-3 * np.arange(8)[::-1],
    "degenerate": np.ones(8),
}


def base_of(rng, spectrum, d_in):
    if SPECTRA[spectrum] is None:
        return rng.standard_normal((67, d_in))
    return with_spectrum(rng, 67, d_in, 8, SPECTRA[spectrum])


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("size", [1e-6, 1e-3, 3e-2, 0.5, 3.0])
@pytest.mark.parametrize("n", [1, 5])
def test_float32_is_within_the_bound_or_falls_back(spectrum, size, n):
    rng = np.random.default_rng(int(1e7 * size) + n)
    w0 = base_of(rng, spectrum, 96)
    base, *experts = tensors([w0, *additive_experts(rng, w0, n, size=size)], torch.float32)
    fine, coarse, stats = both(base, experts)
    assert (coarse - fine).norm() <= BOUND * fine.norm()
    assert stats.float32 + stats.float64_fallbacks == stats.slices
    if spectrum == "condition 1e6":
        assert stats.float32 <= 1  # the last slice has three rows, and a condition number of 50


@pytest.mark.parametrize("line", LINES)
def test_every_line_is_within_the_bound(line):
    rng = np.random.default_rng(1)
    w0 = rng.standard_normal((67, 200))
    base, experts = bfloat16(w0, additive_experts(rng, w0, 4, size=0.01))
    fine, coarse, stats = both(base, experts, line)
    assert (coarse - fine).norm() <= BOUND * fine.norm()
    assert stats.float32 > 0
    assert 0 < stats.float32_difference <= BOUND


@pytest.mark.parametrize("height", [1, 2, 3, 64])
def test_every_height_is_within_the_bound(height):
    rng = np.random.default_rng(2)
    w0 = rng.standard_normal((130, 400))
    base, experts = bfloat16(w0, additive_experts(rng, w0, 3, size=0.02))
    fine, coarse, _ = both(base, experts, slice_height=height)
    assert (coarse - fine).norm() <= BOUND * fine.norm()


@pytest.mark.parametrize("n", [2, 12])
def test_relative_updates_weights_and_factors(n):
    rng = np.random.default_rng(3)
    w0 = with_spectrum(rng, 40, 64, 8, np.linspace(2, 1, 8))
    base, experts = bfloat16(w0, multiplicative_experts(rng, w0, 8, n))
    weights = tuple(range(1, n + 1))
    fine, coarse, _ = both(base, experts, weights=weights)
    assert (coarse - fine).norm() <= BOUND * fine.norm()
    some = [0.5, -1.5] * (n // 2)
    fine, coarse = (
        merge_update(base, experts, CoramConfig(compute_dtype=dtype), factors=some)[0]
        for dtype in ("float64", "float32")
    )
    assert (coarse - fine).norm() <= BOUND * fine.norm()


@pytest.mark.parametrize("line", ["full", "nca", "ca+ave", "SS(ca+ave,variance)", "q", "sv"])
@pytest.mark.parametrize(
    "case",
    ["all equal base", "one equals base", "identical", "zero rows", "zero slice", "zero base", "narrow"],
)
def test_awkward_matrices_are_as_in_float64(line, case):
    rng = np.random.default_rng(4)
    w0 = rng.standard_normal((24, 5 if case == "narrow" else 64))
    experts = additive_experts(rng, w0, 3, size=0.01)
    if case == "all equal base":
        experts = [w0] * 3
    elif case == "one equals base":
        experts[1] = w0
    elif case == "identical":
        experts = experts[:1] * 3
    elif case == "zero rows":
        w0[3] = experts[0][3] = experts[1][12] = 0
    elif case == "zero slice":
        w0[8:16] = experts[2][16:] = 0
    elif case == "zero base":
        w0 = np.zeros_like(w0)
    base, others = bfloat16(w0, experts)
    fine, coarse, stats = both(base, others, line)
    assert coarse.isfinite().all()
    assert (coarse - fine).norm() <= BOUND * fine.norm()
    if case in ("zero slice", "narrow", "zero base"):
        assert stats.frameless > 0
    if case == "all equal base":
        assert not coarse.any()


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_numbers_whose_products_leave_float32_take_float64(size):
    rng = np.random.default_rng(5)
    w0 = rng.standard_normal((16, 40))
    base, *experts = tensors([w0, *additive_experts(rng, w0, 2)], torch.float32)
    fine, coarse, stats = both(size * base, [size * expert for expert in experts])
    assert stats.float64_fallbacks == 2
    assert 0 < (fine / size).norm() < torch.inf
    assert ((coarse - fine) / size).norm() <= BOUND * (fine / size).norm()


def test_auto_is_float32_only_where_everything_has_16_bits():
    rng = np.random.default_rng(6)
    w0 = rng.standard_normal((16, 40))
    base, *experts = tensors([w0, *additive_experts(rng, w0, 2)], torch.bfloat16)

    def slices_in_float32(base, experts, **options):
        return merge_update(base, experts, CoramConfig(), **options)[1].float32

    assert slices_in_float32(base, experts) == 2
    assert slices_in_float32(base, [experts[0], experts[1].half()]) == 2
    assert slices_in_float32(base, [experts[0], experts[1].float()]) == 0
    assert slices_in_float32(base.float(), experts) == 0
    assert slices_in_float32(base, experts, result=torch.float32) == 0


def test_merge_matrix_whose_result_has_32_bits_is_exact():
    rng = np.random.default_rng(7)
    w0 = rng.standard_normal((16, 40))
    base, experts = bfloat16(w0, additive_experts(rng, w0, 2))
    exact = reference.merge(base.double().numpy(), [expert.double().numpy() for expert in experts])
    np.testing.assert_allclose(merge_matrix(base, experts).numpy(), exact, rtol=0, atol=3e-7)


def test_the_measured_difference_is_that_of_the_sampled_slices():
    """With two slices, both are sampled."""
    rng = np.random.default_rng(8)
    w0 = rng.standard_normal((16, 400))
    base, experts = bfloat16(w0, additive_experts(rng, w0, 3))
    fine = merge_update(base.double(), [expert.double() for expert in experts], CoramConfig())[0]
    _, coarse, stats = both(base, experts)
    assert stats.float32_difference == pytest.approx(float((coarse - fine).norm() / fine.norm()), rel=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_one_core_and_several_agree(threads, dtype):
    rng = np.random.default_rng(9)
    w0 = rng.standard_normal((20, 2500))
    base, *experts = tensors([w0, *additive_experts(rng, w0, 3)], torch.float32)
    expected = reference.merge(*(np.float64(base), [np.float64(expert) for expert in experts]))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        update = merge_update(base, experts, CoramConfig(compute_dtype=dtype))[0]
    finally:
        torch.set_num_threads(before)
    exact = expected - np.float64(base)
    assert np.linalg.norm(update - exact) <= (1e-6 if dtype == "float32" else 1e-7) * np.linalg.norm(exact)
