"""CoramConfig: validation, and the paper's lines both ways."""

import itertools

import numpy as np
import pytest

from coram_hf import CoramConfig

CORES = ("full", "lr", "nca", "nca+ave", "ca", "ca+ave")
MODES = ("mean", "energy", "variance", "owner", "margin")
RESIDUALS = ("ta", "ties", "tsvm")
DIAGNOSTIC = ("q", "s", "v", "qs", "sv")
GEOMETRY = [*CORES, *DIAGNOSTIC, *(f"SS({core},{mode})" for core, mode in itertools.product(CORES, MODES))]
DECORRELATED = [
    f"DEC({line}{how})" for line, how in itertools.product(GEOMETRY, ("", ",ridge", ",wudi", ",auto"))
]
ALONE = [*GEOMETRY, *DECORRELATED]
LINES = [*ALONE, *(f"{line}.{rp}" for line, rp in itertools.product(ALONE, RESIDUALS))]


@pytest.mark.parametrize("height", ["", " (h=16)", " (h=32)", " (h=64)"])
def test_every_line_round_trips(height):
    configs = {line + height: CoramConfig.from_line(line + height) for line in LINES}
    assert {line: config.line for line, config in configs.items()} == {line: line for line in configs}
    assert len(set(configs.values())) == len(LINES)


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("full", {}),
        ("lr", {"branch": "lr"}),
        ("nca", {"conflict": "nca"}),
        ("ca+ave", {"conflict": "ca+ave"}),
        ("nca+ave.tsvm", {"conflict": "nca+ave", "residual": "tsvm"}),
        ("lr.ta", {"branch": "lr", "residual": "ta"}),
        ("SS(lr,mean).ties", {"branch": "lr", "spread": "mean", "residual": "ties"}),
        ("SS(ca+ave,variance).ties", {"conflict": "ca+ave", "spread": "variance", "residual": "ties"}),
        ("SS(full,margin)", {"spread": "margin"}),
        ("full (h=16)", {"slice_height": 16}),
        (
            "SS( nca , owner ).ta(h=16)",
            {"conflict": "nca", "spread": "owner", "residual": "ta", "slice_height": 16},
        ),
        ("lr-nca", {"branch": "lr", "conflict": "nca"}),
        ("DEC(full)", {"decorrelate": "tsv"}),
        ("DEC( lr , tsv )", {"branch": "lr", "decorrelate": "tsv"}),
        ("DEC(full,ridge).ta (h=16)", {"decorrelate": "ridge", "residual": "ta", "slice_height": 16}),
        (
            "DEC(SS(nca,mean)).ties",
            {"conflict": "nca", "spread": "mean", "residual": "ties", "decorrelate": "tsv"},
        ),
        (
            "DEC( SS(lr-nca,owner) , ridge )",
            {"branch": "lr", "conflict": "nca", "spread": "owner", "decorrelate": "ridge"},
        ),
    ],
)
def test_lines_mean_what_the_paper_says(line, fields):
    assert CoramConfig.from_line(line) == CoramConfig(**fields)
    assert CoramConfig.from_line(CoramConfig(**fields).line) == CoramConfig(**fields)


def test_a_line_takes_further_options():
    config = CoramConfig.from_line("lr.ties", lam=2.6)
    assert (config.branch, config.residual, config.lam) == ("lr", "ties", 2.6)
    assert CoramConfig.from_line("full", slice_height=16, residual="ta").line == "full.ta (h=16)"
    with pytest.raises(ValueError, match=r"branch: already given by the line 'lr\.ties'"):
        CoramConfig.from_line("lr.ties", branch="full")


