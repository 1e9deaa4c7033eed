"""Every baseline against numpy, on every shape; presets, parameters, and the residual pathway."""

import hashlib

import numpy as np
import pytest
import torch
from helpers import baseline_reference as reference
from helpers.architectures import ARCHITECTURES
from helpers.matrices import tensors
from helpers.models import fine_tuned, snapshot, tiny_llama

from coram_hf import CoramConfig, CoramError, CoramMerger
from coram_hf.baselines import METHODS, PRESETS, merge, merge_tensor, open_merger
from coram_hf.methods.ace import is_uneven
from coram_hf.methods.orthomerge import cayley, inverse_cayley, procrustes

SHAPES = {
    "square": (24, 24),
    "tall": (60, 18),
    "wide": (18, 60),
    "vector": (50,),
    "stack": (3, 8, 10),
    "scalar": (),
}


def problem(shape, n=3, seed=0):
    rng = np.random.default_rng(seed)
    w0 = rng.standard_normal(shape)
    return w0, [w0 + 0.05 * (i + 1) * rng.standard_normal(shape) for i in range(n)]


def agree(shape, expected_of, method, dtype, **parameters):
    """merge_tensor equals the reference on the same (rounded) numbers, relative to the update."""
    w0, experts = problem(shape)
    base, *others = (torch.as_tensor(a).to(dtype) for a in (w0, *experts))
    w0, *experts = (np.asarray(t.double()) for t in (base, *others))
    merged = merge_tensor(base, others, method, **parameters)
    assert merged.shape == base.shape
    assert merged.dtype == dtype
    expected = expected_of(w0, experts)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-6
    error = np.linalg.norm(np.asarray(merged.double()) - expected)
    assert error <= tolerance * np.linalg.norm(expected - w0)


@pytest.fixture(params=list(SHAPES))
def shape(request):
    return SHAPES[request.param]


@pytest.fixture(params=[torch.float64, torch.float32])
def dtype(request):
    return request.param


@pytest.mark.parametrize(
    "options", [{}, {"weights": (1, 2, 3)}, {"weights": (0.5, 0.5, 0.5), "normalize": False}]
)
def test_linear(shape, dtype, options):
    agree(shape, lambda w, e: reference.linear(w, e, **options), "linear", dtype, **options)


@pytest.mark.parametrize("scale", [0.4, 1.0])
def test_task_arithmetic(shape, dtype, scale):
    agree(shape, lambda w, e: reference.task_arithmetic(w, e, scale), "task_arithmetic", dtype, scale=scale)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"density": 0.5, "scale": 0.4, "combine": "sum"},
        {"density": 1.0, "sign": "count"},
        {"weights": (1, 2, 3)},
    ],
)
def test_ties(shape, dtype, options):
    agree(shape, lambda w, e: reference.ties(w, e, **options), "ties", dtype, **options)


