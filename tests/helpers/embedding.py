"""Tiny sentence-transformers folders, written by hand as the library writes them."""

import json
import shutil
from pathlib import Path

import torch
from helpers.models import fine_tuned
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "pod", "restarts", "a", "cat"]
LIBRARY = "sentence_transformers.models"


def tiny_bert(seed=0, **config):
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4}
    return BertModel(BertConfig(**shape, vocab_size=len(WORDS), max_position_embeddings=24, **config)).eval()


def tokenizer():
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special, model_max_length=24)


def write_json(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2))


def sentence_folder(folder: Path, model, *, inside="", pooling="mean", prompts=None, dense=None) -> Path:
    """Transformer, Pooling, Dense and Normalize; `inside`: the folder of the transformer."""
    place = folder / inside
    model.save_pretrained(place)
    tokenizer().save_pretrained(place)
    write_json(place / "sentence_bert_config.json", {"max_seq_length": 16, "do_lower_case": False})
    names = [
        ("Transformer", inside),
        ("Pooling", "1_Pooling"),
        ("Dense", "2_Dense"),
        ("Normalize", "3_Normalize"),
    ]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"{LIBRARY}.{name}"}
        for i, (name, path) in enumerate(names)
    ]
    write_json(folder / "modules.json", modules)
    modes = {f"pooling_mode_{m}": m.startswith(pooling) for m in ("cls_token", "mean_tokens", "max_tokens")}
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 32, **modes})
    settings = {"in_features": 32, "out_features": 8, "bias": True}
    activation = {"activation_function": "torch.nn.modules.activation.Tanh"}
    write_json(folder / "2_Dense" / "config.json", settings | activation)
    generator = torch.Generator().manual_seed(5 if dense is None else dense)
    weights = {"linear.weight": torch.randn(8, 32, generator=generator), "linear.bias": torch.zeros(8)}
    save_file(weights, folder / "2_Dense" / "model.safetensors")
    (folder / "3_Normalize").mkdir()
    prompts = {"query": "the ", "document": ""} if prompts is None else prompts
    write_json(
        folder / "config_sentence_transformers.json",
        {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"},
    )
    return folder


def sentence_models(folder: Path, names=("a", "b"), **options):
    """A base and its experts as folders of sentence-transformers, and the models in them."""
    base = tiny_bert()
    models = {name: fine_tuned(base, 0.1, i) for i, name in enumerate(names)}
    shutil.rmtree(folder / "base", ignore_errors=True)
    paths = {name: sentence_folder(folder / name, model, **options) for name, model in models.items()}
    return sentence_folder(folder / "base", base, **options), paths, base, models
