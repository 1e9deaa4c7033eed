"""The page, opened in a browser; the figures; the command that writes them."""

import copy
import json
import re

import pytest
from helpers.browser import CHROMIUM, Browser
from helpers.command import coram_hf
from helpers.folders import on_disk
from helpers.models import fine_tuned, tiny_llama
from helpers.paths import ROOT
from PIL import Image

from coram_hf import CoramMerger
from coram_hf.report.diagnostic_figures import FIGURES, draw_figures
from coram_hf.report.diagnostics import SECTIONS, diagnose
from coram_hf.report.page import SECTIONS as PARTS
from coram_hf.report.page import render_page
from coram_hf.report.verdict import verdict

SCREENSHOTS = ROOT / "build" / "screenshots"
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=document.title='owned'>"
NAMES = ["math", HOSTILE, "$\\frac{x}$ {{ 7 * 7 }} \u202e\x00\x1b[31m 'quoted\" & <b>", "long-" * 60]
browser_needed = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")


@pytest.fixture(scope="module")
def numbers():
    base = tiny_llama(num_hidden_layers=12, hidden_size=64)
    experts = {name: fine_tuned(base, 0.02 + 0.01 * i, i) for i, name in enumerate(NAMES)}
    merged = {"merged": fine_tuned(base, 0.01, 8), HOSTILE: fine_tuned(base, 0.05, 9)}
    return diagnose(base, experts, merged=merged, progress=False)


