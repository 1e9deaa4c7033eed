"""mergekit's own output for a recipe, with the random draws of ours where its methods draw."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import peft
import pytest
import torch
import yaml
from helpers.adapters import adapted
from helpers.folders import on_disk
from helpers.models import fine_tuned, tiny_llama, tiny_tokenizer

from coram_hf.methods.pruning import draw
from coram_hf.methods.updates import Updates

RECIPES = Path(__file__).parent.parent / "data" / "mergekit"
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


def models_for_recipes(folder: Path) -> Path:
    """The models that the recipes of tests/data/mergekit name, as folders."""
    base = tiny_llama(num_hidden_layers=3)
    math = fine_tuned(base, 0.06, 1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], lora_alpha=16)
    experts = {
        "math": math,
        "code": fine_tuned(base, 0.1, 2),
        "chat": fine_tuned(base, 0.04, 3),
        "lora": adapted(base, config, 4),
        "lora-of-math": adapted(math, config, 5),
    }
    on_disk(folder, base, experts, tiny_tokenizer())
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    for name in ("math", "code", "chat"):
        tokenizer.save_pretrained(folder / name)
    return folder


def documents(path: Path) -> list[dict]:
    return list(yaml.safe_load_all(path.read_text()))


def merge_by_mergekit(path: Path, out: Path) -> None:
    """Run every document of a recipe, as `mergekit-multi` does; the last one goes to `out`."""
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    options = MergeOptions(
        copy_tokenizer=True, quiet=True, write_model_card=False, lora_merge_cache=str(out.parent / "loras")
    )
    results: dict[str, str] = {}
    for content in documents(path):
        name = content.pop("name", None) or content.pop("out_path", None)
        last = content == documents(path)[-1] or name == documents(path)[-1].get("out_path", 0)
        target = out if last else out.parent / "stages" / Path(name).name
        text = yaml.safe_dump(content)
        for known, folder in results.items():
            text = text.replace(f": {known}\n", f": {folder}\n")
        with our_draws():
            run_merge(MergeConfiguration.model_validate(yaml.safe_load(text)), str(target), options)
        results[str(name)] = str(target)


@contextmanager
def our_draws() -> Iterator[None]:
    """Let mergekit keep the entries that we keep: its random numbers are those of `draw`."""
    from mergekit.merge_methods import generalized_task_arithmetic as theirs

    merge, sparsify = theirs.GeneralizedTaskArithmeticMerge.merge_group, theirs.sparsify
    state = {"name": "", "expert": -1}

    def merge_group(self, group, /, **parameters):
        state.update(name=group.metadata.name, expert=-1)
        return merge(self, group, **parameters)

    def counted(tensor, **options):
        state["expert"] += 1
        return sparsify(tensor, **options)

    def bernoulli(chances):
        shape = chances.squeeze(0) if state["name"].endswith("norm.weight") else chances
        updates = Updates(shape, [], (), (), name=state["name"])
        return (draw(updates, state["expert"], 0).view(chances.shape) >= 1 - chances).to(chances.dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theirs.GeneralizedTaskArithmeticMerge, "merge_group", merge_group)
        patch.setattr(theirs, "sparsify", counted)
        patch.setattr(torch, "bernoulli", bernoulli)
        yield
