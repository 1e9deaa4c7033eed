"""Dtypes in and out, rounding loss, quantised models, companion files, foreign experts."""

import copy
import json

import numpy as np
import pytest
import torch
from helpers import reference
from helpers.models import fine_tuned, tiny_llama
from helpers.vocabulary import WORDS, word_tokenizer
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, FineGrainedFP8Config

from coram_hf import CoramConfig, CoramError, CoramMerger
from coram_hf.baselines import merge

Q = "model.layers.0.self_attn.q_proj.weight"


def in_dtype(model, dtype):
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)
    return model


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_experts_in_another_dtype_are_read_exactly(dtype):
    base = tiny_llama()
    exact = [fine_tuned(base, 0.2, i) for i in range(2)]
    experts = [in_dtype(e, dtype) for e in exact]
    for config in (CoramConfig(residual="ta"), CoramConfig(spread="owner", conflict="nca", residual="ties")):
        result = CoramMerger(base, experts, config, progress=False).merge()
        assert result.model.dtype == torch.float32
        w0 = base.state_dict()[Q].double().numpy()
        others = [e.state_dict()[Q].double().numpy() for e in experts]
        merged = reference.merge(w0, others, spread=config.spread, conflict=config.conflict)
        expected = w0 + result.report.lam * (merged - w0)
        np.testing.assert_allclose(result.model.state_dict()[Q].double().numpy(), expected, atol=1e-7)


@pytest.mark.parametrize("dtype", ["float32", torch.float64, "float16"])
def test_the_result_may_have_another_dtype(dtype, tmp_path):
    base = tiny_llama(dtype=torch.bfloat16)
    experts = [fine_tuned(base, 0.05, i) for i in range(2)]
    result = CoramMerger(base, experts, dtype=dtype, progress=False).merge()
    expected = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    assert {p.dtype for p in result.model.parameters()} == {expected}
    assert base.dtype == torch.bfloat16
    assert result.with_lambda(1.0).model.dtype == expected
    assert result.model.model.rotary_emb.inv_freq.dtype == base.model.rotary_emb.inv_freq.dtype
    result.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == expected


@pytest.mark.parametrize("dtype", ["int8", "floaty", torch.int32, torch.float8_e4m3fn, 3])
def test_a_dtype_that_cannot_be_is_refused(dtype):
    base = tiny_llama()
    with pytest.raises(ValueError, match="'float32', 'bfloat16'"):
        CoramMerger(base, [base], dtype=dtype)


def test_a_loss_by_rounding_is_measured_and_reported():
    wide = tiny_llama()
    base = in_dtype(wide, torch.bfloat16)
    experts = [fine_tuned(in_dtype(base, torch.float32), 0.002, i) for i in range(3)]
    result = CoramMerger(base, experts, progress=False).merge()
    exact = CoramMerger(base, experts, dtype="float64", progress=False).merge()
    lost = moved = 0.0
    for name in CoramMerger(base, experts, progress=False).inspect().targets:
        w, w0 = exact.model.state_dict()[name], base.state_dict()[name].double()
        lost += (result.model.state_dict()[name].double() - w).square().sum().item()
        moved += (w - w0).square().sum().item()
    assert result.report.rounding_loss == pytest.approx((lost / moved) ** 0.5, rel=1e-3)
    assert result.report.rounding_loss > 0.25
    assert any(
        'dtype="float32"' in w and f"{result.report.rounding_loss:.0%}" in w for w in result.report.warnings
    )
    louder = result.with_lambda(100.0).report
    assert louder.rounding_loss < 0.25
    assert not any("rounding" in w for w in louder.warnings)
    precise = CoramMerger(base, experts, dtype="float32", progress=False).merge().report
    assert precise.rounding_loss < 1e-3
    assert not any("rounding" in w for w in precise.warnings)


def test_an_expert_of_another_base_is_pointed_out():
    base = tiny_llama(seed=0)
    stranger = tiny_llama(seed=1)
    plan = CoramMerger(
        base, {"kin": fine_tuned(base, 0.05, 0), "stranger": stranger}, progress=False
    ).inspect()
    assert plan.relative_updates["stranger"] == pytest.approx(2**0.5, rel=0.1)
    assert any("'stranger'" in w and "do not seem to share this base" in w for w in plan.warnings)
    assert not any("'kin'" in w for w in plan.warnings)


@pytest.mark.parametrize("scheme", ["gptq", "awq", "bitsandbytes", "compressed-tensors"])
@pytest.mark.parametrize("who", ["the base", "expert 'q'"])
def test_a_quantised_model_that_cannot_be_dequantised_is_refused_by_scheme(scheme, who):
    base, quantised = tiny_llama(), tiny_llama()
    quantised.config.quantization_config = {"quant_method": scheme, "bits": 4}
    models = (quantised, {"q": base}) if who == "the base" else (base, {"q": quantised})
    with pytest.raises(CoramError, match=rf"{who} is quantised \({scheme}\).*unquantised checkpoint"):
        CoramMerger(*models)


