"""Merges on an accelerator, with a stand-in for one: nothing mixes devices, and results are the CPU's."""

from dataclasses import replace

import pytest
import torch
from helpers.accelerator import DEVICE, Accelerator, Stream
from helpers.models import fine_tuned, tiny_llama

from coram_hf import CoramConfig
from coram_hf.execution.tasks import here, merge_task
from coram_hf.geometry import merge_update
from coram_hf.inputs.opening import open_inputs
from coram_hf.methods.registry import find_method, method_names
from coram_hf.outputs.place import InMemory, KeptPlace, Place

LINES = (
    "full",
    "lr",
    "nca+ave",
    "SS(full,variance)",
    "SS(ca+ave,owner)",
    "full.ties",
    "full.tsvm",
    "DEC(full)",
    "DEC(full,ridge)",
    "DEC(full,wudi)",
)


@pytest.fixture(scope="module")
def inputs():
    base = tiny_llama().to(torch.bfloat16)
    return open_inputs(base, {f"e{i}": fine_tuned(base, 0.05, i) for i in range(2)}, {})


def merged(inputs, choice, kept=None):
    """Every merged parameter, one after the other."""
    method = choice.make(inputs)
    names = method.names(inputs)
    work = method.bind(inputs, (1.0, 0.5), measure=True)
    task, found = merge_task(work, names, 1.5, inputs, measures=True), {}
    for name in names:
        parameter = here(inputs, name)
        room = InMemory(torch.empty_like(parameter.base))
        place = Place(room, parameter.target) if kept is None else KeptPlace(room, parameter.target, kept)
        task(parameter, place)
        found[name] = room.tensor
    return found


def compare(inputs, choice, monkeypatch, kept=None):
    expected = merged(inputs, choice, kept)
    with Accelerator(monkeypatch):
        found = merged(replace(inputs, device=DEVICE), choice, None if kept is None else {})
    for name, tensor in expected.items():
        base, result = inputs.parameter(name).base.double(), found[name].double()
        torch.testing.assert_close(result - base, tensor.double() - base, rtol=0.02, atol=1e-4)


@pytest.mark.parametrize("line", ["full", "SS(ca+ave,variance)"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_rows_are_sent_ahead(line, dtype, monkeypatch):
    """Seven parts through two buffers, on a stream that copies as late as it may."""
    generator = torch.Generator().manual_seed(0)
    base, *noise = (torch.randn(100, 48, generator=generator) for _ in range(4))
    base, *experts = (matrix.to(dtype) for matrix in (base, *(base + 0.05 * one for one in noise)))
    config = CoramConfig.from_line(line)
    expected = merge_update(base, experts, config)[0]
    part = 16 * 5 * 48 * (8 if dtype == torch.float64 else 4)
    monkeypatch.setattr("coram_hf.geometry.merge.FAR_BYTES", part)
    with Accelerator(monkeypatch):
        found = merge_update(base, experts, config, device=DEVICE)[0]
    assert Stream.late == 7 * 4
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_the_stand_in_refuses_what_a_device_would(monkeypatch):
    with Accelerator(monkeypatch):
        far = torch.ones(3, device=DEVICE)
        assert far.device == DEVICE
        with pytest.raises(RuntimeError, match="on the CPU"):
            far + torch.ones(3)
        with pytest.raises(RuntimeError, match="on the CPU"):
            torch.ones(3).add_(far)
        with pytest.raises(RuntimeError, match="pinned"):
            far.copy_(torch.ones(3), non_blocking=True)
        with pytest.raises(TypeError, match="numpy"):
            far.numpy()
        assert (far * 2).cpu().tolist() == [2, 2, 2]


@pytest.mark.parametrize("line", LINES)
def test_a_line_is_merged_on_an_accelerator(inputs, line, monkeypatch):
    compare(inputs, find_method("coram").choose({"line": line}), monkeypatch)


@pytest.mark.parametrize("method", [name for name in method_names() if name != "coram"])
def test_a_baseline_is_merged_on_an_accelerator(inputs, method, monkeypatch):
    compare(inputs, find_method(method).choose({}), monkeypatch)


def test_updates_are_kept_from_an_accelerator(inputs, monkeypatch):
    compare(inputs, find_method("coram").choose({}), monkeypatch, kept={})
