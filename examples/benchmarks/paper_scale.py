"""Predict what merging the paper's four suites takes on this machine, beside what the paper reports.

    python examples/benchmarks/paper_scale.py [--folder DIR] [--read MB/s] [--write MB/s]
    python examples/benchmarks/paper_scale.py --run T2 [--folder DIR] [--yes] [--scale 1]

The models are built without weights. One matrix of every shape is merged with as many experts as the suite
has, a thread a core, on random bf16 weights, and counts for all of that shape; the other tensors are measured
by the rate of one. The disk under DIR is measured, unless its rates are given. Nothing is downloaded.

With `--run`, the checkpoints of one suite are made under DIR with random weights (39 GB for T2, in bf16),
merged by commands from the shell beside `cat` and mergekit's linear average, and removed. Every run reads its
inputs from the disk. `--scale 0.1` makes a tenth of the layers and of the vocabulary.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import a_core_each, machine
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma2Config,
    LlamaConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
)

from coram_hf import CoramConfig
from coram_hf.execution.forecast import (
    HASH_RATE,
    PROBE_BYTES,
    RESIDENT,
    Forecast,
    read_rate,
    write_cost,
)
from coram_hf.execution.tasks import thread_count
from coram_hf.geometry import merge_rows, squared_norms
from coram_hf.geometry.slices import CHUNK_BYTES
from coram_hf.inputs.targets import find_targets
from coram_hf.outputs.place import InMemory, write_rows

SAMPLE = 2**24
"""Entries of the tensor whose norms are timed for those that are not merged."""


class Suite(NamedTuple):
    """A base, how many experts it has, and the paper's slice caches in GB."""

    base: str
    experts: int
    caches: int
    model: Any


LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8, "head_dim": 128}
SUITES = {
    "T1": Suite(
        "Llama-3.1-8B",
        5,
        162,
        LlamaConfig(
            hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, **LLAMA
        ),
    ),
    "T2": Suite(
        "Llama-3.2-3B",
        5,
        66,
        LlamaConfig(
            hidden_size=3072,
            intermediate_size=8192,
            num_hidden_layers=28,
            num_attention_heads=24,
            tie_word_embeddings=True,
            **LLAMA,
        ),
    ),
    "T3": Suite(
        "Qwen2.5-VL-7B",
        3,
        100,
        Qwen2_5_VLConfig(
            text_config={
                "hidden_size": 3584,
                "intermediate_size": 18944,
                "num_hidden_layers": 28,
                "num_attention_heads": 28,
                "num_key_value_heads": 4,
                "vocab_size": 152064,
            },
            vision_config={
                "depth": 32,
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "out_hidden_size": 3584,
            },
        ),
    ),
    "T4": Suite(
        "Gemma-2-9B",
        5,
        192,
        Gemma2Config(
            hidden_size=3584,
            intermediate_size=14336,
            num_hidden_layers=42,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=256,
            vocab_size=256000,
        ),
    ),
}
GPU_HOURS = "0.5-0.8"


def without_weights(config: Any) -> PreTrainedModel:
    auto = AutoModelForImageTextToText if isinstance(config, Qwen2_5_VLConfig) else AutoModelForCausalLM
    with torch.device("meta"):
        model: PreTrainedModel = auto.from_config(config, dtype=torch.bfloat16)
    model.tie_weights()
    return model


def merge_seconds(shape: torch.Size, experts: int, threads: int) -> float:
    """Seconds for one matrix of a shape, when all threads merge one."""
    base = (0.02 * torch.randn(shape)).bfloat16()
    others = [(base + 0.0004 * torch.randn(shape)).bfloat16() for _ in range(experts)]

    def work(out: torch.Tensor) -> None:
        for merged in merge_rows(base, others, CoramConfig(), measure=True):
            write_rows(InMemory(out), base, merged.rows, merged.update, 2.5)

    outs = [torch.empty_like(base) for _ in range(threads)]
    return a_core_each(work, outs) / threads


