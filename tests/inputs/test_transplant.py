"""Experts with a base of their own: their updates, moved onto the base of the merge."""

import copy

import pytest
import torch
import transformers as hf
import yaml
from helpers.adapters import METHODS, adapted
from helpers.architectures import ARCHITECTURES
from helpers.command import coram_hf
from helpers.folders import assert_same_tensors, on_disk
from helpers.models import fine_tuned, tiny_llama, tiny_tokenizer
from peft import LoraConfig, get_peft_model

from coram_hf import CoramConfig, CoramMerger
from coram_hf.baselines import merge_oft, open_merger
from coram_hf.errors import CoramError
from coram_hf.hub.again import command_line, python_code
from coram_hf.report import MergeReport

PAIRS = {"Qwen2.5-VL": "Qwen2", "LLaVA": "Llama", "Gemma-3": "Gemma-3 text"}
"""Vision-language models, and the text models that their language models have the shapes of."""


def name_in_vision_language_model(name):
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def moved_by_hand(base, own, expert):
    """A copy of `base` with W_0 + (W_i - W_base_i) in its language model."""
    moved, end = copy.deepcopy(base), dict(expert.named_parameters())
    with torch.no_grad():
        for name, start in own.named_parameters():
            place = moved.get_parameter(name_in_vision_language_model(name))
            place.copy_(place.double() + end[name].double() - start.double())
    return moved


@pytest.mark.parametrize("kind", PAIRS)
def test_a_text_expert_goes_into_the_language_model_of_a_vision_language_model(kind):
    base, own = ARCHITECTURES[kind].build(0), ARCHITECTURES[PAIRS[kind]].build(1)
    expert, sibling = fine_tuned(own, 0.05, 2), fine_tuned(base, 0.04, 3)
    config = CoramConfig.from_line("SS(ca+ave,variance).ta")
    merger = CoramMerger(base, {"math": expert, "vision": sibling}, config, bases={"math": own})
    result = merger.merge()
    by_hand = CoramMerger(base, {"math": moved_by_hand(base, own, expert), "vision": sibling}, config)
    expected = by_hand.merge()
    for name, tensor in expected.model.state_dict().items():
        torch.testing.assert_close(result.model.state_dict()[name], tensor, rtol=0, atol=2e-6)
    assert result.report.relative_updates == pytest.approx(expected.report.relative_updates, rel=1e-5)

    plan = merger.inspect()
    found = plan.transplants["math"]
    assert set(found.matched) == {name_in_vision_language_model(n) for n, _ in own.named_parameters()}
    assert all(name_in_vision_language_model(theirs) == ours for ours, theirs in found.matched.items())
    assert set(found.stayed) == {n for n, _ in base.named_parameters()} - set(found.matched)
    assert found.stayed
    assert not found.left_out
    assert set(plan.targets) <= set(found.matched)
    assert "math, matched: " in str(plan)
    assert "math, stayed: " in str(plan)
    assert "math" not in " ".join(plan.warnings)


def test_nothing_but_the_language_model_is_moved():
    base, own = ARCHITECTURES["Qwen2.5-VL"].build(0), ARCHITECTURES["Qwen2"].build(1)
    merger = open_merger(base, {"math": fine_tuned(own, 0.05, 2)}, "linear", bases={"math": own})
    merged = merger.merge().model.state_dict()
    moved = {name for name, tensor in base.state_dict().items() if not torch.equal(merged[name], tensor)}
    weights = {name for name, _ in base.named_parameters() if name.endswith(".weight")}
    assert moved == {name for name in weights if ".visual." not in name}


@pytest.mark.parametrize("kind", PAIRS)
def test_files_are_merged_as_models_in_memory(kind, tmp_path):
    """Checkpoints on disk have other names than models in memory."""
    base, own = ARCHITECTURES[kind].build(0), ARCHITECTURES[PAIRS[kind]].build(1)
    expert = fine_tuned(own, 0.05, 2)
    for name, model in (("base", base), ("own", own), ("math", expert)):
        model.save_pretrained(tmp_path / name)
    config = CoramConfig.from_line("full.ta")
    files = CoramMerger(
        tmp_path / "base", [tmp_path / "math"], config, bases={"math": tmp_path / "own"}, progress=False
    )
    files.merge_to(tmp_path / "merged")
    found = type(base).from_pretrained(tmp_path / "merged").state_dict()
    expected = CoramMerger(base, {"math": expert}, config, bases={"math": own}).merge().model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_language_part_of_an_expert_goes_into_a_text_model():
    base, own = ARCHITECTURES["Qwen2"].build(0), ARCHITECTURES["Qwen2.5-VL"].build(1)
    merger = CoramMerger(base, {"see": fine_tuned(own, 0.05, 2)}, bases={"see": own})
    found = merger.inspect().transplants["see"]
    assert set(found.matched) == {name for name, _ in base.named_parameters()}
    assert found.left_out
    assert all(name.startswith("model.visual.") for name in found.left_out)
    assert "see, left out: " in str(merger.inspect())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_base_of_the_merge_as_own_base_changes_no_bit(dtype):
    base = tiny_llama(dtype=dtype)
    experts = {"a": fine_tuned(base, 0.03, 1), "b": fine_tuned(base, 0.5, 2)}
    config = CoramConfig(compute_dtype="float64")  # transplanted experts are wider than 16 bits
    plain = CoramMerger(base, experts, config).merge()
    again = CoramMerger(base, experts, config, bases={"a": base, "b": base}).merge()
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor)


