"""Chat template, tokenizer, generation config and special tokens: the experts' where they agree."""

import json

import pytest
import torch
import yaml
from helpers.adapters import ALL, adapted
from helpers.chat import CHATML, PLAIN, instructed
from helpers.command import coram_hf
from helpers.models import fine_tuned, tiny_tokenizer
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from coram_hf import CoramError, CoramMerger, MergeReport

INSTRUCT = {"template": PLAIN, "eos_token_id": [4, 1], "generation": {"temperature": 0.7, "do_sample": True}}


def both_ways(tmp_path, base, experts, **options):
    """The folders of the merge in memory and of the merge from files to files, and the plan."""
    merger = CoramMerger(base, experts, progress=False, **options)
    merger.merge().save_pretrained(tmp_path / "saved")
    merger.merge_to(tmp_path / "streamed")
    return [tmp_path / "saved", tmp_path / "streamed"], merger.inspect()


def same_companions(folders):
    """The files beside the weights, which both ways must write alike."""
    names = [
        {path.name for path in folder.iterdir() if path.suffix in (".json", ".jinja")} - {"coram_report.json"}
        for folder in folders
    ]
    assert names[0] == names[1]
    for name in names[0]:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name


def test_experts_that_agree_give_template_and_end_to_a_base_without(tmp_path):
    base, experts = instructed(tmp_path, {"math": INSTRUCT, "code": INSTRUCT})
    folders, plan = both_ways(tmp_path, base, experts)
    same_companions(folders)
    for folder in folders:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.chat_template == PLAIN
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.generation_config.eos_token_id == [4, 1]
        assert model.config.eos_token_id == [4, 1]
        assert model.generation_config.temperature == 0.7
        assert model.generation_config.pad_token_id == 0
        report = MergeReport.load(folder)
        assert report.surroundings["chat template"] == "that of 'math', 'code'; the base has none"
        assert "that of 'math', 'code'; the base has none" in (folder / "README.md").read_text().replace(
            "&#x27;", "'"
        ).replace("&#39;", "'")
    assert plan.surroundings["eos_token_id"] == "[4, 1], that of 'math', 'code'; the base's differs"
    assert plan.surroundings["pad_token_id"] == "0, the base's"
    assert "chat template: that of 'math', 'code'; the base has none" in str(plan)
    assert not any("chat template" in warning for warning in plan.warnings)


def test_the_merge_stops_where_its_experts_stop(tmp_path):
    base, experts = instructed(tmp_path, {"math": INSTRUCT})
    result = CoramMerger(base, experts, progress=False).merge()
    model, prompt = result.model, torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[4] = model.model(prompt).last_hidden_state[0, -1]
    assert model.generate(prompt, do_sample=False, max_new_tokens=5).tolist() == [[5, 6, 7, 4]]


def test_disagreement_is_a_warning_with_names_and_keeps_the_base(tmp_path):
    base, experts = instructed(
        tmp_path, {"math": INSTRUCT, "code": {"template": CHATML, "eos_token_id": 5}, "plain": {}}
    )
    folders, plan = both_ways(tmp_path, base, experts)
    for folder in folders:
        assert AutoTokenizer.from_pretrained(folder).chat_template is None
        assert GenerationConfig.from_pretrained(folder).eos_token_id == 1
    told = next(warning for warning in plan.warnings if "chat template" in warning)
    assert "('math' | 'code')" in told
    assert "the base has none" in told
    assert "--chat-template math" in told
    ends = next(warning for warning in plan.warnings if "eos_token_id" in warning)
    assert "('math' | 'code' | 'plain' like the base)" in ends
    assert "--special-tokens math" in ends
    assert plan.surroundings["generation config"].startswith("that of 'math'")


def test_ends_with_one_in_common_are_all_taken(tmp_path):
    base, experts = instructed(
        tmp_path, {"a": {"eos_token_id": [4, 5]}, "b": {"eos_token_id": 4}, "c": {"eos_token_id": [6, 4]}}
    )
    merger = CoramMerger(base, experts, progress=False)
    assert merger.merge().model.generation_config.eos_token_id == [4, 5, 6]
    assert not any("eos_token_id" in warning for warning in merger.inspect().warnings)
    assert (
        merger.inspect().surroundings["eos_token_id"]
        == "[4, 5, 6], that of 'a', 'b', 'c'; the base's differs"
    )


def test_an_expert_without_a_template_has_no_say(tmp_path):
    base, experts = instructed(tmp_path, {"math": INSTRUCT, "plain": {}})
    plan = CoramMerger(base, experts, progress=False).inspect()
    assert plan.surroundings["chat template"] == "that of 'math'; the base has none"


