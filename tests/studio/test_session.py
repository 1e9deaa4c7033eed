"""The studio without its page: roots, jobs, sessions, chat, and what leaves it."""

import os
import re
import shutil
import threading
from dataclasses import replace

import pytest
import torch
from helpers.folders import on_disk, tensors_of
from helpers.models import fine_tuned, tiny_llama, tiny_tokenizer
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from coram_hf import CoramConfig, CoramMerger
from coram_hf.errors import CoramError
from coram_hf.execution.progress import Progress
from coram_hf.hub.push import check_whole
from coram_hf.studio import writing
from coram_hf.studio.actions import Actions
from coram_hf.studio.chat import Chat
from coram_hf.studio.job import Job
from coram_hf.studio.prompts import demo_prompts, pasted, read_pasted
from coram_hf.studio.roots import Roots
from coram_hf.studio.session import Session
from coram_hf.studio.views import answers_view, plan_view
from coram_hf.studio.words import plain_warnings

TOKEN = "hf_" + "s3cret" * 5


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    base = tiny_llama(eos_token_id=1, pad_token_id=0)
    experts = {"math": fine_tuned(base, 0.05, 1, "proj"), "code": fine_tuned(base, 0.06, 2, "proj")}
    on_disk(folder, base, experts, tokenizer=tiny_tokenizer())
    return folder


@pytest.fixture
def session(models):
    found = Session(Roots([models]))
    found.inspect("base", ["math", "code"], "full")
    return found


@pytest.fixture
def merged(session):
    job = session.start_merge()
    assert job.wait(60)
    assert job.state == "done", job.error
    return session


def test_roots_refuse_what_is_outside(tmp_path):
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    (inside / "link").symlink_to(outside)
    (inside / "model").mkdir()
    roots = Roots([inside])
    assert roots.source("a=model") == f"a={inside / 'model'}"
    assert roots.output("new/merge") == inside / "new" / "merge"
    for path in (str(outside), "../out", "link", f"x={outside}"):
        with pytest.raises(CoramError, match="refused"):
            roots.source(path)
    for path in ("../out", str(outside / "x"), "link/x", ".", ""):
        with pytest.raises(CoramError, match=r"refused|no folder"):
            roots.output(path)
    with pytest.raises(CoramError, match="no such folder"):
        roots.source("/nowhere/at/all")
    assert roots.source("me/model") == "me/model"
    with pytest.raises(CoramError, match="switched off"):
        Roots([inside], hub=False).source("me/model")


def test_roots_list_models_and_adapters(models):
    checkpoints, adapters = Roots([models]).models()
    assert sorted(checkpoints) == ["base", "code", "math"]
    assert adapters == []


def test_a_job_stops_resumes_and_is_dropped():
    turn, seen = threading.Semaphore(0), []

    def work():
        progress = Progress("counting", 3, enabled=False)
        for i in range(3):
            turn.acquire()
            seen.append(i)
            progress.add()
        return "counted"

    job = Job("Counting", work)
    job.stop()
    turn.release(3)
    assert not job.wait(0.3)
    assert (seen, job.state, job.done, job.total) == ([0], "stopped", 1, 3)
    job.resume()
    assert job.wait(10)
    assert (seen, job.state, job.words) == ([0, 1, 2], "done", "counted")
    seen.clear()
    other = Job("Counting", work)
    other.stop()
    turn.release(3)
    other.drop()
    assert (seen, other.state) == ([0], "dropped")


def test_one_thing_at_a_time(merged):
    held = threading.Event()
    job = merged.start("Holding", lambda: str(held.wait(30)))
    for refused in (
        merged.start_merge,
        lambda: merged.inspect("base", ["math"], "full"),
        lambda: merged.start_calibration("[math]\n1\n[code]\n2", "lambda", True),
        lambda: merged.rescale(1.0),
        lambda: writing.save(merged, "held", "", adapter=False),
        lambda: Chat(merged).ask("1+1=", "math", template=False),
    ):
        with pytest.raises(CoramError, match="one thing at a time; holding is running"):
            refused()
    held.set()
    assert job.wait(30)
    merged.rescale(1.0)


def test_a_stopped_merge_resumes_with_the_same_weights(models, session):
    actions = Actions(session.roots)
    actions.session = session
    job = session.start_merge()
    job.stop()
    assert not job.wait(0.5)
    assert list(actions.follow(job))[-1].count("is stopped, and nothing is lost: Merge goes on") == 1
    assert session.result is None
    assert "Merged 2 experts" in list(actions.merge(""))[-1]
    assert session.job is job
    straight = CoramMerger(models / "base", [models / "math", models / "code"], CoramConfig()).merge()
    ours = session.merged().model.state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in straight.model.state_dict().items())


