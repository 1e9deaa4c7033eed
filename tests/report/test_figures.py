"""Figures come out whatever the numbers: a damaged weight makes D as large as a number can be."""

import copy
import math
import re
from dataclasses import replace

import pytest
from helpers.models import fine_tuned, tiny_llama
from PIL import Image

from coram_hf import CoramMerger
from coram_hf.report import charts
from coram_hf.report.diagnostic_figures import FIGURES, draw_figures
from coram_hf.report.diagnostics import diagnose
from coram_hf.report.figures import draw_updates
from coram_hf.report.page import render_page, shapes

DISPERSIONS = (1.0, 1e4, 1e300, math.inf)
SIZES = ((0.02, 0.03), (1e-300, 1e-299), (1e-160, 1e150), (1e150, 1e150), (5e-324, 1.7e308), (0.0, 1e-3))


@pytest.fixture(scope="module")
def models():
    base = tiny_llama()
    return base, {"math": fine_tuned(base, 0.02, 0), "code": fine_tuned(base, 0.03, 1)}


@pytest.fixture(scope="module")
def report(models):
    return CoramMerger(*models, progress=False).merge().report


@pytest.fixture(scope="module")
def numbers(models):
    return diagnose(*models, merged={"merged": models[1]["math"]}, progress=False)


def plain(value):
    """A number as `diagnose` writes it."""
    return "inf" if math.isinf(value) else value


def damaged(numbers, D, sizes=(0.02, 0.03)):
    """The numbers of a merge with another D, and other sizes of the experts' updates."""
    found = copy.deepcopy(numbers)
    found["dispersion"] |= {"D": plain(D), "kappa": None if math.isinf(D) else 0.5}
    relative = dict(zip(found["models"]["experts"], sizes, strict=True))
    found["dispersion"]["relative_updates"] = relative
    for at in found["matrices"].values():
        at["relative_updates"] = dict(relative)
    return found


def check_png(path):
    with Image.open(path) as image:
        assert max(image.size) < 2000
        assert len(image.convert("RGB").getcolors(1 << 24)) > 10


def check_page(text):
    drawn = re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.DOTALL)
    shapes_of_page = re.findall(r"<(?:rect|line|circle|path|polyline|text|i)\b[^>]*>", drawn)
    assert len(shapes_of_page) > 100
    assert not [shape for shape in shapes_of_page if "nan" in shape or "inf" in shape]


@pytest.mark.parametrize("D", DISPERSIONS)
def test_every_figure_survives_any_dispersion(report, numbers, tmp_path, D):
    check_png(draw_updates(replace(report, dispersion=D), tmp_path))
    for path in draw_figures(damaged(numbers, D), tmp_path):
        check_png(path)
    page = render_page(damaged(numbers, D))
    check_page(page)
    assert f"D {D:.4g}, kappa" in page or math.isinf(D)


@pytest.mark.parametrize("sizes", SIZES)
def test_every_figure_survives_any_update_sizes(report, numbers, tmp_path, sizes):
    updates = dict(zip(report.relative_updates, sizes, strict=True))
    check_png(draw_updates(replace(report, relative_updates=updates), tmp_path))
    assert len(draw_figures(damaged(numbers, 3.0, sizes), tmp_path)) == len(FIGURES)
    check_page(render_page(damaged(numbers, 3.0, sizes)))


def test_every_figure_survives_infinite_numbers_and_conditions(numbers, tmp_path):
    found = damaged(numbers, 3.0)
    found["contraction"]["coefficients"] |= {"energy_ratio": "inf", "norm_matching": 1e300}
    for at in found["matrices"].values():
        at |= {"c_rms": "inf", "retention": {"merged": "inf"}, "relative_updates": {"math": "inf", "code": 1}}
    for at in found["audit"]["condition"].values():
        at["histogram"]["edges"] = [10.0 * i for i in range(len(at["histogram"]["edges"]) - 1)] + [308.9]
    draw_figures(found, tmp_path)
    page = render_page(found)
    check_page(page)
    assert "q_proj.weight: inf" in page


@pytest.mark.parametrize("threshold", [1e-300, 7.5, 50.0, 1e300])
def test_every_figure_survives_any_threshold(report, numbers, tmp_path, threshold):
    config = {**report.config, "dispersion_threshold": threshold}
    check_png(draw_updates(replace(report, config=config), tmp_path))
    found = damaged(numbers, 3.0)
    found["dispersion"]["threshold"] = threshold
    draw_figures(found, tmp_path)
    check_page(render_page(found))


@pytest.mark.parametrize("D", [1.0, 3.0, 16.0, 17.0, 99.0, 999.0])
def test_ticks_of_ordinary_dispersions(D):
    decades = 2 if D < 100 else 3
    assert charts.dispersion_ticks(D) == [d * 10**p for p in range(decades) for d in (1, 2, 5)]


def test_what_lies_beyond_the_axis_says_so():
    assert charts.dispersion_ticks(charts.on_axis(1e300)) == [1, 10, 100, 1000, 10**4, 10**5]
    assert charts.this_merge(999.0) == "this merge"
    assert charts.this_merge(1e30) == "this merge, D = 1e+30"
    assert [charts.drawable(x) for x in ("inf", None, math.nan, 0.0, -2.0, 1e-200)] == [
        1e150, None, None, 0.0, -2.0, 1e-150,
    ]  # fmt: skip


def test_png_and_svg_show_the_same_numbers(numbers):
    """The grid of a PNG and the cells of the page are one heat map."""
    for maps, key in (
        (charts.update_maps(numbers), "relative_updates"),
        (charts.retention_maps(numbers), "retention"),
    ):
        for found in maps:
            cells = shapes.shaded(found, lambda value: ("heat", 1)).cells
            assert len(cells) == len(numbers["matrices"])
            for (name, at), cell in zip(numbers["matrices"].items(), cells, strict=True):
                value = at[key][found.title]
                assert found.grid()[cell.y][cell.x] == value
                assert (found.layers[cell.x], found.modules[cell.y]) == (at["layer"], at["module"])
                assert cell.text == f"{name}: {value:.4g}"
