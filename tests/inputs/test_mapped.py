"""Tensors of safetensors files: what safetensors loads, without a page of it read."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from coram_hf.inputs.mapped import DTYPES, mapped_tensors


def values(dtype, *shape):
    return (100 * torch.rand(shape, generator=torch.Generator().manual_seed(0))).to(dtype)


def test_tensors_of_every_dtype_and_shape_are_what_safetensors_loads(tmp_path):
    tensors = {name: values(dtype, 3, 5) for dtype, name in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "complex": torch.tensor([1 + 2j])}
    save_file(tensors, tmp_path / "a.safetensors")
    found, expected = dict(mapped_tensors(tmp_path / "a.safetensors")), load_file(tmp_path / "a.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
        assert found[name].is_contiguous()


def test_a_tensor_at_an_odd_offset(tmp_path):
    """Other writers need not align their headers."""
    expected = values(torch.float32, 2, 3)
    header = json.dumps({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    header += b" " * (1 - len(header) % 2)
    data = len(header).to_bytes(8, "little") + header + expected.numpy().tobytes()
    (tmp_path / "a.safetensors").write_bytes(data)
    assert torch.equal(dict(mapped_tensors(tmp_path / "a.safetensors"))["a"], expected)


def resident(path):
    """The bytes of a mapped file that this process has touched."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.split()[0].count("-") == 1:
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_opening_reads_nothing(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({str(i): values(torch.bfloat16, 256, 1024) for i in range(8)}, path)
    found = dict(mapped_tensors(path))
    assert resident(path) == 0
    found["3"].sum()
    assert resident(path) >= found["3"].nbytes