def test_a_merge_inspects_again_only_what_changed(models, tmp_path):
    for name in ("base", "math", "code"):
        shutil.copytree(models / name, tmp_path / name)
    session, choice = Session(Roots([tmp_path])), ("base", ["math", "code"], "full")
    assert not session.is_inspected(*choice)
    session.inspect(*choice)
    assert session.is_inspected(*choice)
    assert not session.is_inspected("base", ["math", "code"], "lr")
    assert not session.is_inspected("base", ["math"], "full")
    os.utime(tmp_path / "math" / "model.safetensors", ns=(1, 1))
    assert not session.is_inspected(*choice)


def test_a_merge_to_a_folder_is_that_of_merge_to(models, session):
    job = session.start_merge("straight")
    assert job.wait(60)
    assert job.state == "done", job.error
    CoramMerger(models / "base", [models / "math", models / "code"]).merge_to(models / "reference")
    ours, theirs = tensors_of(models / "straight"), tensors_of(models / "reference")
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    with pytest.raises(CoramError, match="no merge in memory"):
        session.merged()


def test_lambda_moves_the_weights_along_a_line(models, merged):
    base = load_file(models / "base" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    found = {}
    for lam in (1.0, 2.0, 0.0):
        merged.rescale(lam)
        found[lam] = merged.merged().model.state_dict()[name].clone()
    assert torch.equal(found[0.0], base[name])
    torch.testing.assert_close(found[2.0] - base[name], 2 * (found[1.0] - base[name]), rtol=1e-3, atol=1e-6)


def test_each_model_answers_for_itself(models, merged):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    chat = Chat(merged)
    turn = chat.ask("1+1=", "code", template=False)
    tokenizer = AutoTokenizer.from_pretrained(models / "base")
    tokens = tokenizer("1+1=", return_tensors="pt")
    for folder, said in (("base", turn.base_says), ("code", turn.expert_says)):
        model = AutoModelForCausalLM.from_pretrained(models / folder)
        whole = model.generate(**tokens, max_new_tokens=48, do_sample=False)[0, tokens.input_ids.shape[1] :]
        expected = tokenizer.decode(whole, skip_special_tokens=True).lstrip().split("\n")[0].strip()
        assert said == expected
    merged.rescale(0.0)
    chat.again(template=False)
    assert chat.turns[-1].merge_says == turn.base_says
    assert chat.turns[-1].lam == 0.0
    with pytest.raises(CoramError, match="no chat template"):
        chat.ask("1", "code", template=True)


def test_answers_and_names_are_escaped(merged):
    chat = Chat(merged)
    turn = chat.ask("<script>alert(1)</script>", "math", template=False)
    turn.merge_says = "<img src=x onerror=alert(1)>"
    html = answers_view(chat.turns)
    assert "<script" not in html
    assert "<img" not in html
    assert "&lt;script&gt;" in html


def test_the_plan_says_what_is_uneven(models, session):
    plan = session.plan
    html = plan_view(plan, 7.5)
    assert "Ready to merge" in html
    assert "this merge" in html
    assert plain_warnings(plan) == []
    base = tiny_llama()
    on_disk(models / "uneven", base, {"small": 0.005, "large": 0.1})
    warnings = plain_warnings(session.inspect("uneven/base", ["uneven/small", "uneven/large"], "full"))
    assert any("Choose the recommended line" in warning for warning in warnings)
    assert any("stays at the base" in warning and "--line" not in warning for warning in warnings)


def test_pasted_prompts():
    text = "[a]\none\ntwo\n\nthree\n[b]\n\nfour\n"
    assert read_pasted(text, ["a", "b"]) == {"a": ["one\ntwo", "three"], "b": ["four"]}
    assert read_pasted("one\n\ntwo", ["only"]) == {"only": ["one", "two"]}
    assert read_pasted(pasted(demo_prompts()), list(demo_prompts())) == demo_prompts()
    with pytest.raises(CoramError, match="whose prompt"):
        read_pasted("one", ["a", "b"])
    with pytest.raises(CoramError, match="no prompts yet"):
        read_pasted(" \n", ["a", "b"])


def test_calibration_replaces_the_merge(merged):
    job = merged.start_calibration("[math]\n1+1=\n\n2+2=\n\n[code]\nabc\n\nxyz", "lambda", True)
    assert job.wait(120)
    assert job.state == "done", job.error
    assert merged.report.lam_source == "calibrated"
    assert merged.merged().report.lam == merged.report.lam


def test_saving_keeps_the_edited_card_and_inputs(models, merged):
    card = writing.card_text(merged) + "\nWritten by hand.\n"
    writing.save(merged, "saved", card, adapter=False)
    assert "Written by hand." in (models / "saved" / "README.md").read_text()
    state = merged.merged().model.state_dict()
    saved = tensors_of(models / "saved")
    assert all(torch.equal(state[name], tensor) for name, tensor in saved.items())
    with pytest.raises(CoramError, match="exists"):
        writing.save(merged, "saved", card, adapter=False)
    writing.save(merged, "saved", card, adapter=False, overwrite=True)
    with pytest.raises(CoramError, match="not a merge"):
        writing.save(merged, "base", card, adapter=False, overwrite=True)


def test_an_adapter_gets_the_edited_card_and_keeps_its_own_metadata(models, merged):
    card = writing.card_text(merged).replace("---\n", "---\nlanguage: en\n", 1) + "\nWritten by hand.\n"
    writing.save(merged, "saved-adapter", card, adapter=True)
    saved = ModelCard.load(models / "saved-adapter" / "README.md")
    assert (saved.data.language, saved.data.library_name, saved.data.base_model_relation) == (
        "en",
        "peft",
        "adapter",
    )
    assert saved.text.rstrip().endswith("Written by hand.")
    assert "as a LoRA adapter" in saved.text
    assert saved.text.count("<!-- coram: begin -->") == 1
    retitled = card.replace("# A merge of math, code", "# My merge")
    writing.save(merged, "retitled", retitled, adapter=True)
    assert "\n# My merge\n" in (models / "retitled" / "README.md").read_text()
    with pytest.raises(CoramError, match="must be YAML"):
        writing.save(merged, "broken", card.replace("language: en", "language: [en"), adapter=True)
    assert not (models / "broken").exists()


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"a": 0.01, "b": 0.2}, "choose the recommended way to merge"),
        ({"a": 0.01, "b": 0.05}, "move lambda after merging"),
        ({"a": 0.01, "b": 1.5}, "choose the base"),
    ],
)
def test_the_verdict_speaks_of_the_studio(session, sizes, says):
    D = max(sizes.values()) / min(sizes.values())
    html = plan_view(replace(session.plan, relative_updates=sizes, dispersion=D, lam=1.5), 7.5)
    said = re.search(r'class="verdict[^>]*>(.*?)</p>', html, re.S)[1]
    assert says in said
    assert "--" not in said
    assert "coram-hf" not in said


