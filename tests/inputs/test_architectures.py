"""Every architecture of the guide's table: targets, merge, save, reload, forward."""

import itertools
import re

import numpy as np
import pytest
import torch
from helpers import reference
from helpers.architectures import ARCHITECTURES
from helpers.models import fine_tuned
from helpers.paths import ROOT

from coram_hf import CoramConfig, CoramError, CoramMerger
from coram_hf.inputs.targets import find_targets

GUIDE = ROOT / "examples" / "guides" / "models.md"


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
    assert row in GUIDE.read_text(encoding="utf-8")


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
    import transformers as hf

    config = hf.Llama4TextConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=44,
        intermediate_size_mlp=44,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        interleave_moe_layer_step=1,
    )
    targets = find_targets(hf.Llama4ForCausalLM(config))
    stacks = {target.name: target.transposed for target in targets if ".experts." in target.name}
    assert stacks == {
        f"model.layers.{layer}.feed_forward.experts.{part}": True
        for layer in range(2)
        for part in ("gate_up_proj", "down_proj")
    }
    assert not any(target.transposed for target in targets if target.name not in stacks)


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


LLAMA_BLOCK = (
    "self_attn.{q_proj,k_proj,v_proj,o_proj}.weight",
    "mlp.{gate_proj,up_proj,down_proj}.weight",
)
SIGLIP_BLOCK = ("self_attn.{k_proj,v_proj,q_proj,out_proj}.weight", "mlp.{fc1,fc2}.weight")
EVERY_TARGET = {
    "SmolVLM": {"model.text_model.layers.{0,1}": LLAMA_BLOCK},
    "GIT": {
        "git.encoder.layer.{0,1}": (
            "attention.self.{query,key,value}.weight",
            "{attention.output,intermediate,output}.dense.weight",
        )
    },
    "SigLIP": {
        "text_model.encoder.layers.{0,1}": SIGLIP_BLOCK,
        "vision_model.encoder.layers.{0,1}": SIGLIP_BLOCK,
    },
    "Switch": {
        "encoder.block.{0,1}.layer.0": ("SelfAttention.{q,k,v,o}.weight",),
        "encoder.block.0.layer.1": ("mlp.{wi,wo}.weight",),
        "encoder.block.1.layer.1": ("mlp.experts.expert_{0,1,2,3}.{wi,wo}.weight",),
        "decoder.block.{0,1}.layer.0": ("SelfAttention.{q,k,v,o}.weight",),
        "decoder.block.{0,1}.layer.1": ("EncDecAttention.{q,k,v,o}.weight",),
        "decoder.block.0.layer.2": ("mlp.{wi,wo}.weight",),
        "decoder.block.1.layer.2": ("mlp.experts.expert_{0,1,2,3}.{wi,wo}.weight",),
    },
    "RWKV": {
        "rwkv.blocks.{0,1}": (
            "attention.{key,value,receptance,output}.weight",
            "feed_forward.{key,receptance,value}.weight",
        )
    },
    "Phi-MoE": {
        "model.layers.{0,1}": (LLAMA_BLOCK[0], "mlp.experts.{gate_up_proj,down_proj}"),
    },
    "ViT": {
        "vit.layers.{0,1}": ("attention.{q_proj,k_proj,v_proj,o_proj}.weight", "mlp.{fc1,fc2}.weight"),
        "classifier": ("weight",),
    },
}


def spelled_out(blocks):
    """The names behind a pattern, whose braces hold alternatives."""
    names = set()
    for block, parts in blocks.items():
        for part in parts:
            pieces = [piece.split(",") for piece in re.split(r"[{}]", f"{block}.{part}")]
            names |= {"".join(choice) for choice in itertools.product(*pieces)}
    return names


@pytest.mark.parametrize("name", [name for name in EVERY_TARGET if name != "ViT"])
def test_parts_that_are_no_targets(name):
    """Not vision towers and poolers of language models, routers, gates, or what mixes over time."""
    targets = [target.name for target in find_targets(small(name))]
    assert len(targets) == len(set(targets))
    assert set(targets) == spelled_out(EVERY_TARGET[name])


def test_all_linear_takes_linear_maps_alone():
    targets = [target.name for target in find_targets(ARCHITECTURES["ViT"].build(), "all-linear")]
    assert len(targets) == 13
    assert set(targets) == spelled_out(EVERY_TARGET["ViT"])


def test_a_resized_bart_keeps_its_logit_bias_in_line(tmp_path):
    base = small("BART")
    experts = {f"e{i}": fine_tuned(base, 0.05, seed=i) for i in range(2)}
    experts["e1"].resize_token_embeddings(52, mean_resizing=False)
    result = CoramMerger(base, experts, CoramConfig(residual="ta"), progress=False).merge()
    assert result.model.final_logits_bias.shape == (1, 48)
    result.save_pretrained(tmp_path)
    _, info = type(base).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
