"""Every architecture of the README's table: targets, merge, save, reload, forward."""

import numpy as np
import pytest
import torch
from helpers import reference
from helpers.architectures import ARCHITECTURES
from helpers.models import fine_tuned
from helpers.paths import ROOT

from coram_hf import CoramConfig, CoramError, CoramMerger
from coram_hf.inputs.targets import find_targets

SWITCH_TARGETS = 2 * 4 + 2 * 8 + (2 * 1 + 2 * 4) * 2
"""Attention of two encoder and two decoder layers; per stack, a dense and a four-expert MLP of two maps."""

README = ROOT / "README.md"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_merge_save_reload_forward(name, tmp_path, record_property):
    architecture = ARCHITECTURES[name]
    base = architecture.build()
    experts = {f"e{i}": fine_tuned(base, 0.05, seed=i) for i in range(2)}
    merger = CoramMerger(base, experts, CoramConfig.from_line("full.ta"), progress=False)
    plan = merger.inspect()
    row = f"| {name} | `{architecture.model.__name__}` | {len(plan.targets)} | {len(plan.residual)} |"
    record_property("architecture", row)
    assert len(plan.targets) == architecture.targets, plan.targets
    result = merger.merge()
    result.save_pretrained(tmp_path / "merged")
    reloaded, info = architecture.model.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    for key, tensor in result.model.state_dict().items():
        assert torch.equal(reloaded.state_dict()[key], tensor), key
    output = architecture.forward(reloaded.eval())
    assert output.isfinite().all()
    torch.testing.assert_close(output, architecture.forward(result.model))
    for other in (base, *experts.values()):
        assert not torch.allclose(output, architecture.forward(other), atol=1e-5)
    assert row in README.read_text(encoding="utf-8")


def qwen_image_inputs():
    """A picture through Qwen's own (PIL) image processor, and a prompt that holds it."""
    from PIL import Image
    from transformers import Qwen2VLImageProcessorPil

    pixels = np.random.default_rng(0).integers(0, 256, (56, 56, 3), dtype=np.uint8)
    processor = Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, min_pixels=28 * 28, max_pixels=56 * 56)
    image = processor(images=[Image.fromarray(pixels)], return_tensors="pt")
    n_tokens = int(image["image_grid_thw"].prod()) // 4
    return {"input_ids": torch.tensor([[5, 58, *[60] * n_tokens, 59, 7, 8]]), **image}


@pytest.mark.parametrize(
    ("options", "vision_moves"),
    [({}, False), ({"residual": "ta"}, True), ({"target_modules": r".*visual\.blocks.*(qkv|proj)"}, True)],
)
def test_the_vision_tower_moves_only_when_asked_to(options, vision_moves):
    base = ARCHITECTURES["Qwen2.5-VL"].build()
    experts = {f"e{i}": fine_tuned(base, 0.05, seed=i) for i in range(3)}
    result = CoramMerger(base, experts, CoramConfig(**options), progress=False).merge()
    moved = {
        name
        for name, tensor in result.model.state_dict().items()
        if not torch.equal(tensor, base.state_dict()[name])
    }
    assert any("visual" in name for name in moved) == vision_moves
    assert any("language_model" in name for name in moved) == ("target_modules" not in options)
    inputs = qwen_image_inputs()
    with torch.no_grad():
        logits = [model(**inputs).logits for model in (result.model, base, *experts.values())]
    assert logits[0].isfinite().all()
    assert not any(torch.allclose(logits[0], other, atol=1e-5) for other in logits[1:])


def test_stacked_experts_are_merged_one_by_one():
    """Mixtral stores (expert, out, in), GPT-OSS (expert, in, out): rows are output neurons in both."""
    for name, transposed in (("Mixtral", False), ("GPT-OSS", True)):
        base = ARCHITECTURES[name].build()
        experts = [fine_tuned(base, 0.05, seed=i) for i in range(2)]
        result = CoramMerger(base, experts, CoramConfig(lam=1.0), progress=False).merge()
        for parameter in ("gate_up_proj", "down_proj"):
            key = f"model.layers.1.mlp.experts.{parameter}"
            for e in range(4):
                w0, *others = (m.state_dict()[key][e].double().numpy() for m in (base, *experts))
                if transposed:
                    expected = reference.merge(w0.T.copy(), [o.T.copy() for o in others]).T
                else:
                    expected = reference.merge(w0, others)
                found = result.model.state_dict()[key][e].double().numpy()
                np.testing.assert_allclose(found, expected, atol=1e-7)