def test_a_quantised_model_that_can_be_dequantised_is(monkeypatch):
    base, expert = tiny_llama(), fine_tuned(tiny_llama(), 0.05, 0)
    held = copy.deepcopy(expert)
    with torch.no_grad():
        held.get_parameter(Q).zero_()
    held.config.quantization_config = {"quant_method": "stand-in"}

    def dequantize(self, dtype=None):
        del self.config.quantization_config
        self.load_state_dict(expert.state_dict())
        return self

    monkeypatch.setattr(type(base), "dequantize", dequantize)
    result = merge(base, {"e": held}, "linear", progress=False)
    torch.testing.assert_close(result.model.state_dict()[Q], expert.state_dict()[Q])
    assert not held.get_parameter(Q).any()


def test_an_fp8_checkpoint_is_saved_unquantised(tmp_path):
    """transformers dequantises FP8 on a CPU; plain save_pretrained would quantise again, without a config."""
    torch.manual_seed(0)
    wide = tiny_llama(hidden_size=128, intermediate_size=256, head_dim=32)
    wide.save_pretrained(tmp_path / "wide")
    folder = tmp_path / "fp8"
    save_as_fp8(tmp_path / "wide", folder)
    base = AutoModelForCausalLM.from_pretrained(folder)
    experts = [fine_tuned(base, 0.05, i) for i in range(2)]
    result = CoramMerger(base, experts, progress=False).merge()
    result.save_pretrained(tmp_path / "merged")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for name, tensor in result.model.state_dict().items():
        torch.testing.assert_close(reloaded.state_dict()[name].float(), tensor.float(), rtol=0, atol=0)


def save_as_fp8(source, target):
    """A finely-grained FP8 checkpoint: e4m3 weights in blocks of 128 with one inverse scale each."""
    from safetensors.torch import load_file, save_file

    target.mkdir()
    state = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            state[name] = tensor
            continue
        rows, columns = -(-tensor.shape[0] // 128), -(-tensor.shape[1] // 128)
        scales = torch.ones(rows, columns)
        quantised = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
        for i in range(rows):
            for j in range(columns):
                block = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
                scales[i, j] = tensor[block].abs().max() / 448
                quantised[block] = (tensor[block] / scales[i, j]).to(torch.float8_e4m3fn)
        state[name] = quantised
        state[f"{name}_scale_inv"] = scales
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = FineGrainedFP8Config(weight_block_size=(128, 128)).to_dict()
    (target / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("trusted", [False, True])
def test_everything_needed_to_run_the_result_is_in_the_folder(tmp_path, trusted):
    base = tiny_llama()
    base.generation_config.temperature = 0.7
    base.generation_config.do_sample = True
    base.save_pretrained(tmp_path / "base")
    tokenizer = word_tokenizer(WORDS)
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "preprocessor_config.json").write_text(
        '{"image_processor_type": "CLIPImageProcessor"}'
    )
    (tmp_path / "base" / "modeling_custom.py").write_text("raise RuntimeError\n")
    (tmp_path / "base" / "additional_chat_templates").mkdir()
    (tmp_path / "base" / "additional_chat_templates" / "rag.jinja").write_text("{{ messages[0].content }}")
    (tmp_path / "base" / "training_args.bin").write_bytes(b"not for the result")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    options = {"trust_remote_code": trusted, "progress": False}
    result = CoramMerger(loaded, [fine_tuned(loaded, 0.05, 0)], **options).merge()
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "tokenizer.json").symlink_to(tmp_path / "base" / "tokenizer.json")
    result.save_pretrained(tmp_path / "merged")
    files = {path.name for path in (tmp_path / "merged").iterdir()}
    wanted = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "preprocessor_config.json",
        "coram_recipe.yaml",
        "coram_report.json",
        "README.md",
        "figures",
        "additional_chat_templates",
    }
    assert files == (wanted | {"modeling_custom.py"} if trusted else wanted)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").generation_config.temperature == 0.7


@pytest.mark.parametrize("options", [{"load_in_4bit": True}, {"load_in_8bit": True}])
def test_bitsandbytes_models_are_dequantised(tmp_path, options):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    tiny_llama(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    quantised = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=BitsAndBytesConfig(**options)
    )
    held = quantised.get_parameter(Q).clone()
    plan = CoramMerger(base, {"q": quantised, "e": fine_tuned(base, 0.05, 0)}, progress=False).inspect()
    assert 0.001 < plan.relative_updates["q"] < 0.2
    assert torch.equal(quantised.get_parameter(Q), held)
    result = CoramMerger(quantised, {"e": fine_tuned(base, 0.05, 0)}, progress=False).merge()
    result.save_pretrained(tmp_path / "merged")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert type(reloaded.get_submodule(Q.removesuffix(".weight"))) is torch.nn.Linear
    assert torch.equal(reloaded.get_parameter(Q), result.model.get_parameter(Q))
