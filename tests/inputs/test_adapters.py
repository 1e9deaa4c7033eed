"""Adapters as experts: every PEFT method through one path, without touching the user's models."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import peft
import pytest
import torch
from helpers import reference
from helpers.adapters import ALL, METHODS, adapted, shake
from helpers.architectures import ARCHITECTURES
from helpers.models import fine_tuned, snapshot, tiny_llama
from helpers.paths import TESTS
from peft import PeftModel, get_peft_model
from peft.tuners.oft.layer import Linear as OFTLinear
from safetensors.torch import load_file, save_file

from coram_hf import CoramConfig, CoramError, CoramMerger
from coram_hf.baselines import merge, merge_oft
from coram_hf.cli.recipe import Recipe
from coram_hf.inputs.adapter_folder import open_adapter
from coram_hf.inputs.adapters import open_adapters
from coram_hf.inputs.opening import open_inputs
from coram_hf.inputs.weights import Weights

OLD_OFT = TESTS / "data"


def unloaded(model):
    """The expert as PEFT makes it, by merging into a float32 copy."""
    return copy.deepcopy(model).float().merge_and_unload()


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 12).unsqueeze(0)).logits


def close(result, expected, base):
    """Equal to 1e-5 of the update's norm, over all parameters."""
    error = moved = 0.0
    w0 = base.state_dict()
    for name, tensor in expected.model.state_dict().items():
        error += (result.model.state_dict()[name].double() - tensor.double()).square().sum().item()
        moved += (tensor.double() - w0[name].double()).square().sum().item()
    return error**0.5 <= 1e-5 * moved**0.5


@pytest.mark.parametrize("method", METHODS)
def test_an_adapter_is_merged_like_the_model_it_makes(method, tmp_path):
    base = tiny_llama(attention_bias=True)
    experts = {f"e{i}": adapted(base, METHODS[method](), seed=i) for i in range(2)}
    for name, expert in experts.items():
        expert.save_pretrained(tmp_path / name)
    outputs = {name: logits(expert) for name, expert in experts.items()}
    before = {name: snapshot(expert) for name, expert in experts.items()}
    config = CoramConfig.from_line("full.ta", lam=1.5)
    whole = {name: unloaded(expert) for name, expert in experts.items()}
    expected = CoramMerger(base, whole, config, progress=False).merge()
    intact = snapshot(base)
    for given in (experts, {name: tmp_path / name for name in experts}):
        result = CoramMerger(base, given, config, progress=False).merge()
        assert close(result, expected, base)
        assert result.report.expert_kinds.keys() == experts.keys()
        assert "full" not in result.report.expert_kinds.values()
    for name, expert in experts.items():
        assert all(torch.equal(tensor, before[name][key]) for key, tensor in expert.state_dict().items())
        assert torch.equal(logits(expert), outputs[name])
    assert all(torch.equal(tensor, intact[key]) for key, tensor in base.state_dict().items())
    assert all(parameter.requires_grad for parameter in base.parameters())


def test_oft_on_a_vision_language_model():
    base = ARCHITECTURES["Qwen2.5-VL"].build()
    target = r".*language_model.*(q_proj|up_proj)"
    config = peft.OFTConfig(oft_block_size=4, target_modules=target, use_cayley_neumann=False)
    experts = {f"e{i}": adapted(base, config, seed=i) for i in range(2)}
    merged = CoramMerger(base, experts, CoramConfig(lam=1.5), progress=False).merge()
    whole = {name: unloaded(expert) for name, expert in experts.items()}
    assert close(merged, CoramMerger(base, whole, CoramConfig(lam=1.5), progress=False).merge(), base)


def test_the_orthogonality_of_oft_is_the_adapters_own():
    base = tiny_llama()
    errors = {}
    for exact in (True, False):
        config = peft.OFTConfig(oft_block_size=4, target_modules=ALL, use_cayley_neumann=not exact)
        report = (
            CoramMerger(base, {"e": adapted(base, config, 0)}, CoramConfig(lam=1.0), progress=False)
            .merge()
            .report
        )
        errors[exact] = report.orthogonality_errors["e"]
    assert errors[True] < 1e-5
    assert errors[False] > 1e-5
    lora = adapted(base, METHODS["LoRA"](), 0)
    assert (
        CoramMerger(base, [lora], CoramConfig(lam=1.0), progress=False).merge().report.orthogonality_errors
        == {}
    )


