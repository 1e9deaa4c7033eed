"""Recipes of mergekit, accepted with what mergekit gives or refused with a reason; recipes after merges."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from helpers.command import coram_hf
from helpers.folders import assert_same_files, on_disk, tensors_of
from helpers.mergekit import RECIPES, documents, merge_by_mergekit, models_for_recipes

from coram_hf import CoramConfig, CoramError, CoramMerger, load_report
from coram_hf.baselines import open_merger
from coram_hf.cli.recipe import read_recipe
from coram_hf.inputs.options import text_options

REFUSED = {
    "passthrough": "merge_method 'passthrough' is not supported: it stacks layers",
    "stacked-slices": "slices: layer_range must be [2, end]",
    "fewer-layers": "layer_range ends at 2, but the models have 3",
    "moe": "a mixture of experts is not supported",
    "modules": "modules merges parts of a model in different ways",
    "multislerp": "merge_method 'multislerp' is not supported: use karcher",
}
SLICES = (
    "merge_method: linear\nslices:\n"
    "- sources: [{{model: math, layer_range: [0, 1], parameters: {{{}}}}}]\n"
    "- sources: [{{model: math, layer_range: [1, 3], parameters: {{{}}}}}]\n"
)
OURS = ("coram",)
OF_TOKENIZERS = {
    "tokenizer-union": "chat_template",
    "tokenizer-of-a-model": "tokenizer",
    "chatml": "chat_template",
    "template-text": "chat_template",
}
"""Recipes that need an option of the merge which not every version offers as text."""

ACCEPTED = sorted(
    path.stem
    for path in RECIPES.glob("*.yml")
    if path.stem not in (*REFUSED, *OURS) and OF_TOKENIZERS.get(path.stem, "dtype") in text_options()
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return models_for_recipes(tmp_path_factory.mktemp("models"))


@pytest.fixture
def here(models, monkeypatch):
    monkeypatch.chdir(models)
    return models


def exact(name, folder):
    """A recipe of ours that computes in float32, as mergekit then does too."""
    path = folder / f"{name}.yml"
    contents = documents(RECIPES / f"{name}.yml")
    for content in contents:
        content.pop("out_dtype", None)
        content["dtype"] = "float32"
    path.write_text(yaml.safe_dump_all(contents, sort_keys=False))
    return path


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_recipe_gives_what_mergekit_gives(name, here, tmp_path):
    pytest.importorskip("mergekit", reason="mergekit is not installed: pip install 'coram-hf[mergekit]'")
    path = exact(name, tmp_path)
    run = coram_hf("merge", "--config", path, "-o", tmp_path / "ours")
    assert run.returncode == 0, run.stderr
    assert "does not differ" not in run.stderr
    merge_by_mergekit(path, tmp_path / "theirs")
    ours, theirs = tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs")
    base = tensors_of(here / documents(path)[-1].get("base_model", "math"))
    assert ours.keys() == theirs.keys()
    error = sum((ours[n].double() - theirs[n].double()).square().sum() for n in ours)
    moved = sum((theirs[n].double() - base[n].double()).square().sum() for n in ours)
    assert moved > 0
    assert error <= (5e-6) ** 2 * moved


@pytest.mark.parametrize("name", ["linear", "slerp", "slerp-gradient"])
def test_in_half_precision_only_the_rounding_differs(name, here, tmp_path):
    """mergekit rounds the models before it merges them, we round the result."""
    pytest.importorskip("mergekit", reason="mergekit is not installed: pip install 'coram-hf[mergekit]'")
    path = RECIPES / f"{name}.yml"
    read_recipe(path).merger(progress=False).merge_to(tmp_path / "ours")
    merge_by_mergekit(path, tmp_path / "theirs")
    ours, theirs = tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs")
    for key, tensor in ours.items():
        assert tensor.dtype == theirs[key].dtype == getattr(torch, documents(path)[0]["dtype"])
        eps = torch.finfo(tensor.dtype).eps
        assert (tensor - theirs[key]).double().norm() <= 2 * eps * theirs[key].double().norm(), key


@pytest.mark.parametrize(("name", "message"), REFUSED.items())
def test_what_cannot_be_done_is_refused_with_the_reason(name, message, here, tmp_path):
    run = coram_hf("merge", "--config", RECIPES / f"{name}.yml", "-o", tmp_path / "out")
    assert run.returncode == 2
    assert message in run.stderr
    assert not (tmp_path / "out").exists()


def test_there_are_thirty_files():
    assert len(list(RECIPES.glob("*.yml"))) >= 30


def test_our_method_in_their_form(here):
    recipe = read_recipe(RECIPES / "coram.yml")
    assert recipe.config() == CoramConfig.from_line("nca+ave.ta", kappa=0.9, weights=(1.0, 0.5))
    assert recipe.experts == {"math": "math", "code": "code"}


def read(tmp_path, text):
    path = tmp_path / "recipe.yml"
    path.write_text(text)
    return read_recipe(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("merge_method: slerp\nmodels: [math, code]\nbase_model: math\n", "slerp needs the parameter t"),
        ("merge_method: ties\nmodels: [math, code]\n", "ties needs a base_model"),
        ("merge_method: linear\nmodels: [math]\nparameters: {weigth: 1}\n", "did you mean 'weight'"),
        ("merge_method: linear\nmodels: [math]\ntokenizer: {source: base, pad_to_multiple_of: 8}\n",
         "pad_to_multiple_of is not supported"),
        ("merge_method: linear\nmodels: [math]\ntokenizer_source: other\n", "is not a model of this merge"),
        ("merge_method: linear\nmodels: [math]\ntokenizer_source: base\ntokenizer: {}\n", "are mutually"),
        (SLICES.format("weight: 1", "weight: 2"), "models or parameters differ from slice to slice"),
        (SLICES.format("weight: [0, 1]", "weight: [0, 1]"), "a gradient starts again in every slice"),
        ("merge_method: ties\nmodels: [math]\nbase_model: base+lora\n", "has an adapter; merge it"),
        ("merge_method: linear\nmodels: [{parameters: {}}]\n", "each must have a key 'model'"),
        ("merge_method: linear\nmodels: [math]\nname: a\n---\nmerge_method: linear\nmodels: [b]\nname: a\n"
         "---\nmerge_method: linear\nmodels: [a]\n", "the same name"),
        ("merge_method: linear\nmodels: [b]\nname: a\n---\nmerge_method: linear\nmodels: [a]\nname: b\n"
         "---\nmerge_method: linear\nmodels: [a]\n", "need each other's results"),
        ("merge_method: linear\nmodels: [b]\n---\nmerge_method: linear\nmodels: [a]\n", "2 documents"),
        ("merge_method: ties\nbase_model: base\nmodels: [{model: math, parameters: {weight: [{filter: mlp, "
         "valu: 1}]}}]\n", "expected {filter"),
    ],
)  # fmt: skip
def test_bad_recipes_are_explained(tmp_path, text, message):
    with pytest.raises(CoramError, match=message):
        read(tmp_path, text)


def test_what_no_method_has_is_ignored_aloud(tmp_path, caplog):
    recipe = read(tmp_path, "merge_method: linear\nmodels: [math]\nparameters: {weight: 1, zzz: 3}\n")
    assert recipe.parameters == {"weights": [1.0], "normalize": True}
    assert "ignored parameters that no method of mergekit has: zzz" in caplog.text


def test_filters_fall_back_on_the_shared_value(tmp_path):
    recipe = read(
        tmp_path,
        """
