"""How to use a merged model: code that loads it with its tokenizer and runs it on an example."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from coram_hf.hub.metadata import pipeline_tag
from coram_hf.report import MergeReport

HERE = '"this/repository"'
QUESTION = "What can you do?"
PIPELINES = {
    "fill-mask": 'found = pipe(f"The sky is {pipe.tokenizer.mask_token}.")',
    "text-classification": 'found = pipe("What a lovely day!")',
    "token-classification": 'found = pipe("Ada Lovelace lived in London.")',
    "question-answering": 'found = pipe(question="Where did Ada live?", context="Ada lived in London.")',
    "image-classification": 'found = pipe("picture.png")',
    "automatic-speech-recognition": 'found = pipe("speech.wav")',
}
"""Example calls of pipelines, by task."""

EMBEDDING = ("from sentence_transformers import SentenceTransformer", "")
ENCODE = 'embeddings = model.encode(["a text", "another"])'


def companions_in(folder: Path) -> tuple[str, ...]:
    """Which of a tokenizer, its chat template and a processor are beside the weights in a folder."""
    found = {
        "tokenizer": any(folder.glob("tokenizer*")),
        "chat_template": _has_template(folder),
        "processor": any(
            (folder / f"{kind}_config.json").is_file() for kind in ("processor", "preprocessor")
        ),
    }
    return tuple(name for name, there in found.items() if there)


def _has_template(folder: Path) -> bool:
    if any(folder.glob("chat_template*")):
        return True
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(isinstance(config, dict) and config.get("chat_template"))


def usage_code(report: MergeReport, base: str) -> str:
    """Python code that loads the merge and, if the files it needs are there, runs it.

    `base`: the source of the base, for an adapter.
    """
    tag, kind = pipeline_tag(report.model_class), report.model_class or "AutoModel"
    if report.adapter:
        return _adapter(kind, base)
    if report.library == "sentence-transformers":
        return "\n".join([*EMBEDDING, f"model = SentenceTransformer({HERE})", ENCODE])
    makes: dict[str, Callable[[str, bool], str]] = {"text-generation": _text, "image-text-to-text": _image}
    needed = "processor" if tag in ("image-text-to-text", "image-classification") else "tokenizer"
    if needed in report.companions and tag in makes and kind.endswith(("LM", "LMHeadModel", "Generation")):
        return makes[tag](kind, "chat_template" in report.companions)
    if needed in report.companions and tag in PIPELINES:
        lines = ["from transformers import pipeline", "", f'pipe = pipeline("{tag}", model={HERE})']
        return "\n".join([*lines, PIPELINES[tag], "print(found)"])
    return f"from transformers import {kind}\n\nmodel = {kind}.from_pretrained({HERE})"


def _text(kind: str, chat: bool) -> str:
    first = ["AutoTokenizer", kind] if kind > "AutoTokenizer" else [kind, "AutoTokenizer"]
    ask = (
        [
            f'messages = [{{"role": "user", "content": "{QUESTION}"}}]',
            "inputs = tokenizer.apply_chat_template(",
            '    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"',
            ").to(model.device)",
        ]
        if chat
        else ['inputs = tokenizer("Once upon a time", return_tensors="pt").to(model.device)']
    )
    return "\n".join(
        [
            f"from transformers import {', '.join(first)}",
            "",
            f"tokenizer = AutoTokenizer.from_pretrained({HERE})",
            f'model = {kind}.from_pretrained({HERE}, dtype="auto")',
            "",
            *ask,
            "output = model.generate(**inputs, max_new_tokens=100)",
            *_decoded("tokenizer", kind),
        ]
    )


def _decoded(reader: str, kind: str) -> list[str]:
    """The lines that print an answer; the output of an encoder-decoder does not repeat the question."""
    if kind.endswith("ForConditionalGeneration") and reader == "tokenizer":
        return [f"print({reader}.decode(output[0], skip_special_tokens=True))"]
    return [
        'answer = output[0, inputs["input_ids"].shape[1] :]',
        f"print({reader}.decode(answer, skip_special_tokens=True))",
    ]


def _image(kind: str, chat: bool) -> str:
    ask = [
        f'content = [{{"type": "image", "url": "picture.png"}}, {{"type": "text", "text": "{QUESTION}"}}]',
        "inputs = processor.apply_chat_template(",
        '    [{"role": "user", "content": content}],',
        '    add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",',
        ").to(model.device)",
    ]
    plain = [
        'image = Image.open("picture.png")',
        f'inputs = processor(images=image, text="{QUESTION}", return_tensors="pt").to(model.device)',
    ]
    return "\n".join(
        [
            *([] if chat else ["from PIL import Image"]),
            f"from transformers import AutoProcessor, {kind}",
            "",
            f"processor = AutoProcessor.from_pretrained({HERE})",
            f'model = {kind}.from_pretrained({HERE}, dtype="auto")',
            "",
            *(ask if chat else plain),
            "output = model.generate(**inputs, max_new_tokens=100)",
            *_decoded("processor", kind),
        ]
    )


def _adapter(kind: str, base: str) -> str:
    source, _, commit = base.partition("@")
    where = f"{source!r}, revision={commit!r}" if commit else repr(source)
    return "\n".join(
        [
            "from peft import PeftModel",
            f"from transformers import {kind}",
            "",
            f"base = {kind}.from_pretrained({where})",
            f"model = PeftModel.from_pretrained(base, {HERE})",
        ]
    )