def test_weights_of_a_narrow_base_are_made_in_float32():
    base = tiny_llama(dtype=torch.bfloat16)
    expert = adapted(base, METHODS["LoRA"](), 0)
    weights = open_adapters("expert", expert)["default"]
    layer = expert.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    exact = (
        base.state_dict()["model.layers.0.mlp.up_proj.weight"].double()
        + layer.get_delta_weight("default").double()
    )
    made = weights["model.layers.0.mlp.up_proj.weight"]
    assert made.dtype == torch.float32
    assert (made.double() - exact).norm() < 1e-6 * exact.norm()


def test_several_adapters_over_one_base():
    """One PeftModel with three adapters, over the very base that is passed: PEFT has changed its modules."""
    base = tiny_llama()
    plain = copy.deepcopy(base)
    model = get_peft_model(base, METHODS["LoRA"](), adapter_name="math")
    model.add_adapter("code", METHODS["LoRA"]())
    model.add_adapter("chat", METHODS["LoRA"]())
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    model.set_adapter("code")
    model.train()
    whole = {}
    for name in ("math", "code", "chat"):
        clone = copy.deepcopy(model)
        clone.set_adapter(name)
        whole[name] = clone.merge_and_unload()
    expected = CoramMerger(plain, whole, CoramConfig(lam=1.5), progress=False).merge()
    old = snapshot(model)
    for given_base in (plain, base, model):
        result = CoramMerger(given_base, [model], CoramConfig(lam=1.5), progress=False).merge()
        assert list(result.report.relative_updates) == ["math", "code", "chat"]
        assert close(result, expected, plain)
        assert type(result.model) is type(plain)
        assert result.model.state_dict().keys() == plain.state_dict().keys()
    assert model.active_adapters == ["code"]
    assert model.training
    assert all(torch.equal(tensor, old[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("method", ["LoRA", "OFT, Cayley"])
def test_a_merged_state_is_seen_through_and_left_alone(method):
    base = tiny_llama(dtype=torch.float64)
    expert = adapted(base, METHODS[method](), 0)
    expected = CoramMerger(
        base, [copy.deepcopy(expert).merge_and_unload()], CoramConfig(lam=1.5), progress=False
    ).merge()
    expert.merge_adapter()
    old = snapshot(expert)
    for given_base in (base, expert):
        result = CoramMerger(given_base, [expert], CoramConfig(lam=1.5), progress=False).merge()
        assert close(result, expected, base)
    assert all(torch.equal(tensor, old[key]) for key, tensor in expert.state_dict().items())
    assert expert.get_submodule("base_model.model.model.layers.0.mlp.up_proj").merged


def test_adapters_and_full_models_mix(tmp_path):
    base = tiny_llama()
    full = fine_tuned(base, 0.03, 5)
    full.save_pretrained(tmp_path / "full")
    lora, oft = adapted(base, METHODS["LoRA"](), 0), adapted(base, METHODS["OFT, Cayley"](), 1)
    oft.save_pretrained(tmp_path / "oft")
    experts = {"full": full, "lora": lora, "oft": str(tmp_path / "oft"), "folder": tmp_path / "full"}
    report = merge(base, experts, "linear", progress=False).report
    assert report.expert_kinds == {"full": "full", "lora": "LORA", "oft": "OFT", "folder": "full"}
    assert report.relative_updates["full"] == report.relative_updates["folder"]
    named = merge(
        base, [f"x={tmp_path / 'oft'}", str(tmp_path / "full"), lora], "linear", progress=False
    ).report
    assert list(named.relative_updates) == ["x", "full", "expert_3"]


def test_mixture_experts_trained_by_parameter():
    base = ARCHITECTURES["Mixtral"].build()
    config = peft.LoraConfig(
        r=2,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    expert = adapted(base, config, 0)
    whole = copy.deepcopy(expert).merge_and_unload()
    expected = CoramMerger(base, [whole], CoramConfig(lam=1.5), progress=False).merge()
    result = CoramMerger(base, [expert], CoramConfig(lam=1.5), progress=False).merge()
    assert close(result, expected, base)
    key = "model.layers.0.mlp.experts.down_proj"
    assert not torch.equal(whole.state_dict()[key], base.state_dict()[key])


@pytest.mark.parametrize("saved", ["modules_to_save", "whole embeddings"])
def test_an_adapter_with_added_tokens(tmp_path, saved):
    base = tiny_llama()
    larger = copy.deepcopy(base)
    larger.resize_token_embeddings(52, mean_resizing=False)
    options = {"modules_to_save": ["embed_tokens", "lm_head"]} if saved == "modules_to_save" else {}
    expert = adapted(larger, peft.LoraConfig(r=4, target_modules=ALL, **options), 0)
    expert.save_pretrained(tmp_path, save_embedding_layers=True)
    before = snapshot(base)
    result = CoramMerger(base, {"e": tmp_path}, CoramConfig(residual="ta", lam=1.0), progress=False).merge()
    whole = unloaded(expert).state_dict()["model.embed_tokens.weight"][:48]
    torch.testing.assert_close(
        result.model.state_dict()["model.embed_tokens.weight"], whole, rtol=0, atol=1e-6
    )
    assert result.report.vocabulary["e"]["dropped"] == 4
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())


@pytest.mark.parametrize(
    "config",
    [
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=2, adapter_layers=1),
    ],
)
def test_methods_that_change_no_weights_are_refused(config, tmp_path):
    base = tiny_llama()
    model = get_peft_model(copy.deepcopy(base), config)
    model.save_pretrained(tmp_path)
    for expert in (model, tmp_path):
        with pytest.raises(CoramError, match=f"{config.peft_type.value} adapter.*virtual tokens"):
            CoramMerger(base, {"soft": expert})


def test_an_adapter_of_another_base_is_pointed_out_or_refused(tmp_path):
    base = tiny_llama()
    base.name_or_path = "org/this"
    expert = adapted(base, METHODS["LoRA"](), 0)
    expert.peft_config["default"].base_model_name_or_path = "org/other"
    expert.save_pretrained(tmp_path / "other")
    plan = CoramMerger(base, {"e": tmp_path / "other"}, progress=False).inspect()
    assert any("'e' is an adapter of 'org/other', but the base is 'org/this'" in w for w in plan.warnings)
    wide = adapted(tiny_llama(hidden_size=64), METHODS["LoRA"](), 0)
    wide.save_pretrained(tmp_path / "wide")
    before = snapshot(base)
    found = "down_proj has 64 outputs in the adapter and 32 in the base"
    with pytest.raises(CoramError, match=rf"expert 'e'.*does not fit the base.*{found}"):
        CoramMerger(base, {"e": tmp_path / "wide"})
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())
    assert not any("lora" in name for name, _ in base.named_modules())


def test_a_model_with_injected_adapters_is_no_expert():
    base = tiny_llama()
    injected = adapted(base, METHODS["LoRA"](), 0).get_base_model()
    with pytest.raises(CoramError, match="contains adapters; pass it as a PeftModel"):
        CoramMerger(base, {"e": injected})


def test_the_weights_are_what_the_formula_says(tmp_path):
    """LoRA by hand: W + alpha / r * B A, from the files alone."""
    from safetensors.torch import load_file

    base = tiny_llama()
    adapted(base, peft.LoraConfig(r=4, lora_alpha=6, target_modules=["up_proj"]), 0).save_pretrained(tmp_path)
    state = load_file(tmp_path / "adapter_model.safetensors")
    module = "model.layers.1.mlp.up_proj"
    A, B = (state[f"base_model.model.{module}.lora_{x}.weight"].double().numpy() for x in "AB")
    w0 = base.state_dict()[f"{module}.weight"].double().numpy()
    result = CoramMerger(base, {"e": tmp_path}, CoramConfig(lam=2.0), progress=False).merge()
    merged = reference.merge(w0, [w0 + 6 / 4 * B @ A])
    found = result.model.state_dict()[f"{module}.weight"].double().numpy()
    np.testing.assert_allclose(found, w0 + 2.0 * (merged - w0), atol=1e-7)


def test_a_shadow_never_writes_to_the_base(tmp_path):
    base = tiny_llama(attention_bias=True)
    adapted(base, METHODS["LoRA with bias"](), 0).save_pretrained(tmp_path)
    before = snapshot(base)
    bias = "model.layers.0.self_attn.q_proj.bias"
    weights = open_adapter(Weights(base), "expert", tmp_path)
    assert not torch.equal(weights[bias], before[bias])
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())


