"""Calibration of tiny merges: answers, loss, gradients, the choice, and repeating it without prompts."""

import copy
import itertools
import json
import math
import re

import numpy as np
import peft
import pytest
import torch
from helpers.adapters import adapted
from helpers.calibration_reference import divergence as naive_divergence
from helpers.calibration_reference import greedy as naive_greedy
from helpers.calibration_reference import summed
from helpers.folders import assert_same_tensors, on_disk
from helpers.models import fine_tuned, snapshot, tiny_llama, tiny_tokenizer
from transformers import BertConfig, BertModel

from coram_hf import CoramConfig, CoramError, CoramMerger, MergeReport
from coram_hf.calibration import Lessons
from coram_hf.calibration.divergence import divergence, mean_divergence
from coram_hf.calibration.fit import hold_back
from coram_hf.calibration.surrogate import Surrogate
from coram_hf.calibration.teachers import greedy
from coram_hf.config import CalibrationConfig
from coram_hf.hub.calibration import calibration_text

PROMPTS = {
    "math": ["1+1=", "2+2=?", "3-1", "what is 4", "7"],
    "code": ["def f", "if a:", "x = ", "go", "1, 2, 3"],
}
LORA = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])


def models(kind="full", **options):
    """A base that is sure of what it says, so that experts change it, and experts of uneven sizes."""
    base = tiny_llama(num_hidden_layers=3, **options)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.mul_(2)
    if kind == "full":
        sizes = {"math": 0.08, "code": 0.1}
        return base, {name: fine_tuned(base, size, i, "proj") for i, (name, size) in enumerate(sizes.items())}
    return base, {name: adapted(base, LORA, i) for i, name in enumerate(PROMPTS)}


def merger(base, experts, line="DEC(full)", **options):
    config = CoramConfig.from_line(line, **options)
    return CoramMerger(base, experts, config, tokenizer=tiny_tokenizer(), progress=False)


def lessons(made, prompts=PROMPTS, **options):
    return Lessons(made.inputs, prompts, CalibrationConfig(answer_tokens=5, **options))


@pytest.fixture(scope="module")
def full():
    made = merger(*models())
    return made, made.merge(), lessons(made).teach(progress=False)


def test_answers_are_those_of_a_plain_loop():
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    model.generation_config.repetition_penalty = 5.0
    prompts = [tokenizer(text).input_ids for text in ("1+1=", "a longer prompt than that", "b")]
    said = greedy(model, tokenizer, prompts, CalibrationConfig(answer_tokens=7))
    assert said == [naive_greedy(model, prompt, 7, ends={tokenizer.eos_token_id}) for prompt in prompts]
    assert model.generation_config.repetition_penalty == 5.0


@pytest.mark.parametrize("line", [False, True])
def test_answers_end_with_the_end_of_text_or_of_their_line(line):
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    newline = tokenizer("\n").input_ids[0]
    prompts = [tokenizer(text).input_ids for text in "abcdefgh"]
    longest = [naive_greedy(model, prompt, 9) for prompt in prompts]
    end, stop = longest[0][2], longest[1][1]
    swap = {stop: newline, newline: stop}
    with torch.no_grad():
        order = [swap.get(i, i) for i in range(48)]
        model.lm_head.weight.copy_(model.lm_head.weight[order])
    model.generation_config.eos_token_id = [end]
    ends = {end, tokenizer.eos_token_id} | ({newline} if line else set())
    said = greedy(model, tokenizer, prompts, CalibrationConfig(answer_tokens=9, answer_line=line))
    assert said == [naive_greedy(model, prompt, 9, ends) for prompt in prompts]
    assert any(answer[-1] == end for answer in said)


