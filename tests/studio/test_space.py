"""The Space's files are complete: the app runs from them alone."""

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.metadata import version

import pytest
import yaml
from helpers.paths import ROOT
from space.deploy import stage

pytest.importorskip("gradio", reason="the extra `studio` is not installed")


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
    card = (ROOT / "examples" / "space" / "README.md").read_text()
    settings = yaml.safe_load(re.match(r"---\n(.*?)---\n", card, re.S)[1])
    assert (settings["sdk"], settings["app_file"]) == ("gradio", "app.py")
    assert settings["sdk_version"] == version("gradio")
    assert f"gradio=={settings['sdk_version']}" in (ROOT / "constraints.txt").read_text().split()