@pytest.mark.parametrize("exact", [True, False])
def test_orthomerge_on_oft_adapters(tmp_path, exact):
    base = tiny_llama()
    config = peft.OFTConfig(oft_block_size=8, target_modules=ALL, use_cayley_neumann=not exact)
    experts = {f"e{i}": adapted(base, config, seed=i) for i in range(3)}
    intact = snapshot(base)
    result = merge_oft(base, experts, weights=(2, 1, 1), progress=False)

    module = "model.layers.1.mlp.up_proj"
    w0 = base.state_dict()[f"{module}.weight"].double().numpy()
    entries = [
        e.get_submodule(f"base_model.model.{module}").oft_R["default"].weight.detach().double().numpy()
        for e in experts.values()
    ]
    mean = sum(w * q for w, q in zip((0.5, 0.25, 0.25), entries, strict=True))
    mean *= sum(
        w * np.linalg.norm(q) for w, q in zip((0.5, 0.25, 0.25), entries, strict=True)
    ) / np.linalg.norm(mean)
    rotation = np.zeros((32, 32))
    for block in range(4):
        Q = np.zeros((8, 8))
        Q[np.triu_indices(8, 1)] = mean[block]
        Q -= Q.T
        R = (np.eye(8) - Q) @ np.linalg.inv(np.eye(8) + Q) if exact else neumann(Q)
        rotation[8 * block : 8 * block + 8, 8 * block : 8 * block + 8] = R
    found = result.model.state_dict()[f"{module}.weight"].double().numpy()
    np.testing.assert_allclose(found, w0 @ rotation.T, atol=1e-6)

    result.save_adapter(tmp_path)
    reloaded = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    torch.testing.assert_close(logits(reloaded), logits(result.model), rtol=0, atol=1e-4)
    assert all(torch.equal(tensor, intact[key]) for key, tensor in base.state_dict().items())
    one = merge_oft(base, {"e": experts["e0"]}, progress=False)
    torch.testing.assert_close(logits(one.model), logits(experts["e0"]), rtol=0, atol=1e-4)


