"""PEFT adapters of every method, over tiny models."""

import copy

import peft
import torch
from peft import get_peft_model

ALL = ["q_proj", "v_proj", "up_proj", "down_proj"]
SQUARE = ["q_proj", "o_proj"]
METHODS = {
    "LoRA": lambda: peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=ALL, rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 16}
    ),
    "rsLoRA": lambda: peft.LoraConfig(r=4, use_rslora=True, target_modules=ALL),
    "DoRA": lambda: peft.LoraConfig(r=4, use_dora=True, target_modules=ALL),
    "PiSSA": lambda: peft.LoraConfig(r=4, init_lora_weights="pissa", target_modules=ALL),
    "LoRA with bias": lambda: peft.LoraConfig(r=4, bias="all", target_modules=ALL),
    "LoRA on embeddings": lambda: peft.LoraConfig(r=4, target_modules=[*ALL, "embed_tokens"]),
    "LoRA, modules_to_save": lambda: peft.LoraConfig(
        r=4, target_modules=ALL, modules_to_save=["lm_head", "embed_tokens"]
    ),
    "LoRA, trainable tokens": lambda: peft.LoraConfig(
        r=4, target_modules=ALL, trainable_token_indices=[1, 5]
    ),
    "OFT, Cayley": lambda: peft.OFTConfig(oft_block_size=4, target_modules=ALL, use_cayley_neumann=False),
    "OFT, Cayley-Neumann": lambda: peft.OFTConfig(oft_block_size=4, target_modules=ALL),
    "COFT": lambda: peft.OFTConfig(oft_block_size=4, target_modules=ALL, coft=True, use_cayley_neumann=False),
    "OFT, shared blocks": lambda: peft.OFTConfig(oft_block_size=4, target_modules=ALL, block_share=True),
    "BOFT": lambda: peft.BOFTConfig(boft_block_size=4, target_modules=ALL),
    "LoHa": lambda: peft.LoHaConfig(r=4, target_modules=ALL),
    "LoKr": lambda: peft.LoKrConfig(r=4, target_modules=ALL),
    "VeRA": lambda: peft.VeraConfig(r=4, target_modules=SQUARE),
    "IA3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "HRA": lambda: peft.HRAConfig(r=4, target_modules=ALL),
    "SHiRA": lambda: peft.ShiraConfig(r=2, target_modules=SQUARE),
    "FourierFT": lambda: peft.FourierFTConfig(n_frequency=20, target_modules=ALL),
    "LN tuning": lambda: peft.LNTuningConfig(target_modules=["input_layernorm", "norm", "down_proj"]),
}


def adapted(base, config, seed, name="default"):
    """A PeftModel over a copy of `base` whose trainable parameters have moved."""
    model = get_peft_model(copy.deepcopy(base), config, adapter_name=name)
    shake(model, seed)
    return model.eval()


def shake(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