@pytest.fixture(scope="module")
def page(numbers, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_page(numbers), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser():
    with Browser() as found:
        yield found


@browser_needed
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_is_quiet_whole_and_fits(browser, page, width, scheme):
    browser.look_like(width, 900, scheme)
    browser.open(page.as_uri())
    assert browser.complaints == []
    assert browser.requests == [page.as_uri()]
    assert browser.run("document.title") == "full - merge report"
    assert browser.run("document.documentElement.scrollWidth") <= width
    found = browser.run("[...document.querySelectorAll('section')].map(s => s.id)")
    assert found == list(PARTS)
    assert browser.run("[...document.querySelectorAll('section')].every(s => s.offsetHeight > 60)")
    assert browser.run("document.querySelectorAll('rect.cell').length") == 12 * 7 * (4 + 2 + 1)
    assert browser.run("document.querySelector('rect.cell title').textContent").startswith("model.layers.0.")
    assert browser.run("document.querySelectorAll('path.here').length") == 1
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    browser.screenshot(SCREENSHOTS / f"report-{width}-{scheme}.png")
    browser.run("scrollTo(0, 1e9)")
    assert browser.complaints == []


def background(browser):
    return browser.run("getComputedStyle(document.body).backgroundColor")


@browser_needed
def test_the_scheme_is_the_reader_s(browser, page):
    browser.look_like(800, 900, "light")
    browser.open(page.as_uri())
    light = background(browser)
    shade = "getComputedStyle(document.querySelectorAll('rect.cell')[300]).fill"
    pale = browser.run(shade)
    browser.run("document.getElementById('scheme').click()")
    dark = background(browser)
    assert (sum(map(int, re.findall(r"\d+", light))), sum(map(int, re.findall(r"\d+", dark)))) == (
        pytest.approx(750, abs=20),
        pytest.approx(60, abs=40),
    )
    assert browser.run(shade) != pale
    browser.run("document.getElementById('scheme').click()")
    assert background(browser) == light


@browser_needed
def test_tables_sort_by_number_and_by_name(browser, page, numbers):
    browser.look_like(1280)
    browser.open(page.as_uri())

    def column(i):
        return browser.run(
            f"[...document.querySelectorAll('#matrices tbody tr')].map(r => r.children[{i}].dataset.value)"
        )

    def click(i):
        browser.run(f"document.querySelectorAll('#matrices th button')[{i}].click()")
        return browser.run(f"document.querySelectorAll('#matrices th')[{i}].getAttribute('aria-sort')")

    names = list(numbers["matrices"])
    assert column(0) == names
    values = [at["relative_updates"]["math"] for at in numbers["matrices"].values()]
    assert click(1) == "ascending"
    assert [float(v) for v in column(1)] == sorted(values)
    assert click(1) == "descending"
    assert [float(v) for v in column(1)] == sorted(values, reverse=True)
    assert click(0) == "ascending"
    assert column(0) == sorted(names)
    assert browser.run("document.querySelectorAll('#matrices th[aria-sort]').length") == 1
    layers = (
        "[...document.querySelectorAll('#conflict table')[1].rows].slice(1).map(r => r.cells[0].textContent)"
    )
    browser.run("document.querySelectorAll('#conflict table')[1].querySelector('button').click()")
    assert browser.run(layers) == [str(i) for i in range(12)]


@browser_needed
def test_hostile_names_are_text(browser, page, numbers):
    browser.open(page.as_uri())
    assert browser.run("document.querySelectorAll('img, b:not(.tile b), script:not([id])').length") == 1
    assert browser.run("document.querySelectorAll('script').length") == 2
    shown = browser.run("[...document.querySelectorAll('#updates h3')].map(h => h.textContent)")
    assert shown[0] == "math"
    assert shown[1] == HOSTILE[:77] + "..."
    assert "{{ 7 * 7 }}" in shown[2]
    assert "\u202e" not in shown[2]
    assert len(shown[3]) == 80
    embedded = browser.run("document.getElementById('numbers').textContent")
    assert json.loads(embedded) == json.loads(json.dumps(numbers))


def test_the_page_needs_no_other_file(page):
    text = page.read_text(encoding="utf-8")
    assert HOSTILE not in text
    assert text.count("</script>") == 2
    addresses = re.findall(r'<[^<>]*\b(?:src|href)="([^"]*)"', text)
    assert addresses
    assert all(address.startswith(("data:,", "#")) for address in addresses)
    assert "://" not in text


def with_other_data(numbers):
    """Numbers of the same shape that every figure must show in another way."""
    other = copy.deepcopy(numbers)
    matrix = other["matrices"]["model.layers.5.self_attn.k_proj.weight"]
    for key in ("relative_updates", "retention"):
        matrix[key] = {name: 1.5 * value for name, value in matrix[key].items()}
    matrix["conflict"] /= 2
    dispersion = other["dispersion"]
    dispersion["D"] *= 2
    dispersion["relative_updates"]["math"] *= 2
    angles = other["audit"]["rotation_log"]["angles"]
    angles["counts"] = angles["counts"][::-1]
    for way in other["audit"]["condition"].values():
        way["histogram"]["counts"][0] += 500
    return other


def pixels(path):
    with Image.open(path) as image:
        return image.convert("RGB").tobytes()


def test_figures_show_their_numbers(numbers, tmp_path):
    paths = draw_figures(numbers, tmp_path / "figures")
    assert [path.stem for path in paths] == list(FIGURES)
    others = draw_figures(with_other_data(numbers), tmp_path / "others")
    unmoved = [a.stem for a, b in zip(paths, others, strict=True) if pixels(a) == pixels(b)]
    assert not unmoved


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return on_disk(tmp_path_factory.mktemp("suite"), experts={"math": 0.02, "code": 0.03}).base.parent


def test_the_command_writes_page_numbers_and_figures(folders, tmp_path):
    run = coram_hf(
        "report", folders / "base", folders / "math", f"coder={folders / 'code'}",
        "--merged", folders / "code", "--merged", f"two={folders / 'math'}",
        "-o", tmp_path / "new" / "report.html",
        "--json", tmp_path / "numbers.json", "--figures", tmp_path / "figures", "--line", "SS(nca,mean)",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    text = (tmp_path / "new" / "report.html").read_text(encoding="utf-8")
    assert all(f'id="{part}"' in text for part in PARTS)
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert set(SECTIONS) <= set(numbers)
    assert set(numbers["branches"]["lr"]) == {"norm_ratio", "relative", "cosine"}
    assert list(numbers["retention"]) == ["code", "two"]
    assert numbers["models"]["experts"] == ["math", "coder"]
    assert verdict(numbers["dispersion"])[:40] in run.stdout
    assert set(numbers["audit"]["condition"]) == {"contiguous", "mean"}
    assert len(list((tmp_path / "figures").glob("*.png"))) == len(FIGURES)
    assert not list(tmp_path.rglob(".*"))
    assert numbers["cost"] == {}


def test_the_page_has_the_cost_of_merges(folders, tmp_path):
    experts = {"math": folders / "math", "code": folders / "code"}
    report = CoramMerger(folders / "base", experts, progress=False).merge_to(tmp_path / "made")
    numbers = diagnose(folders / "base", experts, merged={"made": tmp_path / "made"}, progress=False)
    lines = numbers["cost"]["made"]
    assert lines["peak memory"] == f"{report.cost['peak_memory'] / 2**20:,.0f} MB"
    text = render_page(numbers)
    assert "Cost of made" in text
    assert all(value in text for value in lines.values())


@pytest.mark.parametrize("section", SECTIONS)
def test_each_section_is_a_command(folders, tmp_path, section):
    more = {"retention": ["--merged", folders / "code"], "decorrelation": ["--decorrelate", "tsv"]}
    out = tmp_path / "numbers.json"
    run = coram_hf(
        "report",
        section,
        folders / "base",
        folders / "math",
        folders / "code",
        "--json",
        out,
        *more.get(section, ()),
    )
    assert run.returncode == 0, run.stderr
    numbers = json.loads(out.read_text())
    assert set(numbers) & set(SECTIONS) == {section}
    value = {
        "dispersion": lambda n: n["relative_updates"]["math"],
        "threshold": lambda n: n["12"]["lam"],
        "contraction": lambda n: n["c_rms"],
        "decorrelation": lambda n: n["overlap_before"],
        "branches": lambda n: n["lr"]["cosine"],
        "audit": lambda n: n["condition"]["variance"]["p95"],
        "ownership": lambda n: n["sign_agreement"]["math"]["code"],
        "conflict": lambda n: n["by_layer"]["1"],
        "retention": lambda n: n["code"]["mlp"],
    }[section](numbers[section])
    assert f"{value:.4g}" in run.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["base"], "at least one expert"),
        (["audit"], "at least one expert"),
        (["retention", "base", "math"], "--merged"),
        (["base", "math", "--method", "ties"], "--merged"),
        (["base", "math", "-o", "base"], "is a folder"),
        (["base", "math", "--json", "base/config.json/x"], "not a folder"),
        (["base", "math", "--merged", "nowhere/"], "nowhere"),
        (["audit", "base", "math", "--merged", "code"], "No such option"),
    ],
)
def test_bad_commands_are_one_line(folders, monkeypatch, arguments, message):
    monkeypatch.chdir(folders)
    run = coram_hf("report", *arguments)
    assert run.returncode == 2
    assert message in run.stderr
    assert "Traceback" not in run.stderr
    assert not (folders / "report.html").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        "--merged code --merged two=math --json {out} base math",
        "--json {out} base math --merged code --merged two=math",
    ],
)
def test_merged_models_may_be_named_in_any_order(folders, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(folders)
    out = tmp_path / "numbers.json"
    run = coram_hf("report", "retention", *arguments.format(out=out).split())
    assert run.returncode == 0, run.stderr
    numbers = json.loads(out.read_text())
    assert numbers["models"]["experts"] == ["math"]
    assert list(numbers["retention"]) == ["code", "two"]


def test_help_tells_both_ways():
    text = " ".join(coram_hf("report", "--help").stdout.split())
    assert "report BASE EXPERT... -o report.html" in text
    assert all(section in text for section in SECTIONS)
