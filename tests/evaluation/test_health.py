"""Generation health: counted by hand, and of a real model by the command line."""

import json
import re

import pytest
from helpers.command import coram_hf
from helpers.folders import on_disk
from helpers.models import tiny_llama, tiny_tokenizer

from coram_hf.evaluation.health import health, repeats


def test_answers_are_counted():
    prompts = ["a", "b", "c", "\u0434\u0430"]
    answers = ["fine", " ", "\u4f60\u597d\u4f60\u597d\u4f60", "\u0434\u0430\u0434\u0430\u0434"]
    found = health(prompts, answers, [1, 0, 5, 8], most=8)
    assert found.to_dict() == {
        "answers": 4, "foreign": pytest.approx(1 / 3), "mean_tokens": 3.5, "empty": 0.25, "repeats": 0,
        "unended": 0.25,
    }  # fmt: skip
    assert health(["\u0434"], ["x"], [1], 8).foreign is None
    assert health(["a"], ["\u4f60\u597d\u4f60\u597d"], [4], 8).foreign == 0


def test_repeats_are_five_words_three_times():
    assert repeats("one two three four five " * 3)
    assert not repeats("one two three four five " * 2)
    assert not repeats("yes " * 6)
    assert repeats("yes " * 7)


def test_the_command_line_prints_the_health_of_a_folder(tmp_path):
    base = on_disk(tmp_path, tiny_llama(), (), tiny_tokenizer()).base
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join([json.dumps({"prompt": "1+1="}), json.dumps("go")]))
    run = coram_hf("eval", base, "--generate", prompts)
    assert run.returncode == 0, run.stderr
    found = dict(re.findall(r"^ *(\w+(?: \w+)?)  +(\S+) *$", run.stdout, re.M))
    assert list(found) == ["answers", "foreign", "mean tokens", "empty", "repeats", "unended"]
    assert found["answers"] == "2"
    assert float(found["mean tokens"]) >= 1
    assert (
        json.loads(coram_hf("--json", "eval", base, "--generate", prompts).stdout)["health"]["answers"] == 2
    )
    assert coram_hf("eval", base).returncode == 2
    prompts.write_text("{}")
    assert "must be a text or have the key 'prompt'" in coram_hf("eval", base, "--generate", prompts).stderr
