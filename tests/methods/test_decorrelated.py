"""Merges of decorrelated experts: against numpy, in memory and from files, of every kind of expert."""

import copy
import math

import numpy as np
import peft
import pytest
import torch
from helpers import decorrelate_reference, reference
from helpers.adapters import METHODS, adapted
from helpers.architectures import ARCHITECTURES
from helpers.folders import assert_same_files, on_disk
from helpers.models import fine_tuned, tiny_llama

from coram_hf import CoramConfig, CoramError, CoramMerger
from coram_hf.baselines import merge
from coram_hf.geometry.decorrelated import decorrelate_experts
from coram_hf.inputs.low_rank import low_rank_updates
from coram_hf.methods import decorrelated


def suite(sizes=(0.03, 0.05, 0.04), dtype=torch.float64, base=None):
    base = tiny_llama(dtype=dtype) if base is None else base
    return base, {f"e{i}": fine_tuned(base, size, i) for i, size in enumerate(sizes)}


def arrays(model):
    return {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}


def expected_update(config, w0, experts, factors, target):
    taus = [f * (w[target] - w0[target]) for f, w in zip(factors, experts, strict=True)]
    moved = [w0[target] + tau for tau in decorrelate_reference.WAYS[config.decorrelate](taus)]
    options = {key: getattr(config, key) for key in ("branch", "conflict", "spread", "weights")}
    return taus, moved, reference.merge(w0[target], moved, **options) - w0[target]


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("DEC(full)", {}),
        ("DEC(full,ridge)", {"kappa": 0.8}),
        ("DEC(lr,wudi)", {"balance": "root"}),
        ("DEC(SS(ca+ave,variance))", {"balance": "root"}),
        ("DEC(nca,ridge)", {"weights": (1, 2, 1), "balance": "equal"}),
        ("DEC(lr)", {"lam": 2.0}),
    ],
)
def test_against_numpy(line, options):
    base, experts = suite((0.02, 0.3, 0.05))
    config = CoramConfig.from_line(line, **options)
    result = CoramMerger(base, experts, config, progress=False).merge()
    report, w0, found = result.report, arrays(base), arrays(result.model)
    others = [arrays(expert) for expert in experts.values()]
    factors = list(report.balance_factors.values())
    before, after, merged = [], [], []
    for target in CoramMerger(base, experts).inspect().targets:
        taus, moved, update = expected_update(config, w0, others, factors, target)
        error = np.linalg.norm(found[target] - w0[target] - report.lam * update)
        assert error <= 1e-8 * np.linalg.norm(report.lam * update)
        before.append([np.sum(tau**2) for tau in taus])
        after.append([np.sum((w - w0[target]) ** 2) for w in moved])
        merged.append(np.sum(update**2))
    rms, size = math.sqrt(np.sum(before) / 3), math.sqrt(np.sum(merged))
    assert report.c_rms == pytest.approx(rms / size, rel=1e-8)
    assert report.amplitude == pytest.approx(report.lam * size / rms, rel=1e-8)
    if config.lam is None:
        assert report.lam == pytest.approx(report.kappa * rms / size, rel=1e-8)
        assert report.amplitude == pytest.approx(report.kappa, rel=1e-12)
    ratio = math.sqrt(np.sum(after) / 3) / size / report.sqrt_n
    assert report.decorrelation["c_rms_ratio"] == pytest.approx(ratio, rel=1e-8)
    assert report.decorrelation["overlap_after"] < report.decorrelation["overlap_before"]
    assert result.with_lambda(1.5).report.amplitude == pytest.approx(1.5 * size / rms, rel=1e-8)


@pytest.mark.parametrize("line", ["DEC(full)", "DEC(SS(nca,mean),ridge).ties"])
def test_from_files_to_files(line, tmp_path):
    sources = on_disk(tmp_path, tiny_llama(dtype=torch.bfloat16), (0.03, 0.05, 0.3))
    config = CoramConfig.from_line(line, balance="root", weights=(1, 1, 2))
    report = CoramMerger(*sources, config, progress=False).merge_to(tmp_path / "streamed")
    result = CoramMerger(*sources, config, progress=False).merge()
    result.save_pretrained(tmp_path / "saved")
    assert report.lam == result.report.lam
    assert report.line == line
    assert report.decorrelation == result.report.decorrelation
    card = (tmp_path / "streamed" / "README.md").read_text()
    assert "c_RMS / sqrt(N) after decorrelation" in card
    assert f"--line '{line}'" in card
    assert_same_files(tmp_path / "streamed", tmp_path / "saved")