merge_method: task_arithmetic
base_model: base
models:
  - {model: math, parameters: {weight: {filter: mlp, value: 0.7}}}
  - code
parameters: {weight: [{filter: self_attn, value: [0, 1]}, {value: "2e-1"}]}
""",
    )
    assert recipe.parameters["weights"] == [
        ({"filter": "mlp", "value": 0.7}, {"filter": "self_attn", "value": (0.0, 1.0)}, {"value": 0.2}),
        ({"filter": "self_attn", "value": (0.0, 1.0)}, {"value": 0.2}),
    ]


def test_several_documents_need_the_merge_command(here):
    run = coram_hf("inspect", "--config", RECIPES / "multi.yml")
    assert run.returncode == 2
    assert "several documents" in run.stderr


def test_the_results_of_earlier_documents_are_kept_and_used_again(here, tmp_path):
    arguments = ("merge", "--config", RECIPES / "multi.yml", "-o", tmp_path / "out")
    assert coram_hf(*arguments).returncode == 0
    kept = tmp_path / "out-intermediates" / "soup"
    written = {path: path.stat().st_mtime_ns for path in kept.iterdir()}
    assert coram_hf(*arguments, "--overwrite").returncode == 0
    assert {path: path.stat().st_mtime_ns for path in kept.iterdir()} == written


@pytest.mark.parametrize("name", ["task_arithmetic-gradient", "ties", "lora", "coram", "dare_linear"])
def test_a_merge_can_be_run_again_from_the_recipe_beside_it(name, here, tmp_path, monkeypatch):
    assert coram_hf("merge", "--config", RECIPES / f"{name}.yml", "-o", tmp_path / "out").returncode == 0
    monkeypatch.chdir(tmp_path)
    run = coram_hf("merge", "--config", tmp_path / "out" / "coram_recipe.yaml", "-o", tmp_path / "again")
    assert run.returncode == 0, run.stderr
    assert_same_files(tmp_path / "again", tmp_path / "out")
    assert load_report(tmp_path / "again").config == load_report(tmp_path / "out").config


def test_the_recipe_of_a_merge_from_python(tmp_path):
    sources = on_disk(tmp_path, experts={"a": 0.03, "b": 0.05})
    config = CoramConfig.from_line("SS(nca,mean).ta", kappa=0.9, balance="damp", weights=(1, [0.2, -0.5]))
    CoramMerger(*sources, config, dtype="bfloat16", progress=False).merge().save_pretrained(tmp_path / "out")
    content = yaml.safe_load((tmp_path / "out" / "coram_recipe.yaml").read_text())
    assert content == {
        "base": str(sources.base),
        "experts": {name: str(path) for name, path in sources.experts.items()},
        "line": "SS(nca,mean).ta",
        "kappa": 0.9,
        "weights": [1.0, [0.2, -0.5]],
        "balance": "damp",
        "dtype": "bfloat16",
    }
    again = read_recipe(tmp_path / "out" / "coram_recipe.yaml").merger(progress=False)
    again.merge().save_pretrained(tmp_path / "again")
    assert_same_files(tmp_path / "again", tmp_path / "out")


def test_a_soup_has_no_base_that_does_not_differ(here):
    plan = read_recipe(RECIPES / "linear-sum.yml").merger(progress=False).inspect()
    assert not any("does not differ" in warning for warning in plan.warnings)
    assert plan.dispersion == 1
    paths = {"a": here / "base", "b": here / "math"}
    plan = open_merger(here / "base", paths, "task_arithmetic", progress=False).inspect()
    assert any("does not differ" in warning for warning in plan.warnings)


def test_an_adapter_on_another_model(here):
    merger = open_merger("base", {"both": "math+lora-of-math"}, "linear", progress=False)
    model = merger.merge().model.state_dict()
    math = tensors_of(Path("math"))
    name = "model.layers.0.self_attn.q_proj.weight"
    adapter = tensors_of(Path("lora-of-math"))
    A, B = (adapter[f"base_model.model.{name.removesuffix('.weight')}.lora_{k}.weight"] for k in "AB")
    scale = json.loads(Path("lora-of-math/adapter_config.json").read_text())
    expected = math[name] + B @ A * scale["lora_alpha"] / scale["r"]
    torch.testing.assert_close(model[name], expected, rtol=0, atol=1e-6)
    assert merger.merge().report.expert_kinds == {"both": "full+LORA"}
    with pytest.raises(CoramError, match="'code' is not an adapter"):
        open_merger("base", {"both": "math+code"}, "linear", progress=False)


def test_a_template_in_the_recipe_becomes_that_of_the_merge(here, tmp_path):
    run = coram_hf("merge", "--config", RECIPES / "template-text.yml", "-o", tmp_path / "out")
    assert run.returncode == 0, run.stderr
    (given,) = documents(RECIPES / "template-text.yml")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == given["chat_template"]
    again = coram_hf("merge", "--config", tmp_path / "out" / "coram_recipe.yaml", "-o", tmp_path / "again")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "again" / "chat_template.jinja").read_text() == given["chat_template"]
