"""Questions about images, through the model's processor, against inputs that are put together by hand."""

import json
import re

import pytest
import torch
from datasets import Dataset, DatasetDict, Features, Image, List, Value
from helpers.command import coram_hf
from helpers.models import CHARACTERS, fine_tuned, tiny_tokenizer
from helpers.seeing import ImagesOnly, image_processor, llava, picture, qwen_vl
from transformers import AutoProcessor, Qwen2_5_VLConfig

from coram_hf import CoramError, dataset_task, evaluate_folder, run_sweep
from coram_hf.evaluation.light import Score, score
from coram_hf.evaluation.tasks import open_tasks

CHOICES = ["cat", "ox", "2"]
PROMPTS = ["what?", "who?", "a:"]
SEEN = [60, 60, 60, 60, 3]
"""The tokens of one image, and a newline."""
PIXELS = "?prompt=q&choices=options&answer=key&images=image"


@pytest.fixture(scope="module", autouse=True)
def _registered():
    AutoProcessor.register(Qwen2_5_VLConfig, ImagesOnly, exist_ok=True)


def rows(count=6):
    return [
        {"q": PROMPTS[i % 3], "options": CHOICES, "key": i % 3, "image": picture(i)} for i in range(count)
    ]


def dataset(count=6, **columns):
    kinds = {"q": Value("string"), "options": List(Value("string")), "key": Value("int64"), "image": Image()}
    return Dataset.from_list([row | columns for row in rows(count)], features=Features(kinds))


def characters(text):
    return [3 + CHARACTERS.index(c) for c in text]


def log_likelihood(model, before, after, **seen):
    """Token by token, one forward pass each."""
    total = 0.0
    for i, token in enumerate(after):
        ids = torch.tensor([before + after[:i]])
        types = {"mm_token_type_ids": (ids == 60).int()} if "image_grid_thw" in seen else {}
        with torch.no_grad():
            logits = model(input_ids=ids, **types, **seen).logits[0, -1].double()
        total += (logits[token] - logits.logsumexp(0)).item()
    return total


def by_hand(model, row, before, after):
    """The log-likelihoods of the choices after tokens, four for the image, and more."""
    seen = image_processor()(images=[row["image"]], return_tensors="pt")
    assert int(seen["image_grid_thw"].prod()) // 4 == 4
    return [log_likelihood(model, [*before, *after(row["q"])], characters(c), **seen) for c in row["options"]]


def right(model, before, after):
    found = [by_hand(model, row, before, after) for row in rows()]
    return sum(
        likelihoods.index(max(likelihoods)) == row["key"]
        for likelihoods, row in zip(found, rows(), strict=True)
    )


@pytest.fixture(scope="module")
def seeing():
    model, processor = qwen_vl(1)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
        model.model.visual.merger.mlp[2].weight.mul_(40)
    return model, processor


def test_images_come_before_the_prompt(seeing):
    model, processor = seeing
    task = dataset_task(dataset(), prompt="q", choices="options", answer="key", images="image")
    assert task.needs_processor
    expected = right(model, SEEN, characters)
    assert score(model, processor, task.task) == Score(expected, 6)
    other = dataset_task(
        dataset(image=picture(99)), prompt="q", choices="options", answer="key", images="image"
    )
    first, second = (by_hand(model, rows()[i], SEEN, lambda _: characters("who?")) for i in (0, 1))
    assert first != pytest.approx(second, abs=1e-4), "the model does not look"
    assert task.identity != other.identity
    assert (
        task.identity
        == dataset_task(dataset(), prompt="q", choices="options", answer="key", images="image").identity
    )


def test_a_chat_template_puts_images_in_their_place(seeing):
    model, processor = seeing
    task = dataset_task(dataset(), prompt="q", choices="options", answer="key", images="image", chat=True)
    before = [*characters("u:"), 58, *[60] * 4, 59]
    expected = right(model, before, lambda prompt: [*characters(prompt), 1, *characters("a:")])
    assert score(model, processor, task.task) == Score(expected, 6)


def test_exact_answers_and_several_images(seeing):
    """The greedy answer to a question with two images is right, and any other is wrong."""
    model, processor = seeing
    pictures = [picture(5), picture(6)]
    seen = image_processor()(images=pictures, return_tensors="pt")
    ids = SEEN + SEEN + characters("who?")
    for _ in range(2):
        types = (torch.tensor([ids]) == 60).int()
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), mm_token_type_ids=types, **seen).logits
        ids.append(int(logits[0, -1].argmax()))
    said = processor.tokenizer.decode(ids[-2:])
    kinds = Features({"prompt": Value("string"), "target": Value("string"), "images": List(Image())})
    for target, correct in ((said[0], ids[-1] == 3), (f"{said[0]}zz", False)):
        row = {"prompt": "who?", "target": target, "images": pictures}
        task = dataset_task(Dataset.from_list([row], features=kinds), images="images")
        assert score(model, processor, task.task).correct == correct


