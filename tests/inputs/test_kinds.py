"""The kind of every parameter of every architecture, against tables written by hand."""

import re

import pytest
import torch
from helpers.architectures import ARCHITECTURES
from helpers.models import fine_tuned
from torch import nn

from coram_hf import CoramConfig, CoramMerger
from coram_hf.inputs.kinds import KINDS, find_kinds
from coram_hf.inputs.targets import find_targets

LLAMA = {
    "attention": r"self_attn\.(q|k|v|o)_proj\.weight",
    "mlp": r"mlp\.(gate|up|down)_proj\.weight",
    "norm": r"((input|post_attention|pre_feedforward|post_feedforward)_layernorm|\bnorm|self_attn\.[qk]_norm)"
    r"\.weight",
    "embedding": r"embed_tokens\.weight",
    "head": r"lm_head\.weight",
}
BIASED = LLAMA | {"bias": r"self_attn\.(q|k|v)_proj\.bias"}
FUSED = {
    "attention": r"(attention|self_attention)\.(query_key_value|dense)\.weight",
    "mlp": r"mlp\.dense_(h_to_4h|4h_to_h)\.weight",
    "norm": r"(layernorm|layer_norm|ln_f)\.(weight|bias)",
    "bias": r"(query_key_value|dense|dense_h_to_4h|dense_4h_to_h)\.bias",
    "embedding": r"(embed_in|word_embeddings)\.weight",
    "head": r"lm_head\.weight",
}
BERT = {
    "attention": r"attention\.(self\.\w+|output\.dense)\.weight",
    "mlp": r"layer\.\d+\.(intermediate|output)\.dense\.weight",
    "norm": r"(LayerNorm|layer_norm)\.(weight|bias)",
    "bias": r"(query|key|value|dense|\w+_proj|decoder|lm_head|predictions|classifier)\.bias",
    "embedding": r"(word|position|token_type|rel)_embeddings\.weight",
    "head": r"^(cls\..*|lm_head\.|pooler\.)?(dense|decoder|classifier)\.weight",
}
LISTED = {
    "attention": r"(self|encoder)_attn\.(q|k|v|out)_proj\.weight",
    "mlp": r"fc[12]\.weight",
    "norm": r"(norm\d?|pre_layrnorm)\.(weight|bias)",
    "bias": r"((q|k|v|out)_proj|fc[12]|conv[12])\.bias",
    "embedding": r"(embed_tokens|embed_positions|token_embedding|position_embedding|class_embedding)\b",
}
MIXTURE = LLAMA | {"experts": r"mlp\.experts\.(gate_up|down)_proj$", "router": r"mlp\.gate\.weight"}
QWEN_VL = {
    "tower": r"visual\.(patch_embed|blocks|pos_embed)\.",
    "projector": r"visual\.(merger|deepstack_merger_list)\.",
}
TOWERS = {"tower": r"vision_tower\.", "projector": r"multi_modal_projector\."}
EXPECTED = {
    **dict.fromkeys(["Llama", "Mistral", "Qwen3", "Gemma-2", "Gemma-3 text"], LLAMA),
    "Qwen2": BIASED,
    "Gemma-3": LLAMA | TOWERS,
    "LLaVA": LLAMA | TOWERS,
    "Qwen2-VL": BIASED | QWEN_VL,
    "Qwen2.5-VL": BIASED | QWEN_VL,
    "Qwen3-VL": LLAMA | QWEN_VL,
    "Phi-3": LLAMA
    | {"attention": r"self_attn\.(qkv|o)_proj\.weight", "mlp": r"mlp\.(gate_up|down)_proj\.weight"},
    "GPT-2": {
        "attention": r"attn\.(c_attn|c_proj)\.weight",
        "mlp": r"mlp\.(c_fc|c_proj)\.weight",
        "norm": r"ln_(1|2|f)\.(weight|bias)",
        "bias": r"c_\w+\.bias",
        "embedding": r"w[tp]e\.weight",
        "head": r"lm_head\.weight",
    },
    "GPT-NeoX": FUSED,
    "BLOOM": FUSED,
    "Falcon": {kind: names for kind, names in FUSED.items() if kind != "bias"},
    "OPT": LISTED | {"projector": r"project_(in|out)\.weight", "head": r"lm_head\.weight"},
    "Whisper": LISTED | {"convolution": r"conv[12]\.weight", "head": r"proj_out\.weight"},
    "CLIP": LISTED
    | {
        "convolution": r"patch_embedding\.weight",
        "projector": r"(visual|text)_projection\.weight",
        "other": r"logit_scale",
    },
    **dict.fromkeys(["BERT", "RoBERTa", "DeBERTa-v2"], BERT),
    "T5": {
        "attention": r"(SelfAttention|EncDecAttention)\.[qkvo]\.weight",
        "mlp": r"DenseReluDense\.(wi_0|wi_1|wo)\.weight",
        "norm": r"layer_norm\.weight",
        "embedding": r"(shared|embed_tokens|relative_attention_bias)\.weight",
        "head": r"lm_head\.weight",
    },
    "ViT": {
        "attention": r"attention\.(q|k|v|o)_proj\.weight",
        "mlp": r"fc[12]\.weight",
        "norm": r"layernorm(_before|_after)?\.(weight|bias)",
        "bias": r"(\w_proj|fc[12]|projection|classifier)\.bias",
        "embedding": r"(cls_token|position_embeddings)$",
        "convolution": r"projection\.weight",
        "head": r"classifier\.weight",
    },
    "Mixtral": MIXTURE,
    "Qwen3-MoE": MIXTURE,
    "Qwen2-MoE": MIXTURE
    | {
        "bias": BIASED["bias"],
        "mlp": r"mlp\.shared_expert\.(gate|up|down)_proj\.weight",
        "router": r"mlp\.(gate|shared_expert_gate)\.weight",
    },
    "GPT-OSS": MIXTURE
    | {
        "attention": r"self_attn\.((q|k|v|o)_proj\.weight|sinks)",
        "bias": r"(\.bias|_proj_bias)$",
        "router": r"mlp\.router\.weight",
    },
    "Mamba": {
        "mixer": r"mixer\.((in|x|dt|out)_proj\.weight|A_log|D)$",
        "convolution": r"conv1d\.weight",
        "bias": r"(conv1d|dt_proj)\.bias",
        "norm": r"norm(_f)?\.weight",
        "embedding": r"embeddings\.weight",
        "head": r"lm_head\.weight",
    },
}
"""The kinds of each architecture, each with a pattern of the names that have it."""

