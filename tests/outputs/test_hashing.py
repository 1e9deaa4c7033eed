"""Files are hashed while they are filled, in whatever order."""

import hashlib
import itertools
from io import FileIO

import pytest

from coram_hf.outputs.hashing import FollowingHash

PARTS = {"a": b"aaaa", "b": b"bb", "c": b"cccccc"}
OFFSETS = {"a": 3, "b": 7, "c": 9}
WHOLE = b"top" + b"".join(PARTS.values())


@pytest.mark.parametrize("order", itertools.permutations(PARTS))
def test_every_order_gives_the_hash_of_the_whole_file(tmp_path, order):
    path = tmp_path / "file"
    path.write_bytes(b"top" + bytes(12))
    with FileIO(path, "r+") as file:
        following = FollowingHash(file, len(WHOLE), OFFSETS)
        for number, name in enumerate(order, start=1):
            assert following.found() is None
            file.seek(OFFSETS[name])
            file.write(PARTS[name])
            following.complete([name])
            following.follow()
            left = [OFFSETS[other] for other in order[number:]]
            assert following.done == min(left, default=len(WHOLE))
        assert following.found() == {"size": len(WHOLE), "sha256": hashlib.sha256(WHOLE).hexdigest()}


def test_a_tensor_is_hashed_as_far_as_it_is_written(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(WHOLE)
    with FileIO(path, "r+") as file:
        following = FollowingHash(file, len(WHOLE), OFFSETS)
        following.reach("c", OFFSETS["c"] + 2)
        following.follow()
        assert following.done == OFFSETS["a"]
        following.complete(["a", "b"])
        following.follow()
        assert following.done == OFFSETS["c"] + 2
        assert following.found() is None
        following.complete(["c"])
        following.follow()
        assert following.found() == {"size": len(WHOLE), "sha256": hashlib.sha256(WHOLE).hexdigest()}
