"""Score models, adapters or merges on every task of the suite.

    python examples/suite/score.py base examples/suite/adapters/sql merged --limit 50 --json scores.json

A source is `base` (SmolLM2), or the folder of an adapter of it or of a model. Prints the share of right
answers, in percent.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from base import SMOLLM2
from make_data import TASKS
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from coram_hf.evaluation.light import score
from coram_hf.evaluation.questions import read_task
from coram_hf.report.tables import markdown as table

HERE = Path(__file__).parent
Row = dict[str, float]


def load(source: str, base: Path) -> PreTrainedModel:
    """A source as a plain model in float32, which is what a CPU is fastest at."""
    folder = base if source == "base" else Path(source)
    if not (folder / "adapter_config.json").is_file():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, folder).merge_and_unload()


def score_all(model: PreTrainedModel, base: Path, limit: int | None = None, part: str = "test") -> Row:
    """Accuracy by task, over the first `limit` questions of each."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    tasks = {name: read_task(HERE / "data" / name / f"{part}.jsonl") for name in TASKS}
    return {name: score(model, tokenizer, task, limit).accuracy for name, task in tasks.items()}


def average(row: Row) -> float:
    return sum(row[task] for task in TASKS) / len(TASKS)


def percents(rows: Mapping[str, Row]) -> str:
    """Rows of accuracies in percent."""
    return table(
        ["model", *TASKS, "average"],
        [
            [name, *(f"{100 * x:.1f}" for x in (*(row[task] for task in TASKS), average(row)))]
            for name, row in rows.items()
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="+", metavar="SOURCE")
    parser.add_argument("--base", type=Path, default=SMOLLM2.folder)
    parser.add_argument("--limit", type=int, help="questions of each task; all 100 if left out")
    parser.add_argument("--part", choices=["validation", "test"], default="test")
    parser.add_argument("--json", type=Path, help="a file for the scores")
    options = parser.parse_args()
    base = SMOLLM2.build(options.base)
    rows = {
        source: score_all(load(source, base), base, options.limit, options.part)
        for source in dict.fromkeys(options.sources)
    }
    print(percents(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
