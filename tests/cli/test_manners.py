"""How commands behave: what they check first, what they say, and how much."""

import copy
import json
import logging
import re
import subprocess
import sys

import pytest
import torch
from helpers.command import coram_hf
from helpers.folders import on_disk
from helpers.models import fine_tuned, tiny_llama
from helpers.paths import ROOT

import coram_hf as package
from coram_hf import CoramMerger
from coram_hf.cli import app
from coram_hf.cli.voice import Volume, speaking
from coram_hf.execution.progress import INTERVAL, Progress
from coram_hf.inputs.files import stored_bytes
from coram_hf.methods.registry import method_names


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return on_disk(tmp_path_factory.mktemp("suite"), experts={"math": 0.03, "code": 0.05})


def no_space(monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("coram_hf.execution.workspace.shutil.disk_usage", lambda _: usage)


@pytest.fixture
def unreadable(tmp_path):
    """A base that no model can be opened from, with the weights of one."""
    base = on_disk(tmp_path, experts=()).base
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchModel"]}))
    return base


@pytest.mark.parametrize("option", ["-o", "--adapter-out"])
def test_an_existing_output_is_found_before_models_are_opened(unreadable, tmp_path, option):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("")
    run = coram_hf("merge", unreadable, unreadable, option, tmp_path / "there")
    assert run.returncode == 2
    assert "there exists; choose another folder, or pass overwrite=True (--overwrite)" in run.stderr
    free = coram_hf("merge", unreadable, unreadable, option, tmp_path / "new")
    assert "NoSuchModel" in free.stderr


def test_a_full_disk_is_found_before_models_are_opened(unreadable, tmp_path, monkeypatch):
    no_space(monkeypatch)
    run = coram_hf("merge", unreadable, unreadable, "-o", tmp_path / "new")
    assert run.returncode == 2
    assert "only 0.00 GB are free" in run.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-shard-size", "five"), "max_shard_size must be"),
        (("--dtype", "float31"), "dtype: unknown value 'float31'"),
        (("--line", "ful"), "'ful'"),
        (("--config", "nowhere.yaml"), "the recipe nowhere.yaml does not exist"),
        (("--config", "."), "is a folder; a recipe is a YAML file"),
    ],
)
def test_bad_options_and_recipes_are_found_before_models_are_opened(unreadable, tmp_path, options, message):
    run = coram_hf("merge", unreadable, unreadable, "-o", tmp_path / "new", *options)
    assert run.returncode == 2
    assert message in run.stderr


def test_a_missing_expert_is_found_before_the_base_is_opened(unreadable, tmp_path):
    run = coram_hf("merge", unreadable, tmp_path / "nowhere", "-o", tmp_path / "new")
    assert f"no such folder: '{tmp_path / 'nowhere'}'" in run.stderr


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_the_size_of_a_merge_is_known_from_headers(tmp_path, dtype, tied):
    base = on_disk(tmp_path, tiny_llama(tie_word_embeddings=tied), (0.03,)).base
    merger = CoramMerger(base, [tmp_path / "e0"], dtype=dtype)
    assert stored_bytes(base, None if dtype is None else dtype.itemsize) == merger.requirements()[0]


def test_a_dry_run_on_a_full_disk_shows_the_plan(suite, monkeypatch):
    no_space(monkeypatch)
    run = coram_hf("merge", suite.base, suite.experts["math"], "-o", suite.base.parent / "x", "--dry-run")
    assert run.returncode == 2
    assert re.search(r"target +14 tensors", run.stdout)
    assert re.search(r"disk +0.00 GB", run.stdout)
    assert "only 0.00 GB are free" in run.stderr


def test_warnings_have_a_level_a_flag_and_appear_once(suite, tmp_path):
    run = coram_hf(
        "merge",
        suite.base,
        *suite.experts.values(),
        "-o",
        tmp_path / "out",
        "--adapter-out",
        tmp_path / "lora",
    )
    assert run.returncode == 0, run.stderr
    told = [line for line in run.stderr.splitlines() if "lies outside" in line]
    assert len(told) == 1
    assert told[0].startswith("coram-hf: warning: ")
    assert told[0].endswith("(--line full.ta)")


def test_python_logs_a_warning_once(suite, tmp_path, caplog):
    base = tiny_llama()
    merger = CoramMerger(base, [fine_tuned(base, 0.03, 1)])
    with caplog.at_level(logging.WARNING, "coram_hf"):
        merger.merge()
        merger.merge_adapter_to(tmp_path / "lora")
    assert sum("lies outside" in record.message for record in caplog.records) == 1


def test_rounding_is_told_once_per_lambda(caplog):
    base = tiny_llama(dtype=torch.bfloat16)
    start = copy.deepcopy(base).float()
    result = CoramMerger(base, [fine_tuned(start, 1e-3, 1), fine_tuned(start, 1e-3, 2)]).merge()
    told = [record.message for record in caplog.records if record.message.startswith("rounding to")]
    assert told == [result.report.warnings[-1]]
    assert told[0].endswith("(--dtype float32) would keep it")
    for _ in range(3):
        result.rescale_(result.report.lam * 1.1)
    assert sum(record.message.startswith("rounding to") for record in caplog.records) == 1