NO_MLP = ("Mixtral", "Qwen3-MoE", "GPT-OSS")
"""Mixtures whose blocks have experts and no MLP beside them."""


def expected_kind(name, table):
    """The one kind whose pattern a name matches; all that is in a tower or projector is of that kind."""
    found = [kind for kind, pattern in table.items() if re.search(pattern, name)]
    outer = [kind for kind in found if kind in ("tower", "projector")]
    assert len(outer or found) == 1, (name, found)
    return (outer or found)[0]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_parameter_has_the_kind_that_its_architecture_gives_it(name):
    architecture = ARCHITECTURES[name]
    with torch.device("meta"):
        model = architecture.model(architecture.config)
    found, table = find_kinds(model), EXPECTED[name]
    assert set(found) == set(model.state_dict())
    assert found == {parameter: expected_kind(parameter, table) for parameter in found}
    assert set(found.values()) == set(table) - ({"mlp"} if name in NO_MLP else set())
    assert {found[target.name] for target in find_targets(model)} <= {"attention", "mlp", "experts", "mixer"}


def test_the_kinds_are_told_by_class_and_place_not_by_name():
    """A Llama whose modules have numbers for names has the same kinds."""
    architecture = ARCHITECTURES["Llama"]
    plain, renamed = architecture.build(), architecture.build()
    kinds = list(find_kinds(plain).values())
    for module in list(renamed.model.layers.modules()):
        if not isinstance(module, nn.ModuleList):
            children = list(module.named_children())
            for i, (key, child) in enumerate(children):
                delattr(module, key)
                module.add_module(f"part{i}", child)
    names = list(find_kinds(renamed))
    assert not any(word in name for name in names for word in ("attn", "mlp", "layernorm"))
    assert list(find_kinds(renamed).values()) == kinds


class ScaleByMoments(nn.Module):
    """A norm whose class does not say so."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.smallest = 1e-6


class Stretch(nn.Module):
    """A vector that norms nothing."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))


def test_a_norm_is_a_vector_with_an_epsilon():
    model = ARCHITECTURES["Llama"].build()
    model.model.norm = ScaleByMoments(32)
    model.model.layers[0].input_layernorm = Stretch(32)
    kinds = find_kinds(model)
    assert kinds["model.norm.gain"] == "norm"
    assert kinds["model.layers.0.input_layernorm.gain"] == "other"
    assert kinds["model.layers.1.input_layernorm.weight"] == "norm"


