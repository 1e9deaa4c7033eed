"""Merging from files to files: the same bytes as in memory, for any source and any method."""

import json
import logging
import random

import peft
import pytest
import torch
from helpers.adapters import METHODS, adapted
from helpers.architectures import ARCHITECTURES
from helpers.folders import assert_same_files, assert_same_tensors, on_disk, tensors_of
from helpers.merging import baseline_merger
from helpers.models import fine_tuned, tiny_llama

from coram_hf import CoramConfig, CoramError, CoramMerger
from coram_hf.geometry import slices
from coram_hf.geometry.slices import as_rows, row_blocks
from coram_hf.report import MergeReport


def experts_of(base, sizes=(0.03, 0.05)):
    return {f"e{i}": fine_tuned(base, size, i) for i, size in enumerate(sizes)}


def report_of(folder):
    return json.loads((folder / "coram_report.json").read_text())


@pytest.mark.parametrize("shards", ["50GB", "20KB"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_files_to_files_is_the_merge_in_memory(architecture, shards, tmp_path):
    base = ARCHITECTURES[architecture].build().to(torch.bfloat16)
    sources = on_disk(tmp_path, base, max_shard_size=shards)
    config = CoramConfig.from_line("SS(nca,variance).ta", lam=1.5)
    merger = CoramMerger(*sources, config, progress=False)
    report = merger.merge_to(tmp_path / "streamed", max_shard_size=shards)
    result = CoramMerger(*sources, config, progress=False).merge()
    result.save_pretrained(tmp_path / "saved", max_shard_size=shards)
    if (shards == "20KB" and "MoE" in architecture) or architecture == "Mixtral":
        assert_same_tensors(tmp_path / "streamed", tmp_path / "saved")  # transformers shards views together
    else:
        assert_same_files(tmp_path / "streamed", tmp_path / "saved")
    assert not list(tmp_path.glob(".*"))
    assert MergeReport.load(tmp_path / "streamed") == report
    for name, value in result.report.to_dict().items():
        if isinstance(value, float):
            assert report.to_dict()[name] == pytest.approx(
                value, rel=1e-9 if name != "rounding_loss" else 1e-6
            ), name
        elif name not in ("relative_updates", "outside_share", "retention", "warnings", "files", "cost"):
            assert report.to_dict()[name] == value, name
    assert report.relative_updates == pytest.approx(result.report.relative_updates, rel=1e-9)
    assert report.outside_share == pytest.approx(result.report.outside_share, rel=1e-9)
    assert report.retention == pytest.approx(result.report.retention, rel=1e-6)


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("full", {}),
        ("lr.ties", {"kappa": 0.9}),
        ("full", {"scale": "c_rms"}),
        ("ca+ave", {"balance": "damp"}),
        ("full.ta", {"balance": "equal", "weights": (1, 2)}),
        ("full", {"compute_dtype": "float32"}),
    ],
)
def test_every_way_to_lambda(line, options, tmp_path):
    base = tiny_llama(dtype=torch.bfloat16)
    sources = on_disk(tmp_path, base, (0.01, 0.3))
    config = CoramConfig.from_line(line, **options)
    report = CoramMerger(*sources, config, progress=False).merge_to(tmp_path / "streamed")
    result = CoramMerger(*sources, config, progress=False).merge()
    result.save_pretrained(tmp_path / "saved")
    assert report.lam == pytest.approx(result.report.lam, rel=1e-12)
    assert_same_files(tmp_path / "streamed", tmp_path / "saved")


@pytest.mark.parametrize("method", ["linear", "ties", "dare_ties", "tsvm", "orthomerge"])
def test_baselines_stream_too(method, tmp_path):
    base = tiny_llama(dtype=torch.bfloat16)
    sources = on_disk(tmp_path, base)
    options = {"trim": "global"} if method == "ties" else {"balance": "damp"}
    merger = baseline_merger(*sources, method, progress=False, **options)
    report = merger.merge_to(tmp_path / "streamed")
    merger.merge().save_pretrained(tmp_path / "saved")
    assert report.method == method
    assert_same_files(tmp_path / "streamed", tmp_path / "saved")


@pytest.mark.parametrize("method", ["linear", "task_arithmetic"])
@pytest.mark.parametrize("architecture", ["Llama", "GPT-2", "Mixtral", "Qwen2.5-VL"])
def test_rows_at_a_time_give_what_whole_tensors_give(architecture, method, tmp_path, monkeypatch):
    base = ARCHITECTURES[architecture].build()
    sources = on_disk(tmp_path, base)
    whole = baseline_merger(*sources, method, progress=False)
    whole.merge(keep_update=True).save_pretrained(tmp_path / "saved")
    monkeypatch.setattr(slices, "CHUNK_BYTES", 2**12)
    baseline_merger(*sources, method, progress=False).merge_to(tmp_path / "streamed")
    assert_same_tensors(tmp_path / "streamed", tmp_path / "saved")


