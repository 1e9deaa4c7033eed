"""Calibration by plain loops: greedy answers, divergence and the sum of updates, one token at a time."""

import copy

import numpy as np
import torch


def probabilities(model, tokens):
    """The probabilities of the next token, by numpy."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0, -1].double().numpy()
    shifted = np.exp(logits - logits.max())
    return shifted / shifted.sum()


def greedy(model, tokens, longest, ends=()):
    said = []
    while len(said) < longest:
        said.append(int(probabilities(model, [*tokens, *said]).argmax()))
        if said[-1] in ends:
            break
    return said


def divergence(expert, merge, before, after):
    """sum over tokens of KL(expert || merge)."""
    total = 0.0
    for i in range(len(after)):
        p, q = (probabilities(model, [*before, *after[:i]]) for model in (expert, merge))
        total += float(np.sum(p * (np.log(p) - np.log(q))))
    return total


def summed(base, experts, targets, factors):
    """A copy of the base with W_0 + sum_i f_i(name) (W_i - W_0) on the targets."""
    model = copy.deepcopy(base)
    state, origin = model.state_dict(), base.state_dict()
    for name in targets:
        total = origin[name].double().clone()
        for i, expert in enumerate(experts):
            total += factors(i, name) * (expert.state_dict()[name].double() - origin[name].double())
        state[name].copy_(total)
    return model