def small(name):
    """Further models: experts in a list, a pooler in the backbone, a resampler, a gated delta network."""
    import transformers as hf
    from helpers.architectures import COMMON, GROUPED, VISION

    models = {
        "Switch": lambda: hf.SwitchTransformersForConditionalGeneration(
            hf.SwitchTransformersConfig(
                num_experts=4,
                d_model=32,
                d_kv=8,
                d_ff=44,
                num_layers=2,
                num_decoder_layers=2,
                num_sparse_encoder_layers=1,
                num_sparse_decoder_layers=1,
                num_heads=4,
                vocab_size=64,
            )
        ),
        "BERT alone": lambda: hf.BertModel(hf.BertConfig(**COMMON)),
        "SigLIP": lambda: hf.SiglipModel(
            hf.SiglipConfig(text_config=COMMON | {"projection_size": 32}, vision_config=VISION)
        ),
        "Idefics2": lambda: hf.Idefics2ForConditionalGeneration(
            hf.Idefics2Config(
                text_config=GROUPED | {"model_type": "mistral"},
                vision_config=VISION,
                perceiver_config={"resampler_n_latents": 4, "resampler_depth": 1, "num_key_value_heads": 1},
            )
        ),
        "Qwen3-Next": lambda: hf.Qwen3NextForCausalLM(
            hf.Qwen3NextConfig(
                **GROUPED,
                head_dim=8,
                num_experts=4,
                moe_intermediate_size=16,
                shared_expert_intermediate_size=16,
                linear_num_key_heads=2,
                linear_num_value_heads=4,
                linear_key_head_dim=8,
                linear_value_head_dim=8,
                layer_types=["linear_attention", "full_attention"],
            )
        ),
    }
    with torch.device("meta"):
        return models[name]()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "Switch",
            {
                "encoder.block.0.layer.1.mlp.wi.weight": "mlp",
                "encoder.block.1.layer.1.mlp.experts.expert_3.wo.weight": "experts",
                "encoder.block.1.layer.1.mlp.router.classifier.weight": "router",
                "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": "embedding",
            },
        ),
        ("BERT alone", {"pooler.dense.weight": "head", "pooler.dense.bias": "bias"}),
        (
            "SigLIP",
            {
                "logit_scale": "other",
                "text_model.head.weight": "projector",
                "vision_model.head.probe": "head",
                "vision_model.encoder.layers.1.self_attn.q_proj.weight": "attention",
            },
        ),
        (
            "Idefics2",
            {
                "model.vision_model.embeddings.patch_embedding.weight": "tower",
                "model.connector.perceiver_resampler.latents": "projector",
                "model.connector.perceiver_resampler.layers.0.self_attn.q_proj.weight": "projector",
                "model.text_model.layers.0.self_attn.q_proj.weight": "attention",
            },
        ),
        (
            "Qwen3-Next",
            {
                "model.layers.0.linear_attn.A_log": "mixer",
                "model.layers.0.linear_attn.out_proj.weight": "mixer",
                "model.layers.0.linear_attn.conv1d.weight": "convolution",
                "model.layers.0.linear_attn.norm.weight": "norm",
                "model.layers.1.self_attn.o_proj.weight": "attention",
                "model.layers.1.mlp.shared_expert_gate.weight": "router",
            },
        ),
    ],
)
def test_less_common_parts(name, expected):
    kinds = find_kinds(small(name))
    assert {parameter: kinds[parameter] for parameter in expected} == expected


def test_plan_and_report_count_by_kind():
    """Every parameter of a small Qwen2.5-VL is counted once, under the part of the plan that it is in."""
    base = ARCHITECTURES["Qwen2.5-VL"].build()
    experts = {f"e{i}": fine_tuned(base, 0.05, seed=i) for i in range(2)}
    merger = CoramMerger(base, experts, CoramConfig(residual="ta"), progress=False)
    plan, report = merger.inspect(), merger.merge().report
    assert report.kinds == plan.kind_counts
    assert list(report.kinds) == [kind for kind in KINDS if kind in report.kinds]
    totals = {kind: sum(of.values()) - of["tensors"] for kind, of in report.kinds.items()}
    sizes = {name: parameter.numel() for name, parameter in base.named_parameters()}
    merger_part = [size for name, size in sizes.items() if ".merger." in name]
    assert totals["projector"] == sum(merger_part)
    assert totals["tower"] == sum(s for n, s in sizes.items() if ".visual." in n) - sum(merger_part)
    assert totals["attention"] == 2 * (2 * 32 * 32 + 2 * 16 * 32) == report.kinds["attention"]["target"]
    assert totals["mlp"] == 2 * 3 * 32 * 44 == report.kinds["mlp"]["target"]
    assert report.kinds["bias"] == {"tensors": 6, "target": 0, "residual": 2 * (32 + 16 + 16), "kept": 0}
    assert sum(totals.values()) == sum(sizes.values())
    assert "  bias: 6 tensors, 128 parameters" in str(plan).splitlines()
    assert "6 tensors, 128 parameters" in repr(plan)
    assert "6 tensors, 128 parameters" in repr(report)
    assert set(report.retention) == set(report.kinds) - {"bias"}, "biases of 0 do not move"
