"""Tasks of lm-eval: the outcome of every question, and sampled answers under several seeds."""

import json
from statistics import fmean

import pytest
from helpers.models import choice_task, tiny_llama, tiny_tokenizer

from coram_hf.evaluation.seeds import Repeated, repeat_sampled
from coram_hf.evaluation.tasks import open_tasks

pytest.importorskip("lm_eval")

CHOICE = """
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
"""
SAMPLED = """
task: local_sampled
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{prompt}}"
generation_kwargs: {until: ["#"], do_sample: true, temperature: 1.0, max_gen_toks: 1}
process_results: !function answers.length
metric_list:
  - metric: even
    aggregation: mean
    higher_is_better: true
"""
LENGTH = "def length(doc, results):\n    return {'even': float(sum(map(ord, results[0])) % 2 == 0)}\n"


@pytest.fixture
def tasks(tmp_path):
    data = choice_task(tmp_path / "data.jsonl", 3)
    (tmp_path / "answers.py").write_text(LENGTH)
    for name, text in (("choice", CHOICE), ("sampled", SAMPLED)):
        (tmp_path / f"{name}.yaml").write_text(text.replace("DATA", json.dumps(str(data))))
    return open_tasks([tmp_path / "choice.yaml", tmp_path / "sampled.yaml"], limit=12)


def test_outcomes_of_questions_and_seeds_of_sampled_answers(tasks):
    model, tokenizer = tiny_llama(7), tiny_tokenizer()
    choice, sampled = repeat_sampled(tasks, (18, 38))
    result = choice(model, tokenizer)[0]
    assert not isinstance(choice, Repeated)
    assert len(result.outcomes) == 12
    assert fmean(result.outcomes) == pytest.approx(result.value)
    assert isinstance(sampled, Repeated)
    first, again = sampled(model, tokenizer)[0], sampled(model, tokenizer)[0]
    assert set(first.by_seed) == {"18", "38"}
    assert first.value == pytest.approx(fmean(first.by_seed.values()))
    assert first.by_seed == again.by_seed
    assert len(first.outcomes) == 12
    assert fmean(first.outcomes) == pytest.approx(first.value)
    assert set(first.outcomes) - {0.0, 1.0}, "no answer differs between the seeds"