def test_every_matrix_is_decorrelated_once(tmp_path, monkeypatch):
    """From files to files, too: updates are kept on disk until lambda is known."""
    sources = on_disk(tmp_path)
    merger = CoramMerger(*sources, CoramConfig(decorrelate="tsv"), progress=False)
    seen = []

    def counted(base, *rest):
        seen.append(base.shape)
        return decorrelate_experts(base, *rest)

    monkeypatch.setattr(decorrelated, "decorrelate_experts", counted)
    disk, memory = merger.requirements()
    merger.merge_to(tmp_path / "out")
    targets = merger.inputs.targets
    assert len(seen) == len(targets)
    kept = sum(merger.inputs.base.original(name).numel() for name in targets)
    plain = CoramMerger(*sources, progress=False)
    assert disk == plain.requirements()[0] + 4 * kept
    largest = max(merger.inputs.base.original(name).numel() for name in targets)
    assert memory >= plain.requirements()[1] + 2 * 2 * 8 * largest
    assert merger.forecast(tmp_path / "other").seconds > 0


@pytest.mark.parametrize("architecture", ["Mixtral", "GPT-2", "GPT-OSS"])
def test_every_matrix_of_a_stack_by_itself(architecture, tmp_path):
    base = ARCHITECTURES[architecture].build().double()
    sources = on_disk(tmp_path, base)
    config = CoramConfig(decorrelate="tsv", lam=1.0)
    merger = CoramMerger(*sources, config, progress=False)
    found = merger.merge().model.state_dict()
    for name in merger.inputs.targets:
        for i, matrix in enumerate(merger.inputs.parameter(name).matrices()):
            w0, *experts = (t.double().numpy() for t in (matrix.base, *matrix.experts))
            moved = [w0 + tau for tau in decorrelate_reference.tsv([e - w0 for e in experts])]
            update = reference.merge(w0, moved) - w0
            ours = merger.inputs.targets[name].matrices(found[name])[i].numpy() - w0
            assert np.linalg.norm(ours - update) <= 1e-8 * np.linalg.norm(update)


def test_one_expert_gives_itself_back():
    base, experts = suite((0.05,))
    for how in ("tsv", "ridge", "wudi"):
        plain, changed = (
            CoramMerger(base, experts, CoramConfig(decorrelate=way, lam=1.0), progress=False).merge().model
            for way in (None, how)
        )
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(changed.state_dict()[name], tensor, rtol=0, atol=1e-14)


def test_identical_experts_and_the_base_as_an_expert():
    base, experts = suite((0.05,))
    same = CoramMerger(base, {"a": experts["e0"], "b": experts["e0"]}, CoramConfig(decorrelate="tsv"))
    assert same.merge().report.lam > 0
    config = CoramConfig(decorrelate="ridge", kappa=1.0)
    report = CoramMerger(base, {"a": experts["e0"], "b": base}, config, progress=False).merge().report
    assert math.isinf(report.dispersion)
    assert math.isfinite(report.lam)
    with pytest.raises(CoramError, match="c_RMS"):
        CoramMerger(base, {"a": base, "b": base}, config, progress=False).merge()


def test_a_nan_is_named_before_anything_is_decomposed(tmp_path):
    base, experts = suite((0.03, 0.05), torch.float32)
    broken = experts["e1"]
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight[3, 4] = math.nan
    sources = on_disk(tmp_path, base, experts)
    merger = CoramMerger(*sources, CoramConfig(decorrelate="tsv"), progress=False)
    with pytest.raises(CoramError, match=r"expert 'e1', tensor 'model.layers.1.mlp.up_proj.weight'"):
        merger.merge_to(tmp_path / "out")


