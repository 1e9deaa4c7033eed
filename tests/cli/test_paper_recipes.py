"""The recipes of examples/paper: the rows of the paper's tables, on stand-ins of its suites."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from helpers.command import coram_hf as run_command
from helpers.models import choice_task, tiny_tokenizer
from helpers.paths import ROOT
from transformers import AutoConfig

from coram_hf.baselines import PRESETS, Preset
from coram_hf.cli.recipe import read_recipe
from coram_hf.evaluation.compare import compare_methods
from coram_hf.methods.registry import find_method
from model_cards import SUITES, stand_ins

PAPER = ROOT / "examples" / "paper"
RECIPES = {f"{path.parent.name}/{path.stem}": path for path in sorted(PAPER.glob("T?/*.yaml"))}
LISTS = sorted((PAPER / "tasks").glob("*.txt"))

ROWS = {
    "T1/coram": ("full", 2.6),
    "T1/coram-c": ("nca+ave", 2.6),
    "T1/coram-c-ss": ("SS(ca+ave,energy)", 2.6),
    "T2/coram-ss-rp": ("SS(lr,mean).ties", 2.6),
    "T2/coram-c-rp": ("nca.ties", 2.6),
    "T2/coram-c-ss-rp": ("SS(ca+ave,variance).ties", 2.6),
    "T3/coram": ("lr", 2.0),
    "T3/coram-rp": ("lr.ta", 2.0),
    "T3/coram-c-rp": ("nca.ta", 2.0),
    "T4/coram-c": ("ca+ave", 1.1),
    "T4/coram-rp": ("lr.ties", 1.1),
    "T4/coram-ss-rp": ("SS(lr,mean).ta", 1.1),
}
"""The paper's mapping of main-table rows to lines, and the coefficient of its rule."""

PRESET_OF = {
    "linear": "Linear",
    "task-arithmetic": "MergeBench Task Arithmetic",
    "ties": "MergeBench TIES",
    "dare-ties": "MergeBench DARE-TIES",
    **{
        f"orthomerge-{name.lower().replace('-', '')}-{kind.lower()}": f"OrthoMerge {name}+{kind}"
        for name in ("TA", "TIES", "TSV-M")
        for kind in "GC"
    },
}
LM_EVAL_FOLDERS = (
    "agieval",
    "commonsense_qa",
    "gsm8k",
    "ifeval",
    "minerva_math",
    "mmlu/default",
    "okapi",
    "siqa",
)
HARNESS_NAME = re.compile(r"[a-z0-9_]+")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The folders of a suite's stand-ins, and r_i by a plain loop, both by suite."""

    @cache
    def make(suite):
        folder = tmp_path_factory.mktemp(suite)
        base, experts = stand_ins(SUITES[suite])
        base.save_pretrained(folder / "base")
        for position, (name, expert) in enumerate(experts.items()):
            if suite == "T2":
                expert.resize_token_embeddings(base.config.vocab_size + 8, mean_resizing=False)
            other_names = {"save_original_format": False} if suite == "T3" and position == 0 else {}
            expert.save_pretrained(folder / name, **other_names)
        return folder, {name: relative_update(base, expert) for name, expert in experts.items()}

    return make


def is_target(name):
    return re.search(r"(?<!visual\.)layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight$", name) is not None


def relative_update(base, expert):
    """|W_i - W_0| / |W_0| over the projections of the language model."""
    merged = expert.float().merge_and_unload() if hasattr(expert, "merge_and_unload") else expert
    found, moved, size = merged.state_dict(), 0.0, 0.0
    for name, tensor in base.state_dict().items():
        if is_target(name):
            moved += float((found[name].double() - tensor.double()).square().sum())
            size += float(tensor.double().square().sum())
    return (moved / size) ** 0.5


def local(recipe, folder):
    """The recipe with its Hub ids replaced by the folders of their stand-ins."""
    return replace(recipe, base=str(folder / "base"), experts={n: str(folder / n) for n in recipe.experts})


