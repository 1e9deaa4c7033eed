"""`coram-hf eval`: results beside the weights and on the card, and what later merges make of them."""

import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers.command import coram_hf
from helpers.folders import on_disk
from helpers.merging import merged
from helpers.models import choice_task, fine_tuned, tiny_llama, tiny_tokenizer
from huggingface_hub import ModelCard
from scipy.stats import binomtest
from transformers import AutoModelForCausalLM

from coram_hf import CoramError, evaluate_folder, evaluation, load_report, run_sweep
from coram_hf.evaluation import harness
from coram_hf.evaluation.light import score
from coram_hf.evaluation.questions import read_task
from coram_hf.evaluation.tasks import open_tasks
from coram_hf.hub.card import BEGIN, END, edited_card, render_card
from coram_hf.hub.model_index import with_results
from coram_hf.hub.publish import publish_report
from coram_hf.hub.push import check_whole
from coram_hf.report.eval_results import Result

YAML = """
task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
  - metric: acc_norm
"""


@pytest.fixture
def folder(tmp_path):
    """A merged folder."""
    result = merged(progress=False, tokenizer=tiny_tokenizer()).merge()
    result.save_pretrained(tmp_path / "merged")
    return tmp_path / "merged"


@pytest.fixture
def tasks(tmp_path):
    return [choice_task(tmp_path / f"{name}.jsonl", seed) for seed, name in enumerate(("math", "code"))]


def on_card(folder):
    """(task, metric) -> value, as the card says."""
    return {
        (result.dataset_name, result.metric_type): result.metric_value
        for result in ModelCard.load(folder / "README.md").data.eval_results or []
    }


def expected(folder, path):
    return score(AutoModelForCausalLM.from_pretrained(folder), tiny_tokenizer(), read_task(path))


def test_results_go_beside_the_weights_and_on_the_card(folder, tasks):
    before = (folder / "README.md").read_text()
    run = coram_hf("eval", folder, "--tasks", tasks[0], "--tasks", tasks[1])
    assert run.returncode == 0, run.stderr
    numbers = json.loads((folder / "eval_results.json").read_text())
    for path, result in zip(tasks, numbers["results"], strict=True):
        found = expected(folder, path)
        assert (result["task"], result["value"], result["questions"]) == (path.stem, found.accuracy, 24)
        assert result["standard_error"] == pytest.approx(found.standard_error)
        assert on_card(folder)[path.stem, "accuracy"] == pytest.approx(found.accuracy, abs=1e-6)
        assert re.search(rf"{path.stem} +accuracy +{found.accuracy:.4f}", run.stdout)
    text = (folder / "README.md").read_text()
    assert text.partition(BEGIN)[2] == before.partition(BEGIN)[2]
    assert ModelCard(text).data.model_name == "merged"
    assert check_whole(folder) == load_report(folder)


def test_a_part_of_the_questions_is_not_published_unless_asked(folder, tasks):
    before = (folder / "README.md").read_text()
    run = coram_hf("eval", folder, "--tasks", tasks[0], "--limit", "3")
    assert run.returncode == 0, run.stderr
    assert "not written" in run.stdout
    assert "pass --write" in run.stdout
    assert not (folder / "eval_results.json").exists()
    assert (folder / "README.md").read_text() == before
    run = coram_hf("eval", folder, "--tasks", tasks[0], "--limit", "3", "--write")
    assert "written to" in run.stdout
    assert json.loads((folder / "eval_results.json").read_text())["results"][0]["questions"] == 3
    again = coram_hf("eval", folder, "--tasks", tasks[1], "--no-write")
    assert again.returncode == 0
    assert [task for task, _ in on_card(folder)] == [tasks[0].stem]


@pytest.mark.parametrize(("right", "count"), [(0, 3), (3, 3), (1, 4), (50, 100)])
def test_small_samples_have_an_interval(right, count):
    share = right / count
    found = Result("t", "exact_match (strict)", share, (share * (1 - share) / count) ** 0.5, count, "light")
    expected = binomtest(right, count).proportion_ci(method="wilson")
    assert found.interval == pytest.approx((expected.low, expected.high), abs=1e-6)
    assert found.interval[0] < found.interval[1]


def test_other_metrics_have_intervals_of_their_standard_error():
    assert Result("t", "perplexity", 12.0, 1.0, 9, "lm-eval").interval == pytest.approx(
        (10.04, 13.96), abs=1e-3
    )
    assert Result("t", "perplexity", 12.0, None, 9, "lm-eval").interval is None


def test_the_same_task_again_replaces_its_result(folder, tasks):
    evaluate_folder(folder, tasks)
    evaluate_folder(folder, tasks[:1], limit=5, write=True)
    numbers = json.loads((folder / "eval_results.json").read_text())
    assert {found["task"]: found["questions"] for found in numbers["results"]} == {"code": 24, "math": 5}
    assert len(on_card(folder)) == 2
    results = ModelCard.load(folder / "README.md").data.eval_results
    assert {r.dataset_name: r.metric_args["questions"] for r in results} == {"code": 24, "math": 5}


