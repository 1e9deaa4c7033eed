"""Tasks from `datasets`: every way to name one gives the same questions, and mistakes are named early."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, IterableDataset, Value
from helpers.command import coram_hf
from helpers.models import tiny_llama, tiny_tokenizer
from helpers.paths import ROOT
from helpers.suites import make_suite, sources
from transformers import AutoModelForCausalLM

from coram_hf import CoramError, compare_methods, dataset_task, evaluate_folder, run_sweep
from coram_hf.evaluation import folder as folders
from coram_hf.evaluation.light import Score, score
from coram_hf.evaluation.questions import Question, Task, read_task
from coram_hf.evaluation.tasks import open_tasks

ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b), "level": a} for a in range(4) for b in range(3)]
SOLVED = [{"question": f"{a}-1=", "answer": str(a - 1), "level": a} for a in range(5, 9)]
EXPECTED = tuple(Question(row["question"], (row["answer"],), 0) for row in ROWS)
QUERY = "?prompt=question&target=answer"
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def written(folder, kind):
    """The rows in one format; the address of what was written."""
    data, solved = Dataset.from_list(ROWS), Dataset.from_list(SOLVED)
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "arrow":
        DatasetDict(test=data, train=solved).save_to_disk(folder / "sums")
    elif kind == "one arrow":
        data.save_to_disk(folder / "sums")
    elif kind == "folder":
        (folder / "sums").mkdir()
        data.to_parquet(folder / "sums" / "test.parquet")
        solved.to_parquet(folder / "sums" / "train.parquet")
    else:
        path = folder / f"sums.{kind}"
        write = {"csv": data.to_csv, "parquet": data.to_parquet, "jsonl": data.to_json}[kind]
        write(path)
        return path
    return folder / "sums"


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl", "folder", "arrow", "one arrow"])
def test_every_format_holds_the_same_questions(tmp_path, kind):
    (task,) = open_tasks([f"{written(tmp_path, kind)}{QUERY}"])
    assert (task.name, task.task.questions) == ("sums", EXPECTED)
    (few,) = open_tasks([f"{written(tmp_path / 'few', kind)}{QUERY}&name=few"], limit=3)
    assert (few.name, few.task.questions) == ("few", EXPECTED[:3])


@pytest.mark.parametrize("name", ["sql", "triage"])
def test_folders_of_splits_are_read_as_their_test_files(name):
    """The suite's folders have a test, a train and a validation set, with the columns of the scorer."""
    folder = ROOT / "examples" / "suite" / "data" / name
    (task,) = open_tasks([folder])
    assert task.task == read_task(folder / "test.jsonl")
    assert task.identity == open_tasks([folder / "test.jsonl"])[0].identity


def test_objects_need_no_address():
    data = Dataset.from_list(ROWS).rename_columns({"question": "prompt", "answer": "target"})
    (task,) = open_tasks([data])
    assert task.task.questions == EXPECTED
    both = DatasetDict(test=data, train=data.select(range(2)))
    assert dataset_task(both, split="train").task.questions == EXPECTED[:2]
    assert open_tasks([dataset_task(data, name="mine")], limit=2)[0].limit == 2
    assert len(open_tasks([data], limit=2)[0].task.questions) == 2


def test_choices_come_as_lists_columns_and_nested_and_answers_in_five_ways():
    rows = [
        {
            "q": "a",
            "options": ["x", "yy"],
            "A": "x",
            "B": "yy",
            "nested": {"text": ["x", "yy"], "label": ["1", "2"]},
            "index": 1,
            "letter": "B",
            "said": "yy",
            "key": "2",
            "class": 1,
        }
    ]
    features = Features(
        {
            "q": Value("string"),
            "options": [Value("string")],
            "A": Value("string"),
            "B": Value("string"),
            "nested": {"text": [Value("string")], "label": [Value("string")]},
            "index": Value("int32"),
            "letter": Value("string"),
            "said": Value("string"),
            "key": Value("string"),
            "class": ClassLabel(names=["no", "yes"]),
        }
    )
    data = Dataset.from_list(rows, features=features)
    for choices in ("options", "nested.text", ["A", "B"], ["{A}", "{B}"]):
        for answer in ("index", "letter", "said", "class"):
            task = dataset_task(data, prompt="q", choices=choices, answer=answer).task
            assert task.questions == (Question("a", ("x", "yy"), 1),)
    keyed = dataset_task(data, prompt="q", choices="nested.text", answer="key", labels="nested.label")
    assert keyed.task.questions == (Question("a", ("x", "yy"), 1),)
    made = dataset_task(data, prompt="Q: {q} ({index})\nA:", choices=["{A}!", "B"], answer="letter")
    assert made.task.questions == (Question("Q: a (1)\nA:", ("x!", "yy"), 1),)


