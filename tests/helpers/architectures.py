"""A tiny model of every architecture that the guide's table lists, with its targets counted by hand."""

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf

COMMON = {
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
GROUPED = COMMON | {"num_key_value_heads": 2}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
QWEN_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 44, "num_heads": 4, "out_hidden_size": 32}
QWEN_TEXT = GROUPED | {
    "rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [1, 1, 2]}
}
TOKENS = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 58, "vision_end_token_id": 59}


@dataclass(frozen=True)
class Architecture:
    """Model class, config, and per layer which matrices are targets; `targets` is their number."""

    model: type
    config: Any
    targets: int
    inputs: dict[str, tuple[int, ...]] = field(default_factory=lambda: {"input_ids": (2, 7)})

    def build(self, seed: int = 0) -> hf.PreTrainedModel:
        torch.manual_seed(seed)
        return self.model(self.config).eval()

    def forward(self, model: hf.PreTrainedModel) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        inputs = {
            name: torch.randint(3, 50, shape, generator=generator)
            if name.endswith("ids")
            else torch.randn(shape, generator=generator)
            for name, shape in self.inputs.items()
        }
        with torch.no_grad():
            output = model(**inputs)
        return next(
            v
            for v in (getattr(output, "logits", None), getattr(output, "logits_per_image", None))
            if v is not None
        )


TEXT_IMAGE = {"input_ids": (2, 7), "pixel_values": (2, 3, 16, 16)}

