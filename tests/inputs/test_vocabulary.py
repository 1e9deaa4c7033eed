"""Experts with added tokens, resized or reordered embeddings, tied and untied heads."""

import copy
import json

import pytest
import torch
from helpers.folders import on_disk
from helpers.models import fine_tuned, tiny_llama
from helpers.vocabulary import WORDS, word_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from coram_hf import CoramConfig, CoramError, CoramMerger
from coram_hf.baselines import merge

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def reordered(expert, order):
    """The same expert with its embedding rows in another order."""
    moved = copy.deepcopy(expert)
    with torch.no_grad():
        for name in (EMBED, HEAD):
            moved.get_parameter(name).copy_(expert.get_parameter(name)[order])
    return moved


def with_tokens(base, tokenizer, added, seed):
    """An expert of `base` with some added tokens and a resized, trained embedding."""
    own = copy.deepcopy(tokenizer)
    own.add_tokens(added)
    expert = fine_tuned(base, 0.05, seed)
    expert.resize_token_embeddings(max(len(own), base.config.vocab_size), mean_resizing=False)
    generator = torch.Generator().manual_seed(seed + 100)
    with torch.no_grad():
        for name in (EMBED, HEAD):
            weight = expert.get_parameter(name)
            for token in added:
                weight[own.get_vocab()[token]] = torch.randn(weight.shape[1], generator=generator)
    return expert, own


def weight(model, name):
    return model.state_dict()[name].double()


@pytest.fixture
def base():
    """40 tokens and 8 padding rows."""
    return tiny_llama()


def test_rows_are_matched_by_token_whatever_their_order(base):
    tokenizer = word_tokenizer(WORDS)
    experts = {f"e{i}": fine_tuned(base, 0.05, i) for i in range(2)}
    plain = CoramMerger(base, experts, CoramConfig(residual="ta"), progress=False).merge()
    order = torch.cat([torch.randperm(40, generator=torch.Generator().manual_seed(0)), torch.arange(40, 48)])
    shuffled = {**experts, "e1": reordered(experts["e1"], order)}
    theirs = {"e0": tokenizer, "e1": word_tokenizer([WORDS[i] for i in order[:40]])}
    merger = CoramMerger(
        base,
        shuffled,
        CoramConfig(residual="ta"),
        tokenizer=tokenizer,
        expert_tokenizers=theirs,
        progress=False,
    )
    result = merger.merge()
    for name in (EMBED, HEAD):
        assert torch.equal(result.model.state_dict()[name], plain.model.state_dict()[name])
    assert result.report.vocabulary["e1"] == {"matched": 48, "added": 0, "dropped": 0}
    assert any("'e1'" in w and "by token" in w for w in result.report.warnings)


def test_by_index_without_tokenizers(base):
    larger = fine_tuned(base, 0.05, 0)
    larger.resize_token_embeddings(56, mean_resizing=False)
    smaller = fine_tuned(base, 0.05, 1)
    smaller.resize_token_embeddings(44, mean_resizing=False)
    experts = {"larger": larger, "smaller": smaller}
    result = CoramMerger(base, experts, CoramConfig(residual="ta"), progress=False).merge()
    for name in (EMBED, HEAD):
        w0 = weight(base, name)
        expected = w0 + (weight(larger, name)[:48] - w0) / 2
        expected[:44] += (weight(smaller, name) - w0[:44]) / 2
        torch.testing.assert_close(weight(result.model, name), expected, rtol=0, atol=1e-6)
    assert result.report.vocabulary == {
        "larger": {"matched": 48, "added": 0, "dropped": 8},
        "smaller": {"matched": 44, "added": 0, "dropped": 0},
    }
    assert sum("by index" in w for w in result.report.warnings) == 2
    assert result.model.config.vocab_size == 48