def test_every_row_has_a_recipe():
    baselines = {f"{suite}/{name}" for suite in ("T2", "T3", "T4") for name in (*PRESET_OF, "tsvm")}
    on_oft = {f"T1/{name}" for name in (*PRESET_OF, "tsvm") if not name.startswith("orthomerge")}
    assert set(RECIPES) == {*ROWS, *baselines, *on_oft, "T1/orthomerge-oft"}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_what_its_row_is(name):
    recipe = read_recipe(RECIPES[name])
    suite, _, row = name.partition("/")
    assert recipe.base == SUITES[suite].base
    assert recipe.experts == {expert: source for expert, (source, _) in SUITES[suite].experts.items()}
    if name in ROWS:
        config = recipe.config()
        assert (config.line, config.slice_height) == (ROWS[name][0], 8)
        kappa = 0.5 if suite == "T4" else 1.15
        assert ROWS[name][1] == round(kappa * len(recipe.experts) ** 0.5, 1)
        assert recipe.parameters == {"line": config.line, "lambda_step": 0.1}
    elif row in PRESET_OF:
        preset = PRESETS[PRESET_OF[row]]
        assert recipe.method == preset.method
        complete = find_method(recipe.method).complete
        assert complete(recipe.parameters) == complete(preset.parameters)
    else:
        expected = {"tsvm": ("tsvm", {"scale": 1.0}), "orthomerge-oft": ("orthomerge", {"space": "oft"})}
        assert (recipe.method, recipe.parameters) == expected[row]


@pytest.mark.parametrize("name", RECIPES)
def test_the_plan_of_a_recipe_on_stand_ins(name, sources):
    recipe, suite = read_recipe(RECIPES[name]), name.partition("/")[0]
    folder, updates = sources(suite)
    plan = local(recipe, folder).merger(progress=False).inspect()
    assert len(plan.targets) == 14
    assert all(map(is_target, plan.targets))
    for expert, r in updates.items():
        assert plan.relative_updates[expert] == pytest.approx(r, rel=1e-3)
    assert (plan.dispersion >= 7.5) == (suite == "T4")
    assert plan.lam == (ROWS[name][1] if name in ROWS else None)
    stays = name == "T1/orthomerge-oft" or (name in ROWS and "." not in ROWS[name][0])
    assert bool(plan.residual) != stays
    assert bool(plan.vocabulary) == (suite == "T2")


@pytest.mark.parametrize("name", ["T1/orthomerge-oft", "T2/coram-c-rp", "T3/coram-rp", "T4/ties"])
def test_a_row_is_one_command(name, sources, tmp_path):
    """Sources on the command line stand in for those of the recipe."""
    folder, _ = sources(name.partition("/")[0])
    experts = [f"{expert}={folder / expert}" for expert in read_recipe(RECIPES[name]).experts]
    arguments = ["--config", RECIPES[name], "-o", tmp_path / "merged"]
    run = run_command("merge", folder / "base", *experts, *arguments)
    assert run.returncode == 0, run.stderr
    report = json.loads((tmp_path / "merged" / "coram_report.json").read_text())
    assert report["lam"] == (ROWS[name][1] if name in ROWS else None)
    assert report["lam_source"] == ("rule" if name in ROWS else None)
    assert AutoConfig.from_pretrained(tmp_path / "merged").architectures == [report["model_class"]]
    assert report["model_class"] == type(SUITES[name[:2]].model()).__name__


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return choice_task(tmp_path_factory.mktemp("task") / "task.jsonl", 0, count=2)


