"""Small decompositions use one core each, whatever the number of torch's threads."""

from contextlib import suppress

import pytest
import torch
from helpers.models import fine_tuned, tiny_llama

from coram_hf import CoramConfig, CoramMerger
from coram_hf.baselines import merge_tensor
from coram_hf.execution.progress import Progress
from coram_hf.geometry import merge_matrix
from coram_hf.geometry.cores import one_core


@pytest.fixture
def threads(two_threads, monkeypatch):
    """The numbers of threads with which singular values and eigenvalues were found."""
    seen = []
    for name in ("svd", "eigh", "solve"):
        real = getattr(torch.linalg, name)

        def counted(*arguments, real=real, **options):
            seen.append(torch.get_num_threads())
            return real(*arguments, **options)

        monkeypatch.setattr(torch.linalg, name, counted)
    return seen


@pytest.fixture
def result():
    base = tiny_llama()
    return CoramMerger(base, [fine_tuned(base, 0.03, 1), fine_tuned(base, 0.05, 2)], progress=False).merge()


def test_an_adapter_is_factored_on_one_core_per_matrix(result, threads, tmp_path):
    result.save_adapter(tmp_path / "lora")
    assert len(threads) == 14
    assert set(threads) == {1}
    assert torch.get_num_threads() == 2


def test_single_matrices_are_merged_on_one_core(threads):
    base, *experts = torch.randn(3, 32, 48, generator=torch.Generator().manual_seed(0))
    merge_matrix(base, experts, CoramConfig())
    merge_tensor(base, experts, "tsvm")
    assert threads
    assert set(threads) == {1}
    assert torch.get_num_threads() == 2


def test_another_lambda_is_written_a_core_per_matrix(result, two_threads, monkeypatch):
    import coram_hf.result

    seen, real = [], coram_hf.result.write_update

    def counted(*arguments):
        seen.append(torch.get_num_threads())
        return real(*arguments)

    monkeypatch.setattr(coram_hf.result, "write_update", counted)
    other = result.with_lambda(2.5)
    assert seen == [1] * 14
    for name, update in {n: t for n, t in other.model.named_parameters() if "proj" in n}.items():
        assert not torch.equal(update, result.model.get_parameter(name))


@pytest.mark.parametrize("job", ["adapter", "lambda"])
def test_there_is_a_bar(result, monkeypatch, tmp_path, job):
    shown = []

    class Seen(Progress):
        def __init__(self, label, total, enabled, **options):
            super().__init__(label, total, False, **options)
            shown.append([label, total, enabled, 0])

        def add(self, done=1):
            shown[-1][-1] += done

    monkeypatch.setattr("coram_hf.result.Progress", Seen)
    if job == "adapter":
        result.save_adapter(tmp_path / "lora")
        result.save_adapter(tmp_path / "quiet", progress=False)
    else:
        result.with_lambda(2.5)
        result.with_lambda(2.5, progress=False)
    label = "adapter: factors" if job == "adapter" else "lambda 2.5"
    assert shown == [[label, 14, True, 14], [label, 14, False, 14]]


def test_threads_are_restored_after_an_error(two_threads):
    with suppress(OSError), one_core():
        assert torch.get_num_threads() == 1
        raise OSError
    assert torch.get_num_threads() == 2