def test_few_shot_images_come_in_order(seeing):
    model, processor = seeing
    data = DatasetDict(test=dataset(2), train=dataset(1))
    options = {"prompt": "q", "choices": "options", "answer": "key", "images": "image", "fewshot": 1}
    task = dataset_task(data, split="test", **options).task
    expected = 0
    for row in rows(2):
        seen = image_processor()(images=[picture(0), row["image"]], return_tensors="pt")
        before = SEEN + characters("what?cat\n\n") + SEEN + characters(row["q"])
        found = [log_likelihood(model, before, characters(choice), **seen) for choice in CHOICES]
        expected += found.index(max(found)) == row["key"]
    assert score(model, processor, task) == Score(expected, 2)


@pytest.fixture(scope="module")
def folder(seeing, tmp_path_factory):
    """Qwen2.5-VL with two experts, and a folder of images with metadata."""
    folder = tmp_path_factory.mktemp("seeing")
    model, processor = seeing
    model.save_pretrained(folder / "base")
    processor.save_pretrained(folder / "base")
    for seed in range(2):
        fine_tuned(model, 0.4, seed).save_pretrained(folder / f"e{seed}")
    (folder / "pets" / "test").mkdir(parents=True)
    lines = []
    for i, row in enumerate(rows()):
        row.pop("image").save(folder / "pets" / "test" / f"{i:02}.png")
        lines.append(json.dumps(row | {"file_name": f"{i:02}.png"}))
    (folder / "pets" / "test" / "metadata.jsonl").write_text("\n".join(lines))
    return folder


def test_the_command_line_evaluates_a_folder_of_images(seeing, folder):
    run = coram_hf("eval", folder / "base", "--tasks", f"{folder / 'pets'}{PIXELS}")
    assert run.returncode == 0, run.stderr
    expected = right(seeing[0], SEEN, characters)
    assert re.search(rf"pets +accuracy +{expected / 6:.4f} ", run.stdout)


def test_a_sweep_over_images_scores_each_merge(seeing, folder, tmp_path):
    sources = folder / "base", [folder / "e0", folder / "e1"]
    tasks = [f"{folder / 'pets'}{PIXELS}&chat=1"]
    options = {"baselines": (), "progress": False, "output": tmp_path}
    swept = run_sweep(*sources, lambdas="0", tasks=tasks, limit=2, **options)
    (task,) = open_tasks(tasks, limit=2)
    at_base = score(seeing[0], seeing[1], task.task).accuracy
    assert swept.lines[0].points[0].results["pets"].value == at_base
    assert swept.references["base"]["pets"].value == at_base
    journal = (tmp_path / "points.jsonl").read_bytes()
    run_sweep(*sources, lambdas="0", tasks=tasks, limit=2, **options)
    assert (tmp_path / "points.jsonl").read_bytes() == journal


def test_text_tasks_of_a_seeing_model_need_no_processor(folder):
    data = [{"prompt": row["q"], "choices": row["options"], "answer": row["key"]} for row in rows()]
    (result,) = evaluate_folder(folder / "base", [Dataset.from_list(data)])
    assert result.questions == 6


def test_llava_reads_images_with_the_processor_of_its_folder(tmp_path):
    model, processor = llava()
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    task = dataset_task(dataset(), prompt="q", choices="options", answer="key", images="image", name="pets")
    (result,) = evaluate_folder(tmp_path / "model", [task])
    expected = 0
    for row in rows():
        seen = processor.image_processor(images=[row["image"]], return_tensors="pt")
        before = SEEN + characters(row["q"])
        found = [log_likelihood(model, before, characters(choice), **seen) for choice in CHOICES]
        expected += found.index(max(found)) == row["key"]
    assert result.value == expected / 6


def test_what_is_missing_is_named_before_a_model_is_loaded(seeing, tmp_path):
    task = dataset_task(dataset(2), prompt="q", choices="options", answer="key", images="image", name="pets")
    for name in ("no processor", "broken"):
        seeing[0].config.save_pretrained(tmp_path / name)
        seeing[1].tokenizer.save_pretrained(tmp_path / name)
    with pytest.raises(CoramError, match=r"no processor.*, which tasks with images need"):
        evaluate_folder(tmp_path / "no processor", [task])
    settings = {"processor_class": "Qwen2_5_VLProcessor"}
    (tmp_path / "broken" / "processor_config.json").write_text(json.dumps(settings))
    with pytest.raises(CoramError, match=r"has no processor that loads .*tasks with images need"):
        evaluate_folder(tmp_path / "broken", [task])
    with pytest.raises(CoramError, match="task 'pets' has images, but the model has no image processor"):
        score(seeing[0], tiny_tokenizer(), task.task)
    llava_processor = llava()[1]
    chat = dataset_task(dataset(2), prompt="q", choices="options", answer="key", images="image", chat=True)
    with pytest.raises(CoramError, match="has no chat template; ask with chat=0"):
        score(seeing[0], llava_processor, chat.task)