@pytest.mark.parametrize(
    "options", [{}, {"drop": 0.5, "rescale": False}, {"drop": 0.3, "scale": 0.4, "combine": "sum"}]
)
def test_dare_ties(shape, dtype, options):
    def masks(w, n, seed, name):
        for i in range(n):
            digest = hashlib.sha256(f"{seed}/{name}/{i}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
            yield (
                (torch.rand(w.shape or 1, generator=generator) >= options.get("drop", 0.9))
                .numpy()
                .reshape(w.shape)
            )

    def expected(w, e):
        return reference.dare_ties(w, e, list(masks(w, len(e), 7, "layer.weight")), **options)

    agree(shape, expected, "dare_ties", dtype, seed=7, name="layer.weight", **options)


def test_dare_draws_depend_on_seed_and_name_only():
    w0, experts = problem((40, 50))
    base, *others = tensors([w0, *experts])

    def run(**options):
        return merge_tensor(base, others, "dare_ties", drop=0.6, **options)

    assert torch.equal(run(seed=1, name="a"), run(seed=1, name="a"))
    assert not torch.equal(run(seed=1, name="a"), run(seed=2, name="a"))
    assert not torch.equal(run(seed=1, name="a"), run(seed=1, name="b"))
    kept = (run(seed=1, name="a") != base).float().mean().item()
    assert kept == pytest.approx(1 - 0.6**3, abs=0.05)


@pytest.mark.parametrize("options", [{}, {"rank": 4, "scale": 0.7}])
def test_tsvm(shape, dtype, options):
    agree(shape, lambda w, e: reference.tsvm(w, e, **options), "tsvm", dtype, **options)


@pytest.mark.parametrize("options", [{}, {"scale": 0.7}])
@pytest.mark.parametrize("method", ["iso_c", "wudi", "ace"])
def test_iso_c_wudi_and_ace(shape, dtype, method, options):
    agree(shape, lambda w, e: getattr(reference, method)(w, e, **options), method, dtype, **options)


@pytest.mark.parametrize("sizes", [(0.01, 0.01, 0.01), (1e-3, 1.0, 20.0)])
@pytest.mark.parametrize("shape", [(24, 24), (40, 12), (12, 40)])
def test_ace_of_even_and_uneven_experts(shape, sizes):
    w0, experts = problem(shape)
    experts = [w0 + size * (e - w0) for size, e in zip(sizes, experts, strict=True)]
    energies = [float(((e - w0) ** 2).sum()) for e in experts]
    assert is_uneven(energies) == (sizes[0] != sizes[2])
    options = {"eps": 0.003, "fraction": 0.5, "weights": (1, 2, 1)}
    found = merge_tensor(*(lambda base, *others: (base, others))(*tensors([w0, *experts])), "ace", **options)
    expected = reference.ace(w0, experts, **options)
    assert np.linalg.norm(found.numpy() - expected) <= 1e-9 * np.linalg.norm(expected - w0)


@pytest.mark.parametrize("method", ["iso_c", "wudi", "ace"])
def test_degenerate_updates_of_the_new_rivals(method):
    base = torch.randn(10, 8, dtype=torch.float64)
    tau = torch.outer(torch.randn(10), torch.randn(8)).double()
    for experts in ([base], [base, base], [base + tau, base], [base + tau] * 3, [base + tau]):
        merged = merge_tensor(base, experts, method)
        assert merged.isfinite().all()
        assert torch.equal(merged, base) == all(torch.equal(e, base) for e in experts)
    assert merge_tensor(base[:0], [base[:0]], method).shape == (0, 8)
    one_row = merge_tensor(base[:1], [base[:1] + 1, base[:1] - 0.5], method)
    assert one_row.isfinite().all()


def test_tsvm_of_low_rank_experts_with_capped_rank():
    """Rank-2 updates: only their own directions take part, as if rank=2 had been asked for."""
    rng = np.random.default_rng(0)
    w0 = rng.standard_normal((40, 30))
    experts = [w0 + rng.standard_normal((40, 2)) @ rng.standard_normal((2, 30)) for _ in range(3)]
    base, *others = tensors([w0, *experts])
    capped = merge_tensor(base, others, "tsvm", cap_rank=True)
    np.testing.assert_allclose(capped.numpy(), reference.tsvm(w0, experts, rank=2), atol=1e-10)
    assert merge_tensor(base, others, "tsvm").isfinite().all()


@pytest.mark.parametrize("conflict", [False, True])
@pytest.mark.parametrize("residual", ["ta", "ties", "tsvm"])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_orthomerge(shape, dtype, residual, conflict, scale):
    options = {"residual": residual, "conflict": conflict, "scale": scale}
    agree(shape, lambda w, e: reference.orthomerge(w, e, **options), "orthomerge", dtype, **options)


@pytest.mark.parametrize("shape", [(24, 24), (60, 18), (18, 60), (5, 40)])
def test_orthomerge_rotations(shape):
    w0, experts = problem(shape, n=4)
    base, *others = tensors([w0, *experts])
    eye = torch.eye(shape[1], dtype=torch.float64)
    total = torch.zeros_like(eye)
    for other in others:
        rotation = procrustes(base, other)
        np.testing.assert_allclose(rotation.numpy(), reference.procrustes(w0, other.numpy()), atol=1e-10)
        torch.testing.assert_close(inverse_cayley(cayley(rotation)), rotation, rtol=0, atol=1e-10)
        total += cayley(rotation)
    merged = inverse_cayley(total)
    assert (merged @ merged.T - eye).abs().max() <= 1e-10
    for copies in (1, 2):
        same = merge_tensor(base, [others[0]] * copies, "orthomerge")
        torch.testing.assert_close(same, others[0], rtol=0, atol=1e-8)


def orthomerge_beside_zero(w0, experts):
    """OrthoMerge of an expert that is all zero and of others: R_0 = I, A_0 = 0, and -W_0 is left over."""
    eye, count = np.eye(w0.shape[1]), 1 + len(experts)
    rotations = [reference.procrustes(w0, e) for e in experts]
    generators = [(r - eye) @ np.linalg.inv(r + eye) for r in rotations]
    size = sum(np.linalg.norm(a) for a in generators) / count
    a = sum(generators) * size / np.linalg.norm(sum(generators))
    left_over = sum(e - w0 @ r for e, r in zip(experts, rotations, strict=True)) - w0
    return w0 @ (eye + a) @ np.linalg.inv(eye - a) + left_over / count


def test_orthomerge_of_degenerate_matrices():
    zeros = torch.zeros(6, 8, dtype=torch.float64)
    w0, experts = problem((6, 8))
    base, *others = tensors([w0, *experts])
    mean = sum(others) / len(others)
    torch.testing.assert_close(merge_tensor(zeros, others, "orthomerge"), mean, rtol=0, atol=1e-12)
    found = merge_tensor(base, [zeros, *others], "orthomerge").numpy()
    expected = orthomerge_beside_zero(w0, experts)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)
    mirrored = base @ torch.diag(torch.tensor([-1.0] + [1.0] * 7, dtype=torch.float64))
    torch.testing.assert_close(merge_tensor(base, [mirrored], "orthomerge"), mirrored, rtol=0, atol=1e-10)
    eye = torch.eye(8, dtype=torch.float64)
    for other in (torch.roll(eye[:4], 2, 0), torch.roll(eye[:4], 3, 1), eye[[2, 5, 6, 7]]):
        rotation = procrustes(eye[:4], other)
        assert (rotation @ rotation.T - eye).abs().max() <= 1e-10
    half_turn = eye @ torch.diag(torch.tensor([-1.0, -1] + [1.0] * 6, dtype=torch.float64))
    with pytest.raises(ValueError, match="180 degrees"):
        merge_tensor(eye, [half_turn], "orthomerge")