@pytest.mark.parametrize("residual", [None, "ta", "ties", "tsvm"])
@pytest.mark.parametrize("tied", [False, True])
def test_union_adds_every_new_token_as_the_mean_of_those_that_have_it(tmp_path, residual, tied):
    base = tiny_llama(tie_word_embeddings=tied)
    tokenizer = word_tokenizer(WORDS, added=[f"x{i}" for i in range(6)])
    e0, t0 = with_tokens(base, tokenizer, ["<a>", "<b>", "<c>"], 0)
    e1, t1 = with_tokens(base, tokenizer, ["<b>", "<d>"], 1)
    merger = CoramMerger(
        base,
        {"e0": e0, "e1": e1},
        CoramConfig(residual=residual),
        vocabulary="union",
        tokenizer=tokenizer,
        expert_tokenizers={"e0": t0, "e1": t1},
        progress=False,
    )
    result = merger.merge()
    result.save_pretrained(tmp_path / "saved")
    merger.merge_to(tmp_path / "streamed")
    weights = [(tmp_path / way / "model.safetensors").read_bytes() for way in ("saved", "streamed")]
    assert weights[0] == weights[1]
    merged = AutoTokenizer.from_pretrained(tmp_path / "saved")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert len(merged) == 46 + 4 == model.config.vocab_size
    assert model.get_input_embeddings().weight.shape[0] == 50
    owners = {"<a>": [(e0, t0)], "<b>": [(e0, t0), (e1, t1)], "<c>": [(e0, t0)], "<d>": [(e1, t1)]}
    for name in (EMBED, HEAD):
        rows = weight(model, name)
        assert (rows.norm(dim=1) > 0).all()
        for token, having in owners.items():
            mean = sum(weight(e, name)[t.get_vocab()[token]] for e, t in having) / len(having)
            torch.testing.assert_close(rows[merged.get_vocab()[token]], mean, rtol=0, atol=1e-6)
        if residual is None:
            assert torch.equal(rows[:46], weight(base, name)[:46])
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert result.report.vocabulary["e0"]["added"] == 3
    assert result.report.vocabulary["e1"] == {"matched": 46, "added": 2, "dropped": 0}
    with torch.no_grad():
        assert model(input_ids=torch.tensor([[merged.get_vocab()["<d>"]]])).logits.shape[-1] == 50


def test_the_base_policy_drops_new_tokens_and_says_so(base):
    tokenizer = word_tokenizer(WORDS)
    expert, own = with_tokens(base, tokenizer, [f"<{i}>" for i in range(12)], 0)
    options = {"tokenizer": tokenizer, "expert_tokenizers": {"e": own}, "progress": False}
    result = merge(base, {"e": expert}, "linear", **options)
    assert result.model.config.vocab_size == 48
    assert result.report.vocabulary == {"e": {"matched": 40, "added": 0, "dropped": 12}}
    torch.testing.assert_close(weight(result.model, EMBED)[:40], weight(expert, EMBED)[:40])
    assert torch.equal(weight(result.model, EMBED)[40:], weight(base, EMBED)[40:])


def test_tokenizers_beside_the_checkpoints_are_found(base, tmp_path):
    tokenizer = word_tokenizer(WORDS)
    order = torch.cat([torch.arange(40).flip(0), torch.arange(40, 48)])
    expert = fine_tuned(base, 0.05, 0)
    on_disk(tmp_path, base, {"expert": reordered(expert, order)}, tokenizer)
    word_tokenizer(WORDS[::-1]).save_pretrained(tmp_path / "expert")
    loaded = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("base", "expert")]
    result = merge(loaded[0], [loaded[1]], "linear", progress=False)
    torch.testing.assert_close(weight(result.model, EMBED), weight(expert, EMBED))
    result.save_pretrained(tmp_path / "merged")
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").get_vocab() == tokenizer.get_vocab()


