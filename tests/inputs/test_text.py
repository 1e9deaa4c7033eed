"""Logits at chosen places of a batch, and batches of similar length."""

import pytest
import torch
from helpers.models import tiny_llama

from coram_hf.inputs.text import batches, logits_at, padded


@pytest.mark.parametrize("says_its_head", [True, False])
def test_logits_at_places_are_those_of_single_texts(says_its_head):
    """Also if the model does not say what its head is, so that the places can only be picked afterwards."""
    model = tiny_llama()
    if not says_its_head:
        model.get_output_embeddings = lambda: None
    rows = [[5, 6, 7, 8], [9, 3], [4, 4, 2]]
    where = [(0, 1), (0, 3), (1, 1), (2, 0)]
    found = logits_at(model, *padded(rows), *map(torch.tensor, zip(*where, strict=True)))
    for logits, (row, column) in zip(found, where, strict=True):
        alone = model(input_ids=torch.tensor([rows[row]])).logits[0, column]
        torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-5)
    assert found.shape == (4, 48)


def test_the_head_sees_only_the_places_asked_for():
    model, seen = tiny_llama(), []
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    logits_at(model, *padded([[1, 2, 3], [4, 5]]), torch.tensor([0, 1]), torch.tensor([2, 1]))
    assert seen == [(1, 2, 48)]
    model(input_ids=torch.tensor([[1, 2, 3]]))
    assert seen[1] == (1, 3, 48)


def test_batches_hold_every_row_once_and_no_more_tokens_than_allowed():
    lengths = [3, 9, 4, 4, 1, 12]
    found = list(batches(lengths, 12))
    assert sorted(i for batch in found for i in batch) == list(range(6))
    assert all(len(batch) * max(lengths[i] for i in batch) <= 12 for batch in found)