@pytest.mark.parametrize("kind", ["steep", "correlated"])
@pytest.mark.parametrize("shape", [(50, 12), (12, 50), (20, 20)])
def test_tsvm_of_badly_conditioned_updates(shape, kind, dtype):
    rng = np.random.default_rng(0)
    w0 = rng.standard_normal(shape)
    if kind == "steep":
        u, v = (np.linalg.qr(rng.standard_normal((n, min(shape))))[0] for n in shape)
        taus = [u * np.logspace(0, -4, min(shape)) @ v.T]
    else:
        common = rng.standard_normal(shape)
        taus = [common + 0.05 * rng.standard_normal(shape) for _ in range(3)]
    base, *others = tensors([w0, *(w0 + t for t in taus)], dtype)
    w0, *experts = (t.double().numpy() for t in (base, *others))
    merged = merge_tensor(base, others, "tsvm").double().numpy()
    expected = reference.tsvm(w0, experts)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-6
    assert np.linalg.norm(merged - expected) <= tolerance * np.linalg.norm(expected)


def test_tsvm_ignores_experts_that_do_not_change_a_tensor():
    """An embedding that one expert trained must not be mixed with arbitrary directions of the others."""
    rng = np.random.default_rng(1)
    w0, tau = rng.standard_normal((30, 20)), rng.standard_normal((30, 20))
    base, changed = tensors([w0, w0 + tau])
    merged = merge_tensor(base, [changed, base, base, base], "tsvm").numpy()
    u, s, v = reference.svd(tau)
    np.testing.assert_allclose(merged, w0 + u[:, :5] * s[:5] @ v[:, :5].T, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_capped_rank_sees_through_the_rounding_of_weights(dtype):
    rng = np.random.default_rng(2)
    w0 = 0.02 * rng.standard_normal((128, 96))
    low = [0.02 * 0.1 * rng.standard_normal((128, 4)) @ rng.standard_normal((4, 96)) for _ in range(3)]
    base, *others = tensors([w0, *(w0 + t for t in low)], dtype)
    capped = merge_tensor(base, others, "tsvm", cap_rank=True)
    exact = merge_tensor(base, others, "tsvm", rank=4)
    torch.testing.assert_close(capped, exact, rtol=0, atol=1e-7)
    assert (merge_tensor(base, others, "tsvm") - exact).norm() > 1e-3 * (exact - base).norm()


def test_weights_count_in_every_method():
    """Weights (2, 1) are the same as the first expert given twice, where a method is linear in copies."""
    w0, experts = problem((20, 16), n=2)
    base, a, b = tensors([w0, *experts])
    for method in ("linear", "task_arithmetic", "ties", "orthomerge"):
        options = {"scale": 0.5} if method == "task_arithmetic" else {}
        weighted = merge_tensor(base, [a, b], method, weights=(2, 1), **options)
        if method == "task_arithmetic":
            options = {"scale": 0.5 * 2 / 3}
        torch.testing.assert_close(
            weighted, merge_tensor(base, [a, a, b], method, **options), rtol=0, atol=1e-12
        )
    spectra = [reference.svd(e - w0) for e in experts]
    k = 16 // 2
    u, v = (np.concatenate([p[i][:, :k] for p in spectra], axis=1) for i in (0, 2))
    s = np.concatenate([spectra[0][1][:k] * 4 / 3, spectra[1][1][:k] * 2 / 3])
    expected = w0 + reference.polar(u) * s @ reference.polar(v).T
    np.testing.assert_allclose(
        merge_tensor(base, [a, b], "tsvm", weights=(2, 1)).numpy(), expected, atol=1e-10
    )


def test_dare_density_trims_the_survivors():
    w0, experts = problem((40, 50), n=1)
    base, other = tensors([w0, *experts])
    sparse = merge_tensor(base, [other], "dare_ties", drop=0.5, density=1.0) - base
    trimmed = merge_tensor(base, [other], "dare_ties", drop=0.5, density=0.25) - base
    kept = sparse[sparse != 0].abs().sort(descending=True).values
    cut = kept[int(0.25 * len(kept)) - 1]
    torch.testing.assert_close(trimmed, torch.where(sparse.abs() >= cut, sparse, 0.0))


def test_large_tensors_are_trimmed_like_small_ones(monkeypatch):
    w0, experts = problem((300, 40))
    base, *others = tensors([w0, *experts], torch.float32)
    small = merge_tensor(base, others, "ties")
    monkeypatch.setattr("coram_hf.methods.cuts.SMALL", 100)
    assert torch.equal(merge_tensor(base, others, "ties"), small)


@pytest.mark.parametrize("architecture", ["Mixtral", "GPT-2", "GPT-OSS"])
def test_every_matrix_of_a_stack_has_its_own_cut(architecture):
    base = ARCHITECTURES[architecture].build()
    merger = open_merger(
        base, [fine_tuned(base, 0.02 * (i + 1), seed=i) for i in range(2)], "ties", progress=False
    )
    found, targets = merger.merge().model.state_dict(), merger.inputs.targets
    for name, target in targets.items():
        for i, (_, w0, experts) in enumerate(merger.inputs.parameter(name).matrices()):
            assert torch.equal(target.matrices(found[name])[i], merge_tensor(w0, experts, "ties"))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)])
