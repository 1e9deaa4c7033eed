"""The studio in a real browser: inspect, merge, slide, chat, report, save; nothing leaves 127.0.0.1.

CORAM_SCREENSHOTS=folder also walks through the demo and leaves the README's screenshots there.
"""

import os
import urllib.error
import urllib.request
from urllib.parse import urlsplit

import pytest
from helpers.browser import CHROMIUM, Browser
from helpers.command import coram_hf
from helpers.folders import on_disk, tensors_of
from helpers.hub_server import TOKEN
from helpers.models import fine_tuned, tiny_llama, tiny_tokenizer
from helpers.studio import Walk
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("gradio", reason="the extra `studio` is not installed")

from coram_hf import CoramConfig, CoramMerger
from coram_hf.report import MergeReport
from coram_hf.studio import run_studio

SHOTS = os.environ.get("CORAM_SCREENSHOTS")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("studio")
    base = tiny_llama(eos_token_id=1)
    experts = {"math": fine_tuned(base, 0.2, 1, "proj"), "law": fine_tuned(base, 0.25, 2, "proj")}
    on_disk(folder, base, experts, tokenizer=tiny_tokenizer())
    return folder


@pytest.fixture(scope="module")
def address(root):
    return run_studio([root], block=False)


@pytest.fixture(scope="module")
def browser():
    with Browser() as found:
        yield found


def answer_of(folder):
    """One line that a model on disk says to "1+1=", without any code of the studio."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder.parent / "base")
    tokens = tokenizer("1+1=", return_tensors="pt")
    said = model.generate(**tokens, max_new_tokens=48, do_sample=False)[0, tokens.input_ids.shape[1] :]
    line = tokenizer.decode(said, skip_special_tokens=True).lstrip().partition("\n")[0]
    return " ".join(line.split()) or "(nothing)"


def assert_local(browser, address):
    """Every request went to the studio itself, and the console is empty: no errors, no warnings."""
    own = urlsplit(address).netloc
    assert own.startswith("127.0.0.1:")
    requests = [urlsplit(request) for request in browser.requests]
    assert len(requests) > 10
    assert {
        found.geturl()
        for found in requests
        if found.scheme not in ("data", "blob", "about") and found.netloc != own
    } == set()
    assert browser.complaints == []


def test_inspect_merge_slide_chat_report_save(browser, root, address):
    walk = Walk(browser, address)
    walk.pick("#base", "base")
    walk.pick("#experts", "math")
    walk.pick("#experts", "law")
    plan = walk.inspect()
    assert "Ready to merge" in plan
    assert "this merge" in plan
    assert "Merged 2 experts at lambda" in walk.merge()
    CoramMerger(root / "base", [root / "math", root / "law"], CoramConfig.recommended()).merge_to(
        root / "merged"
    )

    walk.tab("Try it")
    browser.until("document.querySelector('#expert input').value === 'math'")
    base, expert, merge = walk.ask("1+1=")
    assert len({base, expert, merge}) == 3
    assert (base, expert, merge) == tuple(answer_of(root / name) for name in ("base", "math", "merged"))
    walk.slide(0)
    assert walk.answers() == [base, expert, base]
    lam = walk.drag()
    assert 0 < lam < walk.widest()
    walk.slide(1.5)
    shown = walk.answers()[2]

    walk.tab("Report")
    browser.click("#make-report")
    browser.until("!!document.querySelector('#page iframe')")

    walk.tab("Save")
    assert "Saved the model" in walk.save("by-hand")
    report = MergeReport.load(root / "by-hand")
    assert (report.lam, report.n_experts, report.lam_source) == (1.5, 2, "given")
    assert tensors_of(root / "by-hand").keys() == tensors_of(root / "base").keys()
    assert answer_of(root / "by-hand") == shown
    assert "refused" in walk.save("../outside")
    assert not (root.parent / "outside").exists()
    assert_local(browser, address)


def test_calibrate_save_an_adapter_and_push(browser, root, address, hub):
    walk = Walk(browser, address)
    walk.pick("#base", "base")
    walk.pick("#experts", "math")
    walk.pick("#experts", "law")
    walk.merge()
    walk.tab("Calibrate")
    browser.until("document.querySelector('#prompts textarea').value.startsWith('[math]')")
    walk.fill("#prompts textarea", "[math]\n1+1=\n\n2+2=\n\n[law]\nabc\n\nxyz")
    browser.click("#calibrate")
    walk.seen("#calibration", "Calibrated on 4 prompts")

    walk.tab("Save")
    walk.edit_card("Written by hand.")
    assert "Saved the model" in walk.save("calibrated")
    browser.click("#adapter input")
    assert "Saved an adapter of the base" in walk.save("adapter")
    for folder in ("calibrated", "adapter"):
        assert MergeReport.load(root / folder).lam_source == "calibrated"
        assert "Written by hand." in (root / folder / "README.md").read_text()
    base, model = tensors_of(root / "base"), tensors_of(root / "calibrated")
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(root / "base"), root / "adapter"
    ).merge_and_unload()
    moved = [name for name in base if not base[name].equal(model[name])]
    assert len(moved) > 5
    for name in moved:
        lost = adapted.state_dict()[name] - model[name]
        assert lost.norm() < 0.11 * (model[name] - base[name]).norm()

    assert f"Pushed: {hub.address}/me/adapter/commit/" in walk.push("me/adapter")
    files = hub.files("me/adapter")
    assert files["adapter_model.safetensors"] == (root / "adapter" / "adapter_model.safetensors").read_bytes()
    assert b"Written by hand." in files["README.md"]
    assert "me/adapter" in hub.private
    hub.fail.append(("POST", "/repos/create", 403))
    assert "cannot push to 'me/other'" in walk.push("me/other")
    assert TOKEN not in browser.run("document.documentElement.outerHTML")
    assert not [name for name, content in files.items() if TOKEN.encode() in content]
    assert_local(browser, address)


def test_a_path_outside_is_refused_and_no_file_is_served(browser, root, address):
    walk = Walk(browser, address)
    walk.type("#base", "/etc")
    walk.pick("#experts", "math")
    browser.click("#inspect")
    assert "refused" in walk.seen("#plan", "refused")
    for path in ("/etc/passwd", root / "base" / "config.json"):
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(f"{address}gradio_api/file={path}")
        assert error.value.code in (403, 404)


def test_the_command_refuses_a_root_that_is_no_folder(tmp_path):
    run = coram_hf("studio", "--root", tmp_path / "nowhere", "--no-browser")
    assert run.returncode == 2
    assert "is not a folder" in run.stderr


@pytest.mark.skipif(not SHOTS, reason="set CORAM_SCREENSHOTS to a folder")
def test_the_demo_for_the_readme(browser, tmp_path_factory):
    root = tmp_path_factory.mktemp("demo")
    address = run_studio([root], block=False)
    walk = Walk(browser, address, SHOTS, patience=400)
    walk.load_demo()
    walk.inspect()
    walk.shot("plan")
    walk.merge()
    walk.tab("Try it")
    for question in ("Request", "Name", "24h"):
        browser.click("#examples button", question)
        browser.until(
            f"document.querySelector('#answers .question')?.innerText.startsWith('{question}')", walk.patience
        )
    walk.shot("try")
    walk.tab("Report")
    browser.click("#make-report")
    browser.until("!!document.querySelector('#page iframe')", walk.patience)
    walk.shot("report", (1100, 860))
    assert_local(browser, address)