def neumann(Q):
    """PEFT's Cayley-Neumann rotation: (I + Q)(I + Q + Q^2 + Q^3 + Q^4), five terms of the inverse."""
    powers = [np.linalg.matrix_power(Q, k) for k in range(5)]
    return np.eye(len(Q)) + 2 * sum(powers[1:4]) + powers[4]


def test_orthomerge_on_oft_wants_like_adapters():
    base = tiny_llama()
    oft = adapted(base, METHODS["OFT, Cayley"](), 0)
    for other, message in (
        (adapted(base, METHODS["LoRA"](), 1), "expert 'b' is LORA; expected an OFT adapter"),
        (fine_tuned(base, 0.05, 1), "expert 'b' is full; expected an OFT adapter"),
        (adapted(base, METHODS["OFT, Cayley-Neumann"](), 1), "expert 'b' has use_cayley_neumann=True"),
        (
            adapted(base, peft.OFTConfig(oft_block_size=8, target_modules=ALL, use_cayley_neumann=False), 1),
            "expert 'b' has OFT blocks on different modules or of different sizes",
        ),
    ):
        with pytest.raises(CoramError, match=message):
            merge_oft(base, {"a": oft, "b": other}, progress=False)


@pytest.mark.parametrize("options", [{"rank": 4}, {"energy": 0.9}, {"energy": 1.0}])
def test_a_merge_can_be_shared_as_a_lora_adapter(tmp_path, options):
    base = tiny_llama()
    experts = {f"e{i}": adapted(base, METHODS["LoRA"](), seed=i) for i in range(2)}
    result = CoramMerger(base, experts, CoramConfig(lam=1.5), progress=False).merge()
    report = result.save_adapter(tmp_path, **options)
    rebuilt = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).merge_and_unload()
    for module, rank in report.adapter_ranks.items():
        w0, w = (m.state_dict()[f"{module}.weight"].double().numpy() for m in (base, result.model))
        found = rebuilt.state_dict()[f"{module}.weight"].double().numpy()
        s = np.linalg.svd(w - w0, compute_uv=False)
        if "rank" in options:
            assert rank == 4
        else:
            share = np.cumsum(s**2) / (s**2).sum()
            assert share[rank - 1] >= options["energy"] - 1e-6
            assert rank == 1 or share[rank - 2] < options["energy"] + 1e-6
        error = np.linalg.norm(found - w) / np.linalg.norm(w - w0)
        assert report.adapter_errors[module] == pytest.approx(error, abs=2e-5)
    if options == {"energy": 1.0}:
        torch.testing.assert_close(logits(rebuilt), logits(result.model), rtol=0, atol=1e-4)
    assert (tmp_path / "coram_report.json").is_file()


