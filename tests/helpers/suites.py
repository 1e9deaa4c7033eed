"""A base with a tokenizer, two experts and some tasks on disk, for sweeps and comparisons."""

import copy

import torch
from helpers.folders import on_disk
from helpers.models import choice_task, tiny_llama, tiny_tokenizer

from coram_hf import run_sweep
from coram_hf.evaluation.light import score
from coram_hf.evaluation.questions import read_task

EXPERTS = ("math", "code")
LINES = ("full", "SS(nca,mean).ties")
LAMBDAS = "0.5:2.5:0.5"


def make_suite(folder):
    on_disk(folder, tiny_llama(7), dict(zip(EXPERTS, (0.6, 0.9), strict=True)), tiny_tokenizer())
    for seed, name in enumerate(EXPERTS):
        choice_task(folder / f"{name}.jsonl", seed)
    choice_task(folder / "world.jsonl", 9)
    return folder


def sources(folder):
    return folder / "base", [folder / name for name in EXPERTS]


def task_files(folder):
    return [folder / f"{name}.jsonl" for name in EXPERTS]


def assembled(base, merged, lam):
    """W_0 + lam (W_merge - W_0) in float64, rounded once."""
    model = copy.deepcopy(base)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            start, end = base.get_parameter(name).double(), merged.get_parameter(name).double()
            parameter.copy_(start + lam * (end - start))
    return model


def accuracy(model, path, limit=None):
    return score(model, tiny_tokenizer(), read_task(path), limit).accuracy


def sweep(suite, **options):
    given = {
        "lambdas": LAMBDAS,
        "tasks": task_files(suite),
        "baselines": ("ties",),
        "progress": False,
    } | options
    return run_sweep(*sources(suite), LINES, **given)