def test_addresses_are_percent_encoded(tmp_path):
    address = f"{written(tmp_path, 'csv')}?prompt=Q:%20{{question}}%0AA:&target=+{{answer}}%26"
    (task,) = open_tasks([address])
    assert task.task.questions[0] == Question("Q: 0+0=\nA:", ("+0&",), 0)


def test_few_shot_examples_come_from_another_split(tmp_path):
    folder = written(tmp_path, "folder")
    (task,) = open_tasks([f"{folder}{QUERY}&fewshot=2"])
    model, tokenizer = tiny_llama(3), tiny_tokenizer()
    spelled = tuple(Question(f"5-1=4\n\n6-1=5\n\n{q.prompt}", q.choices, 0) for q in EXPECTED)
    assert score(model, tokenizer, task.task) == score(model, tokenizer, Task("t", spelled))
    assert task.identity != open_tasks([f"{folder}{QUERY}"])[0].identity
    assert task.identity != open_tasks([f"{folder}{QUERY}&fewshot=1"])[0].identity


def greedy(model, tokenizer, prompt, length):
    """The tokens that the model says after a prompt, without a cache."""
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    for _ in range(length):
        ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
    return ids[-length:]


def test_a_chat_template_asks_in_turns_and_ends_with_them():
    """The right answer is what the model says after the rendered turns, up to the end of its turn."""
    tokenizer, model = tiny_tokenizer(), tiny_llama(4)
    tokenizer.chat_template = TEMPLATE
    shots = (Question("1+1=", (" 2",), 0),)
    rendered = "[user]1+1=<eos>\n[assistant]2<eos>\n[user]{}<eos>\n[assistant]"
    prompts, ended = ("ab", "2+2=", "why?", "x", "q"), []
    for ends in (False, True):
        with torch.no_grad():
            said = {p: greedy(model, tokenizer, rendered.format(p), 2) for p in prompts}
        said = {prompt: tokens for prompt, tokens in said.items() if tokens[0] > 4}
        ended.append([tokens[1] == 1 for tokens in said.values()])
        letters = {prompt: tokenizer.decode(tokens[:1]) for prompt, tokens in said.items()}
        exact = tuple(Question(prompt, (f" {letter}",), 0) for prompt, letter in letters.items())
        found = score(model, tokenizer, Task("t", exact, chat=True, shots=shots))
        assert found == Score(sum(ended[-1]), len(said))
        choices = tuple(Question(prompt, ("7z", letter, "8"), 1) for prompt, letter in letters.items())
        plain = tuple(Question(rendered.format(q.prompt), q.choices, 1) for q in choices)
        chat = Task("t", choices, chat=True, shots=shots)
        assert score(model, tokenizer, chat) == score(model, tokenizer, Task("t", plain))
        if not ends:  # a head that ends its turns after a letter
            asked = [tokenizer(rendered.format(p)).input_ids + tokens[:1] for p, tokens in said.items()]
            with torch.no_grad():
                last = [model.model(torch.tensor([ids])).last_hidden_state[0, -2:] for ids in asked]
                model.lm_head.weight[1] = sum(after - before for before, after in last)
    assert not any(ended[0])
    assert any(ended[1])


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("?prompt=qestion&target=answer", "no column 'qestion'; it has 'question', 'answer', 'level'"),
        ("?prompt={question} {wrong}&target=answer", "no column 'wrong'; it has 'question'"),
        ("?prompt=question", "name the column of the answers, as target= or choices=; it has 'question'"),
        (f"{QUERY}&choices=answer", "target and choices are mutually exclusive"),
        (f"{QUERY}&answer=level", "answer and labels belong to choices"),
        (f"{QUERY}&split=validation", "no split 'validation'; it has 'train', 'test'"),
        (f"{QUERY}&fewshot=1&fewshot_split=dev", "no split 'dev'; it has 'train', 'test'"),
        (f"{QUERY}&fewshot=1&fewshot_split=test", "examples must be from another"),
        (f"{QUERY}&fewshot=9", "fewshot=9, but split 'train' has 4 rows"),
        (f"{QUERY}&fewshot_split=train", "but no fewshot=; add it"),
        (f"{QUERY}&fewshot=few", "fewshot must be a number, found 'few'"),
        (f"{QUERY}&chat=maybe", "chat must be 1 or 0, found 'maybe'"),
        (f"{QUERY}&prmpt=a", "unknown option of a dataset 'prmpt'; did you mean 'prompt'?"),
        (f"{QUERY}&prompt=a", "prompt is given twice"),
        (f"{QUERY}&split", "'split' after the question mark is not name=value"),
        (f"{QUERY}&revision=main", "revision is only for datasets on the Hub"),
        (f"{QUERY}&images=question", "column 'question' has no images"),
        (f"{QUERY}&images=picture", "no column 'picture'"),
        ("?prompt=question&choices=answer&answer=level", "'answer' must be a list of texts, found '0'"),
        ("?prompt=question&choices=answer&choices=question&answer=level", "row 6: answer 2 is not one of"),
    ],
)
def test_mistakes_in_an_address_are_named_before_a_model_is_loaded(tmp_path, monkeypatch, query, message):
    folder, model = written(tmp_path, "folder"), tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("not read")
    monkeypatch.setattr(folders, "AutoTokenizer", None)
    with pytest.raises(CoramError) as error:
        evaluate_folder(model, [f"{folder}{query}"])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_mistakes_in_the_data_are_named(tmp_path):
    def refused(data, message, **options):
        with pytest.raises(CoramError, match=message):
            dataset_task(data, **options)

    empty = Dataset.from_dict({"prompt": [], "target": []})
    refused(empty, "holds no rows")
    refused(
        Dataset.from_dict({"prompt": ["a", None], "target": ["b", "c"]}), r"row 1: 'prompt' must be non-em"
    )
    refused(
        Dataset.from_dict({"prompt": ["a"], "target": [0.5]}), r"'target' must be non-empty text, found 0.5"
    )
    refused(Dataset.from_dict({"prompt": ["a"], "choices": [["b"]], "answer": [0]}), "at least two")
    refused(
        Dataset.from_dict({"prompt": ["a"], "choices": [["b", "c"]], "target": ["b"]}), "has both target and"
    )
    refused(
        Dataset.from_dict({"prompt": ["a"], "target": [{"x": "b"}]}),
        "no 'y' in 'target.y'",
        target="target.y",
    )
    refused(DatasetDict(a=empty, b=empty), r"choose a split; it has 'a', 'b'")
    refused(IterableDataset.from_generator(lambda: iter(ROWS)), "without streaming=True")
    refused(empty, "belong to an address", revision="main")
    refused(empty, "unknown option of a dataset 'promt'", promt="a")
    refused("hf://datasets/a/b/c", "must be hf://datasets/org/name")
    refused("hf://datasets/a/b@c", "one in the query", revision="d")
    refused(tmp_path / "nowhere", "no such file or folder")
    (tmp_path / "notes.txt").write_text("a")
    refused(tmp_path / "notes.txt", r"not a dataset; files must end in \.csv")
    (tmp_path / "bad.parquet").write_text("a")
    refused(tmp_path / "bad.parquet", r"bad\.parquet: split 'train' cannot be read: ")
    twice = [f"{written(tmp_path, 'csv')}{QUERY}"] * 2
    with pytest.raises(CoramError, match=r"two are called 'sums'; rename one \(a dataset by \?name=\)"):
        open_tasks(twice)


