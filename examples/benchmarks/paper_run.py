"""A suite of the paper's size, really merged: its checkpoints are made on disk, merged, and removed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from common import beside_python, run_command
from torch import Tensor
from transformers import PreTrainedModel

from coram_hf.outputs.layout import Layout, units, write_index
from coram_hf.outputs.pages import forget

LINES = ("full", "SS(ca+ave,variance).ties")
BLOCK = 2**24
"""Entries that are made and written at a time."""
POOL = 2**25 - 39
"""Entries of the noise that all tensors are cut from; a prime, so that no width divides it."""
BASE, UPDATE = 0.02, 0.0004
"""The standard deviations of the base's matrices and of the experts' updates."""
GB = 1e9


class Suite:
    """A base and its experts on disk, in bf16, with random weights."""

    def __init__(self, folder: Path, model: PreTrainedModel, experts: int) -> None:
        self.folder = folder
        model.config.architectures, model.config.dtype = [type(model).__name__], "bfloat16"
        self._layout = Layout(model, [units(model)], "5GB")
        self.size = sum(self._layout.sizes.values())
        self.sources = [folder / name for name in ("base", *(f"expert{i}" for i in range(1, experts + 1)))]

    def make(self) -> Iterator[Path]:
        """Write the checkpoints, and yield each when it is on the disk."""
        generator = torch.Generator().manual_seed(0)
        pool = torch.randn(POOL, generator=generator)
        base = (BASE * pool).bfloat16()
        for number, folder in enumerate(self.sources):
            folder.mkdir(parents=True)
            write_index(folder, self._layout)
            self._layout.skeleton.config.save_pretrained(folder)
            for file, header in self._layout.headers.items():
                with (folder / file).open("wb", buffering=0) as out:
                    out.write(header)
                    for values in self._tensors(file, base, pool, number):
                        out.write(values.view(torch.uint8).numpy().data)
                        os.fsync(out.fileno())
                        forget(out.fileno())
            yield folder

    def _tensors(self, file: str, base: Tensor, pool: Tensor, number: int) -> Iterator[Tensor]:
        """The entries of a file, in order: of the base, or with the update of an expert added."""
        places = [
            (place.offset, name, place.like)
            for name, place in self._layout.places.items()
            if place.file == file
        ]
        for _, name, like in sorted(places, key=lambda place: place[0]):
            start = int.from_bytes(name.encode()) % POOL
            for done in range(0, like.numel(), BLOCK):
                count = min(BLOCK, like.numel() - done)
                if like.ndim < 2:
                    yield torch.ones(count, dtype=torch.bfloat16)
                    continue
                values = cut(base, start + done, count)
                if number:
                    values = values.float().add_(
                        cut(pool, start + done + number * 5_000_011, count), alpha=UPDATE
                    )
                yield values.bfloat16()

    def forget(self) -> None:
        """Drop the files from the page cache, so that every run reads them from the disk."""
        os.sync()
        for path in self.files():
            with path.open("rb") as file:
                forget(file.fileno())

    def files(self) -> list[Path]:
        return [path for source in self.sources for path in sorted(source.glob("*.safetensors"))]


def cut(pool: Tensor, start: int, count: int) -> Tensor:
    """Consecutive entries of the pool, which begins anew at its end."""
    start %= len(pool)
    parts = [pool[start : start + count]]
    return parts[0] if len(parts[0]) == count else torch.cat([parts[0], pool[: count - len(parts[0])]])


def check_disk(parent: Path, needed: int, agreed: bool) -> None:
    """Stop unless the disk is large enough, and the user agrees."""
    free = shutil.disk_usage(parent).free
    print(f"this writes up to {needed / GB:.0f} GB to {parent}, of {free / GB:.0f} GB that are free")
    if free < 1.05 * needed:
        raise SystemExit("not enough free disk: choose another --folder, or a smaller --scale")
    if not agreed and input("go on? [y/N] ").strip().lower() != "y":
        raise SystemExit("nothing was written; --yes does not ask")


def run(name: str, model: PreTrainedModel, experts: int, parent: Path, agreed: bool) -> dict[str, Any]:
    """Make the suite, run every merge, and remove everything, even after an error."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    folder, started = Path(tempfile.mkdtemp(prefix=".coram-bench-", dir=parent)), time.perf_counter()

    def tell(text: str) -> None:
        print(f"[{time.perf_counter() - started:4.0f} s] {text}", file=sys.stderr, flush=True)

    try:
        suite = Suite(folder, model, experts)
        check_disk(parent, (len(suite.sources) + 1) * suite.size, agreed)
        tell(f"making {len(suite.sources)} checkpoints of {suite.size / GB:.1f} GB")
        for source in suite.make():
            tell(f"made {source.name}")
        found: dict[str, dict[str, Any]] = {}
        for label, words in commands(suite).items():
            tell(f"running {label}")
            forecast = told(words) if label.startswith("coram_hf") else {}
            suite.forget()
            found[label] = {**run_command(*words), **forecast}
            out = folder / "out"
            shutil.rmtree(out, ignore_errors=True)
            tell(f"{label}: {found[label]['seconds']:.0f} s")
        return {"suite": name, "bytes": len(suite.sources) * suite.size, "runs": found}
    finally:
        tell("removing the checkpoints")
        shutil.rmtree(folder, ignore_errors=True)


