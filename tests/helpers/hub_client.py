"""Scenarios on a Hub, run by test_hub in a process whose HF_ENDPOINT is a server on loopback."""

import copy
import json
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers.adapters import adapted
from helpers.command import coram_hf as run_command
from helpers.models import choice_task, fine_tuned, tiny_llama, tiny_tokenizer
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData, hf_hub_download, snapshot_download
from peft import AutoPeftModelForCausalLM, LoraConfig, OFTConfig, PeftModel
from transformers import AutoModelForCausalLM

from coram_hf import CoramConfig, CoramError, CoramMerger, evaluate_folder, load_report
from coram_hf.baselines import merge_oft
from coram_hf.evaluation.tasks import open_tasks
from coram_hf.hub import push_folder
from coram_hf.hub.upload import Size
from coram_hf.inputs.hub_size import hub_bytes
from coram_hf.inputs.locate import parse_source


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 12).unsqueeze(0)).logits


def experts(base):
    return {f"e{i}": fine_tuned(base, 0.04, i) for i in range(2)}


def result():
    base = tiny_llama()
    return CoramMerger(base, experts(base), CoramConfig.from_line("lr.ta"), progress=False).merge()


def first_push(folder):
    merged = result()
    data = ModelCardData(
        language="en",
        model_name="merged",
        eval_results=[EvalResult("text-generation", "me/data", "Data", "accuracy", 0.5)],
    )
    url = merged.push_to_hub("me/merged", private=False, commit_message="A first merge", card_data=data)
    again = AutoModelForCausalLM.from_pretrained("me/merged")
    assert torch.equal(logits(again), logits(merged.model.eval()))
    report = load_report("me/merged")
    assert CoramConfig.from_report(report) == CoramConfig.from_line("lr.ta")
    assert report.lam == merged.report.lam
    card = ModelCard.load("me/merged")
    assert card.data.language == "en"
    assert card.data.eval_results[0].metric_value == 0.5
    return url


def config_push(folder):
    config = CoramConfig.from_line("SS(nca,mean).ties", weights=(1, [0.5, -1]), keep=["lm_head"])
    url = config.push_to_hub("me/config", commit_message="Our options")
    assert CoramConfig.from_pretrained("me/config") == config
    result().push_to_hub("me/merge-with-config")
    assert CoramConfig.from_pretrained("me/merge-with-config") == CoramConfig.from_line("lr.ta")
    for source, why in (
        ("me/nothing", "cannot be read from the Hub"),
        ("./me", r"has no coram_config\.json"),
    ):
        with pytest.raises(CoramError, match=why):
            CoramConfig.from_pretrained(source)
    return url


def local_paths(folder):
    """The recipe beside a merge names local folders; the one on the Hub does not."""
    base = tiny_llama()
    base.save_pretrained(folder / "private" / "base")
    fine_tuned(base, 0.04, 1).save_pretrained(folder / "private" / "expert")
    merger = CoramMerger(folder / "private" / "base", [folder / "private" / "expert"], progress=False)
    merger.merge_to(folder / "with-recipe")
    push_folder(folder / "with-recipe", "me/with-recipe")
    return (folder / "with-recipe" / "coram_recipe.yaml").read_text()


def offloaded_push(folder):
    """A result that is on the disk arrives in the bytes of a merge to files."""
    base, experts_ = folder / "offload-base", experts(tiny_llama())
    tiny_llama().save_pretrained(base)
    options = {"device_map": {"": "disk"}, "offload_folder": folder / "offload", "progress": False}
    merger = CoramMerger(base, experts_, CoramConfig.from_line("lr.ta"), **options)
    merged = merger.merge()
    assert all(parameter.is_meta for parameter in merged.model.parameters())
    merged.push_to_hub("me/offloaded")
    merger.merge_to(folder / "offload-merged")
    path = HfApi().hf_hub_download("me/offloaded", "model.safetensors")
    return Path(path).read_bytes() == (folder / "offload-merged" / "model.safetensors").read_bytes()


def edited_card(folder):
    merged = result()
    merged.save_pretrained(folder / "edited")
    path = folder / "edited" / "README.md"
    text = path.read_text()
    text = text.replace("# A merge of", "# My merge of", 1).replace("- merge\n", "- merge\n- mine\n", 1)
    path.write_text(text.replace("| dispersion D |", "| made up |") + "\nMy last words.\n")
    push_folder(folder / "edited", "me/edited")
    published = ModelCard.load("me/edited").content
    assert "# My merge of" in published
    assert "- mine" in published
    assert "My last words." in published
    assert "made up" not in published
    assert "| dispersion D |" in published
    merged.with_lambda(2.5).push_to_hub("me/edited")
    published = ModelCard.load("me/edited", ignore_metadata_errors=True).content
    assert "My last words." in published
    assert "| lambda | 2.5 |" in published
    merged.with_lambda(1.7).push_to_hub("me/edited", card_data=ModelCardData(language="en"))
    assert "My last words." in ModelCard.load("me/edited", ignore_metadata_errors=True).content