def test_a_tokenizer_without_a_template_is_refused_before_a_model_is_loaded(tmp_path):
    model = tmp_path / "model"
    tiny_tokenizer().save_pretrained(model)
    tiny_llama().config.save_pretrained(model)
    with pytest.raises(CoramError, match="task 'sums': the tokenizer has no chat template; ask with chat=0"):
        evaluate_folder(model, [f"{written(tmp_path, 'csv')}{QUERY}&chat=1"])


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    folder = make_suite(tmp_path_factory.mktemp("suite"))
    for name in ("math", "code"):
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        renamed = [{"q": row["prompt"], "options": row["choices"], "key": row["answer"]} for row in rows]
        (folder / f"{name}-data").mkdir()
        Dataset.from_list(renamed).to_parquet(folder / f"{name}-data" / "test.parquet")
    return folder


MAPPED = "?prompt=q&choices=options&answer=key&name="


def test_the_command_line_evaluates_a_folder_as_it_does_a_file(suite, tmp_path):
    model = shutil.copytree(suite / "base", tmp_path / "model")
    run = coram_hf("eval", model, "--tasks", f"{suite / 'math-data'}{MAPPED}math")
    assert run.returncode == 0, run.stderr
    found = score(
        AutoModelForCausalLM.from_pretrained(model), tiny_tokenizer(), read_task(suite / "math.jsonl")
    )
    assert re.search(rf"math +accuracy +{found.accuracy:.4f} ", run.stdout)
    assert 0 < found.accuracy < 1
    (result,) = json.loads((model / "eval_results.json").read_text())["results"]
    assert (result["value"], result["questions"]) == (found.accuracy, 24)
    bad = coram_hf("eval", model, "--tasks", f"{suite / 'math-data'}?prompt=p&choices=options&answer=key")
    assert bad.returncode == 2
    assert "no column 'p'; it has 'q', 'options', 'key'" in bad.stderr


