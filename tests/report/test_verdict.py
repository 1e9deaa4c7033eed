"""The sentence that opens the report."""

import pytest
from helpers.models import fine_tuned, tiny_llama

from coram_hf.report.diagnostics import diagnose
from coram_hf.report.page import DETAILS, render_page
from coram_hf.report.verdict import verdict


def numbers(sizes, lam=1.6, threshold=7.5):
    low, high = min(sizes.values()), max(sizes.values())
    D = high / low if low else "inf"
    return {"relative_updates": sizes, "D": D, "lam": lam, "threshold": threshold}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            numbers({"a": 0.02, "b": 0.04}),
            ["Ready to merge with lambda 1.6: 2 experts of similar size", "2 times"],
        ),
        (numbers({"a": 0.02}), ["Ready to merge with lambda 1.6: one expert"]),
        (numbers({"a": 0.02, "b": 0.03}, lam=None), ["a lambda that is measured while merging"]),
        (numbers({"a": 0.02, "b": 0.1}), ["Ready to merge", "5 times", "coram-hf sweep"]),
        (numbers({"a": 0.02, "b": 0.2}), ["Uneven: the largest update is 10 times", "--balance root"]),
        (numbers({"a": 0.02, "b": 0.0}), ["Not ready: expert b equals the base"]),
        (numbers({"a": 0.9, "b": 1.2}), ["Not ready: experts a, b differ", "--bases"]),
    ],
)
def test_one_sentence(found, words):
    text = verdict(found)
    assert all(word in text for word in words)
    assert text.endswith(".")
    assert text.count(". ") == 0


def test_the_page_opens_with_it():
    base = tiny_llama()
    found = diagnose(base, {"a": fine_tuned(base, 0.02, 0), "b": fine_tuned(base, 0.03, 1)}, progress=False)
    page = render_page(found)
    sentence = verdict(found["dispersion"])
    assert sentence.startswith("Ready to merge with lambda")
    assert page.index(sentence) < page.index('class="tile"')
    for name, when in DETAILS.items():
        section = page[page.index(f'<section id="{name}">') :].partition("</section>")[0]
        assert f"<details><summary>{when}</summary>" in section
    glance = page[page.index('<section id="summary">') :].partition("</section>")[0]
    assert "cancellation" not in glance
    assert "condition" not in glance
