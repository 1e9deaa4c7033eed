"""The card: complete, valid, and safe from whatever others have called their things."""

import html
import re
import shlex
import shutil
from dataclasses import replace
from itertools import pairwise

import pytest
import yaml
from helpers.adapters import adapted
from helpers.command import coram_hf
from helpers.folders import assert_same_files, on_disk
from helpers.merging import merged
from helpers.models import fine_tuned, tiny_llama
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard import metadata_load
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from coram_hf import CoramConfig, CoramError, CoramMerger, load_report
from coram_hf.baselines import merge
from coram_hf.hub.again import command_line, python_code
from coram_hf.hub.card import BEGIN, END, render_card, renewed_card
from coram_hf.hub.license import strictest
from coram_hf.hub.metadata import pipeline_tag

HOSTILE = [
    "a|b`c`\n\n# Injected\n<script>alert(1)</script>",
    "---\nlicense: mit\n---",
    "[x](javascript:alert(1)) ![y](http://evil/z.png) $x$",
    "{{ 7 * 7 }} {% raw %} <!-- coram: end --> '\"; rm -rf /",
    "\u202eevil\u0000\x1b[31m",
]
KINDS_OF_TINY_LLAMA = {
    "attention": ("8", "6,144", "0"),
    "mlp": ("6", "8,448", "0"),
    "embedding": ("1", "0", "1,536"),
    "head": ("1", "0", "1,536"),
    "norm": ("5", "0", "160"),
}
"""Tensors, parameters that are targets, and others: 48 tokens, width 32, two layers."""
WORDS = {"attention": "self_attn", "mlp": "mlp", "embedding": "embed", "head": "lm_head", "norm": "norm"}


@pytest.fixture(scope="module")
def report():
    return merged(progress=False).merge().report


def test_the_card_records_the_merge(report, tmp_path):
    report = replace(report, counts={key: 101 + i for i, key in enumerate(report.counts)})
    card = render_card(report)
    card.save(tmp_path / "README.md")
    data = metadata_load(tmp_path / "README.md")
    assert data["base_model_relation"] == "merge"
    assert data["library_name"] == "transformers"
    assert data["pipeline_tag"] == "text-generation"
    assert {"merge", "coram", "model-merging"} <= set(data["tags"])
    text = card.content
    assert f"| dispersion D | {report.dispersion:.4g} |" in text
    assert f"| kappa | {report.kappa:.4g} |" in text
    assert f"| lambda | {report.lam:.4g} |" in text
    assert f"| c_RMS | {report.c_rms:.4g} |" in text
    for name, size in report.relative_updates.items():
        assert re.search(rf"\| {name} \|.*\| {size:.4g} \| full \|", text)
    options = text.partition("| option | value |\n| --- | --- |\n")[2].partition("\n\n")[0].splitlines()
    assert len(options) == len(report.config)
    for line, (key, value) in zip(options, report.config.items(), strict=True):
        assert html.unescape(line) == f"| {key} | {value} |"
    for key, words in {
        "det_flips": "rotations that were reflections, and had a column negated",
        "svd_fallbacks": "slices too badly conditioned for the fast kernel, merged by SVD",
        "frameless": "slices without a frame, merged by the mean",
    }.items():
        assert f"| {words} | {report.counts[key]} |" in text
    for kind, (tensors, target, outside) in KINDS_OF_TINY_LLAMA.items():
        row = f"| {kind} | {tensors} | {target} | {outside} | 0 | {report.retention[kind]:.3g} |\n"
        assert row in text
    assert "coram_report.json" in text
    assert ModelCard.load(tmp_path / "README.md").data.to_dict() == card.data.to_dict()


def test_an_empty_line_ends_every_table(report):
    """Without one, renderers take the text that follows for a row."""
    sources = {name: {**found, "license": ["mit"]} for name, found in report.sources.items()}
    lines = render_card(replace(report, sources=sources, warnings=("Look.",))).content.splitlines()
    assert "Licenses of the parents: base: mit; math: mit; code: mit." in lines
    ends = [after for row, after in pairwise(lines) if row.startswith("|") > after.startswith("|")]
    assert len(ends) == 5
    assert set(ends) == {""}
    assert not [i for i in range(len(lines) - 1) if lines[i] == lines[i + 1] == ""]


def test_retention_is_the_formula():
    base = tiny_llama()
    experts = {f"e{i}": fine_tuned(base, 0.03 * (i + 1), i) for i in range(2)}
    result = CoramMerger(base, experts, CoramConfig.from_line("full.ta"), progress=False).merge()
    for found in (result, result.with_lambda(2.5)):
        w0, w = base.state_dict(), found.model.state_dict()
        assert set(found.report.retention) == set(KINDS_OF_TINY_LLAMA)
        for kind, value in found.report.retention.items():
            names = [name for name in w0 if WORDS[kind] in name]
            assert len(names) == int(KINDS_OF_TINY_LLAMA[kind][0])
            moved = sum((w[n].double() - w0[n].double()).square().sum().item() for n in names)
            squares = [
                sum((e.state_dict()[n].double() - w0[n].double()).square().sum().item() for n in names)
                for e in experts.values()
            ]
            assert value == pytest.approx((moved / (sum(squares) / 2)) ** 0.5, rel=1e-3), kind


