"""How a card starts: what the model is, and code that runs."""

import contextlib
import io
import re

import pytest
import torch
import transformers as hf
from helpers.folders import on_disk
from helpers.models import tiny_llama, tiny_tokenizer

from coram_hf import CoramMerger
from coram_hf.report import MergeReport

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
SHAPE = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def bert(kind):
    torch.manual_seed(0)
    return kind(hf.BertConfig(**SHAPE))


def t5():
    torch.manual_seed(0)
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=48, d_model=32, d_kv=8, d_ff=44, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
    )


def merged_card(folder, base, template=None, tokenizer=True):
    reader = tiny_tokenizer()
    reader.add_special_tokens({"mask_token": "<unk>"})
    reader.chat_template = template
    sources = on_disk(folder, base, (0.03,), tokenizer=reader if tokenizer else None)
    CoramMerger(*sources, progress=False).merge_to(folder / "merged")
    return (folder / "merged" / "README.md").read_text()


def run_example(card, folder):
    """Run the first code of a card, and return it and what it prints."""
    code = re.search(r"```python\n(.*?)```", card, re.S)[1]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code.replace("this/repository", str(folder / "merged")), {})
    return code, printed.getvalue()


@pytest.mark.parametrize(
    ("base", "template", "words"),
    [
        (tiny_llama, None, ["AutoTokenizer", "LlamaForCausalLM", "generate("]),
        (tiny_llama, TEMPLATE, ["AutoTokenizer", "apply_chat_template(", "generate("]),
        (t5, None, ["AutoTokenizer", "T5ForConditionalGeneration", "generate("]),
        (lambda: bert(hf.BertForSequenceClassification), None, ['pipeline("text-classification"']),
        (lambda: bert(hf.BertForMaskedLM), None, ['pipeline("fill-mask"']),
    ],
    ids=["text", "chat", "t5", "classifier", "mask"],
)
def test_the_first_code_of_a_card_runs(base, template, words, tmp_path):
    card = merged_card(tmp_path, base(), template)
    code, printed = run_example(card, tmp_path)
    assert all(word in code for word in words)
    assert printed.endswith("\n")


def test_without_a_tokenizer_the_model_is_only_loaded(tmp_path):
    code, _ = run_example(merged_card(tmp_path, tiny_llama(), tokenizer=False), tmp_path)
    assert "generate" not in code
    assert MergeReport.load(tmp_path / "merged").companions == ()


def test_a_card_says_what_the_model_is_and_how_to_use_it_before_the_amplitude(tmp_path):
    card = merged_card(tmp_path, tiny_llama(), TEMPLATE)
    headings = re.findall(r"^## (.*)$", card, re.M)
    assert headings[:2] == ["Use it", "Parents"]
    assert headings.index("How the amplitude was chosen") > headings.index("Warnings")
    begin = card.partition("<!-- coram: begin -->")[2].strip()
    assert begin.startswith(
        "LlamaForCausalLM with one expert (e0) merged into its base (a folder called base)"
    )
    assert MergeReport.load(tmp_path / "merged").companions == ("tokenizer", "chat_template")