def test_the_report_has_the_lambda_of_the_merge(models):
    session = Session(Roots([models]))
    session.inspect("base", ["math", "code"], "recommended")
    assert session.start_merge().wait(60)
    for lam in (session.report.lam, 0.625):
        session.rescale(lam)
        assert f"Ready to merge with lambda {lam:.4g}" in writing.report_page(session)


def test_a_push_needs_a_login_and_never_shows_the_token(merged, monkeypatch):
    actions = Actions(merged.roots)
    actions.session = merged
    monkeypatch.setattr("coram_hf.studio.writing.get_token", lambda: None)
    assert "not logged in" in actions.push("me/merge", "", False, True)
    monkeypatch.setattr("coram_hf.studio.writing.get_token", lambda: TOKEN)

    def refuse(*_, **__):
        raise CoramError(f"401 for {TOKEN}")

    monkeypatch.setattr("coram_hf.studio.writing.push_folder", refuse)
    said = actions.push("me/merge", "", False, True)
    assert "401 for ***" in said
    assert TOKEN not in said


def test_what_is_pushed_is_whole_and_has_the_card(merged, monkeypatch):
    """`push_folder` itself is tested on a Hub of its own; here it gets a folder that it would accept."""
    seen = {}

    def receive(folder, repository, *, private):
        seen.update(report=check_whole(folder), card=(folder / "README.md").read_text(), private=private)
        return f"https://hub/{repository}"

    monkeypatch.setattr("coram_hf.studio.writing.get_token", lambda: TOKEN)
    monkeypatch.setattr("coram_hf.studio.writing.push_folder", receive)
    card = writing.card_text(merged) + "\nBy hand.\n"
    assert writing.push(merged, " me/merge ", card, adapter=False, private=True) == "https://hub/me/merge"
    assert "By hand." in seen["card"]
    assert seen["private"]
    assert seen["report"].lam == merged.report.lam
    writing.push(merged, "me/adapter", "", adapter=True, private=False)
    assert seen["report"].adapter["type"] == "LORA"