def test_blocks_of_rows_are_small_whatever_the_shape():
    stack = torch.empty(4, 512, 64, device="meta")
    rows = as_rows(stack)
    most = max((rows[block].numel() for block in row_blocks(rows)), default=0)
    assert rows.shape == (2048, 64)
    assert most <= slices.CHUNK_BYTES // 6 // 8
    assert [tuple(as_rows(torch.empty(shape)).shape) for shape in ((), (3,), (0, 2), (0, 3, 0))] == [
        (1,),
        (3,),
        (0, 2),
        (0, 0),
    ]


def test_loaded_models_and_adapters_stream_too(tmp_path):
    base = tiny_llama()
    lora = adapted(base, METHODS["LoRA"](), 0)
    adapted(base, METHODS["OFT, Cayley"](), 1).save_pretrained(tmp_path / "oft")
    experts = {"full": fine_tuned(base, 0.05, 2), "lora": lora, "oft": tmp_path / "oft"}
    config = CoramConfig.from_line("full.ta", lam=1.5)
    CoramMerger(base, experts, config, progress=False).merge_to(tmp_path / "streamed")
    CoramMerger(base, experts, config, progress=False).merge().save_pretrained(tmp_path / "saved")
    assert_same_files(tmp_path / "streamed", tmp_path / "saved")
    base.save_pretrained(tmp_path / "base")
    CoramMerger(tmp_path / "base", experts, config, progress=False).merge_to(tmp_path / "again")
    assert_same_files(tmp_path / "again", tmp_path / "saved")


def test_adapters_over_a_mixture_on_disk(tmp_path):
    base = ARCHITECTURES["Mixtral"].build()
    config = peft.LoraConfig(
        r=2,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    adapted(base, config, 0).save_pretrained(tmp_path / "lora")
    base.save_pretrained(tmp_path / "base")
    merge = CoramConfig(lam=1.5)
    CoramMerger(tmp_path / "base", [tmp_path / "lora"], merge, progress=False).merge_to(tmp_path / "streamed")
    CoramMerger(base, [tmp_path / "lora"], merge, progress=False).merge().save_pretrained(tmp_path / "saved")
    assert_same_files(tmp_path / "streamed", tmp_path / "saved")


def test_another_dtype(tmp_path):
    base = tiny_llama(dtype=torch.bfloat16)
    sources = on_disk(tmp_path, base)
    options = {"dtype": "float32", "progress": False}
    CoramMerger(*sources, **options).merge_to(tmp_path / "streamed")
    CoramMerger(*sources, **options).merge().save_pretrained(tmp_path / "saved")
    assert_same_files(tmp_path / "streamed", tmp_path / "saved")


def test_a_sample_on_the_wrong_side_of_the_threshold_is_found_out(tmp_path, caplog, monkeypatch):
    """The sample is taken from the first layers, where the experts are even; in the last, one is larger."""
    drawn = []

    def first(self, population, k):
        drawn.append(k)
        return list(population)[:k]

    monkeypatch.setattr(random.Random, "sample", first)
    base = tiny_llama(num_hidden_layers=3)
    experts = experts_of(base, (0.01, 0.01))
    with torch.no_grad():
        for name, parameter in experts["e1"].model.layers[2].named_parameters():
            if "_proj" in name:
                w0 = base.model.layers[2].get_parameter(name)
                parameter.copy_(w0 + 50 * (parameter - w0))
    sources = on_disk(tmp_path, base, experts)
    plan = CoramMerger(*sources, progress=False).inspect()
    assert plan.dispersion > 20
    with caplog.at_level(logging.WARNING):
        report = CoramMerger(*sources, progress=False).merge_to(tmp_path / "streamed")
    assert drawn
    assert max(drawn) <= 14
    assert "on the other side of the threshold" in caplog.text
    assert report.kappa == 0.5
    result = CoramMerger(*sources, progress=False).merge()
    assert report.dispersion == pytest.approx(result.report.dispersion, rel=1e-9)
    result.save_pretrained(tmp_path / "saved")
    assert_same_files(tmp_path / "streamed", tmp_path / "saved")


def test_what_cannot_be_written_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    base = tiny_llama()
    sources = on_disk(tmp_path, base)
    merger = CoramMerger(*sources, progress=False)
    (tmp_path / "there").mkdir()
    with pytest.raises(CoramError, match=r"there exists; .*overwrite=True"):
        merger.merge_to(tmp_path / "there")
    (tmp_path / "file").write_text("")
    with pytest.raises(CoramError, match="is a file"):
        merger.merge_to(tmp_path / "file", overwrite=True)
    with pytest.raises(CoramError, match="contains an input"):
        merger.merge_to(tmp_path, overwrite=True)
    with pytest.raises(CoramError, match="contains an input"):
        merger.merge_to(sources.experts["e0"], overwrite=True)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("coram_hf.execution.workspace.shutil.disk_usage", lambda _: usage)
    with pytest.raises(CoramError, match=r"only 0\.00 GB are free"):
        merger.merge_to(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))


