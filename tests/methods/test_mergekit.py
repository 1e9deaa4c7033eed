"""Agreement with mergekit's own output, where it is installed."""

import pytest
import torch
from helpers.folders import on_disk
from transformers import AutoModelForCausalLM

from coram_hf.baselines import merge

pytest.importorskip("mergekit", reason="mergekit is not installed: pip install 'coram-hf[mergekit]'")

CASES = {
    "linear": ("linear", {}, {"weight": 1.0}, {"normalize": True}),
    "task_arithmetic": (
        "task_arithmetic",
        {"scale": 0.4},
        {"weight": 0.4},
        {"normalize": False, "lambda": 1.0},
    ),
    "ties": ("ties", {"density": 0.2}, {"weight": 1.0, "density": 0.2}, {"normalize": True, "lambda": 1.0}),
    "ties, summed": (
        "ties",
        {"density": 0.3, "combine": "sum", "scale": 0.4},
        {"weight": 1.0, "density": 0.3},
        {"normalize": False, "lambda": 0.4},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_merge_by_mergekit(tmp_path, case):
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    method, parameters, of_model, of_merge = CASES[case]
    base, experts = on_disk(tmp_path, experts=(0.02, 0.04, 0.06))
    recipe = {
        "merge_method": method,
        "models": [{"model": str(tmp_path / name), "parameters": of_model} for name in experts],
        "parameters": of_merge,
        "dtype": "float32",
    }
    if method != "linear":
        recipe["base_model"] = str(tmp_path / "base")
    options = MergeOptions(copy_tokenizer=False, quiet=True, write_model_card=False)
    run_merge(MergeConfiguration.model_validate(recipe), str(tmp_path / "theirs"), options)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32).state_dict()
    ours = merge(base, experts, method, progress=False, **parameters).model.state_dict()
    assert theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-6)