@pytest.mark.parametrize("suite", SUITES)
def test_comparisons_take_every_recipe_of_a_suite(suite, sources, task):
    """CORAM rows as lines, at the paper's lambda by the rule; baselines as rows with their own parameters."""
    folder, _ = sources(suite)
    found = {name: read_recipe(path) for name, path in RECIPES.items() if name.startswith(suite)}
    rows = [name for name in found if name in ROWS]
    rivals = {name for name in found if name not in ROWS and (suite == "T1" or name.endswith("-ta-g"))}
    any_recipe = local(found[rows[0]], folder)
    comparison = compare_methods(
        any_recipe.base,
        any_recipe.experts,
        [found[name].config() for name in rows],
        tasks=[task],
        baselines={n: Preset(r.method, r.parameters) for n, r in found.items() if n in rivals},
        score_experts=False,
        tokenizer=tiny_tokenizer(),
        progress=False,
    )
    assert set(comparison.baselines) == rivals
    for name, line in zip(rows, comparison.lines, strict=True):
        assert (line.name, line.rule.lam) == ROWS[name]
        assert line.facts["lam_source"] == "rule"


@pytest.mark.parametrize(
    ("command", "name", "label"),
    [
        ("sweep", "T2/coram-c-rp", "nca.ties"),
        ("sweep", "T1/orthomerge-oft", "orthomerge of the recipe"),
        ("compare", "T4/coram-c", "ca+ave"),
        ("compare", "T4/ties", "ties of the recipe"),
    ],
)
def test_sweeps_and_comparisons_read_recipes(command, name, label, sources, task, tmp_path):
    folder, _ = sources(name[:2])
    if not (folder / "base" / "tokenizer.json").exists():
        tiny_tokenizer().save_pretrained(folder / "base")
    experts = [f"{expert}={folder / expert}" for expert in read_recipe(RECIPES[name]).experts]
    arguments = ["--config", RECIPES[name], "--tasks", task, "--no-baselines", "--lambda", "2,3"]
    run = run_command(command, folder / "base", *experts, *arguments, "-o", tmp_path / "out")
    assert run.returncode == 0, run.stderr
    found = json.loads((tmp_path / "out" / f"{command}.json").read_text())
    (line,) = found["lines"]
    kappa = 0.5 if name.startswith("T4") else 1.15
    unrounded = kappa * 5**0.5
    assert line["rule"]["lam"] == (ROWS[name][1] if name in ROWS else pytest.approx(unrounded))
    assert line["effective_kappa"] == pytest.approx(line["rule"]["lam"] / 5**0.5)
    assert line["kappa_best"] == pytest.approx(line["best"]["lam"] / 5**0.5)
    named = [line["line"]] if name in ROWS else found["references" if command == "sweep" else "baselines"]
    assert label in named


def test_the_readme_names_every_recipe_and_its_commands_exist():
    text = (PAPER / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\((T\d/[\w-]+)\.yaml\)", text))
    assert linked == set(RECIPES)
    commands = re.findall(r"coram-hf merge --config examples/paper/(\S+)\.yaml -o merged/(\S+)", text)
    assert all(recipe == output for recipe, output in commands)
    assert {recipe for recipe, _ in commands} == set(ROWS)
    for glob in re.findall(r"examples/paper/tasks/(\S+?\.txt)", text):
        assert list((PAPER / "tasks").glob(glob)), glob
    for path in LISTS:
        for task in path.read_text().split():
            assert f"`{task}`" in text or re.sub(r"_(de|es|fr|ru)$", "_{de,es,fr,ru}", task) in text, task


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_task_lists_are_well_formed(path):
    text = path.read_text(encoding="utf-8")
    names = text.splitlines()
    assert text == "\n".join(names) + "\n"
    assert all(HARNESS_NAME.fullmatch(name) for name in names)
    assert len(set(names)) == len(names) > 0


def test_lm_eval_has_the_tasks():
    tasks = pytest.importorskip("lm_eval.tasks")
    root = Path(tasks.__file__).parent
    manager = tasks.TaskManager(
        include_path=[str(root / folder) for folder in LM_EVAL_FOLDERS], include_defaults=False
    )
    named = {name for path in LISTS for name in path.read_text().split()}
    assert named <= set(manager.all_tasks)