def test_a_lora_adapter_of_a_transposed_model(tmp_path):
    base = ARCHITECTURES["GPT-2"].build()
    experts = [fine_tuned(base, 0.05, i, only="weight") for i in range(2)]
    result = CoramMerger(base, experts, progress=False).merge()
    result.save_adapter(tmp_path, energy=1.0)
    rebuilt = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    torch.testing.assert_close(logits(rebuilt), logits(result.model), rtol=0, atol=1e-4)


def test_what_cannot_be_an_adapter_says_so(tmp_path):
    base = tiny_llama()
    experts = [fine_tuned(base, 0.05, i) for i in range(2)]
    with pytest.raises(CoramError, match="keep_update=True"):
        CoramMerger(base, experts, progress=False).merge(keep_update=False).save_adapter(tmp_path)
    result = CoramMerger(base, experts, progress=False).merge()
    with pytest.raises(ValueError, match="rank must be a positive integer, found 0"):
        result.save_adapter(tmp_path, rank=0)
    with pytest.raises(ValueError, match="energy must be a finite number above 0 and at most 1"):
        result.save_adapter(tmp_path, energy=1.5)
    with pytest.raises(CoramError, match="nothing for an adapter"):
        result.with_lambda(0.0).save_adapter(tmp_path)
    mixture = ARCHITECTURES["Mixtral"].build()
    merged = CoramMerger(mixture, [fine_tuned(mixture, 0.05, 0)], progress=False).merge()
    with pytest.raises(CoramError, match="linear layers only"):
        merged.save_adapter(tmp_path)