def test_the_loss_is_the_mean_over_experts_of_the_mean_over_tokens(full):
    _, result, taught = full
    _, experts = models()
    expected = {}
    for name, passages in taught.items():
        sums = [naive_divergence(experts[name], result.model, p.before, p.after) for p in passages]
        expected[name] = sum(sums) / sum(len(p.after) for p in passages)
    found = divergence(result.model, taught)
    assert found == pytest.approx(expected, rel=1e-3)
    assert mean_divergence(found) == pytest.approx(np.mean(list(expected.values())), rel=1e-3)
    assert divergence(experts["math"], {"math": taught["math"]})["math"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_sum_of_updates_and_its_gradient_are_those_of_finite_differences(kind):
    base, experts = models(kind, dtype=torch.float64)
    made = merger(base, experts, "full", weights=(0.3, 0.7))
    taught = lessons(made).teach(progress=False)
    dense = [copy.deepcopy(e).merge_and_unload() if kind == "lora" else e for e in experts.values()]
    places = [(layer, part) for layer in range(3) for part in ("self_attn", "mlp")]
    c = torch.linspace(0.3, 1.1, 12, dtype=torch.float64).view(2, 6)

    def loss(c):
        def factor(i, name):
            layer, part = name.split(".")[2:4]
            return 2 * (0.3, 0.7)[i] * float(c[i, places.index((int(layer), part))])

        return mean_divergence(divergence(summed(base, dense, made.inputs.targets, factor), taught))

    with Surrogate(copy.deepcopy(base), made.inputs, made.config, progress=False) as surrogate:
        value, gradient = surrogate.gradient(c, taught)
        assert surrogate.loss(c, taught) == pytest.approx(value, rel=1e-6)
    assert value == pytest.approx(loss(c), rel=1e-5)
    step = 1e-2
    for i, place in itertools.product(range(2), range(len(places))):
        moved = torch.zeros_like(c)
        moved[i, place] = step
        expected = (loss(c + moved) - loss(c - moved)) / (2 * step)
        assert float(gradient[i, place]) == pytest.approx(expected, rel=5e-3, abs=1e-5)


def test_branches_of_low_rank_give_the_same_as_dense_updates():
    base, experts = models("lora")
    low, full = (
        merger(base, experts),
        merger(base, {n: e.merge_and_unload() for n, e in models("lora")[1].items()}),
    )
    taught = lessons(low).teach(progress=False)
    c = torch.linspace(0.3, 1.1, 12, dtype=torch.float64).view(2, 6)
    found = []
    for made in (low, full):
        with Surrogate(copy.deepcopy(base), made.inputs, made.config, progress=False) as surrogate:
            found.append(surrogate.gradient(c, taught))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-2, atol=1e-4)


def test_every_module_takes_the_factor_of_its_expert_its_group_or_its_layer():
    """The surrogate's loss is that of the sum with the factors that a merge would take."""
    base, experts = models()
    made = merger(base, experts, "full", target_modules=("down_proj", "v_proj", "lm_head"))
    taught = lessons(made).teach(progress=False)
    logs = torch.linspace(-1.5, 0.3, 16, dtype=torch.float64)
    with Surrogate(copy.deepcopy(base), made.inputs, made.config, progress=False) as surrogate:
        for log_c in (logs[:2], logs[:12].view(2, 6), logs[:4].view(2, 2)):
            factors = log_c.exp().tolist()

            def factor(i, name, factors=factors):
                of = factors[i]
                if isinstance(of, float):
                    return of
                parts, half = name.split("."), len(of) // 2
                if parts[1] != "layers":
                    return math.prod(of) ** (1 / len(of))
                return of[(half if parts[3] == "mlp" else 0) + (int(parts[2]) if half == 3 else 0)]

            merged = summed(base, list(experts.values()), made.inputs.targets, factor)
            found = surrogate.loss(surrogate.columns(log_c), taught)
            assert found == pytest.approx(mean_divergence(divergence(merged, taught)), rel=1e-4)


def test_a_quarter_of_every_teachers_answers_is_held_back(full):
    _, _, taught = full
    some = {"math": taught["math"] * 2, "code": taught["code"][:1]}
    fitted, held = hold_back(some, 0)
    assert {name: len(passages) for name, passages in held.items()} == {"math": 2}
    assert {name: len(passages) for name, passages in fitted.items()} == {"math": 8, "code": 1}
    assert hold_back(some, 0) == (fitted, held)
    picked = {tuple(id(p) for p in hold_back(some, seed)[1]["math"]) for seed in range(5)}
    assert len(picked) > 1