def test_new_tokens_may_take_the_place_of_padding_rows(base):
    """Qwen-style: 40 tokens in 48 rows, and an expert that used two of the padding rows without resizing."""
    tokenizer = word_tokenizer(WORDS)
    expert, own = with_tokens(base, tokenizer, ["<a>", "<b>"], 0)
    plain = fine_tuned(base, 0.05, 1)
    options = {"tokenizer": tokenizer, "expert_tokenizers": {"e": own}, "progress": False}
    result = merge(base, {"e": expert, "plain": plain}, "linear", vocabulary="union", **options)
    assert result.report.vocabulary["e"] == {"matched": 46, "added": 2, "dropped": 0}
    assert result.report.vocabulary["plain"]["added"] == 0
    rows = weight(result.model, EMBED)
    torch.testing.assert_close(rows[40:42], weight(expert, EMBED)[40:42])
    torch.testing.assert_close(rows[:40], (weight(expert, EMBED) + weight(plain, EMBED))[:40] / 2)
    assert len(rows) == 48


def test_tokens_without_a_row_anywhere_are_named(base):
    small = tiny_llama(vocab_size=40)
    own = word_tokenizer(WORDS, added=["<pad>"])
    options = {"tokenizer": word_tokenizer(WORDS), "expert_tokenizers": {"e": own}, "vocabulary": "union"}
    with pytest.raises(CoramError, match=r"'<pad>'.*resize the embeddings"):
        CoramMerger(small, {"e": fine_tuned(small, 0.05, 0)}, **options)


def test_rows_that_only_the_bases_tokenizer_knows_come_from_the_experts():
    """The base's tokenizer has two tokens more than its embedding; an expert was resized for them."""
    base = tiny_llama(vocab_size=40)
    tokenizer = word_tokenizer(WORDS, added=["<p>", "<q>"])
    expert, own = with_tokens(base, tokenizer, ["<n>"], 0)
    options = {
        "tokenizer": tokenizer,
        "expert_tokenizers": {"e": own},
        "vocabulary": "union",
        "progress": False,
    }
    result = CoramMerger(base, {"e": expert}, **options).merge()
    torch.testing.assert_close(weight(result.model, EMBED)[40:], weight(expert, EMBED)[40:])


def test_new_rows_are_as_wide_as_the_result(base):
    tokenizer = word_tokenizer(WORDS, added=[f"x{i}" for i in range(8)])
    narrow = tiny_llama(dtype=torch.bfloat16)
    expert, own = with_tokens(tiny_llama(), tokenizer, ["<n>"], 0)
    options = {
        "tokenizer": tokenizer,
        "expert_tokenizers": {"e": own},
        "vocabulary": "union",
        "progress": False,
    }
    result = CoramMerger(narrow, {"e": expert}, dtype="float32", **options).merge()
    assert torch.equal(weight(result.model, EMBED)[48], weight(expert, EMBED)[48])
    reassembled = result.with_lambda(0.5)
    assert torch.equal(weight(reassembled.model, EMBED), weight(result.model, EMBED))


def test_a_head_of_another_size_than_the_embedding_is_refused(base):
    odd = fine_tuned(base, 0.05, 0)
    odd.lm_head = torch.nn.Linear(32, 60, bias=False)
    with pytest.raises(CoramError, match=r"'odd', tensor 'lm_head\.weight': shape \(60, 32\)"):
        CoramMerger(base, {"odd": odd})


def test_a_damaged_tokenizer_does_not_stop_a_merge_that_needs_none(base, tmp_path, caplog):
    base.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert merge(loaded, [fine_tuned(base, 0.05, 0)], "linear", progress=False).model is not None
    assert "cannot load the tokenizer" in caplog.text


def test_a_given_tokenizer_is_saved(base, tmp_path):
    tokenizer = word_tokenizer(WORDS)
    merge(base, [fine_tuned(base, 0.05, 0)], "linear", tokenizer=tokenizer, progress=False).save_pretrained(
        tmp_path
    )
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == tokenizer.get_vocab()