def test_every_flag_in_a_message_exists():
    """The options that warnings and errors name are options of `merge`."""
    text = "".join(path.read_text() for path in (ROOT / "coram_hf").rglob("*.py"))
    named = set(re.findall(r"\((--[a-z-]+)", text))
    assert {"--line", "--balance", "--dtype", "--bases"} <= named
    helped = coram_hf("merge", "--help").stdout
    assert [flag for flag in named if f"{flag} " not in helped] == []


def test_quiet_before_and_after_the_command(suite, tmp_path):
    sources = (suite.base, *suite.experts.values())
    for i, words in enumerate((("-q", "merge", *sources), ("merge", *sources, "--quiet"))):
        run = coram_hf(*words, "-o", tmp_path / str(i))
        assert run.returncode == 0
        assert run.stderr == ""
        assert "merged 2 experts" in run.stdout
    failed = coram_hf("-q", "merge", *sources, "-o", tmp_path / "0")
    assert "exists" in failed.stderr


def test_verbose_tells_more(suite, tmp_path):
    sources = (suite.base, *suite.experts.values())
    run = coram_hf("merge", *sources, "-o", tmp_path / "out", "-v")
    assert "coram-hf: debug: opened the base (LlamaForCausalLM) and 2 experts" in run.stderr
    again = coram_hf("-v", "merge", *sources, "-o", tmp_path / "out")
    assert "Traceback" in again.stderr
    assert "debug" not in coram_hf("merge", *sources, "-o", tmp_path / "other").stderr


def test_the_version():
    run = coram_hf("--version")
    assert (run.returncode, run.stdout) == (0, f"coram-hf {package.__version__}\n")


def test_every_command_has_the_switches():
    names = [command.name or command.callback.__name__ for command in app.registered_commands]
    assert {"inspect", "merge", "eval"} <= set(names)
    for name in [*names, "report page", "report audit"]:
        helped = coram_hf(*name.split(), "--help").stdout
        assert "--quiet" in helped, name
        assert "--verbose" in helped, name


COUNTED = """
import gc, sys
from coram_hf.cli import main
try:
    main()
finally:
    print(gc.isenabled(), *sys.modules)
"""
"""The command line, which then tells whether garbage is collected, and what was imported."""


def test_a_merge_starts_quietly_and_imports_no_more_than_it_needs(suite, tmp_path):
    """In a process of its own, as imports speak only once: of full checkpoints, so without PEFT."""
    words = ["merge", suite.base, *suite.experts.values(), "-o", tmp_path / "out", "--line", "full.ta"]
    run = subprocess.run(
        [sys.executable, "-c", COUNTED, *map(str, words)], capture_output=True, text=True, check=True
    )
    assert run.stderr == ""
    collects, *imported = run.stdout.splitlines()[-1].split()
    assert collects == "True"
    assert "transformers" in imported
    assert not {"peft", "bitsandbytes", "datasets", "gradio"} & set(imported)


@pytest.mark.parametrize(("volume", "heard"), [(Volume(), False), (Volume(verbose=True), True)])
def test_warnings_of_other_libraries(volume, heard, capsys, recwarn):
    stream = logging.StreamHandler(sys.stdout)
    logging.lastResort, before = stream, logging.lastResort
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        with speaking(volume):
            logging.getLogger("somebody").warning("noise")
            logging.getLogger("somebody").error("trouble")
    finally:
        logging.lastResort, root.handlers = before, handlers
    out = "".join(capsys.readouterr())
    assert ("noise" in out) == heard
    assert "trouble" in out


def test_a_pipe_gets_a_line_now_and_then(capsys):
    now = [0.0]
    with Progress("full: write", 200, True, unit="tensors", clock=lambda: now[0]) as progress:
        for _ in range(200):
            now[0] += INTERVAL / 4
            progress.add()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 200 / 4
    assert lines[9] == f"full: write: 20%, 40 of 200 tensors, {INTERVAL * 40 / 60:.0f} min left"


def test_a_merge_in_memory_does_not_flood_a_pipe(capsys):
    base = tiny_llama()
    CoramMerger(base, [fine_tuned(base, 0.03, 1)]).merge()
    assert capsys.readouterr().err == ""


def test_coram_is_in_every_list_of_methods(suite, tmp_path):
    assert "coram" in method_names()
    assert "coram" in coram_hf("merge", "--help").stdout
    assert "  coram  " in coram_hf("methods").stdout
    wrong = coram_hf("merge", suite.base, suite.experts["math"], "--method", "coran", "-o", tmp_path / "out")
    assert "did you mean 'coram'?" in wrong.stderr