@pytest.mark.parametrize("granularity", ["lambda", "expert", "group", "layer"])
def test_a_calibrated_merge_is_nearer_to_its_experts_and_repeats_from_its_report(tmp_path, granularity):
    base, experts = models()
    sources = on_disk(tmp_path, base, experts, tiny_tokenizer())
    made = CoramMerger(*sources, CoramConfig.from_line("DEC(full)"), progress=False)
    result = made.merge()
    before = snapshot(result.model)
    found = result.calibrate(PROMPTS, granularity=granularity, answer_tokens=5, progress=False)
    assert all(torch.equal(before[name], tensor) for name, tensor in result.model.state_dict().items())
    report, told = found.report, found.report.calibration

    taught = lessons(made).teach(progress=False)
    assert told["before"] == pytest.approx(divergence(result.model, taught))
    assert told["after"] == pytest.approx(divergence(found.model, taught))
    assert mean_divergence(told["after"]) < mean_divergence(told["before"])
    assert told["held_back"][told["granularity"]] == min(told["held_back"].values())
    assert (report.lam_source, report.lam) == ("calibrated", told["lam"])
    assert dict(map(tuple, told["curves"]["lambda"]))[told["start"]] == pytest.approx(
        mean_divergence(told["before"])
    )
    assert told["prompts"] == {"math": 5, "code": 5}
    assert all(parameter.requires_grad for parameter in found.model.parameters())

    found.save_pretrained(tmp_path / "first")
    text = (tmp_path / "first" / "coram_report.json").read_text() + (
        tmp_path / "first" / "README.md"
    ).read_text()
    assert not any(prompt in text for prompt in ("what is 4", "2+2=?"))
    config = CoramConfig.from_report(MergeReport.load(tmp_path / "first"))
    assert (config.factors is not None) == (told["granularity"] != "lambda")
    CoramMerger(*sources, config, progress=False).merge_to(tmp_path / "again")
    assert_same_tensors(tmp_path / "first", tmp_path / "again")


def apart():
    """Two experts of very uneven sizes, both of which a merge could keep: each changes other layers."""
    base = models()[0]
    return base, {
        "math": fine_tuned(base, 0.5, 0, "layers.0.mlp"),
        "code": fine_tuned(base, 0.02, 1, "layers.2.mlp"),
    }


def test_factors_are_fitted_where_lambda_alone_does_not_do():
    result = merger(*apart(), "full").merge()
    found = {
        granularity: result.calibrate(PROMPTS, granularity=granularity, answer_tokens=5, progress=False)
        for granularity in ("lambda", "expert")
    }
    losses = {how: mean_divergence(one.report.calibration["after"]) for how, one in found.items()}
    assert found["expert"].report.calibration["granularity"] == "expert"
    assert losses["expert"] < losses["lambda"]
    assert found["expert"].report.calibration["factors"].keys() == {"math", "code"}


@pytest.mark.parametrize(("count", "finest"), [(7, "group"), (8, "layer")])
def test_layers_are_fitted_from_eight_answers_per_expert_on(count, finest):
    result = merger(*apart(), "full").merge()
    prompts = {
        "math": [f"{i}+{i}=" for i in range(count)],
        "code": [f"{name} = " for name in "abcdefghi"],
    }
    options = {"granularity": "layer", "answer_tokens": 4, "progress": False}
    report = result.calibrate(prompts, **options).report
    assert (report.calibration["requested"], report.calibration["granularity"]) == ("layer", finest)
    assert ("(layer needs more prompts)" in calibration_text(report)) == (finest == "group")


