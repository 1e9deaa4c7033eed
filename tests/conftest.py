import os

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # bitsandbytes loads torch's compiler when it is imported

import pytest  # noqa: E402

pytest.register_assert_rewrite("helpers")

from helpers.figures import draw_once  # noqa: E402
from hypothesis import settings  # noqa: E402

from coram_hf.report.figures import draw_updates  # noqa: E402

settings.register_profile("suite", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("suite")


@pytest.fixture(scope="session", autouse=True)
def one_drawing():
    """Cards reuse a figure; tests of the figure call `draw_updates` itself, or ask for `real_figures`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coram_hf.hub.publish.draw_updates", draw_once)
        yield


@pytest.fixture
def real_figures(monkeypatch):
    monkeypatch.setattr("coram_hf.hub.publish.draw_updates", draw_updates)


@pytest.fixture
def hub(monkeypatch):
    """A Hub on loopback, and a login to it."""
    from helpers.hub_server import TOKEN, Hub

    found = Hub()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", found.address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return found


@pytest.fixture
def two_threads():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def pytest_terminal_summary(terminalreporter):
    """Print the guide's table of architectures, with what this run found for each."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, [])]
    rows = [(r.outcome, row) for r in reports for key, row in r.user_properties if key == "architecture"]
    if rows:
        terminalreporter.write_line(
            "\n| architecture | class | targets | residual | status |\n|---|---|---|---|---|"
        )
        for outcome, row in sorted(rows, key=lambda found: found[1]):
            terminalreporter.write_line(f"{row} {outcome} |")