def test_sweeps_and_comparisons_take_datasets_as_files(suite, tmp_path):
    files = [suite / f"{name}.jsonl" for name in ("math", "code")]
    data = [f"{suite / f'{name}-data'}{MAPPED}{name}" for name in ("math", "code")]
    options = {"baselines": (), "progress": False}
    from_files = run_sweep(*sources(suite), lambdas="1,2", tasks=files, **options)
    arguments = [argument for task in data for argument in ("--tasks", task)]
    models = [suite / name for name in ("base", "math", "code")]
    end = ("--no-baselines", "-o", tmp_path / "sweep")
    run = coram_hf("sweep", *models, "--lambda", "1,2", *arguments, *end)
    assert run.returncode == 0, run.stderr
    swept = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    points = from_files.to_dict()["lines"][0]["points"]
    assert [point["average"] for point in swept["lines"][0]["points"]] == [p["average"] for p in points]
    compared = compare_methods(*sources(suite), tasks=data[:1], out_of_domain=data[1:], **options)
    assert compared.lines[0].rule.average == from_files.lines[0].rule.results["math"].value


def test_a_sweep_scores_again_only_what_has_changed(suite, tmp_path):
    """The journal knows a dataset by its rows, not by its name."""
    folder = shutil.copytree(suite / "math-data", tmp_path / "data")
    output = tmp_path / "sweep"
    options = {"lambdas": "1", "baselines": (), "progress": False, "output": output}
    task = f"{folder}{MAPPED}math"
    first = run_sweep(*sources(suite), tasks=[task], **options)
    lines = (output / "points.jsonl").read_bytes()
    again = run_sweep(
        *sources(suite),
        tasks=[dataset_task(folder, prompt="q", choices="options", answer="key", name="math")],
        **options,
    )
    assert (output / "points.jsonl").read_bytes() == lines
    assert again.to_dict() == first.to_dict()
    rows = Dataset.from_parquet(str(folder / "test.parquet")).to_list()
    rows[0]["key"] = (rows[0]["key"] + 1) % 3
    Dataset.from_list(rows).to_parquet(folder / "test.parquet")
    changed = run_sweep(*sources(suite), tasks=[task], **options)
    assert len((output / "points.jsonl").read_bytes()) > len(lines)
    assert changed.to_dict() != first.to_dict()


def test_another_chat_template_is_another_question(suite, tmp_path):
    for name in ("base", "math", "code"):
        shutil.copytree(suite / name, tmp_path / name)
    data = shutil.copytree(suite / "math-data", tmp_path / "data")
    tokenizer = tiny_tokenizer()
    journal = Path(tmp_path / "sweep" / "points.jsonl")
    sizes = []
    for template in (TEMPLATE, TEMPLATE, TEMPLATE.replace("[assistant]", "-")):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / "base")
        tasks = [f"{data}{MAPPED}math&chat=1"]
        run_sweep(
            *sources(tmp_path), lambdas="1", tasks=tasks, baselines=(), progress=False, output=journal.parent
        )
        sizes.append(len(journal.read_bytes().splitlines()))
    assert sizes[0] == sizes[1] < sizes[2]
