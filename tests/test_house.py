"""The layers of the package stay apart."""

import subprocess
import sys

import pytest


def imported_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {module.partition(".")[0] for module in run.stdout.split()}


@pytest.mark.parametrize("package", ["coram_hf.geometry", "coram_hf.amplitude"])
def test_the_mathematics_imports_nothing_of_hugging_face(package):
    assert not imported_by(f"import {package}") & {
        "transformers",
        "peft",
        "accelerate",
        "huggingface_hub",
        "safetensors",
    }


def test_importing_the_package_is_light():
    assert not imported_by("import coram_hf") & {"torch", "transformers", "numpy"}


def test_public_names_resolve():
    import coram_hf

    assert all(getattr(coram_hf, name).__name__ == name for name in coram_hf.__all__)
    with pytest.raises(AttributeError, match="CoramMerge"):
        _ = coram_hf.CoramMerge