def test_policies_that_cannot_work_say_why(base):
    tokenizer = word_tokenizer(WORDS)
    expert, own = with_tokens(base, tokenizer, [f"<{i}>" for i in range(12)], 0)
    with pytest.raises(
        CoramError, match=r'a different vocabulary from the base.*vocabulary="base" or "union"'
    ):
        CoramMerger(base, {"e": expert}, vocabulary="error")
    with pytest.raises(CoramError, match='vocabulary="union" needs the base'):
        CoramMerger(base, {"e": expert}, vocabulary="union")
    other = word_tokenizer([*WORDS[:39], "alien"])
    with pytest.raises(CoramError, match=r"'e'.*'alien'.*trained separately"):
        CoramMerger(
            base, {"e": base}, vocabulary="union", tokenizer=tokenizer, expert_tokenizers={"e": other}
        )
    with pytest.raises(ValueError, match="valid: 'base', 'union', 'error'"):
        CoramMerger(base, {"e": base}, vocabulary="all")
    with pytest.raises(CoramError, match="no expert is called 'f'"):
        CoramMerger(base, {"e": base}, expert_tokenizers={"f": own})
    with pytest.raises(ValueError, match="unknown merge option 'vocabular'; did you mean 'vocabulary'"):
        CoramMerger(base, {"e": base}, vocabular="base")


def test_an_expert_that_untied_its_head_is_merged_on_the_bases_terms(tmp_path):
    base = tiny_llama(tie_word_embeddings=True)
    tied = fine_tuned(base, 0.05, 0)
    untied = tiny_llama(tie_word_embeddings=False)
    untied.load_state_dict(fine_tuned(base, 0.05, 1).state_dict())
    with torch.no_grad():
        untied.lm_head.weight.mul_(1.1)
    result = CoramMerger(base, {"a": tied, "b": untied}, CoramConfig(residual="ta"), progress=False).merge()
    assert any("'b'" in w and "'lm_head.weight'" in w and "tie" in w for w in result.report.warnings)
    assert result.model.lm_head.weight is result.model.model.embed_tokens.weight
    expected = (weight(tied, EMBED) + weight(untied, EMBED)) / 2
    torch.testing.assert_close(weight(result.model, EMBED), expected, rtol=0, atol=1e-6)
    result.save_pretrained(tmp_path)
    from safetensors import safe_open

    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118


def test_a_tied_expert_of_an_untied_base():
    base = tiny_llama(tie_word_embeddings=False)
    with torch.no_grad():
        base.lm_head.weight.copy_(base.model.embed_tokens.weight)
    expert = tiny_llama(tie_word_embeddings=True)
    expert.load_state_dict(fine_tuned(base, 0.05, 0, only="embed").state_dict())
    expert.tie_weights()
    result = merge(base, [expert], "linear", progress=False)
    assert any("which the base does not" in w for w in result.report.warnings)
    assert result.model.lm_head.weight is not result.model.model.embed_tokens.weight
    torch.testing.assert_close(weight(result.model, HEAD), weight(expert, EMBED))


def test_the_plan_shows_the_parts():
    base = tiny_llama(tie_word_embeddings=True)
    plan = CoramMerger(
        base, [fine_tuned(base, 0.05, 0)], CoramConfig(residual="ta"), progress=False
    ).inspect()
    assert plan.tied == {"lm_head.weight": EMBED}
    assert plan.patterns["model.layers.*.self_attn.q_proj.weight"] == 2
    counts = plan.parameter_counts
    assert counts["kept"] == 0
    assert counts["tied"] == base.get_parameter(EMBED).numel()
    assert counts["target"] + counts["residual"] == base.num_parameters()
    text = str(plan)
    assert "2 x model.layers.*.mlp.up_proj.weight" in text
    assert "lm_head.weight" in text
    assert f"{counts['target']:,}" in text
    assert json.dumps(counts)