def test_what_people_wrote_stays(folder, tasks):
    path = folder / "README.md"
    theirs = {
        "name": "mine",
        "results": [
            {
                "task": {"type": "text-generation"},
                "dataset": {"type": "gsm8k", "name": "GSM8K"},
                "metrics": [{"type": "exact_match", "value": 0.5}],
            }
        ],
    }
    head = f"---\nmodel-index: {json.dumps([theirs])}\nmy_key: kept\n"
    path.write_text(path.read_text().replace("---\n", head, 1).replace(END, f"{END}\n\nMy own words."))
    evaluate_folder(folder, tasks)
    evaluate_folder(folder, tasks)
    card = ModelCard.load(path)
    assert card.data.my_key == "kept"
    assert card.data.model_name == "mine"
    assert on_card(folder).keys() == {("GSM8K", "exact_match"), ("math", "accuracy"), ("code", "accuracy")}
    assert "My own words." in card.text


def test_a_card_with_results_is_still_as_we_made_it(folder, tasks):
    report = load_report(folder)
    made = render_card(report).content
    evaluate_folder(folder, tasks)
    assert edited_card(folder / "README.md", folder) == ""
    text = (folder / "README.md").read_text()
    assert with_results(text, None) == made
    publish_report(report, folder)
    assert (folder / "README.md").read_text() == text
    assert (folder / "eval_results.json").is_file()
    (folder / "README.md").write_text(text + "\nMine.\n")
    assert edited_card(folder / "README.md", folder) == text + "\nMine.\n"


@pytest.mark.parametrize("edited", [False, True])
def test_results_of_other_weights_do_not_outlive_them(folder, tasks, edited):
    evaluate_folder(folder, tasks)
    path = folder / "README.md"
    if edited:
        path.write_text(path.read_text() + "\nMine.\n")
    other = merged(sizes=(0.02, 0.07), progress=False, tokenizer=tiny_tokenizer()).merge()
    other.save_pretrained(folder)
    assert on_card(folder) == {}
    assert not (folder / "eval_results.json").exists()
    assert path.read_text().endswith("\nMine.\n") == edited
    check_whole(folder)
    evaluate_folder(folder, tasks[:1])
    assert len(on_card(folder)) == 1


def test_weights_that_changed_by_hand_lose_their_results(tmp_path, tasks):
    base = tiny_llama()
    base.save_pretrained(tmp_path / "plain")
    tiny_tokenizer().save_pretrained(tmp_path / "plain")
    evaluate_folder(tmp_path / "plain", tasks)
    assert len(on_card(tmp_path / "plain")) == 2
    fine_tuned(base, 0.5, 0).save_pretrained(tmp_path / "plain")
    evaluate_folder(tmp_path / "plain", tasks[:1])
    assert on_card(tmp_path / "plain").keys() == {("math", "accuracy")}


def test_a_card_that_cannot_be_read_is_left_alone(folder, tasks):
    path = folder / "README.md"
    path.write_text("---\na: [\n---\nbody\n")
    with pytest.raises(CoramError, match="not on the card"):
        evaluate_folder(folder, tasks)
    assert path.read_text() == "---\na: [\n---\nbody\n"
    assert (folder / "eval_results.json").is_file()