def old_base():
    """The shape of the base of the old fixtures."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return tiny_llama(hidden_size=16, intermediate_size=20, vocab_size=24, num_hidden_layers=1, **heads)


@pytest.mark.parametrize("folder", sorted(OLD_OFT.glob("oft-*")), ids=lambda folder: folder.name)
def test_oft_of_old_versions_of_peft(folder, tmp_path):
    """The fixtures were written, and merged, by PEFT 0.13.2 and 0.15.2."""
    base = old_base()
    base.load_state_dict(load_file(folder / "base.safetensors"))
    expected = load_file(folder / "expected.safetensors")
    opened = open_inputs(base, {"old": folder}, {}).experts["old"]
    assert opened.kind == "OFT"
    assert opened.orthogonality_error < 1e-5
    changed = [name for name in expected if not torch.equal(expected[name], base.state_dict()[name])]
    assert len(changed) == 4
    for name, tensor in expected.items():
        torch.testing.assert_close(opened[name], tensor, rtol=1e-5, atol=1e-6)
    narrow = tiny_llama(hidden_size=8, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1)
    shapes = r"tensor 'lm_head\.weight': shape \(24, 16\), but the base requires \(48, 8\)"
    with pytest.raises(CoramError, match=shapes):
        open_inputs(narrow, {"old": folder}, {})


def test_wide_oft_layers_are_rotated_block_by_block(monkeypatch):
    base = tiny_llama()
    for method in ("OFT, Cayley", "OFT, Cayley-Neumann", "COFT", "OFT, shared blocks"):
        model = adapted(base, METHODS[method](), seed=0)
        expected = unloaded(model).state_dict()
        monkeypatch.setattr("coram_hf.inputs.oft.DENSE_WIDTH", 0)
        monkeypatch.setattr(OFTLinear, "get_delta_weight", None)
        opened = open_adapters("expert", model)["default"]
        made = {name: opened[name] for name in opened.overrides}
        monkeypatch.undo()
        assert len(made) == 8
        for name, tensor in made.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-7)


def test_an_adapter_without_weights_is_named(tmp_path):
    base = tiny_llama()
    adapted(base, METHODS["LoRA"](), 0).save_pretrained(tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(CoramError, match=r"'half': the weights in .* cannot be read"):
        CoramMerger(base, {"half": tmp_path})
    weights.unlink()
    with pytest.raises(CoramError, match=r"no adapter_model\.safetensors"):
        CoramMerger(base, {"half": tmp_path})


@pytest.mark.parametrize("start", ["olora", "pissa", "gaussian", "orthogonal"])
def test_initialisations_that_write_to_the_base_write_to_a_copy(start, tmp_path):
    base = tiny_llama()
    config = peft.LoraConfig(r=4, target_modules=ALL, init_lora_weights=start)
    experts = {f"e{i}": adapted(base, config, i) for i in range(2)}
    for name, expert in experts.items():
        expert.save_pretrained(tmp_path / name)
    before = snapshot(base)
    opened = open_inputs(base, {name: tmp_path / name for name in experts}, {}).experts
    for name, expert in experts.items():
        for key, tensor in unloaded(expert).state_dict().items():
            torch.testing.assert_close(opened[name][key], tensor, rtol=1e-4, atol=1e-6)
    assert all(torch.equal(tensor, before[key]) for key, tensor in base.state_dict().items())


def edited(folder, edit):
    path = folder / "adapter_model.safetensors"
    state = edit(load_file(path))
    save_file(state, path, {"format": "pt"})


def prefixed(state):
    return {key.replace("base_model.model.model.", "base_model.model."): t for key, t in state.items()}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda s: {k: t for k, t in s.items() if "lora_B" in k}, r"lack '.*lora_A"),
        (lambda s: {k: t for k, t in s.items() if "layers.0." in k}, r"lack 'model\.layers\.1\."),
        (
            lambda s: {**s, "base_model.model.other.lora_A.weight": torch.ones(4, 8)},
            "do not fit the base",
        ),
        (prefixed, r"lack 'model\.layers\.0\.self_attn\.q_proj\.lora_A\.default\.weight' and 15 more"),
        (lambda s: {}, "are empty"),
        (lambda s: {k: t.long() for k, t in s.items()}, "must be floating"),
    ],
)
def test_adapters_with_missing_or_foreign_tensors(edit, message, tmp_path):
    base = tiny_llama()
    adapted(base, METHODS["LoRA"](), 0).save_pretrained(tmp_path)
    edited(tmp_path, edit)
    with pytest.raises(CoramError, match=f"expert 'bad'.*({message})"):
        open_inputs(base, {"bad": tmp_path}, {})


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"peft_type": "FOO"}', '{"peft_type": null}', '{"peft_type": "LORA", "r"', "\xff"],
)
def test_damaged_adapter_configs_are_named(content, tmp_path):
    base = tiny_llama()
    adapted(base, METHODS["LoRA"](), 0).save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CoramError, match=r"expert 'bad': .*adapter_config\.json is not a PEFT config"):
        open_inputs(base, {"bad": tmp_path}, {})


@pytest.mark.parametrize("content", [b"", b"junk", pickle.dumps([1]), pickle.dumps(print)])
def test_damaged_pickled_adapters_are_named(content, tmp_path):
    base = tiny_llama()
    adapted(base, METHODS["LoRA"](), 0).save_pretrained(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter_model.bin").write_bytes(content)
    with pytest.raises(CoramError, match=r"expert 'bad': the weights in"):
        open_inputs(base, {"bad": tmp_path}, {"allow_pickle": True})
    with pytest.raises(CoramError, match=r"pickled weights .*allow_pickle=True"):
        open_inputs(base, {"bad": tmp_path}, {})


def test_nested_merged_adapters_are_all_taken_out():
    base = ARCHITECTURES["Mixtral"].build()
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=parameters)
    model = adapted(base, config, 0, name="a")
    model.add_adapter("b", config)
    shake(model, 1)
    expected = {name: open_adapters("e", model)[name] for name in ("a", "b")}
    expected = {name: {key: weights[key].clone() for key in weights} for name, weights in expected.items()}
    model.merge_adapter(["a"])
    for name, weights in open_adapters("e", model).items():
        for key, tensor in expected[name].items():
            torch.testing.assert_close(weights[key], tensor, rtol=1e-4, atol=1e-6)


def test_merged_tokens_and_tied_embeddings_are_taken_out_of_a_base():
    base = tiny_llama(tie_word_embeddings=True)
    before = snapshot(base)
    full = fine_tuned(base, 0.05, 0)
    for config in (
        peft.LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[1, 5]),
        peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"]),
    ):
        model = adapted(base, config, 0)
        model.merge_adapter()
        opened = open_inputs(model, {"f": full}, {})
        assert opened.base.tied == {"lm_head.weight": "model.embed_tokens.weight"}
        for name in opened.base:
            torch.testing.assert_close(opened.base[name], before[name], rtol=1e-4, atol=1e-6)
        merged = CoramMerger(model, {"f": full}, progress=False).merge().model
        assert not hasattr(merged, "peft_config")
        assert all(parameter.requires_grad for parameter in merged.parameters())


@pytest.mark.parametrize("options", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_a_head_that_only_the_adapter_unties_is_warned_of(options):
    base = tiny_llama(tie_word_embeddings=True)
    config = peft.LoraConfig(r=2, **{"target_modules": ["q_proj"], **options})
    warnings = open_inputs(base, {"head": adapted(base, config, 0)}, {}).warnings
    assert any("has its own 'lm_head.weight'" in warning for warning in warnings)


def test_orthomerge_rotates_whatever_the_adapters_rotate(tmp_path):
    base = tiny_llama()
    config = peft.OFTConfig(oft_block_size=4, target_modules=["q_proj", "lm_head"])
    result = merge_oft(base, {f"e{i}": adapted(base, config, i) for i in range(2)}, progress=False)
    result.save_adapter(tmp_path)
    again = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path)).eval()
    torch.testing.assert_close(logits(again), logits(result.model), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="rank"):
        result.save_adapter(tmp_path, rank=2)
    with_bias = tiny_llama(attention_bias=True)
    biased = peft.OFTConfig(oft_block_size=4, target_modules=["q_proj"], bias="all")
    with pytest.raises(CoramError, match="also trains"):
        merge_oft(with_bias, {"e": adapted(with_bias, biased, 0)}, progress=False)
    with pytest.raises(CoramError, match=r"layout of PEFT before 0\.16"):
        merge_oft(old_base(), {"e": OLD_OFT / "oft-0.15"}, progress=False)


def test_a_baseline_merge_of_loras_can_be_shared_as_one(tmp_path):
    base = tiny_llama()
    experts = {f"e{i}": adapted(base, METHODS["LoRA"](), i) for i in range(2)}
    merged = merge(base, experts, "task_arithmetic", keep_update=True, progress=False)
    merged.save_adapter(tmp_path, energy=1.0)
    again = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path)).eval()
    torch.testing.assert_close(logits(again), logits(merged.model), rtol=0, atol=1e-4)


def test_orthomerge_on_oft_from_files_to_files_by_a_recipe(tmp_path):
    base = tiny_llama()
    base.save_pretrained(tmp_path / "base")
    config = peft.OFTConfig(oft_block_size=8, target_modules=ALL, use_cayley_neumann=False)
    experts = {f"e{i}": adapted(base, config, seed=i) for i in range(3)}
    for name, expert in experts.items():
        expert.save_pretrained(tmp_path / name)
    recipe = Recipe(
        str(tmp_path / "base"),
        {name: str(tmp_path / name) for name in experts},
        "orthomerge",
        {"space": "oft", "weights": [2, 1, 1]},
    )
    merger = recipe.merger(progress=False)
    assert set(merger.inspect().relative_updates) == set(experts)
    report = merger.merge_to(tmp_path / "merged")
    assert (report.method, report.config) == ("orthomerge", {"space": "oft", "weights": [2.0, 1.0, 1.0]})
    expected = merge_oft(base, experts, weights=(2, 1, 1), progress=False)
    found = type(base).from_pretrained(tmp_path / "merged").state_dict()
    for name, tensor in expected.model.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)
    assert report.c_rms == pytest.approx(expected.report.c_rms)
    for parameters, message in (({"space": "lora"}, "space of orthomerge"), ({"residual": "ta"}, "on OFT")):
        with pytest.raises(ValueError, match=message):
            replace(recipe, parameters={"space": "oft", **parameters}).merger()


def test_asking_for_a_name_makes_no_weights():
    def refuse():
        raise AssertionError

    name = "model.layers.0.self_attn.q_proj.weight"
    weights = Weights(tiny_llama(tie_word_embeddings=True), {name: refuse})
    assert name in weights
    assert "lm_head.weight" in weights
    assert "lm_head.bias" not in weights
