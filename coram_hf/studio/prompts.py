"""Prompts pasted into the studio, and the demo's experts, questions and prompts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from coram_hf.demo.base import MODEL_ID, build_base
from coram_hf.demo.run import EXPERTS, SUITE
from coram_hf.errors import CoramError
from coram_hf.evaluation.questions import read_task

HEADING = re.compile(r"\[(.+)\]")


class Example(NamedTuple):
    """A question to try, the expert that knows the answer, and the right answer."""

    expert: str
    prompt: str
    right: str


def read_pasted(text: str, experts: Sequence[str]) -> dict[str, list[str]]:
    """Prompts by expert: `[name]` on a line of its own, then prompts with blank lines between them."""
    found: dict[str, list[str]] = {}
    name = experts[0] if len(experts) == 1 else None
    for block in re.split(r"\n\s*\n", text.replace("\r\n", "\n").strip()):
        lines: list[str] = []
        for line in block.split("\n"):
            heading = HEADING.fullmatch(line.strip())
            if heading:
                _add(found, name, lines)
                name, lines = heading[1].strip(), []
                found.setdefault(name, [])
            else:
                lines.append(line)
        _add(found, name, lines)
    if not any(found.values()):
        raise CoramError("no prompts yet: paste a few for every expert, below its name in [brackets]")
    return found


def _add(found: dict[str, list[str]], name: str | None, lines: list[str]) -> None:
    prompt = "\n".join(lines).strip("\n")
    if not prompt.strip():
        return
    if name is None:
        raise CoramError(f"whose prompt is {prompt[:40]!r}? write the expert's [name] on a line above it")
    found.setdefault(name, []).append(prompt)


def pasted(prompts: Mapping[str, Iterable[str]]) -> str:
    """Prompts as text that `read_pasted` reads."""
    return "\n\n".join(f"[{name}]\n" + "\n\n".join(found) for name, found in prompts.items())


def demo_base(root: Path) -> Path:
    """The demo's base below a root, where `coram-hf demo` puts it, too; it is written when needed."""
    return build_base(root / "demo" / Path(MODEL_ID).name)


def demo_experts() -> dict[str, Path]:
    """The demo's five adapters."""
    return {name: SUITE / "adapters" / name for name in EXPERTS}


def demo_prompts() -> dict[str, list[str]]:
    """Four unlabelled prompts for each of the demo's experts."""
    files = {name: (SUITE / "prompts" / f"{name}.jsonl").read_text(encoding="utf-8") for name in EXPERTS}
    return {name: [json.loads(line)["prompt"] for line in text.splitlines()] for name, text in files.items()}


def demo_examples() -> list[Example]:
    """A held-out question for each of the demo's experts."""
    found = []
    for name in EXPERTS:
        question = read_task(SUITE / "data" / name / "test.jsonl").questions[1]
        found.append(Example(name, question.prompt, question.right.strip()))
    return found