@pytest.mark.parametrize("name", ["a: b", "'\"; {{ 7 }} <!-- coram: end -->", "---"])
def test_names_of_tasks_do_not_inject(folder, tmp_path, name):
    path = choice_task(tmp_path / f"{name}.jsonl", 0, count=3)
    evaluate_folder(folder, [path])
    assert on_card(folder).keys() == {(name, "accuracy")}
    assert edited_card(folder / "README.md", folder) == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["NOWHERE", "--tasks", "TASK"], "has no config.json"),
        (["FOLDER"], "pass --tasks, or --generate"),
        (["FOLDER", "--tasks", "nowhere.jsonl"], "nowhere.jsonl"),
        (["FOLDER", "--tasks", "TASK", "--limit", "0"], "limit must be a positive number"),
        (["FOLDER", "--tasks", "TASK", "--tasks", "TASK"], "two are called 'math'"),
        (["FOLDER", "--tasks", "TASK", "--device", "tpu"], "device: unknown value 'tpu'"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(folder, tasks, arguments, message):
    places = {"NOWHERE": folder / "nowhere", "FOLDER": folder, "TASK": tasks[0]}
    run = coram_hf("eval", *(places.get(argument, argument) for argument in arguments))
    assert run.returncode == 2
    assert message in run.stderr
    assert "Traceback" not in run.stderr
    assert not (folder / "eval_results.json").exists()


def test_a_folder_without_a_tokenizer(tmp_path, tasks):
    tiny_llama().save_pretrained(tmp_path / "bare")
    with pytest.raises(CoramError, match="has no tokenizer that loads"):
        evaluate_folder(tmp_path / "bare", tasks)


@pytest.fixture
def local_task(tmp_path, tasks, monkeypatch):
    """The questions of a task of ours as a YAML task of lm-eval."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'coram-hf[eval]'")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / "yaml" / "local.yaml"
    path.parent.mkdir()
    path.write_text(YAML.replace("DATA", str(tasks[0])))
    return path


def test_tasks_of_lm_eval(folder, tasks, local_task):
    run = coram_hf("eval", folder, "--tasks", local_task, "--tasks", tasks[0])
    assert run.returncode == 0, run.stderr
    found = on_card(folder)
    assert found.keys() == {("local_choice", "acc"), ("local_choice", "acc_norm"), ("math", "accuracy")}
    assert found["local_choice", "acc"] == pytest.approx(expected(folder, tasks[0]).accuracy, abs=1e-6)
    results = json.loads((folder / "eval_results.json").read_text())["results"]
    assert [(r["task"], r["questions"]) for r in results] == [("local_choice", 24)] * 2 + [("math", 24)]
    assert re.fullmatch(r"lm-evaluation-harness \d.*", results[0]["scorer"])
    assert edited_card(folder / "README.md", folder) == ""


def test_tasks_of_lm_eval_are_scorers_like_ours(tasks, local_task):
    (whole,) = open_tasks([local_task])
    (some,) = open_tasks([local_task.parent], limit=5)
    assert whole.name == some.name == "local_choice"
    assert len({whole.identity, some.identity, open_tasks(tasks[:1])[0].identity}) == 3
    for model in (tiny_llama(1), fine_tuned(tiny_llama(1), 0.9, 0)):
        found = score(model, tiny_tokenizer(), read_task(tasks[0]))
        assert whole(model, tiny_tokenizer())[0].value == pytest.approx(found.accuracy)
        few = score(model, tiny_tokenizer(), read_task(tasks[0]), limit=5)
        assert some(model, tiny_tokenizer())[0].value == pytest.approx(few.accuracy)
    tasks[0].write_text(tasks[0].read_text().replace('"answer": 1', '"answer": 2', 1))
    assert open_tasks([local_task])[0].identity != whole.identity


def test_a_sweep_over_tasks_of_lm_eval(tasks, local_task, tmp_path, monkeypatch):
    sources = on_disk(tmp_path, tiny_llama(7), {"expert": 0.6}, tiny_tokenizer())
    options = {"lambdas": [2.0], "baselines": (), "output": tmp_path / "out", "progress": False}
    found = run_sweep(*sources, tasks=[local_task, tasks[0]], **options)
    for point in found.lines[0].points:
        assert point.results["local_choice"].value == pytest.approx(point.results["math"].value)
    monkeypatch.setattr(harness.HarnessScorer, "__call__", lambda *_: pytest.fail("scored again"))
    again = run_sweep(*sources, tasks=[local_task, tasks[0]], **options)
    assert again == found


def test_bad_tasks_of_lm_eval_are_named(local_task, tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        open_tasks([tmp_path / "nowhere.yaml"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no \.yaml files"):
        open_tasks([tmp_path / "empty"])
    local_task.write_text("task: [\n")
    with pytest.raises(ValueError, match=r"local\.yaml' cannot be loaded"):
        open_tasks([local_task])
    broken = YAML.replace("DATA", str(tmp_path / "nowhere.jsonl"))
    local_task.write_text(broken)
    with pytest.raises(ValueError, match=r"local\.yaml' cannot be loaded"):
        open_tasks([local_task])


def test_without_lm_eval_the_remedy_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    run = coram_hf("eval", folder, "--tasks", "hellaswag")
    assert run.returncode == 2
    assert "pip install 'coram-hf[eval]'" in run.stderr


def test_an_unknown_name_is_an_error_with_a_suggestion(monkeypatch):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'coram-hf[eval]'")
    names = SimpleNamespace(all_tasks=["arc_easy", "hellaswag"])  # the true list takes seconds to make
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **_: names)
    monkeypatch.setattr(evaluation, "harness", harness)
    monkeypatch.delitem(sys.modules, harness.__name__)  # a copy of the module, which has listed no tasks yet
    with pytest.raises(ValueError, match=r"unknown task 'helaswag': .* did you mean 'hellaswag'"):
        open_tasks(["helaswag"])


def test_results_are_those_of_the_stored_dtype(tmp_path, tasks):
    tiny_llama(dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    tiny_tokenizer().save_pretrained(tmp_path / "half")
    (found,) = evaluate_folder(tmp_path / "half", tasks[:1])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype=torch.bfloat16)
    assert found.value == score(model, tiny_tokenizer(), read_task(tasks[0])).accuracy