def test_an_adapter_is_opened_on_its_own_base(tmp_path):
    base, own = tiny_llama(0), tiny_llama(1)
    torch.manual_seed(0)
    adapted = get_peft_model(copy.deepcopy(own), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    adapted.save_pretrained(tmp_path / "lora")
    by_hand = copy.deepcopy(base)
    full = copy.deepcopy(adapted).merge_and_unload()
    with torch.no_grad():
        for name, parameter in by_hand.named_parameters():
            parameter += full.get_parameter(name) - own.get_parameter(name)
    expected = CoramMerger(base, {"lora": by_hand}).merge().model.state_dict()
    for source in (tmp_path / "lora", adapted):
        found = CoramMerger(base, {"lora": source}, bases={"lora": own}).merge()
        assert found.report.expert_kinds == {"lora": "LORA"}
        for name, tensor in expected.items():
            torch.testing.assert_close(found.model.state_dict()[name], tensor, rtol=0, atol=1e-6)


def test_rows_of_the_vocabulary_are_matched_by_index_without_tokenizers():
    base, own = tiny_llama(0, vocab_size=52), tiny_llama(1)
    expert = fine_tuned(own, 0.05, 2)
    merger = open_merger(base, {"a": expert}, "linear", bases={"a": own})
    merged = merger.merge().model
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        start, tau = base.get_parameter(name), expert.get_parameter(name) - own.get_parameter(name)
        torch.testing.assert_close(merged.get_parameter(name)[:48], start[:48] + tau, rtol=0, atol=1e-6)
        assert torch.equal(merged.get_parameter(name)[48:], start[48:])
    assert not merger.inspect().transplants["a"].stayed


def test_rows_of_the_vocabulary_are_matched_by_token(tmp_path):
    """The own base lacks one token of the base, and the expert has one more."""
    first, second = tiny_tokenizer(), tiny_tokenizer()
    second.add_tokens(["<tool>"])
    first.add_tokens(["<image>"])
    base, own = tiny_llama(0, vocab_size=50), tiny_llama(1, vocab_size=50)
    expert = fine_tuned(own, 0.05, 2)
    for model, tokenizer, name in ((base, first, "base"), (own, second, "own"), (expert, second, "expert")):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    merger = open_merger(
        tmp_path / "base", {"a": tmp_path / "expert"}, "linear", bases={"a": tmp_path / "own"}
    )
    merged = merger.merge().model.get_parameter("model.embed_tokens.weight")
    start = base.get_parameter("model.embed_tokens.weight")
    image, shared = first.convert_tokens_to_ids("<image>"), first.convert_tokens_to_ids("a")
    assert second.convert_tokens_to_ids("<tool>") == image
    assert torch.equal(merged[image], start[image])
    assert not torch.equal(merged[shared], start[shared])


def sources(folder):
    """A base, an expert of it, and an expert of another base, on disk."""
    base = on_disk(folder, tiny_llama(0), {"code": 0.04}).base
    own = tiny_llama(1)
    own.save_pretrained(folder / "own")
    fine_tuned(own, 0.05, 2).save_pretrained(folder / "math")
    return base, {"math": folder / "math", "code": folder / "code"}, folder / "own"


def test_python_command_line_and_recipes_agree(tmp_path):
    base, experts, own = sources(tmp_path)
    CoramMerger(base, experts, bases={"math": own}, progress=False).merge_to(tmp_path / "python")
    run = coram_hf("merge", base, *experts.values(), "--bases", f"math={own}", "-o", tmp_path / "command")
    assert run.returncode == 0, run.stderr
    recipes = {
        "nested": {"experts": {"math": {"source": str(experts["math"]), "base": str(own)},
                               "code": str(experts["code"])}},
        "listed": {"experts": [{"source": str(experts["math"]), "base": str(own)}, str(experts["code"])]},
        "apart": {"experts": {n: str(e) for n, e in experts.items()}, "bases": {"math": str(own)}},
    }  # fmt: skip
    for name, recipe in recipes.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({"base": str(base), **recipe}))
        run = coram_hf("merge", "--config", path, "-o", tmp_path / name)
        assert run.returncode == 0, run.stderr
    again = coram_hf(
        "merge", "--config", tmp_path / "command" / "coram_recipe.yaml", "-o", tmp_path / "again"
    )
    assert again.returncode == 0, again.stderr
    for name in ("command", "again", *recipes):
        assert_same_tensors(tmp_path / name, tmp_path / "python")


