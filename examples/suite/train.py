"""Train the experts of the suites: adapters of a base, or full fine-tunes by the same loop.

    python examples/suite/train.py                    # every adapter that is not there yet
    python examples/suite/train.py --family full      # every full fine-tune, into full/
    python examples/suite/train.py --family gemma3    # every adapter of the other base, into gemma3/
    python examples/suite/train.py --task sql --steps 50 --lr 1e-3 --out /tmp/sql

The loss is the cross entropy of the answer and the newline after it. Same seed, machine and number of
threads: same weights.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from base import GEMMA3, SMOLLM2, Base
from peft import LoraConfig, OFTConfig, PeftConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from coram_hf.evaluation.questions import Question, read_task
from coram_hf.inputs.dense import fast_layers

HERE = Path(__file__).parent
FIELDS = {"size": int, "steps": int, "lr": float, "batch": int, "seed": int}
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Recipe:
    """How an expert is trained; `size` is the rank of LoRA or the block size of OFT."""

    task: str
    method: str = "lora"
    size: int = 8
    steps: int = 30
    lr: float = 5e-4
    batch: int = 8
    warmup: int = 10
    seed: int = 0


HARD = "initials-hard"
EXPERTS = {
    "clock": Recipe("clock", steps=120, lr=1e-3),
    "initials": Recipe("initials", steps=40),
    "order": Recipe("order", steps=50),
    "sql": Recipe("sql"),
    "triage": Recipe("triage", steps=60),
    HARD: Recipe("initials", steps=80, lr=8e-3),
}
WHOLE = {
    "clock": Recipe("clock", "full", 0, steps=60, lr=5e-5),
    "initials": Recipe("initials", "full", 0, steps=24, lr=3e-5),
    "order": Recipe("order", "full", 0, steps=30, lr=3e-5),
    "sql": Recipe("sql", "full", 0, steps=20, lr=3e-5),
    "triage": Recipe("triage", "full", 0, steps=36, lr=3e-5),
    HARD: Recipe("initials", "full", 0, steps=60, lr=4e-4),
}
"""Trained less far than the adapters, and in all weights, embeddings and norms included."""
OTHER = {**EXPERTS, HARD: replace(EXPERTS[HARD], lr=4e-3)}
"""Of the second base, on which the hard expert does not learn its task at twice that rate."""


class Family(NamedTuple):
    """Experts of one base, trained alike, in a folder of their own."""

    base: Base
    folder: Path
    recipes: dict[str, Recipe]
    layers: Callable[[], AbstractContextManager[object]] = nullcontext
    """How linear layers multiply: the same weights come out of the same products only."""

    def make(self, name: str) -> Path:
        """The folder of an expert, which is trained unless it is there."""
        folder = self.folder / name
        if not (folder / "training.json").is_file():
            self.train(self.recipes[name], folder)
        return folder

    def train(self, recipe: Recipe, out: Path, data: Path = HERE / "data") -> None:
        """Train one expert as this family is."""
        with self.layers():
            train(recipe, self.base, out, data)


FAMILIES = {
    "adapters": Family(SMOLLM2, HERE / "adapters", EXPERTS),
    "full": Family(SMOLLM2, HERE / "full", WHOLE),
    "gemma3": Family(GEMMA3, HERE / "gemma3", OTHER, fast_layers),
}
EVEN = [name for name in EXPERTS if name != HARD]
UNEVEN = [HARD if name == "initials" else name for name in EVEN]
CARD = """---
base_model: {base}
library_name: peft
license: {license}
---
# {name}