def test_the_same_prompts_give_the_same_merge(full):
    _, result, _ = full
    options = {"granularity": "group", "answer_tokens": 5, "progress": False}
    one, other = (result.calibrate(PROMPTS, **options) for _ in range(2))
    assert one.report.calibration == other.report.calibration
    assert all(
        torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True)
    )


def test_the_base_can_be_a_teacher(full):
    _, result, _ = full
    options = {"granularity": "lambda", "answer_tokens": 5, "progress": False}
    kept = result.calibrate({**PROMPTS, "base": ["the cat", "in a", "0"]}, **options)
    assert set(kept.report.calibration["after"]) == {"math", "code", "base"}
    assert kept.report.lam < result.calibrate(PROMPTS, **options).report.lam
    assert kept.report.calibration["neutral"].keys() == {"before", "after"}


def test_chats_need_a_template_and_use_it():
    base, experts = models()
    made = merger(base, experts)
    with pytest.raises(CoramError, match="no chat template"):
        lessons(made, chat=True)
    tokenizer = tiny_tokenizer()
    turn = "{% for turn in messages %}{{ turn.role }}:{{ turn.content }} {% endfor %}"
    tokenizer.chat_template = turn + "{% if add_generation_prompt %}me:{% endif %}"
    made = CoramMerger(base, experts, tokenizer=tokenizer, progress=False)
    chat = {name: [[{"role": "user", "content": text}] for text in texts] for name, texts in PROMPTS.items()}
    plain = {name: [f"user:{text} me:" for text in texts] for name, texts in PROMPTS.items()}
    taught = [
        lessons(made, p, chat=c).teach(progress=False)
        for p, c in ((PROMPTS, True), (chat, False), (plain, False))
    ]
    asked = [{name: [p.before for p in passages] for name, passages in one.items()} for one in taught]
    assert asked[0] == asked[1] == asked[2]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ({"math": ["1"]}, {}, "no prompts for expert 'code'"),
        ({**PROMPTS, "chat": ["1"]}, {}, "unknown expert with prompts for calibration 'chat'"),
        ({**PROMPTS, "math": ["1" * 60]}, {}, "a prompt of 'math' has 60 tokens"),
        (PROMPTS, {"granularity": "module"}, "granularity"),
        (PROMPTS, {"answer_token": 3}, "did you mean 'answer_tokens'"),
        (PROMPTS, {"answer_tokens": 0}, "answer_tokens must be a positive integer"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(prompts, options, message):
    result = merger(*models(max_position_embeddings=64)).merge()
    with pytest.raises(CoramError, match=re.escape(message)):
        result.calibrate(prompts, **options)


def test_merges_that_cannot_be_calibrated_are_refused():
    from coram_hf.baselines import merge

    base, experts = models()
    without = CoramMerger(base, experts, progress=False)
    with pytest.raises(CoramError, match="no tokenizer"):
        without.merge().calibrate(PROMPTS)
    with pytest.raises(CoramError, match="not kept"):
        without.merge(keep_update=False).calibrate(PROMPTS)
    with pytest.raises(CoramError, match="linear"):
        merge(base, experts, "linear", progress=False).calibrate(PROMPTS)
    with pytest.raises(CoramError, match="positive lambda"):
        merger(base, experts, lam=-1.0).merge().calibrate(PROMPTS)
    bert = BertModel(
        BertConfig(
            vocab_size=48, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=44
        )
    )
    encoder = CoramMerger(
        bert,
        {n: fine_tuned(bert, 0.1, i) for i, n in enumerate(PROMPTS)},
        tokenizer=tiny_tokenizer(),
        progress=False,
    )
    with pytest.raises(CoramError, match="BertModel is not one"):
        encoder.merge().calibrate(PROMPTS)


def test_another_lambda_forgets_the_calibration(full):
    _, result, _ = full
    found = result.calibrate(PROMPTS, granularity="lambda", answer_tokens=5, progress=False)
    other = found.with_lambda(1.0).report
    assert (other.lam_source, other.calibration) == ("given", {})
    assert json.loads(json.dumps(found.report.to_dict()))["calibration"]["sha256"]