@pytest.mark.parametrize("name", HOSTILE)
def test_names_do_not_inject(name, tmp_path):
    merger = merged((name, "code"), progress=False)
    result = merger.merge()
    result.save_pretrained(tmp_path)
    text = (tmp_path / "README.md").read_text()
    header, _, body = text.removeprefix("---\n").partition("\n---\n")
    assert set(yaml.safe_load(header)) == {
        "base_model_relation",
        "library_name",
        "pipeline_tag",
        "tags",
    }
    prose = re.sub(r"(`{3,}).*?\n\1", "", body, flags=re.S)
    for evil in ("<script", "# Injected", "](javascript", "](http", "\x1b", "\u202e", "`c`", "{{", "49 "):
        assert evil not in prose
    tables = [line for line in prose.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)
    assert prose.count(BEGIN) == prose.count(END) == 1
    assert renewed_card(text, result.report) == text
    python = python_code(result.report)
    compile(python, "card", "exec")


def test_other_peoples_cards_do_not_inject(report):
    evil = {"license": ["mit\n---\nx: <b>"], "language": ["en: [a"], "datasets": ["a: b\n- c"]}
    sources = {"": {"source": "org/base", "commit": "c" * 40, **evil}, "math": {"source": "/home/me/math"}}
    card = render_card(replace(report, sources=sources))
    header = yaml.safe_load(card.content.removeprefix("---\n").partition("\n---\n")[0])
    assert header["base_model"] == ["org/base"]
    assert header["datasets"] == ["a: b\n- c"]
    assert "/home/me" not in card.content
    assert "<b>" not in card.content.partition("\n---\n")[2]


def test_what_the_user_says_takes_the_place_of_ours(report):
    card = render_card(report, ModelCardData(license="mit", tags=["mine"], language=["de"]))
    assert card.data.license == "mit"
    assert card.data.tags == ["merge", "model-merging", "coram", "mine"]
    assert card.data.library_name == "transformers"


def test_the_card_of_a_baseline_is_as_complete(report):
    base = tiny_llama()
    experts = {f"e{i}": fine_tuned(base, 0.03, i) for i in range(2)}
    result = merge(base, experts, "ties", density=0.3, progress=False)
    card = render_card(result.report)
    assert "ties" in card.data.tags
    for heading in re.findall(r"^## .*$", render_card(report).content, flags=re.M):
        assert heading in card.content
    assert "| density | 0.3 |" in card.content
    assert result.report.retention
    assert "has no amplification" in card.content


@pytest.mark.parametrize(
    ("licenses", "expected"),
    [
        ([], None),
        (["mit"], "mit"),
        (["mit", "apache-2.0"], "apache-2.0"),
        (["apache-2.0", "cc-by-nc-4.0"], "cc-by-nc-4.0"),
        (["apache-2.0", "llama3.1"], "llama3.1"),
        (["gemma", "llama3.1"], "other"),
        (["cc-by-nc-4.0", "llama3.1"], "other"),
    ],
)
def test_the_strictest_license(licenses, expected):
    assert strictest(licenses) == expected


def test_different_licenses_are_listed_and_warned_of(report):
    sources = {
        "": {"source": "org/base", "commit": "c" * 40, "license": ["llama3.1"]},
        "math": {"source": "org/math", "commit": "d" * 40, "license": ["gemma"]},
        "code": {"source": "org/code", "commit": "e" * 40, "license": ["mit"]},
    }
    card = render_card(replace(report, sources=sources))
    assert card.data.license == "other"
    assert "base: llama3.1; math: gemma; code: mit" in card.content
    assert "different licenses" in card.content
    assert f"org/math@{'d' * 40}" in python_code(replace(report, sources=sources))
    assert f"math=org/math@{'d' * 40}" in command_line(replace(report, sources=sources))


def test_the_commands_of_a_card_repeat_the_merge(tmp_path, monkeypatch):
    on_disk(tmp_path / "path" / "to", experts={"math": 0.03, "co de": 0.05})
    monkeypatch.chdir(tmp_path)
    config = CoramConfig.from_line(
        "SS(lr-nca,mean).ta (h=4)", kappa=0.9, weights=(1, 2), target_modules=["q_proj", "up_proj"]
    )
    sources = {"math": "path/to/math", "co de": "path/to/co de"}
    report = CoramMerger("path/to/base", sources, config, dtype="bfloat16", progress=False).merge_to("first")
    words = shlex.split(command_line(report))
    run = coram_hf(*words[1:])
    assert run.returncode == 0, run.stderr
    assert_same_files(tmp_path / "merged", tmp_path / "first")
    shutil.rmtree("merged")
    exec(compile(python_code(report), "card", "exec"), {})
    assert_same_files(tmp_path / "merged", tmp_path / "first")
    again = CoramConfig.from_report(report)
    assert again == config