@pytest.mark.parametrize(
    ("line", "valid"),
    [
        ("", "nca"),
        (None, "SS(X,mode)"),
        ("ful", "full, lr"),
        ("SS(full)", "SS(X,mode)"),
        ("SS(full,median)", "'mean', 'energy', 'variance', 'owner', 'margin'"),
        ("full.tise", "'ta', 'ties', 'tsvm'"),
        ("SS(full,mean", "SS(X,mode)"),
        ("full (h=0)", "(h=N)"),
        ("full.ta.ta", "X.rp"),
        ("x-nca", "full, lr"),
        ("DEC(full,pca)", "'tsv', 'ridge', 'wudi', 'auto'"),
        ("DEC(full.ties)", "DEC(X)"),
        ("SS(DEC(full),mean)", "DEC(X)"),
        ("DEC(DEC(full))", "DEC(X)"),
        ("DEC()", "DEC(X)"),
    ],
)
def test_unreadable_lines_say_what_is_valid(line, valid):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        CoramConfig.from_line(line)
    assert valid in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"branch": "left"}, r"branch: unknown value 'left'; valid: 'full', 'lr', 'q'"),
        ({"branch": None}, "branch: unknown value None"),
        ({"conflict": "nca+avg"}, r"'nca\+ave', 'ca', 'ca\+ave', None"),
        ({"spread": "max"}, "'margin', None"),
        ({"residual": "dare"}, "'ta', 'ties', 'tsvm', None"),
        ({"scale": "sqrt"}, "'sqrt_n', 'c_rms'"),
        ({"balance": True}, "'damp', 'root', 'equal', 'auto', None"),
        ({"compute_dtype": "float16"}, "'float64', 'float32'"),
        ({"slice_height": 0}, "slice_height must be a positive integer, found 0"),
        ({"slice_height": 8.0}, r"found 8\.0"),
        ({"slice_height": True}, "found True"),
        ({"kappa": -1}, "kappa must be a finite number above 0, found -1"),
        ({"lam": float("nan")}, "lam must be a finite number, found nan"),
        ({"lam": "2"}, "found '2'"),
        ({"lambda_step": 0}, "lambda_step must be a finite number above 0 and at most 1, found 0"),
        ({"lambda_step": 10}, "at most 1, found 10"),
        ({"dispersion_threshold": None}, "dispersion_threshold must be a finite number above 0"),
        ({"weights": (1.0, [])}, "found an empty list"),
        ({"weights": (1.0, [{"filter": "mlp"}])}, "expected {filter"),
        ({"weights": (0.0, 0.0)}, "must not all be zero"),
        ({"weights": {"a": 1}}, "list of numbers"),
        ({"target_modules": "("}, "not a regular expression"),
        ({"target_modules": []}, "a regex or a list of names"),
        ({"target_modules": 5}, "a regex or a list of names"),
        ({"weights": (None, 1)}, "weights must be a finite number, found None"),
        ({"weights": 3}, "list of numbers"),
    ],
)
def test_bad_values_are_explained(fields, message):
    with pytest.raises(ValueError, match=message):
        CoramConfig(**fields)


def test_unknown_names_get_a_suggestion():
    with pytest.raises(ValueError, match="unknown CoramConfig option 'spred'; did you mean 'spread'"):
        CoramConfig.from_dict({"spred": "mean"})


def test_configs_survive_a_dict():
    config = CoramConfig.from_line(
        "SS(nca,owner).ta (h=16)", weights=[2, 1], target_modules=["q_proj"], lam=1.5
    )
    assert CoramConfig.from_dict(config.to_dict()) == config


def test_numpy_numbers_are_numbers():
    config = CoramConfig(slice_height=np.int64(16), weights=np.array([1, 3]), lam=np.float32(2))
    assert config.line == "full (h=16)"
    assert config.expert_weights(2) == (0.25, 0.75)


def test_weights_are_normalised_and_counted():
    assert CoramConfig(weights=(1, 3)).expert_weights(2) == (0.25, 0.75)
    assert CoramConfig().expert_weights(4) == (0.25,) * 4
    with pytest.raises(ValueError, match="found 2 for 3 experts"):
        CoramConfig(weights=(1, 3)).expert_weights(3)