def test_empty_tensors_stay_empty(method, shape):
    experts = [torch.empty(shape)] * (METHODS[method].most or 2)
    assert merge_tensor(torch.empty(shape), experts, method).shape == shape


@pytest.fixture(scope="module")
def suite():
    base = tiny_llama()
    return base, {f"e{i}": fine_tuned(base, 0.02 * (i + 1), seed=i) for i in range(3)}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_merges_a_model(suite, preset):
    base, experts = suite
    method, parameters = PRESETS[preset].method, PRESETS[preset].parameters
    before = snapshot(base)
    result = merge(base, experts, method, progress=False, **parameters)
    merged = result.model.state_dict()
    assert {k: (v.shape, v.dtype) for k, v in merged.items()} == {
        k: (v.shape, v.dtype) for k, v in before.items()
    }
    assert all(tensor.isfinite().all() for tensor in merged.values())
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())
    assert any(not torch.equal(merged[name], before[name]) for name in merged)
    alone = ("model.layers.0.mlp.up_proj.weight", "model.norm.weight")
    for name in () if parameters.get("trim") == "global" else alone:
        tensor_by_tensor = merge_tensor(
            base.get_parameter(name).detach(),
            [e.get_parameter(name).detach() for e in experts.values()],
            method,
            name=name,
            **parameters,
        )
        torch.testing.assert_close(merged[name], tensor_by_tensor, rtol=0, atol=1e-6)
    assert result.report.method == method
    assert result.report.dispersion > 1
    assert parameters.items() <= result.report.to_dict()["config"].items()

    unchanged = merge(base, [base, base], method, progress=False, **parameters).model.state_dict()
    for name, tensor in unchanged.items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=1e-7)


