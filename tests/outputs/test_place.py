"""Tensors in files: bytes at their places, in any order, through a page cache that does not fill up."""

import ctypes
import mmap
import os

import pytest
import torch
from helpers.models import tiny_llama
from safetensors.torch import load_file

from coram_hf.outputs import folder as folder_module
from coram_hf.outputs.folder import FolderSink
from coram_hf.outputs.layout import Layout, units, without_data
from coram_hf.outputs.pages import forget
from coram_hf.outputs.place import FileTensor
from coram_hf.outputs.spool import Spool

OFFSET = 13
DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn]


@pytest.fixture
def file(tmp_path):
    with (tmp_path / "file").open("w+b", buffering=0) as opened:
        yield opened


def place_of(file, like):
    return FileTensor(file, OFFSET, like.shape, like.dtype)


def written(file, like):
    data = bytearray(os.pread(file.fileno(), like.nbytes, OFFSET))
    return torch.frombuffer(data, dtype=torch.uint8).view(like.dtype).view(like.shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_in_any_order_by_ranges_and_by_number(file, dtype):
    values = torch.randn(11, 3, 2).clamp_min(0).to(dtype)
    place = place_of(file, values)
    place[8:11] = values[8:11]
    place[0:2] = values[0:2]
    scattered = torch.tensor([7, 2, 5, 3, 6, 4])
    place[scattered] = values[scattered]
    assert written(file, values).view(torch.uint8).equal(values.view(torch.uint8))


def test_what_is_not_contiguous_and_what_has_no_rows(file):
    values = torch.arange(12.0).view(3, 4).mT
    place_of(file, values)[0:4] = values
    assert written(file, torch.empty(4, 3)).equal(values)
    single = torch.tensor(3.5)
    place_of(file, single).view(torch.Size([1]))[0:1] = single.reshape(1)
    assert written(file, single).equal(single)
    before = os.fstat(file.fileno()).st_size
    place_of(file, torch.empty(0, 3))[0:0] = torch.empty(0, 3)
    assert os.fstat(file.fileno()).st_size == before


@pytest.mark.parametrize("rows", [slice(3, 6), slice(-1, 1), torch.tensor([0, 4])])
def test_nothing_is_written_beside_the_place(file, rows):
    values = torch.ones(3, 2)
    with pytest.raises(IndexError, match="of a tensor of 32"):
        place_of(file, torch.empty(4, 2))[rows] = values
    assert os.fstat(file.fileno()).st_size <= OFFSET + 32


def test_a_closed_file_is_not_written_to(file):
    place = place_of(file, torch.empty(2, 2))
    file.close()
    with pytest.raises(ValueError, match="closed"):
        place[0:2] = torch.ones(2, 2)


def test_a_write_that_the_system_cuts_short_goes_on(file, monkeypatch):
    values = torch.randn(5, 7)
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, data, offset: pwrite(handle, data[:11], offset))
    place_of(file, values)[0:5] = values
    assert written(file, values).equal(values)


def resident_pages(path):
    """How many pages of a file are in the page cache, by mincore."""
    size = path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        found = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(mapped)
        status = ctypes.CDLL(None).mincore(ctypes.byref(start), ctypes.c_size_t(size), found)
        del start
        assert status == 0
    return sum(page & 1 for page in found)


def test_what_is_on_the_disk_leaves_the_page_cache(tmp_path, monkeypatch):
    control = tmp_path / "control"
    with control.open("wb") as file:
        file.write(bytes(2**20))
        file.flush()
        os.fsync(file.fileno())
        before = resident_pages(control)
        forget(file.fileno())
    if not resident_pages(control) < before:
        pytest.skip("the file system keeps its pages")
    model = tiny_llama(hidden_size=128)
    skeleton = without_data(model)
    layout = Layout(skeleton, [units(skeleton)], "50GB")
    monkeypatch.setattr(folder_module, "SYNC_BYTES", 2**12)
    path = tmp_path / "model.safetensors"
    with FolderSink(tmp_path, layout, layout.files(0), {}, {}, Spool(tmp_path / "kept")) as sink:
        sink.write(
            {unit[0]: sink.unchanged(unit[0], model.state_dict()[unit[0]]) for unit in units(skeleton)}
        )
        assert path.stat().st_size > 16 * mmap.PAGESIZE
        assert resident_pages(path) < 8  # a sync after every page of a tensor; small ones wait
        sink.sync()
    assert resident_pages(path) <= 1
    state = model.state_dict()
    assert all(tensor.equal(state[name]) for name, tensor in load_file(path).items())
