"""Merges that are killed, stopped, starved of disk, or split over processes."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.disks import failing, watched
from helpers.folders import WEIGHTS, assert_same_tensors, on_disk
from helpers.models import tiny_llama
from helpers.paths import TESTS
from helpers.resumable import run
from transformers import AutoModelForCausalLM

from coram_hf import CoramConfig, CoramError, CoramMerger
from coram_hf.execution import stream as streaming
from coram_hf.execution.processes import Processes
from coram_hf.report import MergeReport

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
FILES = (*WEIGHTS, "coram_report.json")


def contents(folder):
    """The bytes of the files; of the report, all but what the merge cost."""
    found = {path.name: path.read_bytes() for pattern in FILES for path in folder.glob(pattern)}
    report = json.loads(found.pop("coram_report.json"))
    del report["cost"]
    return {**found, "coram_report.json": json.dumps(report)}


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """A base and three experts on disk, and their merge."""
    folder = tmp_path_factory.mktemp("suite")
    base = tiny_llama(
        dtype=torch.bfloat16, hidden_size=128, intermediate_size=352, num_hidden_layers=3, vocab_size=512
    )
    on_disk(folder, base, (0.03, 0.03, 0.03), max_shard_size="500KB")
    run(folder, "whole")
    return folder


@pytest.fixture(scope="module")
def killed(suite):
    """Run a merge that dies at a step of its work on the disk; returns "killed", or "ended" and the steps."""
    command = [sys.executable, "-m", "helpers.resumable", str(suite)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (suite / "errors").open("w") as errors:
        server = subprocess.Popen(command, **pipes, stderr=errors, env=ENVIRONMENT)

    def attempt(name, step):
        server.stdin.write(f"{name} {step}\n")
        server.stdin.flush()
        said = server.stdout.readline().split()
        assert said[:1] in (["killed"], ["ended"]), (suite / "errors").read_text()[-3000:]
        return said

    yield attempt
    server.stdin.close()
    server.wait()


def test_updates_kept_on_disk_outlive_a_kill(suite, killed):
    """Wherever it is killed, a merge whose lambda follows from its own update ends the same."""
    run(suite, "decorrelated-whole")
    expected = contents(suite / "decorrelated-whole")
    _, steps = killed("decorrelated-undisturbed", 0)
    assert contents(suite / "decorrelated-undisturbed") == expected
    found = 0
    for step in (int(steps) // 4, int(steps) // 2):
        assert killed("decorrelated-out", step) == ["killed"]
        found += bool(list(suite.glob(".decorrelated-out.coram/kept/*")))
        run(suite, "decorrelated-out")
        assert contents(suite / "decorrelated-out") == expected
        assert not list(suite.glob(".decorrelated-out*"))
        shutil.rmtree(suite / "decorrelated-out")
    assert found == 2


def test_killed_at_any_moment_it_goes_on_and_ends_the_same(suite, killed):
    expected = contents(suite / "whole")
    _, steps = killed("undisturbed", 0)
    assert contents(suite / "undisturbed") == expected
    schedule = random.Random(0)
    kills = resumed = finished = 0
    for _ in range(100):
        was_killed = killed("out", schedule.randint(1, int(steps))) == ["killed"]
        kills += was_killed
        journal = list(suite.glob(".out.coram/journal-*.jsonl"))
        resumed += was_killed and bool(journal) and journal[0].stat().st_size > 10
        if (suite / "out").exists():
            assert contents(suite / "out") == expected
        if not was_killed:
            finished += 1
            assert not list(suite.glob(".out*"))
            shutil.rmtree(suite / "out")
        if kills >= 20 and finished >= 3:
            break
    assert kills >= 20
    assert finished >= 3
    assert resumed >= 5


def stopped(suite, name, error, after=300_000):
    """Run a merge that meets an error when so many bytes are written; returns what it says."""
    with failing(after, error), pytest.raises((CoramError, KeyboardInterrupt)) as raised:
        run(suite, name)
    return str(raised.value)


def test_a_full_disk_leaves_a_merge_that_goes_on(suite):
    message = stopped(suite, "full", OSError(errno.ENOSPC, "No space left on device"))
    assert "No space left" in message
    assert "run the same command again to resume" in message
    assert (suite / ".full.coram").is_dir()
    assert not (suite / "full").exists()
    run(suite, "full")
    assert contents(suite / "full") == contents(suite / "whole")


def test_what_the_disk_has_lost_is_merged_again(suite, monkeypatch):
    """The system tells of lost pages once: the next fsync succeeds, and the pages are not there."""
    sync, failed = os.fsync, []

    def losing(handle):
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.suffix == ".safetensors" and not failed:
            failed.append(path.name)
            header = 8 + int.from_bytes(os.pread(handle, 8, 0), "little")
            os.pwrite(handle, bytes(os.fstat(handle).st_size - header), header)
            raise OSError(errno.EIO, "Input/output error")
        sync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", losing)
        patch.setattr(streaming, "SYNC_BYTES", 1)
        with pytest.raises(CoramError, match=r"Input/output error.*run the same command again"):
            run(suite, "lost")
    assert failed
    run(suite, "lost")
    assert contents(suite / "lost") == contents(suite / "whole")


def test_room_is_set_aside_before_anything_is_merged(suite, monkeypatch):
    def no_room(handle, start, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_room)
        with pytest.raises(CoramError, match=r"No space left.*run the same command again"):
            run(suite, "roomless")
    run(suite, "roomless")
    assert contents(suite / "roomless") == contents(suite / "whole")


@pytest.mark.parametrize(
    "error", [OSError(errno.EOPNOTSUPP, "not supported"), AttributeError("posix_fallocate")]
)
def test_a_disk_that_cannot_set_room_aside_gets_zeros_first(suite, monkeypatch, error):
    def unable(handle, start, size):
        raise error

    name = f"zeros-{type(error).__name__}"
    whole = {path.name: path.stat().st_size for path in (suite / "whole").glob("*.safetensors")}
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", unable)
        stopped(suite, name, KeyboardInterrupt(), after=sum(whole.values()) + 300_000)
        begun = {path.name: path.stat() for path in (suite / f".{name}.coram").rglob("*.safetensors")}
        assert {file: status.st_size for file, status in begun.items()} == whole
        assert all(status.st_blocks * 512 >= status.st_size for status in begun.values())
        run(suite, name)
    assert contents(suite / name) == contents(suite / "whole")


def test_an_interrupt_says_how_to_go_on(suite, caplog):
    caplog.set_level("INFO", logger="coram_hf")
    stopped(suite, "interrupted", KeyboardInterrupt())
    assert "stopped; run the same command again to resume" in caplog.text
    run(suite, "interrupted")
    assert "resuming the interrupted merge" in caplog.text
    assert contents(suite / "interrupted") == contents(suite / "whole")


def test_changed_inputs_start_again(suite, caplog):
    stopped(suite, "changed", KeyboardInterrupt())
    shard = next((suite / "e1").glob("*.safetensors"))
    status = shard.stat()
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))
    try:
        run(suite, "changed")
    finally:
        os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert "differ from those of" in caplog.text
    assert contents(suite / "changed") == contents(suite / "whole")


def arguments(suite, name):
    sources = [str(suite / source) for source in ("base", "e0", "e1", "e2")]
    return ["merge", *sources, "-o", str(suite / name), "--line", "SS(ca+ave,variance).ties"]


LAUNCHERS = {
    "torchrun": "torch.distributed.run --nproc_per_node 2",
    "accelerate": "accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 "
    "--mixed_precision no --dynamo_backend no --main_process_port 0",
}
"""`torchrun` and `accelerate launch`; --multi_gpu is how the latter starts several processes, also on CPU."""


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_processes_make_the_same_model(suite, launcher):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": "0"}
    run = [sys.executable, "-m", *LAUNCHERS[launcher].split(), "-m", "coram_hf"]
    command = [*run, *arguments(suite, "two")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("merged 3 experts") == 1
    assert len(list((suite / "two").glob("*.safetensors"))) == 2
    assert_same_tensors(suite / "two", suite / "whole")
    reports = [replace(MergeReport.load(suite / name), files={}) for name in ("two", "whole")]
    assert reports[0] == reports[1]
    assert not list(suite.glob(".two*"))
    shutil.rmtree(suite / "two")


def test_ctrl_c_on_the_command_line(suite):
    command = [sys.executable, "-m", "helpers.slow_command", *arguments(suite, "ctrl-c")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes, env=ENVIRONMENT)
    while int(process.stdout.readline()) < 100_000:
        pass
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped; run the same command again to resume" in errors
    assert "Traceback" not in errors
    assert (suite / ".ctrl-c.coram").is_dir()
    assert not (suite / "ctrl-c").exists()


def test_accelerate_launch_with_one_process_says_so(monkeypatch, caplog):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    assert Processes.find() == Processes()
    assert "accelerate launch --multi_gpu --num_processes" in caplog.text
    assert "torchrun --nproc_per_node" in caplog.text


def test_a_target_in_use_is_refused_and_one_that_appears_is_kept(suite, tmp_path):
    sources = [suite / name for name in ("base", "e0")]
    merger = CoramMerger(sources[0], sources[1:], CoramConfig(lam=1.0), progress=False)
    seconds = []

    def meddle(_):
        if not seconds:
            seconds.append("begun")
            with pytest.raises(CoramError) as refused:
                CoramMerger(sources[0], sources[1:], progress=False).merge_to(tmp_path / "out")
            seconds.append(str(refused.value))
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "precious").touch()

    came = r"was created during the merge.*run the same command again"
    with watched(meddle), pytest.raises(CoramError, match=came):
        merger.merge_to(tmp_path / "out")
    assert "another merge is writing to" in seconds[1]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious"]
    shutil.move(tmp_path / "out", tmp_path / "away")
    merger.merge_to(tmp_path / "out")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("lost", ["files", "state.json", "journal", "target"])
def test_half_a_workspace_is_never_taken_for_a_merge(suite, lost):
    """What kills can leave behind while a work folder is removed, or after its end."""
    name = f"half-{lost}"
    stopped(suite, name, KeyboardInterrupt())
    work = suite / f".{name}.coram"
    if lost in ("files", "target"):
        shutil.rmtree(work / "files")
    elif lost == "journal":
        next(work.glob("journal-*")).unlink()
    else:
        (work / lost).unlink()
    run(suite, name)
    assert contents(suite / name) == contents(suite / "whole")
    assert not list(suite.glob(f".{name}*"))


def test_models_in_memory_are_not_promised_to_be_resumed(suite, tmp_path, monkeypatch, caplog):
    base = AutoModelForCausalLM.from_pretrained(suite / "base")
    merger = CoramMerger(base, [suite / "e0"], CoramConfig(lam=1.0), progress=False)
    with pytest.raises(CoramError, match="contains an input"):
        merger.merge_to(suite / "base", overwrite=True)
    with failing(10_000, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        merger.merge_to(tmp_path / "out")
    assert "nothing is kept" in caplog.text
    assert not list(tmp_path.iterdir())
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(CoramError, match="is a symbolic link"):
        merger.merge_to(tmp_path / "link", overwrite=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    merger.merge_to("~/out")
    assert (tmp_path / "out" / "config.json").is_file()
