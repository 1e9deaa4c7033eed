"""The real client of the Hub against a server on loopback."""

import json
import math
import os
import subprocess
import sys

import pytest
from helpers.command import coram_hf
from helpers.folders import on_disk
from helpers.hub_server import Hub
from helpers.paths import ROOT, TESTS

from coram_hf import CoramMerger, load_report
from coram_hf.hub.upload import Size, batches

TOKEN = "hf_loopbackloopback"


class Client:
    """A process that talks to the Hub; its libraries are loaded once."""

    def __init__(self, hub, folder):
        self.hub, self.folder = hub, folder
        environment = {
            **os.environ,
            "HF_ENDPOINT": hub.address,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_TOKEN": TOKEN,
            "HF_HOME": str(folder / "home"),
            "PYTHONPATH": os.pathsep.join([str(TESTS), str(ROOT)]),
        }
        self.errors = (folder / "stderr").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "helpers.hub_client", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=environment,
        )

    def __call__(self, scenario):
        self.process.stdin.write(f"{scenario}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            self.errors.seek(0)
            pytest.fail(self.errors.read()[-3000:])
        return json.loads(line)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    client = Client(Hub(), folder)
    yield client
    client.process.stdin.close()
    client.process.wait()


def test_a_configuration_is_pushed_and_read_back(client):
    assert client("config_push").startswith(f"{client.hub.address}/me/config/commit/")
    files = client.hub.files("me/config")
    assert json.loads(files["coram_config.json"])["weights"] == [1.0, [0.5, -1.0]]


def test_local_paths_in_the_recipe_are_not_published(client):
    private = client("local_paths")
    public = client.hub.files("me/with-recipe")["coram_recipe.yaml"].decode()
    assert "/private/base" in private
    assert "private" not in public
    assert "base: path/to/base" in public
    assert (
        public.partition("experts")[2].partition("line")[2]
        == private.partition("experts")[2].partition("line")[2]
    )


def test_a_full_disk_is_found_before_the_base_is_downloaded(client):
    full, half = client("size_before_download")
    assert "unsized needs" in full
    assert "are free in" in full
    assert "me/nowhere" in half


def test_push_and_load_back(client):
    hub = client.hub
    assert client("first_push").startswith(f"{hub.address}/me/merged/commit/")
    files = hub.files("me/merged")
    assert {"README.md", "coram_report.json", "config.json", "model.safetensors"} <= files.keys()
    assert "figures/updates.png" in files
    assert hub.repositories["me/merged"]["main"]["commits"] == ["A first merge"]
    assert client("offloaded_push") is True
    client("edited_card")
    client("stale_shards")
    client("evaluated")
    weights = {name for name in hub.files("me/many") if "safetensors" in name}
    assert weights == {"model.safetensors", "exp/adapter.safetensors"}
    url = client("pull_request")
    assert url == f"{hub.address}/me/merged/discussions/1"
    assert "refs/pr/1" in hub.repositories["me/merged"]
    assert client("branch_and_private") == "lr.ta"
    assert "me/hidden" in hub.private
    assert not hub.files("me/hidden")
    assert hub.files("me/hidden", "trial")

    for part, status, advice in (
        ("/commit/", 401, "hf auth login"),
        ("/commit/", 403, "has no write access"),
        ("/commit/", 409, "push again"),
    ):
        hub.fail.append(("POST", part, status))
        message = client("refused")
        assert message.startswith("cannot push to 'me/merged'")
        assert advice in message
        assert "hf_secret" not in message
    hub.objects.clear()
    hub.drop = 20
    assert "cannot push to 'me/merged'" in client("refused")
    hub.drop = 0
    assert client("pushed").startswith(f"{hub.address}/me/second/commit/")
    uploads = [path for method, path, _ in hub.log if method == "PUT"]
    client("pushed")
    assert [path for method, path, _ in hub.log if method == "PUT"] == uploads

    assert client("merge_from_the_hub").startswith(f"{hub.address}/me/direct/commit/")
    texts = [f for r in hub.repositories.values() for b in r.values() for f in b["files"].values()]
    client.errors.flush()
    texts.append((client.folder / "stderr").read_bytes())
    for text in texts:
        assert TOKEN.encode() not in text
        assert b"hf_secret" not in text


def test_adapters_are_pushed_and_loaded_from_the_hub(client):
    hub = client.hub
    client("adapters")
    files = hub.files("me/lora")
    wanted = {"README.md", "coram_report.json", "adapter_config.json", "adapter_model.safetensors"}
    assert wanted <= files.keys()
    assert not {"config.json", "model.safetensors"} & files.keys()
    assert not [path for path, content in files.items() if str(client.folder).encode() in content]
    assert "adapter_config.json" not in hub.files("me/oft")
    client("adapter_of_the_hub")


def test_a_large_folder_is_pushed_in_several_commits(client):
    shards, url = client("large")
    commits = client.hub.repositories["me/large"]["main"]["commits"]
    parts = math.ceil(shards / 3)
    assert commits == [f"Large (weights, {i + 1} of {parts})" for i in range(parts)] + ["Large"]
    assert parts > 1
    small = client.hub.repositories["me/small"]
    assert small["main"]["commits"] == ["Small"]
    number = url.rpartition("/")[2]
    assert len(small[f"refs/pr/{number}"]["commits"]) == math.ceil(shards / 4) + 1


def test_groups_of_files_stay_within_a_size():
    sizes = {"a": 4, "b": 4, "c": 9, "d": 1, "e": 1, "f": 1, "g": 1}
    assert batches(sizes, Size(3, 8)) == [["a", "b"], ["c"], ["d", "e", "f"], ["g"]]


def test_an_adapter_that_is_not_whole_is_not_pushed(tmp_path):
    result = CoramMerger(*on_disk(tmp_path, experts=(0.05,)), progress=False).merge()
    result.save_adapter(tmp_path / "adapter", rank=2)
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    run = coram_hf("push", tmp_path / "adapter", "me/x")
    assert run.returncode == 2
    assert "its size or sha256 has changed" in run.stderr
    weights.write_bytes(data)
    (tmp_path / "adapter" / "adapter_config.json").unlink()
    assert "lacks adapter_config.json" in coram_hf("push", tmp_path / "adapter", "me/x").stderr


def test_a_folder_that_is_not_whole_is_not_pushed(tmp_path):
    merged = tmp_path / "merged"
    merger = CoramMerger(*on_disk(tmp_path, experts=(0.05,)), progress=False)
    merger.merge_to(merged, max_shard_size="40KB")
    assert load_report(merged).files.keys() == {path.name for path in merged.glob("*.safetensors")}
    shard = sorted(merged.glob("*.safetensors"))[0]
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    run = coram_hf("push", merged, "me/x")
    assert run.returncode == 2
    assert "its size or sha256 has changed" in run.stderr
    shard.unlink()
    assert "is incomplete" in coram_hf("push", merged, "me/x").stderr
    assert "no coram_report.json" in coram_hf("push", tmp_path / "base", "me/x").stderr


def test_a_dataset_on_the_hub_is_a_task(client):
    """The same rows as in the files, from the branch that was asked for."""
    solved = b"question,answer\n5-1=,4\n"
    branches = {"main": b"question,answer\n1+1=,2\n2+1=,3\n", "more": b"question,answer\n9+0=,9\n"}
    client.hub.repositories["datasets/me/sums"] = {
        name: {"files": {"test.csv": rows, "train.csv": solved}} for name, rows in branches.items()
    }
    found = client("dataset")
    assert found["questions"] == [[["1+1=", "2"], ["2+1=", "3"]], [["9+0=", "9"]]]
    assert found["shot"] == "5-1="
    nothing, split, revision = found["refusals"]
    assert "hf://datasets/me/nothing cannot be opened as a dataset: DatasetNotFoundError" in nothing
    assert "no split 'dev'; it has 'train', 'test'" in split
    assert "nowhere" in revision
