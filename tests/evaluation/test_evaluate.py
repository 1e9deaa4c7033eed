"""The light scorer, against one question at a time and against greedy decoding."""

import json

import pytest
import torch
from helpers.models import CHARACTERS, choice_task, tiny_llama, tiny_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from coram_hf.evaluation import light as evaluate
from coram_hf.evaluation.light import Score, score
from coram_hf.evaluation.questions import Question, Task, read_task


def task_file(folder, *questions):
    path = folder / "task.jsonl"
    path.write_text("".join(json.dumps(question) + "\n" for question in questions))
    return path


def log_likelihood(model, before, after):
    """Token by token, one forward pass each, without batch or padding."""
    total = 0.0
    for i, token in enumerate(after):
        with torch.no_grad():
            logits = model(torch.tensor([before + after[:i]])).logits[0, -1].double()
        total += (logits[token] - logits.logsumexp(0)).item()
    return total


def characters(text):
    return [3 + CHARACTERS.index(c) for c in text]


@pytest.fixture(scope="module")
def model():
    return tiny_llama(3)


@pytest.mark.parametrize("batch_tokens", [1, 40, 1024])
def test_choices_are_those_of_a_plain_loop(model, tmp_path, monkeypatch, batch_tokens):
    monkeypatch.setattr(evaluate, "BATCH_TOKENS", batch_tokens)
    task = read_task(choice_task(tmp_path / "letters.jsonl", seed=5, count=40))
    right = []
    for question in task.questions:
        found = [log_likelihood(model, characters(question.prompt), characters(c)) for c in question.choices]
        right.append(found.index(max(found)) == question.answer)
    assert task.name == "letters"
    assert score(model, tiny_tokenizer(), task) == Score(sum(right), 40)
    assert 0 < sum(right) < 40
    assert score(model, tiny_tokenizer(), task, limit=7) == Score(sum(right[:7]), 7)


def greedy(model, tokenizer, prompt, length):
    ids = torch.tensor([characters(prompt)])
    options = {"max_new_tokens": length, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    said = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :]
    return tokenizer.decode(said)


def endings(model, tokenizer):
    """What greedy decoding says before its first newline, where it soon says one."""
    said = {prompt: greedy(model, tokenizer, prompt, 6) for prompt in ("ab", "2+2=", "why?", "x", "q", "1-1")}
    return {
        p: t.partition("\n")[0] for p, t in said.items() if "\n" in t[1:] and "<" not in t and t[0] != "\n"
    }


def test_exact_answers_are_what_generate_says():
    tokenizer, model = tiny_tokenizer(), tiny_llama(4)
    generator = torch.Generator().manual_seed(0)
    ended = {}
    with torch.no_grad():
        while len(ended) < 2:  # look for a head that ends its answers
            model.lm_head.weight[3] = torch.randn(32, generator=generator) * 0.05
            ended = endings(model, tokenizer)
    answers = list(ended.items())
    wrong = [(prompt, changed) for prompt, text in answers for changed in (text + "a", "9" + text)]
    asked = answers + wrong
    expected = [greedy(model, tokenizer, p, len(t) + 1) == t + "\n" for p, t in asked]
    assert expected == [True] * len(answers) + [False] * len(wrong)
    for (prompt, text), right in zip(asked, expected, strict=True):
        assert score(model, tokenizer, Task("t", (Question(prompt, (text,), 0),))).correct == right
    whole = Task("t", tuple(Question(prompt, (text,), 0) for prompt, text in asked))
    assert score(model, tokenizer, whole) == Score(len(answers), len(asked))


def test_the_answer_is_tokenised_behind_its_prompt(model):
    """A tokenizer that puts a mark before every text puts none between prompt and answer."""
    letters = "abcdefgh"
    vocabulary = {token: i for i, token in enumerate(("<unk>", "\u2581", "=", *letters))}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    assert tokenizer("a=").input_ids == [1, 3, 2]
    right = {"behind": 0, "alone": 0}
    questions = [Question(f"{first}=", ("cb", second + "f"), 1) for first in letters for second in letters]
    for question in questions:
        before, *after = ([vocabulary[c] for c in text] for text in (question.prompt, *question.choices))
        behind = [log_likelihood(model, [1, *before], tokens) for tokens in after]
        alone = [log_likelihood(model, [1, *before], [1, *tokens]) for tokens in after]
        right["behind"] += behind[1] > behind[0]
        right["alone"] += alone[1] > alone[0]
    assert score(model, tokenizer, Task("t", tuple(questions))).correct == right["behind"] != right["alone"]