def test_nan_leaves_nothing_behind(tmp_path):
    base = tiny_llama()
    experts = experts_of(base)
    with torch.no_grad():
        experts["e1"].model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    sources = on_disk(tmp_path, base, experts)
    for config in (CoramConfig(lam=1.0), CoramConfig()):
        with pytest.raises(CoramError, match=r"expert 'e1', tensor 'model.layers.1.mlp.up_proj.weight'"):
            CoramMerger(*sources, config, progress=False).merge_to(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))


def test_the_device_of_the_geometry(tmp_path):
    base = tiny_llama()
    experts = experts_of(base)
    plain = CoramMerger(base, experts, progress=False).merge().model.state_dict()
    for device in ("cpu", "auto", torch.device("cpu")):
        moved = CoramMerger(base, experts, progress=False, device=device).merge().model.state_dict()
        assert all(torch.equal(moved[name], tensor) for name, tensor in plain.items())
    with pytest.raises(ValueError, match="valid: cpu, cuda"):
        CoramMerger(base, experts, device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="'cuda' is not available"):
            CoramMerger(base, experts, device="cuda:1")


def test_generation_config_and_stored_dtypes_come_along(tmp_path):
    base = tiny_llama()
    base.generation_config.update(do_sample=True, temperature=0.7, eos_token_id=[1, 2])
    base.model.norm.to(torch.bfloat16)
    base.model.layers[0].mlp.to(torch.bfloat16)
    sources = on_disk(tmp_path, base)
    CoramMerger(*sources, progress=False).merge_to(tmp_path / "streamed")
    CoramMerger(*sources, progress=False).merge().save_pretrained(tmp_path / "saved")
    generation = json.loads((tmp_path / "streamed" / "generation_config.json").read_text())
    assert generation["temperature"] == 0.7
    assert generation["eos_token_id"] == [1, 2]
    assert_same_tensors(tmp_path / "streamed", tmp_path / "saved")
    kept = tensors_of(tmp_path / "streamed")
    assert kept["model.norm.weight"].dtype == torch.bfloat16
    assert kept["lm_head.weight"].dtype == torch.float32


@pytest.mark.parametrize("size", ["-5MB", "5 apples", 0, ""])
def test_shard_sizes_that_are_none(size, tmp_path):
    base = tiny_llama()
    with pytest.raises(ValueError, match="max_shard_size"):
        CoramMerger(base, [fine_tuned(base, 0.05, 0)], progress=False).merge_to(
            tmp_path / "x", max_shard_size=size
        )


def test_memory_is_that_of_chunks_unless_a_method_takes_whole_tensors(two_threads):
    """Whole tensors are held twice in float32, one a thread; CORAM's residual pathway has those outside."""
    base = tiny_llama(vocab_size=16)
    experts = [fine_tuned(base, 0.02, seed) for seed in range(2)]
    targets = CoramMerger(base, experts, progress=False).inspect().targets
    sizes = {name: 4 * parameter.numel() for name, parameter in base.named_parameters()}

    def two_largest(names):
        return sum(sorted((sizes[name] for name in names), reverse=True)[:2])

    def of_line(line):
        return CoramMerger(base, experts, CoramConfig.from_line(line), progress=False).requirements()

    def of_method(method):
        return baseline_merger(base, experts, method, progress=False).requirements()

    disk, memory = of_line("full")
    assert disk == sum(parameter.nbytes for parameter in base.parameters())
    for by_rows in (of_method("linear"), of_method("ties"), of_line("full.ta"), of_line("full.ties")):
        assert by_rows == (disk, memory)
    assert of_line("ca+ave")[1] == of_line("SS(full,mean)")[1] == memory + 2 * slices.CHUNK_BYTES
    assert of_line("SS(ca+ave,mean)")[1] == memory + 4 * slices.CHUNK_BYTES
    assert of_method("dare_ties") == (disk, memory + 2 * two_largest(sizes))
    assert of_line("full.tsvm") == (disk, memory + 2 * two_largest(sizes.keys() - set(targets)))
    assert two_largest(sizes) > two_largest(sizes.keys() - set(targets))


def test_a_check_refuses_what_the_merge_would(tmp_path):
    base = tiny_llama()
    merger = CoramMerger(base, [fine_tuned(base, 0.02, 0)], progress=False)
    with pytest.raises(CoramError, match="exists; choose another folder"):
        merger.check(tmp_path)
    merger.check(tmp_path / "new")
    with pytest.raises(CoramError, match="'expert_1' does not differ from the base"):
        CoramMerger(base, [base, fine_tuned(base, 0.02, 0)], progress=False).check(tmp_path / "new")