@pytest.mark.parametrize("asked", ["base", "code", "file"])
def test_a_choice_by_name(tmp_path, asked):
    base, experts = instructed(
        tmp_path, {"math": INSTRUCT, "code": {"template": CHATML, "eos_token_id": 5}}, base_template="base"
    )
    expected = {"base": "base", "code": CHATML, "file": "from a file"}[asked]
    (tmp_path / "own.jinja").write_text("from a file")
    given = str(tmp_path / "own.jinja") if asked == "file" else asked
    folders, plan = both_ways(tmp_path, base, experts, chat_template=given)
    same_companions(folders)
    assert AutoTokenizer.from_pretrained(folders[0]).chat_template == expected
    report = MergeReport.load(folders[1])
    assert report.options["chat_template"] == ("path/to/own.jinja" if asked == "file" else asked)
    recipe = yaml.safe_load((folders[1] / "coram_recipe.yaml").read_text())
    assert recipe["chat_template"] == given
    assert not any("chat template" in warning for warning in plan.warnings)


def test_special_tokens_and_settings_by_name_and_from_files(tmp_path):
    base, experts = instructed(tmp_path, {"math": INSTRUCT, "code": {"eos_token_id": 5}})
    model = CoramMerger(base, experts, progress=False, generation_config="math").merge().model
    assert model.generation_config.temperature == 0.7
    assert model.generation_config.eos_token_id == [4, 1]
    model = (
        CoramMerger(base, experts, progress=False, generation_config="math", special_tokens="code")
        .merge()
        .model
    )
    assert (model.generation_config.temperature, model.generation_config.eos_token_id) == (0.7, 5)
    assert model.config.eos_token_id == 5
    (tmp_path / "g.json").write_text(json.dumps({"top_k": 7, "eos_token_id": [9, 8]}))
    model = CoramMerger(base, experts, progress=False, generation_config=tmp_path / "g.json").merge().model
    assert (model.generation_config.top_k, model.generation_config.eos_token_id) == (7, [9, 8])
    model = CoramMerger(base, experts, progress=False, generation_config="base").merge().model
    assert (model.generation_config.temperature, model.generation_config.eos_token_id) == (None, 1)