def stale_shards(folder):
    merged = result()
    merged.save_pretrained(folder / "many", max_shard_size="30KB")
    push_folder(folder / "many", "me/many")
    HfApi().upload_file(path_or_fileobj=b"1", path_in_repo="exp/adapter.safetensors", repo_id="me/many")
    merged.push_to_hub("me/many")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained("me/many")), logits(merged.model.eval()))


def evaluated(folder):
    """Results go to the Hub with the weights that got them, and leave with them, from an edited card, too."""
    merged = result()
    merged.save_pretrained(folder / "evaluated")
    tiny_tokenizer().save_pretrained(folder / "evaluated")
    evaluate_folder(folder / "evaluated", [choice_task(folder / "math.jsonl", 0)])
    push_folder(folder / "evaluated", "me/evaluated")
    (found,) = ModelCard.load("me/evaluated").data.eval_results
    assert found.dataset_name == "math"
    assert HfApi().file_exists("me/evaluated", "eval_results.json")
    card = ModelCard.load("me/evaluated")
    card.text += "\nMy words.\n"
    HfApi().upload_file(
        path_or_fileobj=card.content.encode(), path_in_repo="README.md", repo_id="me/evaluated"
    )
    merged.with_lambda(2.5).push_to_hub("me/evaluated")
    card = ModelCard.load("me/evaluated")
    assert card.data.eval_results is None
    assert "My words." in card.text
    assert not HfApi().file_exists("me/evaluated", "eval_results.json")


def pull_request(folder):
    return result().push_to_hub("me/merged", create_pr=True)


def branch_and_private(folder):
    result().push_to_hub("me/hidden", private=True, revision="trial")
    return load_report("me/hidden", revision="trial").line


def refused(folder):
    result().with_lambda(3.0).save_pretrained(folder / "refused")
    try:
        push_folder(folder / "refused", "me/merged", token="hf_secretsecretsecret")
    except CoramError as error:
        return str(error)
    return "not refused"


def pushed(folder):
    return push_folder(folder / "refused", "me/second")


def merge_from_the_hub(folder):
    """Base, a checkpoint at a commit, and an adapter inside a repository, all from the Hub."""
    base = tiny_llama()
    adapted(base, LoraConfig(r=2, target_modules=["q_proj"]), 0).save_pretrained(
        folder / "up" / "inner" / "lora"
    )
    base.save_pretrained(folder / "base")
    (folder / "base" / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: fr\n---\n")
    fine_tuned(base, 0.05, 3).save_pretrained(folder / "math")
    api = HfApi()
    for name in ("base", "math", "up"):
        api.create_repo(f"me/{name}", exist_ok=True)
        commit = api.upload_folder(repo_id=f"me/{name}", folder_path=folder / name)
    sources = {"math": "me/math@main", "code": "me/up:inner/lora"}
    report = CoramMerger("me/base", sources, CoramConfig(lam=1.5), progress=False).merge_to(folder / "out")
    local = {"math": folder / "math", "code": folder / "up" / "inner" / "lora"}
    expected = CoramMerger(folder / "base", local, CoramConfig(lam=1.5), progress=False).merge()
    found = AutoModelForCausalLM.from_pretrained(folder / "out").state_dict()
    assert all(torch.equal(found[name], t) for name, t in expected.model.state_dict().items())
    assert report.sources["code"]["source"] == "me/up:inner/lora"
    assert report.sources["code"]["commit"] == commit.oid
    assert not any("is an adapter of" in warning for warning in report.warnings), report.warnings
    card = ModelCard.load(folder / "out" / "README.md")
    assert card.data.base_model == ["me/base", "me/math", "me/up"]
    assert card.data.license == "apache-2.0"
    assert card.data.language == ["fr"]
    assert f"me/up:inner/lora@{commit.oid}" in card.content
    url = CoramMerger("me/base", sources, CoramConfig(lam=1.5), progress=False).push_to_hub("me/direct")
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained("me/direct")), logits(expected.model.eval())
    )
    return url


def size_before_download(folder):
    """The size of a base on the Hub is known from its headers, and from the cache once it is there."""
    base = tiny_llama(num_hidden_layers=3)
    base.save_pretrained(folder / "sized" / "inner", max_shard_size="30KB")
    api = HfApi()
    api.create_repo("me/sized")
    api.upload_folder(repo_id="me/sized", folder_path=folder / "sized")
    stored = sum(tensor.numel() for tensor in base.state_dict().values())
    source = parse_source("me/sized:inner")
    assert [hub_bytes(source, size) for size in (None, 2)] == [4 * stored, 2 * stored]
    assert hub_bytes(parse_source("me/nowhere")) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 3 * stored}))
        merge = ["merge", "me/sized:inner", "me/nowhere", "-o", folder / "unsized"]
        full = run_command(*merge).stderr
        assert not list((folder / "home").rglob("models--me--sized/**/*.safetensors"))
        half = run_command(*merge, "--dtype", "bfloat16").stderr
    snapshot_download("me/sized")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HfApi, "list_repo_files", None)
        assert hub_bytes(source) == 4 * stored
    return [full, half]


