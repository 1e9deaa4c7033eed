"""Bootstrap intervals against the binomial and normal distributions that they approximate."""

import math

import numpy as np
import pytest
from scipy import stats

from coram_hf.evaluation.intervals import bootstrap, paired_difference


def outcomes(share, total):
    return [i < round(share * total) for i in range(total)]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.85])
def test_one_task_has_the_interval_of_a_binomial(share):
    total = 200
    found = bootstrap({"task": outcomes(share, total)}, draws=20_000)
    assert found.estimate == pytest.approx(share)
    low, high = stats.binom.ppf([0.025, 0.975], total, share) / total
    assert found.low == pytest.approx(low, abs=1.01 / total)
    assert found.high == pytest.approx(high, abs=1.01 / total)


def test_strata_are_drawn_separately():
    """Two tasks, all right and all wrong: nothing varies within either."""
    found = bootstrap({"easy": [0.5] * 50, "hard": [0.0] * 50})
    assert found == (0.5, 0.5, 0.5)


def test_a_paired_difference_knows_that_the_questions_are_the_same():
    draw = np.random.default_rng(0)
    theirs = {task: (draw.random(100) < 0.6).tolist() for task in "abc"}
    ours = {task: [right or i % 20 == 0 for i, right in enumerate(found)] for task, found in theirs.items()}
    found = paired_difference(ours, theirs, draws=20_000)
    gained = {task: [a - b for a, b in zip(ours[task], theirs[task], strict=True)] for task in ours}
    assert found.estimate == pytest.approx(np.mean([np.mean(values) for values in gained.values()]))
    error = math.sqrt(sum(np.var(values) / 100 for values in gained.values())) / 3
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert found.excludes_zero
    assert not paired_difference(theirs, theirs).excludes_zero


def test_the_seed_decides_the_draws():
    values = {"task": outcomes(0.3, 30)}
    assert bootstrap(values) == bootstrap(values)
    assert bootstrap(values) != bootstrap(values, seed=1)


def test_models_answered_the_same_questions():
    with pytest.raises(ValueError, match="shorter"):
        paired_difference({"task": [True, False]}, {"task": [True]})
