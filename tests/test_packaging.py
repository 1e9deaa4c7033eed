"""The files around the package agree with each other and with the package."""

import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import coram_hf
from coram_hf.demo.run import EXPERTS
from coram_hf.hub.card import CITATION

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CI = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())


def makefile_commands():
    """The lines of all recipes, those that end in a backslash joined, with the variables put in."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    variables = dict(re.findall(r"^(\w+)\s*[:?]?=\s*(.*)$", text, re.MULTILINE))
    for line in re.findall(r"^\t(.*)$", text, re.MULTILINE):
        while found := re.search(r"\$\((\w+)\)", line):
            line = line.replace(found[0], variables[found[1]])
        yield line


def ci_commands(job):
    return [step["run"] for step in CI["jobs"][job]["steps"] if "run" in step]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of the package, built from a copy so that the working tree stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "coram_hf", folder / "coram_hf", ignore=shutil.ignore_patterns("__pycache__"))
    command = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    subprocess.run([sys.executable, "-m", *command], cwd=folder, check=True)
    (built,) = (folder / "dist").iterdir()
    return ZipFile(built)


def test_one_version_everywhere():
    releases = re.findall(r"^## \[(\d\S*)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    found = {
        "installed": version("coram-hf"),
        "changelog": releases[0],
        "citation": str(citation["version"]),
    }
    assert found == dict.fromkeys(found, coram_hf.__version__)


def test_the_citation_names_the_software_and_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["title"] == "coram_hf"
    assert citation["license"] == PYPROJECT["project"]["license"]
    assert [author["name"] for author in citation["authors"]] == [
        author["name"] for author in PYPROJECT["project"]["authors"]
    ]
    (paper,) = citation["references"]
    assert paper["title"] == "CORAM: Coherent Orthogonal Rotation for Model Merging"
    assert [author["family-names"] for author in paper["authors"]] == ["Sui", "Liu", "Ling", "Wang", "Jiang"]
    names = " and ".join(f"{author['family-names']}, {author['given-names']}" for author in paper["authors"])
    assert f"author = {{{names}}}" in CITATION
    assert f"year = {{{paper['year']}}}" in CITATION


def test_the_wheel_has_its_version_types_and_data(wheel):
    names = set(wheel.namelist())
    assert f"coram_hf-{coram_hf.__version__}.dist-info/METADATA" in names
    package = ROOT / "coram_hf"
    modules = {path.relative_to(ROOT).as_posix() for path in package.rglob("*.py")}
    read_at_run_time = {
        "coram_hf/py.typed",
        "coram_hf/hub/card_template.md",
        "coram_hf/hub/section_template.md",
        *(f"coram_hf/report/page/page.{kind}" for kind in ("css", "html", "js")),
    }
    for task in (path.name for path in (package / "demo" / "data").iterdir()):
        read_at_run_time |= {
            f"coram_hf/demo/data/{task}/test.jsonl",
            f"coram_hf/demo/adapters/{task}/adapter_config.json",
            f"coram_hf/demo/adapters/{task}/adapter_model.safetensors",
        }
    assert modules | read_at_run_time <= names


def test_every_install_is_constrained():
    installs = [line for line in makefile_commands() if "pip install" in line]
    assert len(installs) >= 4
    for line in installs:
        assert line.count("pip install") == len(re.findall(r"-c constraints(?:-lowest)?\.txt", line)), line


def test_the_lower_bounds_are_the_versions_that_were_tried():
    """Every `>=` of the package and of its tests is the version that `make lowest` installs."""
    lines = (ROOT / "constraints-lowest.txt").read_text().split()
    tried = {canonicalize_name(name): Version(found) for name, found in (line.split("==") for line in lines)}
    project = PYPROJECT["project"]
    texts = project["dependencies"] + project["optional-dependencies"]["test"]
    needed = [Requirement(text) for text in texts]
    assert len(needed) > 15
    for requirement in needed:
        (lowest,) = [Version(s.version) for s in requirement.specifier if s.operator == ">="]
        assert lowest == tried[canonicalize_name(requirement.name)], requirement
    assert "make lowest" in ci_commands("lowest")
    assert any("-c constraints-lowest.txt" in line for line in makefile_commands())


def test_ci_runs_the_readme_s_test_command():
    readme = (ROOT / "README.md").read_text()
    (command,) = {line.split("#")[0].strip() for line in re.findall(r"^make test\b.*$", readme, re.MULTILINE)}
    assert ci_commands("test") == [command]
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == command


def test_ci_builds_and_checks_the_distributions():
    assert ci_commands("build") == ["make build"]
    assert any("twine check" in line for line in makefile_commands())


def test_one_lowest_python_everywhere():
    lowest = PYPROJECT["project"]["requires-python"].removeprefix(">=")
    prefix = "Programming Language :: Python :: 3."
    classified = [
        f"3.{line.removeprefix(prefix)}"
        for line in PYPROJECT["project"]["classifiers"]
        if line.startswith(prefix)
    ]
    assert CI["jobs"]["test"]["strategy"]["matrix"]["python"] == classified
    assert classified[0] == lowest
    assert PYPROJECT["tool"]["mypy"]["python_version"] == lowest
    assert PYPROJECT["tool"]["ruff"]["target-version"] == "py" + lowest.replace(".", "")
    assert f"Python {lowest} or newer" in (ROOT / "README.md").read_text()


def test_pre_commit_runs_the_style_checks_of_make_test():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    checks = [
        line.removeprefix(".venv/bin/")
        for line in makefile_commands()
        if re.match(r"\.venv/bin/(ruff (check \.|format --check)|mypy)", line)
    ]
    assert [re.search(r"\$PATH\" (.*)'$", hook["entry"])[1] for hook in hooks] == checks


def test_the_wheel_is_small_and_holds_the_demo_s_adapters_alone(wheel):
    assert sum(info.compress_size for info in wheel.infolist()) < 30 * 2**20
    adapters = {name.split("/")[3] for name in wheel.namelist() if name.startswith("coram_hf/demo/adapters/")}
    assert adapters == set(EXPERTS)


def test_releases_are_published_without_a_token_and_only_if_switched_on():
    text = (ROOT / ".github" / "workflows" / "publish.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    assert "secrets." not in text
    assert "password" not in text
    assert jobs["check"]["if"] == "vars.PUBLISH == 'on'"
    assert [step["run"] for step in jobs["check"]["steps"] if "run" in step] == ["make release-check"]
    assert jobs["publish"]["needs"] == "check"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["steps"][-1]["uses"].startswith("pypa/gh-action-pypi-publish@")


@pytest.mark.parametrize(("size", "stops"), [(30, False), (31, True)])
def test_a_wheel_that_is_too_large_is_refused(tmp_path, size, stops):
    """The script of `make release-check`, up to the empty environment."""
    wheel = tmp_path / "coram_hf-1.whl"
    wheel.write_bytes(b"0" * (size * 2**20))
    code = "import release_check, sys, pathlib; release_check.check_size(pathlib.Path(sys.argv[1]))"
    run = subprocess.run(
        [sys.executable, "-c", code, wheel], cwd=ROOT / ".ci", capture_output=True, text=True
    )
    assert ("too large" in run.stderr) == stops
    assert run.returncode == int(stops)
