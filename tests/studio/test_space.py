"""The Space's files are complete: the app runs from them alone."""

import os
import re
import runpy
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from helpers.paths import ROOT
from huggingface_hub import RepoUrl
from space.deploy import stage

pytest.importorskip("gradio", reason="the extra `studio` is not installed")

SPACE = ROOT / "examples" / "space"


class FakeApi:
    """What `deploy` asks of the Hub, and the files that it would upload."""

    def __init__(self):
        self.created, self.uploads = {}, []

    def create_repo(self, repo_id, **options):
        self.created[repo_id] = options
        return RepoUrl(f"https://huggingface.co/spaces/{repo_id}")

    def upload_folder(self, *, folder_path, repo_id, repo_type, **_):
        files = {
            path.relative_to(folder_path).as_posix(): path.read_bytes()
            for path in Path(folder_path).rglob("*")
            if path.is_file()
        }
        self.uploads.append((repo_id, repo_type, files))


@pytest.mark.parametrize(("extra", "private"), [([], True), (["--public"], False)])
def test_one_command_deploys_the_space(monkeypatch, capsys, extra, private):
    api = FakeApi()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: api)
    monkeypatch.setattr(sys, "argv", ["deploy.py", "me/coram-studio", *extra])
    runpy.run_path(str(SPACE / "deploy.py"), run_name="__main__")
    assert "deployed to https://huggingface.co/spaces/me/coram-studio" in capsys.readouterr().out
    assert api.created == {
        "me/coram-studio": {
            "repo_type": "space",
            "space_sdk": "gradio",
            "private": private,
            "exist_ok": True,
        }
    }
    [(repository, kind, files)] = api.uploads
    assert (repository, kind) == ("me/coram-studio", "space")
    assert files["app.py"] == (SPACE / "app.py").read_bytes()
    assert any(line.startswith("gradio") for line in files["requirements.txt"].decode().splitlines())
    package = [path for path in (ROOT / "coram_hf").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert {path.relative_to(ROOT).as_posix() for path in package} <= set(files)
    assert not [name for name in files if name.endswith(".pyc")]


def test_the_space_s_app_listens_where_a_space_must(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("coram_hf.studio.run_studio", lambda roots, **options: seen.append((roots, options)))
    monkeypatch.setenv("STUDIO_ROOT", str(tmp_path / "models"))
    monkeypatch.delenv("PORT", raising=False)
    runpy.run_path(str(SPACE / "app.py"))
    assert seen == [([tmp_path / "models"], {"host": "0.0.0.0", "port": 7860})]
    assert (tmp_path / "models").is_dir()


@pytest.mark.slow
def test_the_space_runs_from_what_is_uploaded(tmp_path):
    folder = stage(tmp_path)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"PORT": str(port), "STUDIO_ROOT": str(tmp_path / "models")}
    with (tmp_path / "log").open("w+") as log:
        app = subprocess.Popen(
            [sys.executable, "app.py"], cwd=folder, env=environment, stdout=log, stderr=log
        )
        try:
            for _ in range(400):
                assert app.poll() is None, (tmp_path / "log").read_text()
                try:
                    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/").read().decode()
                    break
                except OSError:
                    time.sleep(0.2)
            assert "CORAM studio" in page
        finally:
            app.kill()
            app.wait()


def test_the_space_s_card_names_the_version_that_is_tested():
    card = (SPACE / "README.md").read_text()
    settings = yaml.safe_load(re.match(r"---\n(.*?)---\n", card, re.S)[1])
    assert (settings["sdk"], settings["app_file"]) == ("gradio", "app.py")
    assert settings["sdk_version"] == version("gradio")
    assert f"gradio=={settings['sdk_version']}" in (ROOT / "constraints.txt").read_text().split()
