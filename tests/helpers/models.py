"""Tiny models and experts for the tests."""

import copy
import json

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast


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


CHARACTERS = "\n 0123456789abcdefghijklmnopqrstuvwxyz+=?:.,-"


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, as many as `tiny_llama` has."""
    vocabulary = {token: i for i, token in enumerate(("<pad>", "<eos>", "<unk>", *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def choice_task(path, seed: int, count: int = 24, choices: int = 3):
    """A task of random prompts, choices of unequal lengths, and random answers."""
    generator = torch.Generator().manual_seed(seed)

    def text(longest):
        length = int(torch.randint(1, longest + 1, (), generator=generator))
        picked = torch.randint(2, len(CHARACTERS), (length,), generator=generator)
        return "".join(CHARACTERS[i] for i in picked.tolist())

    questions = [
        {"prompt": text(12), "choices": [text(4) for _ in range(choices)],
         "answer": int(torch.randint(0, choices, (), generator=generator))}
        for _ in range(count)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(question) + "\n" for question in questions))
    return path
