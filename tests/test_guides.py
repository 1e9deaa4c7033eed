"""The pages: every command and snippet of a guide runs, links lead somewhere, and the README stays short."""

import re
import shlex
import shutil
from urllib.parse import unquote

import peft
import pytest
import yaml
from datasets import Dataset
from helpers.adapters import adapted
from helpers.architectures import ARCHITECTURES
from helpers.command import coram_hf
from helpers.folders import on_disk
from helpers.models import choice_task, fine_tuned, tiny_llama, tiny_tokenizer
from helpers.paths import ROOT

from coram_hf.report import MergeReport

GUIDES = sorted((ROOT / "examples" / "guides").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "examples").rglob("README.md"), *GUIDES]
OFT = peft.OFTConfig(oft_block_size=4, target_modules=["q_proj", "up_proj"], use_cayley_neumann=False)
BLOCK = re.compile(r"^(<!-- not run: [^\n]+ -->\n)?```(\w+)\n(.*?)^```$", re.M | re.S)


def blocks(page):
    """The language and text of every block of a page that is meant to be run."""
    return [(kind, text) for skipped, kind, text in BLOCK.findall(page.read_text()) if not skipped]


def commands(text):
    """The commands of a shell block, with continued lines joined and comments left out."""
    for line in text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder with what the guides name: a base, experts, adapters, tasks and prompts."""
    base = tiny_llama()
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"])
    experts = {"math": 0.03, "code": 0.05, "chat": 0.04}
    adapters = {"math-lora": lora, "code-lora": lora, "oft-a": OFT, "oft-b": OFT}
    made = {name: adapted(base, config, seed) for seed, (name, config) in enumerate(adapters.items())}
    on_disk(tmp_path, base, {**experts, **made}, tiny_tokenizer())
    for name in experts:
        tiny_tokenizer().save_pretrained(tmp_path / name)
    for seed, name in enumerate(("math", "code", "world")):
        choice_task(tmp_path / f"{name}.jsonl", seed, count=6)
    (tmp_path / "prompts").mkdir()
    for name in ("math", "code"):
        (tmp_path / "prompts" / f"{name}.txt").write_text("1+1=\n2+3=\n4+4=\nabc\n")
    rows = {"question": ["2+2", "1+2"], "options": [["4", "5"], ["3", "5"]], "key": ["A", "A"]}
    Dataset.from_dict(rows).to_parquet(tmp_path / "questions.parquet")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_everything_on_the_page_runs(page, desk):
    found, namespace = blocks(page), {}
    assert any(kind == "bash" for kind, _ in found), "a guide shows at least one command"
    for kind, text in found:
        if kind == "python":
            exec(compile(text, str(page), "exec"), namespace)
        elif kind == "bash":
            for program, *words in commands(text):
                assert program == "coram-hf", f"{program} cannot be run here; say why it is not run"
                run = coram_hf(*words)
                assert run.returncode == 0, (words, run.stderr)
                assert run.stdout, words
        elif name := re.match(r"# (\S+\.yaml)\n", text):
            (desk / name[1]).write_text(text)
    left = {path.name for path in desk.iterdir()}
    assert not [name for name in left if name.startswith(".")], "no half-written output is left"


README = ROOT / "README.md"


@pytest.fixture
def front(desk):
    """The desk with what the README names in the folder `org`, which is a Hub's name there."""
    text, vision = ARCHITECTURES["Llama"].build(1), ARCHITECTURES["LLaVA"].build(0)
    rank = {"r": 2, "target_modules": ["q_proj", "up_proj"]}
    models = {"base": text, "text-base": text, "vlm": vision, "vl-tune": fine_tuned(vision, 0.04, 5)}
    models |= {name: fine_tuned(text, 0.04, i) for i, name in enumerate(("math", "code"))}
    models["code-lora"] = adapted(text, peft.LoraConfig(**rank), 7)
    for name, model in models.items():
        model.save_pretrained(desk / "org" / name)
        tiny_tokenizer().save_pretrained(desk / "org" / name)
    shutil.rmtree(desk / "chat")
    fine_tuned(text, 0.04, 8).save_pretrained(desk / "chat")
    for i in range(1, 6):
        adapted(text, peft.LoraConfig(**rank), i).save_pretrained(desk / f"lora-{i}")
    for seed, name in enumerate(("oft-a", "oft-b")):
        shutil.rmtree(desk / name)
        adapted(text, OFT, seed).save_pretrained(desk / name)
    two = [{"model": "org/math"}, {"model": "org/code"}]
    recipe = {"merge_method": "ties", "base_model": "org/base", "parameters": {"density": 0.5}, "models": two}
    (desk / "mergekit.yaml").write_text(yaml.safe_dump(recipe))
    return desk


def test_the_readme_fits_a_minute(front):
    """It is short, and its ten lines of Python are ten, and run."""
    text = README.read_text()
    assert len(text.splitlines()) <= 200
    (code,) = [text for kind, text in blocks(README) if kind == "python"]
    assert len([line for line in code.splitlines() if line]) == 10
    shutil.copy(front / "prompts" / "math.txt", front / "prompts" / "chat.txt")
    namespace = {}
    exec(compile(code, "README.md", "exec"), namespace)
    assert MergeReport.load(front / "merged").lam == namespace["result"].report.lam
    assert namespace["fitted"].report.lam_source == "calibrated"


def test_the_commands_of_the_readme_run(front, hub):
    """Each command of the table, as it is typed; the last ones find what the others made."""
    table = re.findall(r"^\|.*\| `(coram-hf .*)` \|$", README.read_text(), re.M)
    assert len(table) == 9
    for command in table:
        _, name, *words = shlex.split(command)
        if name == "merge":
            flag = "--adapter-out" if "--adapter-out" in words else "-o"
            output = front / words[words.index(flag) + 1]
            shutil.rmtree(output, ignore_errors=True)
        run = coram_hf(name, *words)
        assert run.returncode == 0, (command, run.stderr)
        assert run.stdout, command
        if name == "merge":
            weights = "adapter_model" if flag == "--adapter-out" else "model"
            written = (output / f"{weights}.safetensors").is_file()
            assert written != ("--dry-run" in words), command
    assert (front / "report.html").is_file()
    assert "coram_report.json" in hub.files("me/merged")


def heading_ids(text):
    """The anchors of a page's headings, as GitHub makes them."""
    for heading in re.findall(r"^#+ (.+)$", text, re.M):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for address in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"https?:", address):
            continue
        path, _, anchor = unquote(address).partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), address
        if anchor:
            assert anchor in heading_ids(target.read_text()), address


def test_the_index_names_every_guide_and_notebook():
    index = (ROOT / "examples" / "README.md").read_text()
    pages = [*GUIDES, *(ROOT / "examples" / "notebooks").glob("*.ipynb")]
    assert not [page.name for page in pages if f"/{page.name})" not in index]