def test_the_direction_of_tsv_is_that_of_tsvm():
    """To first order in the updates: CORAM averages what TSV-M adds."""
    base, experts = suite((1e-4, 1e-4, 1e-4))
    ours = CoramMerger(base, experts, CoramConfig(decorrelate="tsv"), progress=False).merge().model
    theirs = merge(base, experts, "tsvm", progress=False).model
    w0, a, b = arrays(base), arrays(ours), arrays(theirs)
    for target in CoramMerger(base, experts).inspect().targets:
        x, y = a[target] - w0[target], b[target] - w0[target]
        assert np.sum(x * y) / (np.linalg.norm(x) * np.linalg.norm(y)) > 0.9999


LORA = {
    "a": lambda: peft.LoraConfig(r=3, lora_alpha=8, target_modules=["q_proj", "down_proj"]),
    "b": lambda: peft.LoraConfig(r=2, use_rslora=True, target_modules=["q_proj", "up_proj"]),
}


def adapters(base, configs, dtype=torch.float64):
    return {name: adapted(base, make(), i).to(dtype) for i, (name, make) in enumerate(configs.items())}


@pytest.mark.parametrize("how", ["tsv", "ridge", "wudi", "auto"])
def test_adapters_on_small_cores_are_as_dense_ones(how):
    base = tiny_llama(dtype=torch.float64)
    experts = adapters(base, LORA)
    merged = {name: copy.deepcopy(expert).merge_and_unload() for name, expert in experts.items()}
    config = CoramConfig(decorrelate=how)
    small, dense = (CoramMerger(base, some, config, progress=False) for some in (experts, merged))
    of_q = "model.layers.0.self_attn.q_proj.weight"
    shapes = [(b.shape, a.shape) for b, a in low_rank_updates(small.inputs, small.inputs.parameter(of_q))]
    assert shapes == [((32, 3), (3, 32)), ((32, 2), (2, 32))]
    assert low_rank_updates(dense.inputs, dense.inputs.parameter(of_q)) is None
    one, other, w0 = (arrays(model) for model in (small.merge().model, dense.merge().model, base))
    for target in small.inputs.targets:
        error, size = np.linalg.norm(one[target] - other[target]), np.linalg.norm(other[target] - w0[target])
        assert error <= 1e-8 * size


@pytest.mark.parametrize("kind", ["DoRA", "PiSSA", "OFT, Cayley", "LoHa"])
def test_other_adapters_are_made_dense(kind):
    base = tiny_llama()
    experts = adapters(base, {"a": LORA["a"], "b": METHODS[kind]}, torch.float32)
    merger = CoramMerger(base, experts, CoramConfig(decorrelate="tsv"), progress=False)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert low_rank_updates(merger.inputs, merger.inputs.parameter(name)) is None
    assert math.isfinite(merger.merge().report.lam)


def test_adapters_over_another_base_are_made_dense():
    base = tiny_llama()
    other = fine_tuned(base, 0.01, 5)
    experts = {"a": adapted(base, LORA["a"](), 0), "b": adapted(other, LORA["b"](), 1)}
    merger = CoramMerger(base, experts, CoramConfig(decorrelate="tsv"), progress=False)
    for name in merger.inputs.targets:
        assert low_rank_updates(merger.inputs, merger.inputs.parameter(name)) is None


@pytest.mark.parametrize("line", ["DEC(full)", "DEC(SS(full,mean),ridge)"])
def test_adapters_from_files_to_files(line, tmp_path):
    base = tiny_llama(dtype=torch.bfloat16)
    sources = on_disk(tmp_path, base, adapters(base, LORA, torch.float32))
    merger = CoramMerger(*sources, CoramConfig.from_line(line, balance="root"), progress=False)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert low_rank_updates(merger.inputs, merger.inputs.parameter(name)) is not None
    report = merger.merge_to(tmp_path / "streamed")
    result = merger.merge()
    result.save_pretrained(tmp_path / "saved")
    assert report.lam == result.report.lam
    assert_same_files(tmp_path / "streamed", tmp_path / "saved")