ARCHITECTURES = {
    "Llama": Architecture(hf.LlamaForCausalLM, hf.LlamaConfig(**GROUPED), 2 * (4 + 3)),
    "Mistral": Architecture(hf.MistralForCausalLM, hf.MistralConfig(**GROUPED), 2 * (4 + 3)),
    "Qwen2": Architecture(hf.Qwen2ForCausalLM, hf.Qwen2Config(**GROUPED), 2 * (4 + 3)),
    "Qwen3": Architecture(hf.Qwen3ForCausalLM, hf.Qwen3Config(**GROUPED, head_dim=8), 2 * (4 + 3)),
    "Gemma-2": Architecture(hf.Gemma2ForCausalLM, hf.Gemma2Config(**GROUPED, head_dim=8), 2 * (4 + 3)),
    "Gemma-3 text": Architecture(
        hf.Gemma3ForCausalLM, hf.Gemma3TextConfig(**GROUPED, head_dim=8), 2 * (4 + 3)
    ),
    "Gemma-3": Architecture(
        hf.Gemma3ForConditionalGeneration,
        hf.Gemma3Config(
            text_config=GROUPED | {"head_dim": 8},
            vision_config=VISION,
            mm_tokens_per_image=4,
            image_token_index=60,
            boi_token_index=58,
            eoi_token_index=59,
        ),
        2 * (4 + 3),
    ),
    "Phi-3": Architecture(hf.Phi3ForCausalLM, hf.Phi3Config(**GROUPED, pad_token_id=0), 2 * (2 + 2)),
    "GPT-2": Architecture(
        hf.GPT2LMHeadModel,
        hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=16),
        2 * (2 + 2),
    ),
    "GPT-NeoX": Architecture(hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig(**COMMON), 2 * (2 + 2)),
    "Falcon": Architecture(
        hf.FalconForCausalLM,
        hf.FalconConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=64),
        2 * (2 + 2),
    ),
    "OPT": Architecture(
        hf.OPTForCausalLM,
        hf.OPTConfig(
            hidden_size=32,
            ffn_dim=44,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=64,
            word_embed_proj_dim=16,
            max_position_embeddings=32,
        ),
        2 * (4 + 2),
    ),
    "BLOOM": Architecture(
        hf.BloomForCausalLM, hf.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=64), 2 * (2 + 2)
    ),
    "BERT": Architecture(hf.BertForMaskedLM, hf.BertConfig(**COMMON), 2 * (4 + 2)),
    "RoBERTa": Architecture(hf.RobertaForMaskedLM, hf.RobertaConfig(**COMMON), 2 * (4 + 2)),
    "DeBERTa-v2": Architecture(
        hf.DebertaV2ForSequenceClassification,
        hf.DebertaV2Config(**COMMON, relative_attention=True, pos_att_type=["p2c", "c2p"]),
        2 * (4 + 2 + 2),
    ),
    "T5": Architecture(
        hf.T5ForConditionalGeneration,
        hf.T5Config(
            d_model=32,
            d_kv=8,
            d_ff=44,
            num_layers=2,
            num_heads=4,
            vocab_size=64,
            feed_forward_proj="gated-gelu",
        ),
        2 * (4 + 3) + 2 * (4 + 4 + 3),
        {"input_ids": (2, 7), "decoder_input_ids": (2, 5)},
    ),
    "ViT": Architecture(
        hf.ViTForImageClassification, hf.ViTConfig(**VISION), 2 * (4 + 2), {"pixel_values": (2, 3, 16, 16)}
    ),
    "CLIP": Architecture(
        hf.CLIPModel,
        hf.CLIPConfig(text_config=COMMON | {"eos_token_id": 2}, vision_config=VISION, projection_dim=16),
        2 * 2 * (4 + 2),
        TEXT_IMAGE,
    ),
    "Whisper": Architecture(
        hf.WhisperForConditionalGeneration,
        hf.WhisperConfig(
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=44,
            decoder_ffn_dim=44,
            vocab_size=64,
            max_source_positions=16,
            max_target_positions=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            begin_suppress_tokens=None,
        ),
        2 * (4 + 2) + 2 * (4 + 4 + 2),
        {"input_features": (2, 80, 32), "decoder_input_ids": (2, 5)},
    ),
    "Qwen2-VL": Architecture(
        hf.Qwen2VLForConditionalGeneration,
        hf.Qwen2VLConfig(
            text_config=QWEN_TEXT,
            vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4},
            **TOKENS,
        ),
        2 * (4 + 3),
    ),
    "Qwen2.5-VL": Architecture(
        hf.Qwen2_5_VLForConditionalGeneration,
        hf.Qwen2_5_VLConfig(
            text_config=QWEN_TEXT,
            vision_config=QWEN_VISION | {"fullatt_block_indexes": [1], "window_size": 112},
            **TOKENS,
        ),
        2 * (4 + 3),
    ),
    "Qwen3-VL": Architecture(
        hf.Qwen3VLForConditionalGeneration,
        hf.Qwen3VLConfig(
            text_config=QWEN_TEXT | {"head_dim": 8},
            vision_config=QWEN_VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            **TOKENS,
        ),
        2 * (4 + 3),
    ),
    "LLaVA": Architecture(
        hf.LlavaForConditionalGeneration,
        hf.LlavaConfig(
            text_config=hf.LlamaConfig(**GROUPED),
            vision_config=hf.CLIPVisionConfig(**VISION),
            image_token_index=60,
        ),
        2 * (4 + 3),
    ),
    "Mixtral": Architecture(
        hf.MixtralForCausalLM, hf.MixtralConfig(**GROUPED, num_local_experts=4), 2 * (4 + 2)
    ),
    "Qwen3-MoE": Architecture(
        hf.Qwen3MoeForCausalLM,
        hf.Qwen3MoeConfig(
            **GROUPED, num_experts=4, moe_intermediate_size=16, head_dim=8, num_experts_per_tok=2
        ),
        2 * (4 + 2),
    ),
    "Qwen2-MoE": Architecture(
        hf.Qwen2MoeForCausalLM,
        hf.Qwen2MoeConfig(
            **GROUPED, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16
        ),
        2 * (4 + 2 + 3),
    ),
    "GPT-OSS": Architecture(
        hf.GptOssForCausalLM, hf.GptOssConfig(**GROUPED, num_local_experts=4, head_dim=8), 2 * (4 + 2)
    ),
    "Mamba": Architecture(
        hf.MambaForCausalLM,
        hf.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64, state_size=4),
        2 * 4,
    ),
}