def test_edited_cards_keep_all_but_our_section(report):
    text = render_card(report).content
    edited = text.replace("# A merge", "# My merge", 1).replace(report.line, "gone") + "\nMine.\n"
    other = replace(report, lam=9.0)
    renewed = renewed_card(edited, other)
    assert renewed.startswith(text.partition("# A merge")[0])
    assert "# My merge" in renewed
    assert renewed.endswith("\nMine.\n")
    assert "| lambda | 9 |" in renewed
    assert "gone" not in renewed
    assert "| lambda | 9 |" in renewed_card("No section here.", other)


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("LlamaForCausalLM", "text-generation"),
        ("GPT2LMHeadModel", "text-generation"),
        ("Qwen2_5_VLForConditionalGeneration", "image-text-to-text"),
        ("WhisperForConditionalGeneration", "automatic-speech-recognition"),
        ("T5ForConditionalGeneration", "text-generation"),
        ("BertForMaskedLM", "fill-mask"),
        ("CLIPModel", "feature-extraction"),
    ],
)
def test_what_a_model_is_for(name, tag):
    assert pipeline_tag(name) == tag


def test_where_things_lie_is_not_told(tmp_path):
    base = tiny_llama()
    secret = tmp_path / "secret"
    on_disk(secret, base, {"math": 0.05})
    (secret / "base" / "README.md").write_text("---\ndatasets: [/home/me/data, org/data]\nlicense: 5\n---\n")
    adapter = adapted(base, LoraConfig(r=2, target_modules=["q_proj"]), 0)
    adapter.peft_config["default"].base_model_name_or_path = "/home/alice/secret/other"
    adapter.save_pretrained(secret / "lora")
    merger = CoramMerger(secret / "base", [secret / "math", secret / "lora"], progress=False)
    report = merger.merge_to(tmp_path / "out")
    published = [path.read_text() for path in (tmp_path / "out").glob("*.[jm][sd]*")]
    assert len(published) > 2
    assert any("is an adapter of" in warning for warning in report.warnings)
    for text in published:
        assert "/home" not in text
        assert str(tmp_path) not in text
    assert metadata_load(tmp_path / "out" / "README.md")["datasets"] == ["org/data"]


def test_experts_in_memory_are_not_said_to_be_their_base(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    experts = {
        "trained": fine_tuned(base, 0.05, 0),
        "lora": adapted(base, LoraConfig(r=2, target_modules=["q_proj"]), 0),
    }
    report = CoramMerger(base, experts, CoramConfig(lam=1.0), progress=False).merge().report
    assert report.sources[""]["source"] == "base"
    assert report.sources["trained"]["source"] is None
    assert report.sources["lora"]["source"] is None
    assert "path/to/trained" in python_code(report)


def test_commands_for_names_options_and_methods(report):
    sources = {name: {"source": f"org/{name}", "commit": "c" * 40} for name in report.relative_updates}
    sources = {"": {"source": "org/base", "commit": "d" * 40}, **sources}
    named = replace(
        report,
        relative_updates={"org/math": 1.0, "-a=b/c": 2.0},
        sources={**sources, "org/math": sources["math"], "-a=b/c": sources["code"]},
        options={"vocabulary": "union", "trust_remote_code": True},
        config={**report.config, "target_modules": ["q_proj"]},
    )
    words = shlex.split(command_line(named))
    assert f"org/math@{'c' * 40}" in words
    assert f"a_b_c=org/code@{'c' * 40}" in words
    assert words.count("--target-modules") == 2
    assert "--trust-remote-code" in words
    assert words[words.index("--vocabulary") + 1] == "union"
    assert "vocabulary='union'" in python_code(named)
    scaled = replace(report, method="task_arithmetic", config={"scale": 1e-5})
    assert "scale=1.0e-05" in command_line(scaled)
    rotated = replace(report, method="orthomerge", config={"space": "oft", "weights": None})
    assert "merge_oft(" in python_code(rotated)
    assert "--method orthomerge --parameter space=oft" in command_line(rotated)


def test_a_card_edited_in_its_folder_outlives_another_save(tmp_path):
    result = merged(progress=False).merge()
    result.save_pretrained(tmp_path)
    path = tmp_path / "README.md"
    path.write_text(path.read_text() + "\nMine.\n")
    result.with_lambda(2.5).save_pretrained(tmp_path)
    assert path.read_text().endswith("\nMine.\n")
    assert "| lambda | 2.5 |" in path.read_text()


@pytest.mark.parametrize("content", ["{", "[]", "null", "{}"])
def test_damaged_reports_are_named(content, tmp_path):
    (tmp_path / "coram_report.json").write_text(content)
    with pytest.raises(CoramError, match=r"coram_report\.json is damaged"):
        load_report(tmp_path)


def test_names_that_are_no_unicode(tmp_path):
    """The card is UTF-8 without the name; the report has it."""
    merged(("ma\udcffth", "code"), progress=False).merge().save_pretrained(tmp_path)
    assert "# A merge of ma th, code\n" in (tmp_path / "README.md").read_bytes().decode("utf-8")
    assert list(load_report(tmp_path).relative_updates) == ["ma\udcffth", "code"]