def test_an_end_of_text_that_the_tokenizer_adds_is_left_out(model):
    from tokenizers.processors import TemplateProcessing

    task = Task("t", tuple(Question(p, ("ab", "c", "1"), i % 3) for i, p in enumerate(CHARACTERS[2:32])))
    ending = tiny_tokenizer()
    ending.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", 1)]
    )
    assert ending("ab").input_ids[-1] == 1
    assert score(model, ending, task) == score(model, tiny_tokenizer(), task)


def test_the_model_is_left_as_it_was(model, tmp_path):
    task = read_task(choice_task(tmp_path / "t.jsonl", 0, count=3))
    model.train()
    score(model, tiny_tokenizer(), task)
    assert model.training
    model.eval()
    score(model, tiny_tokenizer(), task)
    assert not model.training


def test_a_broken_model_is_never_right_and_that_is_said(caplog):
    broken = tiny_llama(0)
    with torch.no_grad():
        broken.lm_head.weight.fill_(float("nan"))
    task = Task("t", (Question("a", ("b", "c"), 0), Question("a", ("c",), 0)))
    assert score(broken, tiny_tokenizer(), task) == Score(0, 2)
    assert "task 't': 3 of 3 answers of the model are NaN" in caplog.text


def test_numbers():
    found = Score(3, 12)
    assert found.accuracy == 0.25
    assert found.standard_error == pytest.approx((0.25 * 0.75 / 12) ** 0.5)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: is not JSON"),
        ("[" * 100_000, "line 2: is not JSON"),
        ("[]", "line 2: must be"),
        ("null", "must be"),
        ('{"prompt": "a"}', "must be"),
        ('{"prompt": "", "target": "b"}', "must be"),
        ('{"prompt": "a", "target": ""}', "must be"),
        ('{"prompt": "a", "target": 4}', "must be"),
        ('{"prompt": "a", "target": "\\ud800"}', "must be"),
        ('{"prompt": "a", "target": "b", "choices": ["b", "c"]}', "must be"),
        ('{"prompt": "a", "choices": ["b"], "answer": 0}', "two or more"),
        ('{"prompt": "a", "choices": "bc", "answer": 0}', "must be"),
        ('{"prompt": "a", "choices": ["b", ""], "answer": 0}', "must be"),
        ('{"prompt": "a", "choices": ["b", "c"], "answer": true}', "must be"),
        ('{"prompt": "a", "choices": ["b", "c"], "answer": "0"}', "must be"),
        ('{"prompt": "a", "choices": ["b", "c"], "answer": 2}', "answer 2 is not one of the 2 choices"),
        ('{"prompt": "a", "choices": ["b", "c"], "answer": -1}', "answer -1"),
    ],
)
def test_hostile_lines_are_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"prompt": "a", "target": "b"}}\n{line}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl") as error:
        read_task(path)
    assert message in str(error.value)


def test_hostile_files_are_named(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ValueError, match=r"bad\.jsonl: is not UTF-8"):
        read_task(path)
    path.write_text("\n  \n")
    with pytest.raises(ValueError, match="holds no questions"):
        read_task(path)
    with pytest.raises(OSError, match="nowhere"):
        read_task(tmp_path / "nowhere.jsonl")


def test_line_ends_that_json_allows_in_text(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a\xe2\x80\xa8b", "target": "c\xc2\x85"}\r\n\r\n')
    assert read_task(path).questions == (Question("a\u2028b", ("c\x85",), 0),)


@pytest.mark.parametrize("limit", [0, -1, 1.5, True])
def test_a_limit_is_a_number_of_questions(model, limit):
    with pytest.raises(ValueError, match="limit must be a positive number"):
        score(model, tiny_tokenizer(), Task("t", (Question("a", ("b",), 0),)), limit=limit)


def test_what_cannot_be_asked_is_an_error(model):
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    with pytest.raises(ValueError, match=r"task 't': the prompt ' ' has no tokens"):
        score(model, tokenizer, Task("t", (Question(" ", ("a", "a a"), 0),)))
    with pytest.raises(ValueError, match="the answer ' ' has no tokens"):
        score(model, tokenizer, Task("t", (Question("a", ("a", " "), 0),)))
    short = GPT2LMHeadModel(GPT2Config(vocab_size=48, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(ValueError, match="a question has 11 tokens, but the model takes 8"):
        score(short, tiny_tokenizer(), Task("t", (Question("aaaaaaaaa", ("b",), 0),)))


def test_a_test_set_is_called_after_its_folder(tmp_path):
    named = [tmp_path / "sql" / f"{part}.jsonl" for part in ("test", "validation")]
    for path in (*named, tmp_path / "other.jsonl"):
        path.parent.mkdir(exist_ok=True)
        path.write_text('{"prompt": "a", "target": " b"}\n')
    assert [read_task(path).name for path in named] == ["sql", "sql"]
    assert read_task(tmp_path / "other.jsonl").name == "other"