def with_new_tokens(folder, name, base, seed):
    """An expert with ChatML's two tokens, a resized embedding, and the second of them as its end."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = CHATML
    expert = fine_tuned(base, 0.05, seed)
    expert.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    expert.config.eos_token_id = expert.generation_config.eos_token_id = end
    expert.save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / name)
    return expert, end


def test_tokens_that_all_experts_added_come_with_their_tokenizer(tmp_path):
    base, _ = instructed(tmp_path, {})
    model = AutoModelForCausalLM.from_pretrained(base)
    pairs = [with_new_tokens(tmp_path, name, model, i) for i, name in enumerate(("a", "b"))]
    experts = {name: tmp_path / name for name in ("a", "b")}
    folders, plan = both_ways(tmp_path, base, experts)
    same_companions(folders)
    end = pairs[0][1]
    for folder in folders:
        tokenizer, merged = (
            AutoTokenizer.from_pretrained(folder),
            AutoModelForCausalLM.from_pretrained(folder),
        )
        assert tokenizer.eos_token == "<|im_end|>"
        assert tokenizer.eos_token_id == end == merged.generation_config.eos_token_id
        rows = merged.get_input_embeddings().weight
        mean = sum(expert.get_input_embeddings().weight[end] for expert, _ in pairs) / 2
        torch.testing.assert_close(rows[end], mean)
        assert torch.equal(rows[:40], model.get_input_embeddings().weight[:40])
        text = tokenizer.apply_chat_template([{"role": "user", "content": "2+2"}], tokenize=True)
        assert end in text["input_ids"]
    assert plan.surroundings["tokenizer"] == "that of 'a', 'b'; the base's differs"


def test_the_base_policy_keeps_its_tokens_and_warns_of_what_is_lost(tmp_path):
    base, _ = instructed(tmp_path, {})
    model = AutoModelForCausalLM.from_pretrained(base)
    with_new_tokens(tmp_path, "a", model, 0)
    plan = CoramMerger(base, {"a": tmp_path / "a"}, progress=False, vocabulary="base").inspect()
    assert any("eos_token_id of expert 'a' is '<|im_end|>'" in w and "union" in w for w in plan.warnings)
    assert any("uses the token '<|im_start|>'" in warning for warning in plan.warnings)
    assert plan.surroundings["eos_token_id"].startswith("1, the base's")
    union = CoramMerger(base, {"a": tmp_path / "a"}, progress=False, vocabulary="union").merge()
    vocabulary = union.model.config.vocab_size
    assert union.model.generation_config.eos_token_id == vocabulary - 1


def test_an_experts_tokenizer_must_fit_the_rows(tmp_path):
    base, experts = instructed(tmp_path, {"math": {}, "code": {}})
    other = tiny_tokenizer()
    vocabulary = {token: 47 - row for token, row in other.get_vocab().items()}
    content = json.loads((experts["code"] / "tokenizer.json").read_text())
    content["model"]["vocab"] = vocabulary
    for token in content["added_tokens"]:
        token["id"] = vocabulary[token["content"]]
    (experts["code"] / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CoramError, match=r"tokenizer='code': its token '.+' is number \d+, but \d+ in the"):
        CoramMerger(base, experts, tokenizer="code")
    plan = CoramMerger(base, experts, progress=False).inspect()
    assert any(
        "the experts differ in their tokenizer ('math' like the base | 'code')" in w for w in plan.warnings
    )
    with pytest.raises(CoramError, match="mutually exclusive"):
        CoramMerger(base, experts, tokenizer="math", vocabulary="union")


def test_wrong_choices_are_named_before_anything_is_merged(tmp_path):
    base, experts = instructed(tmp_path, {"math": INSTRUCT, "code": {}})
    for option in ("chat_template", "tokenizer", "generation_config", "special_tokens"):
        with pytest.raises(
            CoramError, match=rf"{option} must be 'auto', 'base', an expert \('math', 'code'\)"
        ):
            CoramMerger(base, experts, **{option: "maths"})
    with pytest.raises(CoramError, match=r"chat_template: expert 'code' has no chat template.*\['math'\]"):
        CoramMerger(base, experts, chat_template="code")


def test_the_tokenizer_of_an_adapter_tells_its_template_and_end(tmp_path):
    base, _ = instructed(tmp_path, {})
    model = AutoModelForCausalLM.from_pretrained(base)
    adapted(model, LoraConfig(r=2, target_modules=ALL), 0).save_pretrained(tmp_path / "lora")
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token, tokenizer.chat_template = "z", PLAIN
    tokenizer.save_pretrained(tmp_path / "lora")
    adapted(model, LoraConfig(r=2, target_modules=ALL), 1).save_pretrained(tmp_path / "bare")
    experts = {"lora": tmp_path / "lora", "bare": tmp_path / "bare"}
    folders, plan = both_ways(tmp_path, base, experts)
    same_companions(folders)
    end = tokenizer.get_vocab()["z"]
    assert GenerationConfig.from_pretrained(folders[0]).eos_token_id == end
    assert AutoTokenizer.from_pretrained(folders[1]).chat_template == PLAIN
    assert AutoTokenizer.from_pretrained(folders[1]).eos_token == "z"
    assert plan.surroundings["tokenizer"] == "that of 'lora'; the base's differs"


def test_a_tokenizer_from_a_folder(tmp_path):
    base, experts = instructed(tmp_path, {"math": {}})
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = "z"
    tokenizer.save_pretrained(tmp_path / "own")
    folders, _ = both_ways(tmp_path, base, experts, tokenizer=tmp_path / "own")
    assert all(AutoTokenizer.from_pretrained(folder).pad_token == "z" for folder in folders)


def test_on_the_command_line_and_in_recipes(tmp_path):
    base, experts = instructed(tmp_path, {"math": INSTRUCT, "code": {"template": CHATML}})
    sources = [str(base), *(f"{name}={path}" for name, path in experts.items())]
    run = coram_hf(
        "merge", *sources, "--chat-template", "code", "--tokenizer", "base", "-o", tmp_path / "cli"
    )
    assert run.returncode == 0, run.stderr
    assert AutoTokenizer.from_pretrained(tmp_path / "cli").chat_template == CHATML
    recipe = {"base": str(base), "experts": {n: str(p) for n, p in experts.items()}, "chat_template": "math"}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    run = coram_hf("merge", "--config", tmp_path / "recipe.yaml", "-o", tmp_path / "recipe")
    assert run.returncode == 0, run.stderr
    assert AutoTokenizer.from_pretrained(tmp_path / "recipe").chat_template == PLAIN
    run = coram_hf("inspect", *sources, "--chat-template", "neither")
    assert run.returncode == 2
    assert "chat_template must be" in run.stderr


def test_templates_in_older_places_are_read_and_replaced(tmp_path):
    base, experts = instructed(tmp_path, {"math": {}})
    config = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "old"}))
    (base / "chat_template.json").write_text(json.dumps({"chat_template": "older"}))
    folders, _ = both_ways(tmp_path, base, experts)
    assert AutoTokenizer.from_pretrained(folders[0]).chat_template == "old"
    (tmp_path / "new.jinja").write_text("new")
    CoramMerger(base, experts, progress=False, chat_template=tmp_path / "new.jinja").merge_to(
        tmp_path / "new"
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "new").chat_template == "new"
    assert not (tmp_path / "new" / "chat_template.json").exists()
    assert "chat_template" not in json.loads((tmp_path / "new" / "tokenizer_config.json").read_text())