def test_there_are_ten_presets_of_the_paper_and_three_of_mergebench():
    assert [PRESETS[p].method for p in PRESETS].count("orthomerge") == 6
    assert len(PRESETS) == 13


def test_the_registry_describes_itself():
    names = (
        "linear task_arithmetic ties dare_ties dare_linear della della_linear breadcrumbs sce model_stock "
        "slerp nuslerp karcher arcee_fusion tsvm iso_c wudi ace orthomerge"
    )
    assert list(METHODS) == names.split()
    assert {name: option.default for name, option in METHODS["ties"].options.items()} == {
        "density": 0.2,
        "scale": 1.0,
        "combine": "mean",
        "trim": "tensor",
        "sign": "sum",
        "normalize": True,
        "rescale": False,
    }
    assert all(method.formula.startswith("W = ") for method in METHODS.values())


@pytest.mark.parametrize(
    ("method", "parameters", "message"),
    [
        ("tise", {}, "unknown merge method 'tise'; did you mean 'ties'"),
        ("ties", {"densty": 0.2}, "unknown (parameter|option) of ties 'densty'; did you mean 'density'"),
        ("ties", {"density": 2}, "ties: density must be a finite number at least 0 and at most 1, found 2"),
        (
            "ties",
            {"density": [0.1, 2, 0.3]},
            "ties: density must be a finite number at least 0 and at most 1",
        ),
        ("ties", {"density": [0.1, 0.2]}, "density: found 2 for 3 experts"),
        ("ties", {"trim": "global", "density": [0.1, 0.2, [0.1, 1]]}, "one positive density per expert"),
        ("slerp", {}, "slerp: the number of experts must be exactly 1, found 3"),
        ("nuslerp", {}, "nuslerp: the number of experts must be exactly 2, found 3"),
        ("della", {"density": 0.9}, "probabilities outside"),
        ("ties", {"combine": "max"}, "'mean', 'sum'"),
        ("dare_ties", {"drop": 1.1}, r"drop must be a finite number at least 0 and at most 1, found 1\.1"),
        ("dare_ties", {"rescale": 1}, "True or False"),
        ("task_arithmetic", {"scale": float("nan")}, "finite"),
        ("tsvm", {"rank": 0}, "rank must be a positive integer"),
        ("tsvm", {"scale": None}, "scale must be a finite number, found None"),
        ("orthomerge", {"residual": "dare"}, "'ta', 'ties', 'tsvm'"),
        ("linear", {"weights": (1, 2)}, "found 2 for 3 experts"),
    ],
)
def test_bad_parameters_are_named_before_any_merging(suite, method, parameters, message):
    w0, experts = problem((4, 4))
    with pytest.raises(ValueError, match=message):
        merge_tensor(*(lambda b, *o: (b, o))(*tensors([w0, *experts])), method, **parameters)
    with pytest.raises(ValueError, match=message):
        merge(*suite, method, progress=False, **parameters)


def test_shared_options_are_suggested_too(suite):
    for typo, meant in (("wieghts", "weights"), ("balence", "balance"), ("keep_updates", "keep_update")):
        with pytest.raises(ValueError, match=f"unknown option of linear '{typo}'; did you mean '{meant}'"):
            merge(*suite, "linear", **{typo: None})


def test_models_without_targets_can_be_merged_by_a_baseline():
    import transformers as hf

    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], num_labels=2)
    torch.manual_seed(0)
    base = hf.ResNetForImageClassification(config).eval()
    experts = {f"e{i}": fine_tuned(base, 0.05 * (i + 1), seed=i) for i in range(2)}
    result = merge(base, experts, "linear", progress=False)
    assert result.report.dispersion == pytest.approx(2.0, rel=0.1)
    assert result.report.kappa is None
    name = "classifier.1.weight"
    mean = sum(e.state_dict()[name] for e in experts.values()) / 2
    torch.testing.assert_close(result.model.state_dict()[name], mean)


