"""Prompts: where they come from, what they are, and what is refused."""

import json
import re

import pytest

from coram_hf import CoramError
from coram_hf.calibration.prompts import read_prompts
from coram_hf.config import CalibrationConfig

CONFIG = CalibrationConfig()
MESSAGES = [{"role": "user", "content": "hi"}]


def read(given, experts=("math", "code"), **options):
    return read_prompts(given, experts, CalibrationConfig(**options))


def write(folder, **files):
    for name, text in files.items():
        stem, _, suffix = name.rpartition("_")
        (folder / f"{stem}.{suffix}").write_text(text, encoding="utf-8")
    return folder


def test_lists_files_and_rows_of_a_dataset_give_the_same_prompts(tmp_path):
    lines = ["one", "two"]
    rows = [{"prompt": line, "target": "ignored", "answer": 3} for line in lines]
    folder = write(tmp_path, math_txt="one\n\r\n two \n".replace(" ", ""), code_jsonl="")
    (folder / "code.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = read({"math": lines, "code": lines})
    assert expected.of == {"math": ("one", "two"), "code": ("one", "two")}
    for other in (folder, str(folder), {"math": folder / "math.txt", "code": iter(rows)}):
        found = read(other)
        assert found.of == expected.of
        assert found.sha256 == expected.sha256


def test_the_hash_depends_on_every_prompt_its_expert_and_the_chat():
    given = {"math": ["a", "b"], "code": ["c"]}
    others = [
        read({"math": ["b", "a"], "code": ["c"]}),
        read({"math": ["c"], "code": ["a", "b"]}),
        read(given, chat=True),
        read({**given, "base": ["d"]}),
    ]
    assert len({read(given).sha256, *(other.sha256 for other in others)}) == 5


def test_messages_stay_messages_wherever_they_are():
    found = read({"math": [MESSAGES, {"messages": MESSAGES}], "code": [{"prompt": MESSAGES}]})
    assert found.of == {"math": (tuple(MESSAGES),) * 2, "code": (tuple(MESSAGES),)}


def test_only_the_first_prompts_are_used_up_to_the_limit():
    assert read({"math": list("abc"), "code": ["d"]}, prompt_limit=2).counts == {"math": 2, "code": 1}


def test_the_base_may_have_prompts_and_comes_last():
    assert list(read({"base": ["x"], "code": ["a"], "math": ["b"]}).of) == ["math", "code", "base"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"math": ["a"]}, "no prompts for expert 'code'"),
        ({"math": ["a"], "code": ["b"], "cod": ["c"]}, "'cod'; did you mean 'code'?"),
        ({"math": [], "code": ["b"]}, "'math': none found"),
        ({"math": [""], "code": ["b"]}, "'math', prompt 1: expected text"),
        ({"math": ["a", 3], "code": ["b"]}, "'math', prompt 2: expected text or chat messages"),
        ({"math": [{"text": "a"}], "code": ["b"]}, "expected 'prompt' or 'messages', found only 'text'"),
        ({"math": [[{"role": "user"}]], "code": ["b"]}, "role and content"),
        ({"math": 3, "code": ["b"]}, "expected a file, a list or a split"),
        ({"math": "a", "code": ["b"]}, "a is not a .txt or .jsonl file"),
        (["a"], "a dict expert -> prompts, or a folder"),
        ("nowhere", "nowhere is not a folder"),
    ],
)
def test_what_cannot_be_read_is_refused_and_named(given, message):
    with pytest.raises(CoramError, match=re.escape(message)):
        read(given)


def test_a_folder_without_the_file_of_an_expert_says_what_to_write(tmp_path, caplog):
    write(tmp_path, math_txt="a")
    with pytest.raises(CoramError, match=r"no prompts for expert 'code'; write some to code.txt"):
        read(tmp_path)
    write(tmp_path, code_txt="a", math_jsonl='{"prompt": "b"}')
    with pytest.raises(CoramError, match="both called 'math'"):
        read(tmp_path)
    (tmp_path / "math.jsonl").unlink()
    write(tmp_path, chat_txt="a")
    assert set(read(tmp_path).of) == {"math", "code"}
    assert "chat.txt belongs to no expert" in caplog.text
    write(tmp_path, mat_txt="a")
    with pytest.raises(CoramError, match="'mat'; did you mean 'math'"):
        read(tmp_path)


def test_a_damaged_line_is_named(tmp_path):
    write(tmp_path, math_jsonl='{"prompt": "a"}\n{', code_txt="b")
    with pytest.raises(CoramError, match=r"math.jsonl, line 2: is not JSON"):
        read(tmp_path)