def test_the_report_and_the_card_name_the_own_base(tmp_path):
    base, experts, own = sources(tmp_path)
    CoramMerger(base, experts, bases={"math": own}, progress=False).merge_to(tmp_path / "merged")
    report = MergeReport.load(tmp_path / "merged")
    assert report.sources["math"]["base"]["source"] == "own"
    assert "matched" in report.transplants["math"]
    assert "code" not in report.transplants
    assert "fine-tuned from a folder called own" in (tmp_path / "merged" / "README.md").read_text()
    assert "--bases math=path/to/own" in command_line(report)
    assert "bases={'math': 'path/to/own'}" in python_code(report)


def test_another_own_base_is_not_resumed_from(tmp_path):
    base, experts, own = sources(tmp_path)
    tiny_llama(5).save_pretrained(tmp_path / "other")
    found = [
        CoramMerger(base, experts, bases={"math": bases}).inputs.identity()
        for bases in (own, own, tmp_path / "other")
    ]
    assert found[0] == found[1] != found[2]


def test_an_own_base_is_an_input_that_no_output_replaces(tmp_path):
    base, experts, own = sources(tmp_path)
    merger = CoramMerger(base, experts, bases={"math": own})
    with pytest.raises(CoramError, match="contains an input of the merge"):
        merger.merge_to(own, overwrite=True)


def test_what_has_no_counterpart_is_a_warning():
    base, own = tiny_llama(0, num_hidden_layers=3), tiny_llama(1)
    plan = CoramMerger(base, {"a": fine_tuned(own, 0.05, 2)}, bases={"a": own}).inspect()
    assert any("7 of 21 target matrices" in warning for warning in plan.warnings)
    assert all(".layers.2." in name for name in plan.transplants["a"].stayed)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bases": {"maths": "own"}}, "no expert is called 'maths'"),
        ({"bases": ["own"]}, "bases must map names"),
        ({}, "bases={'a': ...}"),
    ],
)
def test_errors_name_what_to_do(options, words):
    base = ARCHITECTURES["Qwen2.5-VL"].build(0)
    expert = ARCHITECTURES["Qwen2"].build(1)
    with pytest.raises(CoramError) as error:
        CoramMerger(base, {"a": expert}, **options)
    assert words in str(error.value)


def test_an_own_base_is_named_in_messages(tmp_path):
    base = tiny_llama(0)
    with pytest.raises(CoramError, match=r"no such folder: .*nowhere"):
        CoramMerger(base, {"a": base}, bases={"a": tmp_path / "nowhere"})
    (tmp_path / "empty").mkdir()
    with pytest.raises(CoramError, match=r"the base of expert 'a': .*empty contains neither a model"):
        CoramMerger(base, {"a": base}, bases={"a": tmp_path / "empty"})


def test_an_own_base_of_other_shapes_is_refused():
    base, own = tiny_llama(0), tiny_llama(1, hidden_size=64, intermediate_size=80)
    with pytest.raises(CoramError, match=r"expert 'a'.*no tensor of the same name and shape"):
        CoramMerger(base, {"a": fine_tuned(own, 0.05, 2)}, bases={"a": own})


def test_an_expert_is_checked_against_its_own_base():
    base, own = tiny_llama(0), tiny_llama(1)
    other = hf.LlamaForCausalLM(hf.LlamaConfig(**own.config.to_diff_dict() | {"num_hidden_layers": 1}))
    with pytest.raises(CoramError, match="expert 'a' lacks tensor"):
        CoramMerger(base, {"a": other}, bases={"a": own})


def test_rotations_of_another_base_are_refused():
    base, own = tiny_llama(0), tiny_llama(1)
    experts = {name: adapted(model, METHODS["OFT, Cayley"](), 1) for name, model in (("a", own), ("b", base))}
    with pytest.raises(CoramError, match="expert 'a' has a base of its own"):
        merge_oft(base, experts, bases={"a": own})
