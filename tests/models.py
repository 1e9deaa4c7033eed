"""Tiny models and experts for the tests."""

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel


def tiny_llama(seed: int = 0, dtype: torch.dtype = torch.float32, **overrides) -> LlamaForCausalLM:
    options = {
        "vocab_size": 48,
        "hidden_size": 32,
        "intermediate_size": 44,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    } | overrides
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**options)).to(dtype).eval()


def fine_tuned(base: PreTrainedModel, size: float, seed: int, only: str = "") -> PreTrainedModel:
    """A copy of `base` with noise of relative size `size` on the parameters whose name holds `only`."""
    expert = copy.deepcopy(base)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in expert.named_parameters():
            if only in name:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                scale = size * parameter.double().square().mean().sqrt()
                parameter.copy_(parameter.double() + scale * noise)
    return expert


def snapshot(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}
