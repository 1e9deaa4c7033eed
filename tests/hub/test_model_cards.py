"""The example cards are those that the code writes now."""

import re

import pytest
from helpers.paths import ROOT
from huggingface_hub import ModelCard

from model_cards import write_cards

NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")


def assert_same_card(found, expected, name):
    """The same words, and the same numbers up to what another processor may make of them."""
    texts = [re.sub(r"^Made with .*$", "", text, flags=re.M) for text in (found, expected)]
    words, wanted = (NUMBER.split(text) for text in texts)
    assert words == wanted, f"{name}: run `make cards`"
    for number, value in zip(*(NUMBER.findall(text) for text in texts), strict=True):
        assert float(number) == pytest.approx(float(value), rel=0.02, abs=1e-5), f"{name}: run `make cards`"


def test_the_example_cards_are_up_to_date(tmp_path):
    write_cards(tmp_path)
    committed = {path.name for path in (ROOT / "model_cards").glob("*.md")}
    assert committed == {path.name for path in tmp_path.glob("*.md")}
    for path in tmp_path.glob("*.md"):
        assert_same_card(path.read_text(), (ROOT / "model_cards" / path.name).read_text(), path.name)
        assert ModelCard.load(path).data.library_name == "transformers"


def test_the_templates_are_those_of_the_package():
    for path in (ROOT / "model_cards" / "templates").iterdir():
        assert path.resolve().parent == ROOT / "coram_hf" / "hub"
