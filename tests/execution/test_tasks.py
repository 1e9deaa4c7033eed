"""Several parameters at a time: errors, threads of torch, the same bits for any number; and the forecast."""

import hashlib
import threading
import time

import pytest
import torch
from helpers.models import fine_tuned, tiny_llama

from coram_hf import CoramConfig, CoramMerger
from coram_hf.execution.forecast import Forecast, computing, write_cost
from coram_hf.execution.tasks import in_threads
from coram_hf.geometry.slices import scratch


def test_every_item_is_worked_on_once_by_single_threads(two_threads):
    seen = []

    def work(item):
        seen.append((threading.current_thread().name, torch.get_num_threads()))
        return item * item

    assert dict(in_threads(work, range(50), 2)) == {i: i * i for i in range(50)}
    assert len(seen) == 50
    assert {threads for _, threads in seen} == {1}
    assert torch.get_num_threads() == 2


def test_as_many_as_asked_for_at_a_time():
    """Three meet at the barrier, or it breaks; a fourth would be seen."""
    running, most, together = set(), [], threading.Barrier(3, timeout=20)

    def work(item):
        running.add(item)
        together.wait()
        most.append(len(running))
        together.wait()
        running.remove(item)

    assert sorted(dict(in_threads(work, range(30), 3))) == list(range(30))
    assert set(most) == {3}


def test_the_first_error_ends_it(two_threads):
    begun = []

    def work(item):
        begun.append(item)
        if item == 5:
            raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        list(in_threads(work, range(1000), 2))
    assert len(begun) < 20
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("line", ["full", "SS(ca+ave,variance).ties"])
def test_the_bits_do_not_depend_on_the_number_of_threads(tmp_path, line):
    base = tiny_llama(dtype=torch.bfloat16, hidden_size=128, intermediate_size=352)
    experts = [fine_tuned(base, 0.03, seed) for seed in range(3)]
    before, found = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            merger = CoramMerger(base, experts, CoramConfig.from_line(line), progress=False)
            merger.merge_to(tmp_path / str(threads))
            weights = (tmp_path / str(threads) / "model.safetensors").read_bytes()
            found.add(hashlib.sha256(weights).hexdigest())
            merged = merger.merge().model.state_dict()
            found.add(hashlib.sha256(b"".join(t.view(torch.uint8).numpy() for t in merged.values())).digest())
    finally:
        torch.set_num_threads(before)
    assert len(found) == 2


def test_scratch_is_one_for_each_thread_and_use():
    mine = scratch("a", 10, torch.float64).fill_(1.0)
    other = scratch("b", 10, torch.float64).fill_(2.0)
    theirs = []
    thread = threading.Thread(target=lambda: theirs.append(scratch("a", 10, torch.float64).fill_(3.0)))
    thread.start()
    thread.join()
    assert mine.eq(1).all()
    assert other.eq(2).all()
    assert scratch("a", 4, torch.float64).data_ptr() == mine.data_ptr()


def test_the_longest_of_computing_reading_and_writing_counts():
    assert Forecast(computing=3.0, reading=5.0, writing=4.0, hashing=2.5).seconds == 6.0
    assert Forecast(computing=9.0, reading=5.0, writing=4.0, hashing=0.0, opening=2.0).seconds == 11.5


def test_one_parameter_of_a_shape_counts_for_all(monkeypatch):
    likes = {f"layers.{i}.up.weight": torch.empty(4, 4) for i in range(20)}
    likes |= {f"layers.{i}.norm.weight": torch.empty(4) for i in range(20)}
    asked, now = [], [100.0]

    def work(name):
        asked.append(name)
        now[0] += 0.02 if "up" in name else 0.001

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    seconds = computing(likes, work, 2)
    monkeypatch.undo()
    assert asked == [
        "layers.0.up.weight",
        "layers.1.up.weight",
        "layers.0.norm.weight",
        "layers.1.norm.weight",
    ]
    assert seconds == pytest.approx(20 * 0.02 + 20 * 0.001)


def test_the_disk_is_timed_where_the_output_will_be(tmp_path):
    cost = write_cost(tmp_path / "not" / "yet")
    assert 0 < cost.core <= cost.disk
    assert not list(tmp_path.iterdir())