def adapters(folder):
    """A LoRA adapter pushed from a result, and an OFT adapter pushed by the command line, load from there."""
    base = tiny_llama()
    base.save_pretrained(folder / "adapted")
    base = AutoModelForCausalLM.from_pretrained(folder / "adapted")
    merged = CoramMerger(base, experts(base), CoramConfig.from_line("lr"), progress=False).merge()
    merged.push_to_hub("me/lora")
    assert HfApi().file_exists("me/lora", "config.json")
    merged.push_to_hub("me/lora", adapter=True, energy=1.0)
    merged.save_adapter(folder / "lora", energy=1.0)
    rotated = [adapted(base, OFTConfig(oft_block_size=4, target_modules=["q_proj"]), i) for i in range(2)]
    turned = merge_oft(base, rotated, progress=False)
    turned.save_adapter(folder / "oft")
    assert run_command("push", folder / "oft", "me/oft").returncode == 0
    for name, result in {"lora": merged, "oft": turned}.items():
        local = PeftModel.from_pretrained(copy.deepcopy(base), folder / name).eval()
        remote = PeftModel.from_pretrained(copy.deepcopy(base), f"me/{name}").eval()
        assert torch.equal(logits(remote), logits(local))
        torch.testing.assert_close(logits(remote), logits(result.model.eval()), rtol=0, atol=1e-4)
        assert not torch.equal(logits(remote), logits(base))
        card = ModelCard.load(f"me/{name}")
        assert (card.data.library_name, card.data.base_model_relation) == ("peft", "adapter")
        assert name in card.data.tags
        assert load_report(f"me/{name}").adapter["type"].lower() == name
        assert not HfApi().file_exists(f"me/{name}", "config.json")
        config = json.loads(Path(hf_hub_download(f"me/{name}", "adapter_config.json")).read_text())
        assert config["base_model_name_or_path"] is None
        assert str(folder) in (folder / name / "adapter_config.json").read_text()
    merged.push_to_hub("me/oft")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained("me/oft")), logits(merged.model.eval()))


def adapter_of_the_hub(folder):
    """An adapter of a base on the Hub names it, and loads over it by its own config."""
    tiny_llama().save_pretrained(folder / "named")
    commit = HfApi().upload_folder(
        repo_id=HfApi().create_repo("me/named", exist_ok=True).repo_id, folder_path=folder / "named"
    )
    expert = {"math": fine_tuned(tiny_llama(), 0.05, 1)}
    merger = CoramMerger("me/named", expert, CoramConfig(lambda_step=0.1), progress=False)
    merger.merge_adapter_to(folder / "of-named", rank=4)
    push_folder(folder / "of-named", "me/of-named")
    found = AutoPeftModelForCausalLM.from_pretrained("me/of-named").peft_config["default"]
    assert (found.base_model_name_or_path, found.revision) == ("me/named", commit.oid)
    card = ModelCard.load("me/of-named")
    assert card.data.base_model == ["me/named"]
    assert f"from_pretrained('me/named', revision='{commit.oid}')" in card.content


def large(folder):
    """Above a size, weights go ahead in commits of at most that size; the rest follows."""
    merged = result()
    merged.save_pretrained(folder / "large", max_shard_size="10KB")
    sizes = [path.stat().st_size for path in (folder / "large").glob("*.safetensors")]
    push_folder(folder / "large", "me/large", commit_message="Large", large=Size(3, 10 * max(sizes)))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained("me/large")), logits(merged.model.eval()))
    push_folder(folder / "large", "me/small", commit_message="Small", large=Size(100, 10**9))
    url = push_folder(folder / "large", "me/small", create_pr=True, large=Size(4, 10**9))
    return [len(sizes), url]


def dataset(folder):
    """A dataset on the Hub, at a branch, too; the questions of each."""
    address = "hf://datasets/me/sums?prompt=question&target=answer"
    found = [open_tasks([address + more])[0] for more in ("", "&revision=more")]
    (shown,) = open_tasks([f"{address}&fewshot=1"])
    refusals = []
    for bad in ("hf://datasets/me/nothing", f"{address}&split=dev", f"{address}&revision=nowhere"):
        try:
            open_tasks([bad])
        except CoramError as error:
            refusals.append(str(error))
    questions = [[(q.prompt, q.right) for q in task.task.questions] for task in found]
    return {"questions": questions, "shot": shown.task.shots[0].prompt, "refusals": refusals}


def without_waiting():
    """Let the client retry at once; it waits up to eight seconds after every failure."""
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(min(seconds, 0.01))


if __name__ == "__main__":
    without_waiting()
    where = Path(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps(globals()[line.strip()](where)), flush=True)