def test_models_without_blocks_say_how_to_name_targets():
    import transformers as hf

    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], num_labels=2)
    model = hf.ResNetForImageClassification(config)
    with pytest.raises(CoramError, match=r"found no attention or MLP projections in ResNet.*target_modules="):
        CoramMerger(model, [model])


def test_llama4_experts_are_transposed():
    """Llama 4 does not declare the layout of its experts; it shows in the shapes."""
    from transformers.models.llama4.modeling_llama4 import Llama4TextConfig, Llama4TextExperts

    from coram_hf.inputs.targets import _projections

    config = Llama4TextConfig(hidden_size=8, intermediate_size=12, num_local_experts=2)
    assert [transposed for _, transposed in _projections(Llama4TextExperts(config), set())] == [True, True]


def small(name):
    """Further models whose parts are easily taken for targets."""
    import transformers as hf
    from helpers.architectures import COMMON, GROUPED, VISION

    moe = {
        "num_experts": 4,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 44,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 64,
    }
    models = {
        "SmolVLM": lambda: hf.SmolVLMForConditionalGeneration(
            hf.SmolVLMConfig(
                text_config=hf.LlamaConfig(**GROUPED), vision_config=VISION, scale_factor=2, pad_token_id=0
            )
        ),
        "GIT": lambda: hf.GitForCausalLM(hf.GitConfig(**COMMON, vision_config=VISION)),
        "SigLIP": lambda: hf.SiglipModel(
            hf.SiglipConfig(text_config=COMMON | {"projection_size": 32}, vision_config=VISION)
        ),
        "Switch": lambda: hf.SwitchTransformersForConditionalGeneration(
            hf.SwitchTransformersConfig(
                **moe, num_decoder_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1
            )
        ),
        "RWKV": lambda: hf.RwkvForCausalLM(hf.RwkvConfig(**COMMON, attention_hidden_size=32)),
        "Phi-MoE": lambda: hf.PhimoeForCausalLM(hf.PhimoeConfig(**GROUPED, num_local_experts=4)),
        "BART": lambda: hf.BartForConditionalGeneration(
            hf.BartConfig(
                d_model=32,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=44,
                decoder_ffn_dim=44,
                vocab_size=48,
                max_position_embeddings=32,
            )
        ),
    }
    torch.manual_seed(0)
    return models[name]().eval()


@pytest.mark.parametrize(
    ("name", "count", "never"),
    [
        ("SmolVLM", 14, "vision"),
        ("GIT", 12, "image_encoder"),
        ("SigLIP", 24, "head"),
        ("Switch", SWITCH_TARGETS, "router"),
        ("RWKV", 2 * (4 + 3), "time_mix"),
        ("Phi-MoE", 12, "gate.weight"),
    ],
)
def test_parts_that_are_no_targets(name, count, never):
    targets = [target.name for target in find_targets(small(name))]
    assert len(targets) == count, targets
    assert not any(never in target for target in targets)
    assert any("attn" in t or "att" in t.lower() for t in targets)


def test_all_linear_takes_linear_maps_alone():
    targets = find_targets(ARCHITECTURES["ViT"].build(), "all-linear")
    assert not any("token" in target.name or "position" in target.name for target in targets)
    assert len(targets) == 13


def test_a_resized_bart_keeps_its_logit_bias_in_line(tmp_path):
    base = small("BART")
    experts = {f"e{i}": fine_tuned(base, 0.05, seed=i) for i in range(2)}
    experts["e1"].resize_token_embeddings(52, mean_resizing=False)
    result = CoramMerger(base, experts, CoramConfig(residual="ta"), progress=False).merge()
    assert result.model.final_logits_bias.shape == (1, 48)
    result.save_pretrained(tmp_path)
    _, info = type(base).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
