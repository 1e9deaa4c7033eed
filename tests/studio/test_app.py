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
from helpers.models import tiny_llama, tiny_tokenizer
from helpers.studio import Walk

pytest.importorskip("gradio", reason="the extra `studio` is not installed")

from coram_hf.report import MergeReport
from coram_hf.studio import run_studio

SHOTS = os.environ.get("CORAM_SCREENSHOTS")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("studio")
    on_disk(folder, tiny_llama(eos_token_id=1), {"math": 0.05, "code": 0.06}, tokenizer=tiny_tokenizer())
    return folder


@pytest.fixture(scope="module")
def address(root):
    return run_studio([root], block=False)


@pytest.fixture(scope="module")
def browser():
    with Browser() as found:
        yield found


def assert_local(browser, address):
    """Every request went to the studio itself, and there are no errors; Gradio itself warns."""
    own = urlsplit(address).netloc
    assert own.startswith("127.0.0.1:")
    requests = [urlsplit(request) for request in browser.requests]
    assert len(requests) > 10
    assert {
        found.geturl()
        for found in requests
        if found.scheme not in ("data", "blob", "about") and found.netloc != own
    } == set()
    warnings = [found for found in browser.complaints if found.get("type") == "warning"]
    assert [found for found in browser.complaints if found not in warnings] == []


@pytest.mark.slow
def test_inspect_merge_slide_chat_report_save(browser, root, address):
    walk = Walk(browser, address)
    walk.pick("#base", "base")
    walk.pick("#experts", "math")
    walk.pick("#experts", "code")
    plan = walk.inspect()
    assert "Ready to merge" in plan
    assert "this merge" in plan
    assert "Merged 2 experts at lambda" in walk.merge()

    walk.tab("Try it")
    browser.until("document.querySelector('#expert input').value === 'math'")
    base, _, merge = walk.ask("1+1=")
    walk.slide(0)
    browser.until("document.querySelector('#answers .merge h4').innerText.includes('lambda 0')")
    assert walk.answers() == [base, walk.answers()[1], base]
    walk.slide(1.5)
    browser.until("document.querySelector('#answers .merge h4').innerText.includes('lambda 1.5')")
    assert isinstance(merge, str)

    walk.tab("Report")
    browser.click("#make-report")
    browser.until("!!document.querySelector('#page iframe')")

    walk.tab("Save")
    assert "Saved the model" in walk.save("by-hand")
    report = MergeReport.load(root / "by-hand")
    assert (report.lam, report.n_experts, report.lam_source) == (1.5, 2, "given")
    assert tensors_of(root / "by-hand").keys() == tensors_of(root / "base").keys()
    assert "refused" in walk.save("../outside")
    assert not (root.parent / "outside").exists()
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
    browser.click("#demo")
    walk.seen("#progress", "Five adapters")
    walk.inspect()
    walk.shot("plan")
    browser.click("#merge")
    walk.seen("#progress", "Merging")
    walk.seen("#progress", "Merged")
    walk.shot("merge", 400)
    walk.tab("Try it")
    for question in ("Request", "Name", "24h"):
        browser.click("#examples button", question)
        browser.until(
            f"document.querySelector('#answers .question')?.innerText.startsWith('{question}')", 200
        )
    walk.shot("try")
    walk.tab("Calibrate")
    walk.seen("#calibrate", "Calibrate")
    walk.shot("calibrate")
    walk.tab("Save")
    walk.shot("save")
    assert_local(browser, address)