@pytest.mark.parametrize("options", [{"weights": np.array([1.0, 1, 2])}, {"target_modules": {"q_proj"}}])
def test_reports_of_baselines_can_be_saved(suite, options, tmp_path):
    result = merge(*suite, "linear", progress=False, **options)
    result.save_pretrained(tmp_path)
    assert (tmp_path / "coram_report.json").is_file()


@pytest.mark.parametrize("weights", [(0, 0, 0), (1, -2, 1), (float("nan"), 1, 1), "abc", 3])
def test_bad_weights_are_refused(weights):
    w0, experts = problem((4, 4))
    base, *others = tensors([w0, *experts])
    with pytest.raises(ValueError, match="weights"):
        merge_tensor(base, others, "linear", weights=weights)


def test_bad_tensors_are_named():
    with pytest.raises(ValueError, match="no experts"):
        merge_tensor(torch.ones(3), [], "linear")
    with pytest.raises(ValueError, match=r"expert 1 must have the base's shape \(3,\), found \(4,\)"):
        merge_tensor(torch.ones(3), [torch.ones(3), torch.ones(4)], "linear")
    with pytest.raises(ValueError, match="base must be a floating-point tensor"):
        merge_tensor(torch.ones(3, dtype=torch.int64), [torch.ones(3)], "linear")
    with pytest.raises(ValueError, match="expert 0 contains NaN"):
        merge_tensor(torch.ones(3), [torch.tensor([1.0, float("nan"), 0.0])], "ties")


def test_global_trim_takes_the_top_of_the_whole_expert(suite):
    base, experts = suite
    names = list(base.state_dict())
    w0 = {n: base.state_dict()[n].double().numpy() for n in names}
    others = [{n: e.state_dict()[n].double().numpy() for n in names} for e in experts.values()]
    merged = merge(base, experts, "ties", trim="global", density=0.15, progress=False).model.state_dict()
    taus = []
    for other in others:
        everything = np.concatenate([np.abs(other[n] - w0[n]).ravel() for n in names])
        cut = np.sort(everything)[-int(0.15 * everything.size)]
        taus.append(
            {n: np.where(np.abs(other[n] - w0[n]) >= cut * (1 - 1e-7), other[n] - w0[n], 0.0) for n in names}
        )
    for n in names:
        update = reference.elect([t[n] for t in taus], "mean", "sum", np.full(3, 1 / 3))
        np.testing.assert_allclose(merged[n].double().numpy(), w0[n] + update, atol=1e-6)


@pytest.mark.parametrize("conflict", [False, True])
def test_orthomerge_trims_over_the_whole_residual(suite, conflict):
    base, experts = suite
    names = list(base.state_dict())
    w0 = {n: base.state_dict()[n].double().numpy() for n in names}
    others = [{n: e.state_dict()[n].double().numpy() for n in names} for e in experts.values()]
    options = {"residual": "ties", "conflict": conflict, "trim": "global"}
    merged = merge(base, experts, "orthomerge", progress=False, **options).model.state_dict()
    parts = {
        n: reference.turned(w0[n], [o[n] for o in others], conflict)
        if w0[n].ndim == 2
        else (w0[n], [o[n] - w0[n] for o in others])
        for n in names
    }
    cuts = []
    for i in range(len(others)):
        everything = np.concatenate([np.abs(parts[n][1][i]).ravel() for n in names])
        cuts.append(np.sort(everything)[-int(0.2 * everything.size)] * (1 - 1e-6))
    shares = np.full(len(others), 1 / len(others))
    apart = 0.0
    for n, (rotated, left_over) in parts.items():
        kept = [np.where(np.abs(t) >= cut, t, 0.0) for t, cut in zip(left_over, cuts, strict=True)]
        expected = rotated + reference.elect(kept, "mean", "sum", shares)
        np.testing.assert_allclose(merged[n].double().numpy(), expected, atol=1e-6)
        by_tensor = reference.orthomerge(w0[n], [o[n] for o in others], "ties", conflict)
        apart = max(apart, np.abs(by_tensor - expected).max())
    assert apart > 1e-3
    with pytest.raises(CoramError, match="trim is of residual 'ties', found 'ta'"):
        merge(base, experts, "orthomerge", trim="global")