def norm_seconds(experts: int, threads: int) -> float:
    """Seconds for each entry of a tensor that is measured and kept, when all threads do that."""
    base = torch.randn(2**12, SAMPLE // 2**12).bfloat16()
    others = [base.clone() for _ in range(experts)]
    return a_core_each(lambda _: squared_norms(base, others), range(threads)) / threads / SAMPLE


def predict(suite: Suite, read: float, write: float, threads: int) -> tuple[Forecast, int]:
    """The forecast of one suite, and the bytes of one of its checkpoints."""
    model = without_weights(suite.model)
    parameters = dict(model.named_parameters())
    shapes = Counter(parameters[target.name].shape for target in find_targets(model, None))
    merged = sum(shape.numel() * count for shape, count in shapes.items())
    total = sum(p.numel() for p in parameters.values())
    computing = sum(count * merge_seconds(shape, suite.experts, threads) for shape, count in shapes.items())
    computing += (total - merged) * norm_seconds(suite.experts, threads)
    size = 2 * total
    forecast = Forecast(
        computing=computing,
        reading=(1 + suite.experts) * size / read,
        writing=size / write,
        hashing=size / HASH_RATE / threads,
    )
    return forecast, size


def disk_rates(folder: Path) -> tuple[float, float]:
    """Bytes a second of reading and writing."""
    write = 1 / write_cost(folder).disk
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(torch.randint(256, (PROBE_BYTES,), dtype=torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
        return read_rate(Path(file.name)), write


def really(name: str, folder: Path, scale: float, agreed: bool) -> None:
    """Merge one suite for real, and print what that took beside the forecast and the paper."""
    from paper_run import run, table

    suite = SUITES[name]
    text = suite.model.get_text_config()
    text.num_hidden_layers = max(1, round(scale * text.num_hidden_layers))
    text.vocab_size = max(1, round(scale * text.vocab_size))
    found = run(name, without_weights(suite.model), suite.experts, folder, agreed)
    print(
        f"{machine()}; {name}, {suite.base}, {suite.experts} experts, {found['bytes'] / 1e9:.1f} GB in bf16\n"
    )
    print(table(found, GPU_HOURS, suite.caches))
    print("\n" + json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--read", type=float, help="MB a second")
    parser.add_argument("--write", type=float, help="MB a second")
    parser.add_argument("--run", choices=list(SUITES), help="really merge this suite")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the layers and the vocabulary")
    parser.add_argument("--yes", action="store_true", help="write to the disk without asking")
    options = parser.parse_args()
    if options.run:
        really(options.run, options.folder, options.scale, options.yes)
        return
    threads = thread_count(torch.device("cpu"))
    read, write = disk_rates(options.folder)
    read = read if options.read is None else 1e6 * options.read
    write = write if options.write is None else 1e6 * options.write
    print(f"{machine()}; disk {read / 1e6:.0f} MB/s read, {write / 1e6:.0f} MB/s written\n")
    print(
        "| suite | base | experts | checkpoint | minutes here | computing | reading | writing | memory here "
        "| paper: GPU hours | paper: caches |"
    )
    print("|---" * 11 + "|")
    memory = (RESIDENT + threads * 2 * CHUNK_BYTES) / 1e9
    results = {}
    for name, suite in SUITES.items():
        forecast, size = predict(suite, read, write, threads)
        results[name] = {**forecast._asdict(), "seconds": forecast.seconds, "checkpoint": size}
        minutes = [x / 60 for x in (forecast.seconds, forecast.computing, forecast.reading, forecast.writing)]
        print(
            f"| {name} | {suite.base} | {suite.experts} | {size / 1e9:.1f} GB | "
            + " | ".join(f"{x:.1f}" for x in minutes)
            + f" | {memory:.1f} GB | {GPU_HOURS} | {suite.caches} GB |",
            flush=True,
        )
    print("\n" + json.dumps({"read": read, "write": write, "threads": threads, "suites": results}))


if __name__ == "__main__":
    main()