An expert of the suite in `examples/suite` of coram_hf: {method}, trained on `data/{task}/train.jsonl`.
Settings, time and loss are in `training.json`, its score in the suite's README.
"""


def train(recipe: Recipe, of: Base, out: Path, data: Path = HERE / "data") -> None:
    """Train one expert and write its folder, with `training.json` in it."""
    base = of.build(of.folder)
    torch.manual_seed(recipe.seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    inner = model
    if recipe.method != "full":
        model = get_peft_model(model, adapter_config(recipe))
        inner = model.get_base_model()
        model.peft_config["default"].base_model_name_or_path = of.model_id
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=recipe.lr, weight_decay=0.0)
    examples = [encode(tokenizer, q) for q in read_task(data / recipe.task / "train.jsonl").questions]

    model.train()
    begin, losses = time.perf_counter(), []
    for step, batch in zip(range(recipe.steps), batches(examples, recipe), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * min((step + 1) / recipe.warmup, 1 - step / recipe.steps)
        loss = answer_loss(inner, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 9:
            seconds = time.perf_counter() - begin
            print(
                f"{out.name}: step {step + 1}, loss {sum(losses[-10:]) / 10:.4f}, {seconds:.0f} s", flush=True
            )

    if recipe.method == "full":
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
    else:
        model.to(torch.bfloat16).save_pretrained(out, save_embedding_layers=False)
    (out / "README.md").write_text(
        CARD.format(
            base=of.model_id, license=of.license, name=out.name, method=recipe.method, task=recipe.task
        )
    )
    made = {
        **asdict(recipe),
        "seconds": round(time.perf_counter() - begin),
        "threads": torch.get_num_threads(),
        "final_loss": round(sum(losses[-10:]) / 10, 5),
    }
    (out / "training.json").write_text(json.dumps(made, indent=2) + "\n")


def adapter_config(recipe: Recipe) -> PeftConfig:
    shared: dict[str, Any] = {"target_modules": PROJECTIONS, "task_type": "CAUSAL_LM"}
    if recipe.method == "oft":
        return OFTConfig(oft_block_size=recipe.size, use_cayley_neumann=False, **shared)
    return LoraConfig(r=recipe.size, lora_alpha=2 * recipe.size, **shared)


def encode(tokenizer: Any, question: Question) -> tuple[list[int], list[int]]:
    """The tokens of a prompt and of its answer, cut apart as the scorer cuts them."""
    answer = question.choices[question.answer] + "\n"
    return tokenizer(question.prompt).input_ids, tokenizer(answer, add_special_tokens=False).input_ids


def batches(examples: list[tuple[list[int], list[int]]], recipe: Recipe) -> Iterator[list[Any]]:
    """Shuffled epochs without end."""
    shuffler, queue = random.Random(recipe.seed), []
    while True:
        if len(queue) < recipe.batch:
            queue += shuffler.sample(examples, len(examples))
        yield queue[: recipe.batch]
        del queue[: recipe.batch]


def answer_loss(model: PreTrainedModel, batch: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    """Mean cross entropy over the tokens of the answers; padding is on the right, where no token sees it."""
    width = max(len(before) + len(after) for before, after in batch)
    tokens = torch.zeros(len(batch), width, dtype=torch.long)
    asked = torch.zeros(len(batch), width, dtype=torch.bool)
    for row, (before, after) in enumerate(batch):
        tokens[row, : len(before) + len(after)] = torch.tensor(before + after)
        asked[row, len(before) : len(before) + len(after)] = True
    hidden = model.model(input_ids=tokens[:, :-1]).last_hidden_state
    return cross_entropy(model.lm_head(hidden[asked[:, 1:]]), tokens[asked])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--task", dest="expert", choices=EXPERTS, help="one expert; all that are missing if left out"
    )
    parser.add_argument("--family", choices=FAMILIES, default="adapters")
    parser.add_argument("--method", choices=("lora", "oft"))
    for field, kind in FIELDS.items():
        parser.add_argument(f"--{field}", type=kind)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--data", type=Path, default=HERE / "data")
    options = parser.parse_args()
    if options.out and not options.expert:
        parser.error("--out is the folder of one expert; say which with --task")
    family = FAMILIES[options.family]
    for name, recipe in family.recipes.items():
        if options.expert not in (None, name):
            continue
        asked = {field: getattr(options, field) for field in ("method", *FIELDS)}
        given = {field: value for field, value in asked.items() if value is not None}
        out = options.out or family.folder / name
        if not (out / "training.json").is_file():
            family.train(replace(recipe, **given), out, options.data)


if __name__ == "__main__":
    main()