def test_balance_and_weights_reach_the_baselines(suite):
    base, experts = suite
    report = merge(
        base, experts, "task_arithmetic", balance="equal", weights=(1, 1, 2), progress=False
    ).report
    result = merge(
        base, experts, "task_arithmetic", scale=0.4, balance="equal", weights=(1, 1, 2), progress=False
    )
    assert report.dispersion == pytest.approx(1.0)
    assert report.unbalanced_dispersion == pytest.approx(3.0, rel=0.05)
    name = "lm_head.weight"
    w0 = base.get_parameter(name).detach().double()
    factors = report.balance_factors.values()
    expected = w0 + 0.4 * 3 * sum(
        w * f * (e.get_parameter(name).detach().double() - w0)
        for w, f, e in zip((0.25, 0.25, 0.5), factors, experts.values(), strict=True)
    )
    torch.testing.assert_close(result.model.state_dict()[name].double(), expected, rtol=0, atol=1e-7)


def test_a_baseline_can_be_reassembled(suite):
    base, experts = suite
    kept = merge(base, experts, "task_arithmetic", scale=1.0, keep_update=True, progress=False)
    direct = merge(base, experts, "task_arithmetic", scale=0.3, progress=False)
    for a, b in zip(kept.with_lambda(0.3).model.parameters(), direct.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=5e-7)
    with pytest.raises(CoramError, match="keep_update"):
        direct.with_lambda(2.0)


@pytest.mark.parametrize("residual", ["ta", "ties", "tsvm"])
def test_the_residual_pathway_knows_weights_and_balance(suite, residual):
    base, experts = suite
    config = CoramConfig(residual=residual, weights=(1, 1, 2), balance="equal")
    result = CoramMerger(base, experts, config, progress=False).merge()
    name = "lm_head.weight"
    w0 = base.get_parameter(name).detach().double()
    factors = result.report.balance_factors.values()
    scaled = [
        w0 + f * (e.get_parameter(name).detach().double() - w0)
        for f, e in zip(factors, experts.values(), strict=True)
    ]
    method = {"ta": "linear"}.get(residual, residual)
    expected = merge_tensor(w0, scaled, method, weights=(1, 1, 2))
    torch.testing.assert_close(result.model.state_dict()[name].double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("residual", ["ta", "ties", "tsvm"])
def test_the_residual_pathway_carries_what_is_not_a_target(suite, residual):
    base, experts = suite
    plain = CoramMerger(base, experts, CoramConfig.from_line("lr"), progress=False).merge()
    merger = CoramMerger(base, experts, CoramConfig.from_line(f"lr.{residual}"), progress=False)
    plan, result = merger.inspect(), merger.merge()
    assert set(plan.residual) == set(base.state_dict()) - set(plan.targets)
    assert not plan.kept
    assert result.report.left_at_base == 0
    assert not any("outside" in w for w in result.report.warnings)
    moved = result.with_lambda(0.0)
    for name, tensor in result.model.state_dict().items():
        if name in plan.targets:
            assert torch.equal(tensor, plain.model.state_dict()[name])
            continue
        w0 = base.state_dict()[name].double().numpy()
        others = [e.state_dict()[name].double().numpy() for e in experts.values()]
        expected = reference.residual_merge(w0, others, residual, None)
        np.testing.assert_allclose(tensor.double().numpy(), expected, atol=1e-6)
        assert torch.equal(moved.model.state_dict()[name], tensor)


def test_integer_buffers_are_kept_and_must_agree():
    base = tiny_llama()
    base.model.register_buffer("steps", torch.arange(4))
    base.model.register_buffer("num_batches_tracked", torch.tensor(3))
    experts = {"a": fine_tuned(base, 0.02, 1), "b": fine_tuned(base, 0.03, 2)}
    experts["a"].model.num_batches_tracked += 5
    merger = CoramMerger(base, experts, CoramConfig(residual="ta"), progress=False)
    assert set(merger.inspect().kept) == {"model.steps", "model.num_batches_tracked"}
    assert merger.merge().model.model.num_batches_tracked == 3
    experts["b"].model.steps += 1
    with pytest.raises(
        CoramError, match=r"expert 'b', tensor 'model\.steps': its torch\.int64 values differ"
    ):
        CoramMerger(base, experts, progress=False)
