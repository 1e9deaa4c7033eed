"""Bad input gives one clear error before any merging, naming the expert and the tensor."""

import copy

import pytest
import torch
from helpers.models import fine_tuned, tiny_llama
from torch import nn
from transformers import MistralConfig, MistralForCausalLM

from coram_hf import CoramConfig, CoramError, CoramMerger

Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def models():
    base = tiny_llama()
    return base, {"math": fine_tuned(base, 0.02, 1), "code": fine_tuned(base, 0.03, 2)}


def refuse(base, experts, message, config=None):
    with pytest.raises(CoramError, match=message) as error:
        CoramMerger(base, experts, config, progress=False).inspect()
    assert "\n" not in str(error.value)


def test_another_architecture(models):
    base, experts = models
    config = MistralConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=44,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    experts["mistral"] = MistralForCausalLM(config)
    refuse(
        base, experts, r"'mistral' is a MistralForCausalLM \(mistral\), but the base is a LlamaForCausalLM"
    )


def test_a_missing_tensor(models):
    base, experts = models
    experts["shallow"] = tiny_llama(num_hidden_layers=1)
    experts["shallow"].config.num_hidden_layers = 2
    refuse(base, experts, r"expert 'shallow' lacks tensor 'model\.layers\.1\..*and \d+ more")


def test_an_extra_tensor(models):
    base, experts = models
    experts["code"].model.register_parameter("gate", nn.Parameter(torch.ones(2)))
    refuse(base, experts, "expert 'code' has an extra tensor 'model.gate'")


def test_another_shape(models):
    base, experts = models
    experts["wide"] = tiny_llama(intermediate_size=48)
    experts["wide"].config.intermediate_size = 44
    refuse(
        base, experts, r"'wide', tensor 'model\.layers\.0\.mlp.*shape \(48, 32\), but the base has \(44, 32\)"
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("tensor", [Q, "model.norm.weight"])
def test_a_value_that_is_not_finite(models, value, tensor):
    base, experts = models
    with torch.no_grad():
        experts["code"].get_parameter(tensor).view(-1)[3] = value
    refuse(base, experts, f"expert 'code', tensor '{tensor}': contains NaN or infinite")


def test_a_base_that_is_not_finite(models):
    base, experts = models
    with torch.no_grad():
        base.get_parameter(Q)[0, 0] = float("nan")
    refuse(base, experts, f"the base, tensor '{Q}': contains NaN")


def test_an_integer_tensor(models):
    base, experts = models
    projection = experts["math"].model.layers[1].self_attn.q_proj
    projection.weight = nn.Parameter(projection.weight.detach().mul(100).to(torch.int8), requires_grad=False)
    refuse(base, experts, f"expert 'math', tensor '{Q}': dtype torch.int8, but the base has torch.float32")


@pytest.mark.parametrize("none", [[], {}])
def test_no_experts(models, none):
    refuse(models[0], none, "no experts")


def test_duplicate_names(models):
    base, experts = models
    clones = [copy.deepcopy(e) for e in experts.values()]
    for clone in clones:
        clone.name_or_path = "org/math"
    refuse(base, clones, "two experts are called 'org/math'; give them distinct names")


def test_list_experts_are_named_by_origin(models, tmp_path):
    base, experts = models
    experts["math"].save_pretrained(tmp_path / "math-v2")
    loaded = type(base).from_pretrained(tmp_path / "math-v2")
    plan = CoramMerger(base, [loaded, experts["code"]], progress=False).inspect()
    assert list(plan.relative_updates) == ["math-v2", "expert_2"]


@pytest.mark.parametrize("what", [None, 3, nn.Linear(2, 2)])
def test_things_that_are_not_models(models, what):
    base, experts = models
    refuse(what, experts, "the base is a .*PreTrainedModel")
    refuse(base, {"odd": what}, "expert 'odd' is a .*PreTrainedModel")


@pytest.mark.parametrize("experts", [None, 3, "folder", tiny_llama()])
def test_experts_must_be_a_collection(models, experts):
    refuse(models[0], experts, "pass a list of models or a dict")


def test_the_config_must_be_one(models):
    refuse(*models, r"config must be a CoramConfig, found 'full'.*from_line", "full")


@pytest.mark.parametrize("pattern", ["nothing_like_this", ("nothing",)])
def test_targets_that_match_nothing(models, pattern):
    refuse(*models, "found no match for .*all-linear", CoramConfig(target_modules=pattern))


def test_target_modules_select(models):
    base, experts = models
    for pattern, count in ((r".*\.q_proj", 2), (("q_proj", "mlp.up_proj"), 4), ("all-linear", 14)):
        plan = CoramMerger(base, experts, CoramConfig(target_modules=pattern), progress=False).inspect()
        assert len(plan.targets) == count
