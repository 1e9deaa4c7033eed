"""Configs of experts that differ from the base's: refused as what they are, insisted on, or named."""

import json

import pytest
import torch
from helpers.architectures import ARCHITECTURES
from helpers.command import coram_hf
from helpers.folders import on_disk
from helpers.models import fine_tuned, tiny_llama
from transformers import BertConfig, BertForMaskedLM

from coram_hf import CoramError, CoramMerger, MergeReport


def changed(base, seed=0, **settings):
    expert = fine_tuned(base, 0.05, seed)
    for key, value in settings.items():
        setattr(expert.config, key, value)
    return expert


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"num_hidden_layers": 1}, "num_hidden_layers: base 2, expert 1"),
        ({"hidden_size": 64}, "hidden_size: base 32, expert 64"),
        ({"intermediate_size": 40}, "intermediate_size: base 44, expert 40"),
    ],
)
@pytest.mark.parametrize("insist", [False, True])
def test_depth_and_width_are_refused_as_what_they_are(tmp_path, overrides, said, insist):
    base, other = tiny_llama(), tiny_llama(**overrides)
    sources = on_disk(tmp_path, base, {"e": other})
    for given in ((base, {"e": other}), sources):
        with pytest.raises(CoramError, match=rf"expert 'e' differs from the base in architecture: {said}"):
            CoramMerger(*given, allow_config_differences=insist)


ROPE = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
SCALED = {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (ROPE, r"rope_theta: base 10000\.0, expert 500000\.0"),
        (SCALED, r"rope_type: base default, expert linear, factor: base None, expert 2\.0"),
        ({"hidden_act": "gelu"}, "hidden_act: base silu, expert gelu"),
        (
            {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4},
            "num_attention_heads: base 4, expert 8, num_key_value_heads: base 2, expert 4, head_dim: base 8",
        ),
    ],
)
def test_what_computes_otherwise_is_refused_unless_insisted_on(tmp_path, settings, said):
    base = tiny_llama()
    sources = on_disk(tmp_path, base, {"e": changed(base, **settings)})
    found = "expert 'e' has a config that changes what its weights compute"
    with pytest.raises(CoramError, match=rf"{found}.*{said}.*allow_config_differences=True"):
        CoramMerger(*sources)
    merger = CoramMerger(*sources, allow_config_differences=True, progress=False)
    assert any(
        "'e' has a config that changes what its weights compute" in warning
        for warning in merger.inspect().warnings
    )
    plain = CoramMerger(base, {"e": changed(base)}, progress=False).merge().model
    merged = merger.merge().model
    assert all(torch.equal(plain.state_dict()[name], tensor) for name, tensor in merged.state_dict().items())
    merger.merge_to(tmp_path / "merged")
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert (config["hidden_act"], config["rope_parameters"]["rope_theta"]) == ("silu", 10000.0)
    assert MergeReport.load(tmp_path / "merged").options["allow_config_differences"] is True


def test_harmless_differences_are_named_in_the_plan(tmp_path):
    base = tiny_llama()
    sources = on_disk(
        tmp_path, base, {"e": changed(base, max_position_embeddings=4096, rms_norm_eps=1e-5), "f": 0.05}
    )
    plan = CoramMerger(*sources, progress=False).inspect()
    said = plan.surroundings["config"]
    assert (
        "'e' has max_position_embeddings: base 2048, expert 4096, rms_norm_eps: base 1e-06, expert 1e-05"
        in said
    )
    assert "'f'" not in said
    assert said in str(plan)


def test_equal_configs_say_nothing():
    base = tiny_llama()
    assert (
        "config" not in CoramMerger(base, [fine_tuned(base, 0.05, 0)], progress=False).inspect().surroundings
    )


def test_parts_of_multimodal_configs_are_compared():
    architecture = ARCHITECTURES["Gemma-3"]
    base = architecture.build()
    expert = fine_tuned(base, 0.05, 0)
    expert.config.vision_config.hidden_act = "relu"
    with pytest.raises(CoramError, match=r"vision_config\.hidden_act: base \w+, expert relu"):
        CoramMerger(base, {"e": expert})


def test_an_encoder():
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 44,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    base = BertForMaskedLM(BertConfig(**shape))
    with pytest.raises(CoramError, match="hidden_act: base gelu, expert relu"):
        CoramMerger(base, {"e": changed(base, hidden_act="relu")})


def test_on_the_command_line_and_in_recipes(tmp_path):
    base = tiny_llama()
    sources = on_disk(tmp_path, base, {"e": changed(base, **ROPE)})
    words = [str(sources.base), f"e={sources.experts['e']}"]
    run = coram_hf("inspect", *words)
    assert run.returncode == 2
    assert "rope_theta" in run.stderr
    run = coram_hf("inspect", *words, "--allow-config-differences")
    assert run.returncode == 0, run.stderr
    recipe = {"base": words[0], "experts": {"e": str(sources.experts["e"])}, "allow_config_differences": True}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    assert coram_hf("inspect", "--config", tmp_path / "recipe.yaml").returncode == 0