def commands(suite: Suite) -> dict[str, list[str]]:
    """What is run, by its name."""
    base, *experts = map(str, suite.sources)
    out, recipe = str(suite.folder / "out"), suite.folder / "linear.yml"
    models = [{"model": e, "parameters": {"weight": 1 / len(experts)}} for e in experts]
    recipe.write_text(yaml.safe_dump({"merge_method": "linear", "dtype": "bfloat16", "models": models}))
    ours = [beside_python("coram-hf"), "--quiet", "merge", base, *experts, "-o", out]
    found = {"cat of the inputs": ["cat", *map(str, suite.files())]}
    found |= {f"coram_hf {line}": [*ours, "--line", line] for line in LINES}
    if Path(beside_python("mergekit-yaml")).exists():
        options = ["--lazy-unpickle", "--quiet", "--no-copy-tokenizer"]
        found["mergekit linear"] = [beside_python("mergekit-yaml"), str(recipe), out, *options]
    return found


def told(words: list[str]) -> dict[str, Any]:
    """What a dry run predicts for a merge."""
    printed = run_command(*words, "--dry-run", "--json", keep_output=True)["output"]
    plan = json.loads(printed)
    return {"forecast_seconds": plan["seconds"], "forecast_memory": plan["memory"]}


def table(found: dict[str, Any], gpu_hours: str, caches: int) -> str:
    """The runs beside each other, and what the paper reports."""
    rows = [
        "| run | seconds | forecast | CPU s | peak anonymous | forecast | read | written | x cat |",
        "|---" * 9 + "|",
    ]
    floor = found["runs"]["cat of the inputs"]["seconds"]
    for label, r in found["runs"].items():
        forecast_seconds = f"{r['forecast_seconds']:.0f}" if "forecast_seconds" in r else ""
        forecast_memory = f"{r['forecast_memory'] / 2**20:.0f} MB" if "forecast_memory" in r else ""
        rows.append(
            f"| {label} | {r['seconds']:.0f} | {forecast_seconds} | {r['cpu']:.0f} "
            f"| {r['peak'] / 2**20:.0f} MB | {forecast_memory} | {r['read'] / GB:.1f} GB "
            f"| {r['written'] / GB:.1f} GB | {r['seconds'] / floor:.2f} |"
        )
    low, high = (3600 * float(hours) for hours in gpu_hours.split("-"))
    rows.append(f"| the paper, on a GPU | {low:.0f}-{high:.0f} | | | {caches} GB of caches | | | | |")
    return "\n".join(rows)
