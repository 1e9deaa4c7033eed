"""Files that are whole or absent: links, devices and neighbours are left as they are."""

import os
import stat
from contextlib import suppress

from coram_hf.outputs.files import replacing, write_whole


def test_a_link_is_followed(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_what_is_no_file_stays_what_it_is(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_whole(tmp_path / "pipe", "said")
    assert os.read(reader, 10) == b"said"
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_hidden_neighbour_is_left_alone(tmp_path):
    (tmp_path / ".numbers.json").write_text("mine")
    write_whole(tmp_path / "numbers.json", "new")
    assert (tmp_path / ".numbers.json").read_text() == "mine"
    with suppress(OSError), replacing(tmp_path / "numbers.json") as partial:
        partial.write_text("half")
        raise OSError("gone")
    assert (tmp_path / "numbers.json").read_text() == "new"
    assert len(list(tmp_path.iterdir())) == 2
