"""Experts of other classes than the base: matched by their backbones, heads set aside or kept."""

import copy
import json

import pytest
import torch
from helpers.command import coram_hf
from helpers.models import fine_tuned
from peft import LoraConfig, TaskType, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BartConfig,
    BartForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    DistilBertConfig,
    DistilBertForMaskedLM,
    DistilBertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

from coram_hf import CoramConfig, CoramError, CoramMerger, MergeReport
from coram_hf.baselines import merge

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 24,
}
QUERY = "encoder.layer.0.attention.self.query.weight"


def classifier(base: PreTrainedModel, cls, seed, labels=2, **config):
    """An expert of another class: the base's backbone with noise, and a head of its own."""
    own = copy.deepcopy(base.config)
    for key, value in {"num_labels": labels, **config}.items():
        setattr(own, key, value)
    torch.manual_seed(100 + seed)
    model = cls(own)
    prefix = "" if base.base_model is base else f"{base.base_model_prefix}."
    noisy = fine_tuned(base, 0.05, seed).state_dict()
    inner = {key.removeprefix(prefix): tensor for key, tensor in noisy.items() if key.startswith(prefix)}
    model.base_model.load_state_dict(inner, strict=False)
    return model.eval()


def bert(cls=BertModel, **options):
    torch.manual_seed(0)
    return cls(BertConfig(**SHAPE, **options)).eval()


@pytest.fixture
def saved(tmp_path):
    def save(base, experts):
        base.save_pretrained(tmp_path / "base")
        for name, expert in experts.items():
            expert.save_pretrained(tmp_path / name)
        return tmp_path / "base", {name: tmp_path / name for name in experts}

    return save


def mean_of(name, base, experts):
    """The mean of one tensor of the experts' backbones; without an amplitude, `linear` gives exactly this."""
    return sum(expert.base_model.state_dict()[name].double() for expert in experts) / len(experts)


CASES = {
    "a bare base": (BertModel, [(BertForSequenceClassification, 2), (BertForSequenceClassification, 3)]),
    "an MLM base": (BertForMaskedLM, [(BertForSequenceClassification, 2), (BertForTokenClassification, 5)]),
    "a classifier as base": (
        BertForSequenceClassification,
        [(BertForSequenceClassification, 3), (BertModel, 2)],
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("from_files", [False, True])
def test_backbones_are_merged_and_heads_set_aside_and_named(tmp_path, saved, case, from_files):
    cls, kinds = CASES[case]
    base = bert(cls)
    experts = {f"e{i}": classifier(base, kind, i, labels) for i, (kind, labels) in enumerate(kinds)}
    sources = saved(base, experts)
    given = sources if from_files else (base, experts)
    result = merge(*given, "linear", progress=False)
    assert type(result.model) is cls
    merged = result.model.base_model.state_dict()
    for name, tensor in merged.items():
        if "pooler" not in name:
            torch.testing.assert_close(
                tensor.double(), mean_of(name, base, experts.values()), atol=1e-6, rtol=0
            )
    inner = {f"{result.model.base_model_prefix}.{name}" for name in merged}
    for name, tensor in result.model.state_dict().items():
        if cls is not BertModel and name not in inner and "decoder.weight" not in name:
            assert torch.equal(tensor, base.state_dict()[name]), name
    told = [warning for warning in result.report.warnings if "is set aside" in warning]
    with_heads = [name for name, expert in experts.items() if not isinstance(expert, BertModel)]
    assert len(told) >= len(with_heads)
    for name in with_heads:
        assert any(f"'{name}'" in warning and "classifier.weight" in warning for warning in told)
    assert "are set aside" in result.report.surroundings["heads"]


def test_both_ways_give_the_same_bytes(tmp_path, saved):
    base = bert(BertForMaskedLM)
    sources = saved(
        base, {f"e{i}": classifier(base, BertForSequenceClassification, i, 2 + i) for i in range(2)}
    )
    for heads in ("base", "drop", "keep"):
        merger = CoramMerger(*sources, CoramConfig(residual="ta"), heads=heads, progress=False)
        merger.merge().save_pretrained(tmp_path / f"saved {heads}")
        merger.merge_to(tmp_path / f"streamed {heads}")
        files = [tmp_path / f"{way} {heads}" / "model.safetensors" for way in ("saved", "streamed")]
        assert files[0].read_bytes() == files[1].read_bytes()
        assert MergeReport.load(files[1].parent).model_class == (
            "BertForMaskedLM" if heads == "base" else "BertModel"
        )


FAMILIES = {
    "BERT": (BertConfig(**SHAPE), BertForMaskedLM, BertForSequenceClassification),
    "RoBERTa": (
        RobertaConfig(**SHAPE | {"max_position_embeddings": 26}),
        RobertaForMaskedLM,
        RobertaForSequenceClassification,
    ),
    "DistilBERT": (
        DistilBertConfig(dim=32, hidden_dim=44, n_layers=2, n_heads=4, vocab_size=64),
        DistilBertForMaskedLM,
        DistilBertForSequenceClassification,
    ),
    "Llama": (
        LlamaConfig(**SHAPE, num_key_value_heads=2, pad_token_id=0),
        LlamaForCausalLM,
        LlamaForSequenceClassification,
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_heads_load_with_their_class_over_the_merged_backbone(tmp_path, saved, family):
    config, with_language_head, with_classes = FAMILIES[family]
    torch.manual_seed(0)
    base = with_language_head(config).eval()
    names = {0: "bad", 1: "so", 2: "good"}
    experts = {
        "two": classifier(base, with_classes, 0, 2),
        "three": classifier(base, with_classes, 1, 3, id2label=names),
    }
    sources = saved(base, experts)
    merger = CoramMerger(*sources, heads="keep", progress=False)
    result = merger.merge()
    result.save_pretrained(tmp_path / "saved")
    merger.merge_to(tmp_path / "streamed")
    ids = torch.tensor([[5, 6, 7, 8]])
    for folder in (tmp_path / "saved", tmp_path / "streamed"):
        backbone = AutoModel.from_pretrained(folder)
        for name, expert in experts.items():
            loaded, info = AutoModelForSequenceClassification.from_pretrained(
                folder / "heads" / name, output_loading_info=True
            )
            assert type(loaded) is with_classes
            assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
            same = AutoModelForSequenceClassification.from_pretrained(folder, subfolder=f"heads/{name}")
            heads = {
                key: t
                for key, t in expert.state_dict().items()
                if not key.startswith(f"{expert.base_model_prefix}.")
            }
            assert heads
            assert all(torch.equal(loaded.state_dict()[key], tensor) for key, tensor in heads.items())
            for key, tensor in backbone.state_dict().items():
                if "pooler" not in key:
                    assert torch.equal(loaded.base_model.state_dict()[key], tensor)
            in_memory = result.with_head(name)
            with torch.no_grad():
                expected = loaded(input_ids=ids).logits
                assert torch.equal(same(input_ids=ids).logits, expected)
                torch.testing.assert_close(in_memory(input_ids=ids).logits, expected)
        assert loaded.config.id2label == names
        linked = [folder / "model.safetensors", folder / "heads" / "two" / "backbone-00001.safetensors"]
        assert linked[0].samefile(linked[1])
    assert result.report.surroundings["heads"].endswith("heads/ holds those of 'two', 'three'")
    with pytest.raises(CoramError, match="no head of 'four' was kept"):
        result.with_head("four")


def test_a_pooler_that_not_all_experts_have_goes_with_the_head(tmp_path, saved):
    base = bert()
    experts = {
        "whole": classifier(base, BertForSequenceClassification, 0),
        "tokens": classifier(base, BertForTokenClassification, 1),
    }
    merger = CoramMerger(*saved(base, experts), heads="keep", progress=False)
    result = merger.merge()
    result.save_pretrained(tmp_path / "merged")
    own = experts["whole"].bert.pooler.dense.weight
    loaded, info = BertForSequenceClassification.from_pretrained(
        tmp_path / "merged" / "heads" / "whole", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for model in (loaded, result.with_head("whole")):
        assert torch.equal(model.bert.pooler.dense.weight, own)
        assert torch.equal(
            model.bert.encoder.layer[1].output.dense.weight, result.model.encoder.layer[1].output.dense.weight
        )
    assert torch.equal(result.model.pooler.dense.weight, base.pooler.dense.weight)
    narrow = CoramMerger(*saved(base, experts), heads="keep", dtype="bfloat16", progress=False).merge()
    narrow.save_pretrained(tmp_path / "narrow")
    loaded = BertForTokenClassification.from_pretrained(tmp_path / "narrow" / "heads" / "tokens")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in narrow.with_head("tokens").parameters()} == {torch.bfloat16}


def test_image_classifiers_whose_names_on_disk_differ(tmp_path, saved):
    torch.manual_seed(0)
    shape = {key: SHAPE[key] for key in list(SHAPE)[:4]} | {"image_size": 16, "patch_size": 8}
    base = ViTModel(ViTConfig(**shape)).eval()
    experts = {f"e{i}": classifier(base, ViTForImageClassification, i, 3 + i) for i in range(2)}
    sources = saved(base, experts)
    merger = CoramMerger(*sources, heads="keep", progress=False)
    merger.merge().save_pretrained(tmp_path / "saved")
    merger.merge_to(tmp_path / "streamed")
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    for name, expert in experts.items():
        logits = []
        for way in ("saved", "streamed"):
            folder = tmp_path / way / "heads" / name
            loaded, info = ViTForImageClassification.from_pretrained(folder, output_loading_info=True)
            assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
            assert torch.equal(loaded.classifier.weight, expert.classifier.weight)
            logits.append(loaded(pixel_values=pixels).logits)
        assert torch.equal(*logits)
        assert not torch.equal(logits[0], expert(pixel_values=pixels).logits)


AUTO = {
    TaskType.SEQ_CLS: (AutoModelForSequenceClassification, "classifier"),
    TaskType.TOKEN_CLS: (AutoModelForTokenClassification, "classifier"),
    TaskType.QUESTION_ANS: (AutoModelForQuestionAnswering, "qa_outputs"),
}


@pytest.mark.parametrize("task", AUTO)
@pytest.mark.parametrize("language_head", [False, True])
def test_adapters_of_classifiers(tmp_path, task, language_head):
    base = bert(BertForMaskedLM if language_head else BertModel)
    base.save_pretrained(tmp_path / "base")
    auto, head = AUTO[task]
    expected = {}
    for seed, labels in enumerate((2, 2 if task == TaskType.QUESTION_ANS else 3)):
        whole = auto.from_pretrained(tmp_path / "base", num_labels=labels)
        adapter = get_peft_model(whole, LoraConfig(task_type=task, r=2, target_modules=["query", "value"]))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in adapter.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        adapter.save_pretrained(tmp_path / f"e{seed}")
        expected[f"e{seed}"] = adapter.merge_and_unload()
    experts = {name: tmp_path / name for name in expected}
    result = merge(tmp_path / "base", experts, "linear", progress=False)
    mean = mean_of(QUERY, base, expected.values())
    torch.testing.assert_close(result.model.base_model.state_dict()[QUERY].double(), mean, atol=1e-6, rtol=0)
    assert any("'e1'" in w and head in w and "set aside" in w for w in result.report.warnings)
    kept = merge(tmp_path / "base", experts, "linear", heads="keep", progress=False)
    kept.save_pretrained(tmp_path / "kept")
    for name, whole in expected.items():
        loaded = auto.from_pretrained(tmp_path / "kept" / "heads" / name)
        assert torch.equal(getattr(loaded, head).weight, getattr(whole, head).weight)
        assert torch.equal(loaded.base_model.state_dict()[QUERY], kept.model.state_dict()[QUERY])
        if not language_head and task == TaskType.SEQ_CLS:
            assert torch.equal(loaded.bert.pooler.dense.weight, kept.model.pooler.dense.weight)


def test_a_fresh_head_is_named(tmp_path):
    bert().save_pretrained(tmp_path / "backbone")
    torch.manual_seed(1)
    fresh = AutoModelForSequenceClassification.from_pretrained(tmp_path / "backbone", num_labels=2)
    expert = fine_tuned(bert(), 0.05, 0)
    plan = CoramMerger(fresh, {"e": expert}, progress=False).inspect()
    assert any("freshly initialised" in w and "classifier.weight" in w for w in plan.warnings)
    assert not any("pooler" in w and "freshly" in w for w in plan.warnings)
    config = json.loads((tmp_path / "backbone" / "config.json").read_text())
    config["architectures"] = ["BertForSequenceClassification"]
    (tmp_path / "backbone" / "config.json").write_text(json.dumps(config))
    merger = CoramMerger(tmp_path / "backbone", {"e": expert}, progress=False)
    assert any("freshly initialised" in warning for warning in merger.inspect().warnings)
    result = merger.merge()
    assert type(result.model) is BertForSequenceClassification
    assert not result.model.classifier.weight.any()


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("residual", [None, "ta"])
def test_a_fresh_head_starts_from_the_experts(tmp_path, loaded, residual):
    """A classifier over a bare checkpoint, and experts with heads like it."""
    bert().save_pretrained(tmp_path / "backbone")
    config = json.loads((tmp_path / "backbone" / "config.json").read_text())
    config["architectures"] = ["BertForSequenceClassification"]
    (tmp_path / "backbone" / "config.json").write_text(json.dumps(config))
    torch.manual_seed(1)
    fresh = AutoModelForSequenceClassification.from_pretrained(tmp_path / "backbone")
    experts = {f"e{i}": fine_tuned(fresh, 0.1, i) for i in range(2)}
    base = fresh if loaded else tmp_path / "backbone"
    merger = CoramMerger(base, experts, CoramConfig(residual=residual), progress=False)
    result = merger.merge()
    mean = sum(expert.classifier.weight for expert in experts.values()) / 2
    torch.testing.assert_close(result.model.classifier.weight, mean)
    assert any("starts from the mean of the experts' heads" in warning for warning in result.report.warnings)
    result.save_pretrained(tmp_path / "saved")
    merger.merge_to(tmp_path / "streamed")
    weights = [(tmp_path / way / "model.safetensors").read_bytes() for way in ("saved", "streamed")]
    assert weights[0] == weights[1]


def test_a_trained_head_is_not_called_fresh(tmp_path, saved):
    base = bert(BertForSequenceClassification)
    sources = saved(base, {"e": fine_tuned(base, 0.05, 0)})
    assert not any(
        "fresh" in w or "aside" in w for w in CoramMerger(*sources, progress=False).inspect().warnings
    )


def test_labels_that_differ_are_a_warning(saved):
    base = bert(BertForSequenceClassification)
    experts = {name: fine_tuned(base, 0.05, i) for i, name in enumerate(("a", "b"))}
    experts["a"].config.id2label = {0: "bad", 1: "good"}
    experts["b"].config.id2label = {0: "good", 1: "bad"}
    plan = CoramMerger(base, experts, progress=False).inspect()
    assert any("a: ['bad', 'good'] | b: ['good', 'bad']" in warning for warning in plan.warnings)
    experts["b"].config.id2label = {0: "bad", 1: "good"}
    plan = CoramMerger(base, experts, progress=False).inspect()
    assert not any("class names differ" in warning for warning in plan.warnings)


@pytest.mark.parametrize("fresh", [False, True])
def test_class_names_that_experts_agree_on_name_those_of_a_base_without(tmp_path, saved, fresh):
    base = bert(BertForSequenceClassification)
    experts = {name: fine_tuned(base, 0.05, i) for i, name in enumerate(("a", "b", "plain"))}
    for name in ("a", "b"):
        experts[name].config.id2label = {0: "bad", 1: "good"}
        experts[name].config.label2id = {"bad": 0, "good": 1}
    sources = saved(base, experts)
    if fresh:
        base.bert.save_pretrained(tmp_path / "base")
        config = json.loads((tmp_path / "base" / "config.json").read_text())
        config["architectures"] = ["BertForSequenceClassification"]
        (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    merger = CoramMerger(*sources, progress=False)
    merger.merge().save_pretrained(tmp_path / "saved")
    merger.merge_to(tmp_path / "streamed")
    for way in ("saved", "streamed"):
        config = AutoModelForSequenceClassification.from_pretrained(tmp_path / way).config
        assert config.id2label == {0: "bad", 1: "good"}
        assert config.label2id == {"bad": 0, "good": 1}
    assert merger.inspect().surroundings["class names"] == "those of 'a', 'b'; the base has none"
    assert "class names: those of 'a', 'b'" in str(merger.inspect())


def test_labels_of_a_head_of_another_name_are_compared():
    torch.manual_seed(0)
    layers = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
    widths = dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 44)
    config = BartConfig(d_model=32, vocab_size=64, num_labels=2, **layers, **heads, **widths)
    base = BartForSequenceClassification(config).eval()
    experts = {name: fine_tuned(base, 0.05, i) for i, name in enumerate(("a", "b"))}
    experts["a"].config.id2label = {0: "bad", 1: "good"}
    experts["b"].config.id2label = {0: "good", 1: "bad"}
    plan = CoramMerger(base, experts, progress=False).inspect()
    assert any("a: ['bad', 'good'] | b: ['good', 'bad']" in warning for warning in plan.warnings)


@pytest.mark.parametrize("cls", [BertModel, BertForMaskedLM, BertForQuestionAnswering])
def test_question_answering_checkpoints(tmp_path, saved, cls):
    base = bert(cls)
    experts = {f"e{i}": classifier(base, BertForQuestionAnswering, i) for i in range(2)}
    sources = saved(base, experts)
    result = merge(*sources, "linear", progress=False)
    assert type(result.model) is cls
    mean = mean_of(QUERY, base, experts.values())
    torch.testing.assert_close(result.model.base_model.state_dict()[QUERY].double(), mean, atol=1e-6, rtol=0)
    if cls is BertForQuestionAnswering:
        head = sum(expert.qa_outputs.weight.double() for expert in experts.values()) / 2
        torch.testing.assert_close(result.model.qa_outputs.weight.double(), head, atol=1e-6, rtol=0)
    else:
        told = [warning for warning in result.report.warnings if "qa_outputs.weight" in warning]
        assert [f"'e{i}'" in warning for i, warning in enumerate(told)] == [True, True]
    merge(*sources, "linear", heads="keep", progress=False).save_pretrained(tmp_path / "kept")
    for name, expert in experts.items():
        loaded, info = AutoModelForQuestionAnswering.from_pretrained(
            tmp_path / "kept", subfolder=f"heads/{name}", output_loading_info=True
        )
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert torch.equal(loaded.qa_outputs.weight, expert.qa_outputs.weight)
        torch.testing.assert_close(loaded.bert.state_dict()[QUERY].double(), mean, atol=1e-6, rtol=0)


@pytest.mark.parametrize("heads", ["drop", "keep"])
def test_heads_of_a_base_that_accelerate_places(tmp_path, saved, heads):
    """The merge may place the backbone; a loaded base that is placed already is refused with what to do."""
    base = bert(BertForMaskedLM)
    sources = saved(base, {"e": classifier(base, BertForSequenceClassification, 0)})
    where = {"embeddings": "cpu", "encoder.layer.0": "cpu", "encoder.layer.1": "disk"}
    plain = CoramMerger(*sources, heads=heads, progress=False).merge().model.state_dict()
    placed = CoramMerger(
        *sources, heads=heads, progress=False, device_map=where, offload_folder=tmp_path / "off"
    )
    placed.merge().save_pretrained(tmp_path / "merged")
    for name, tensor in AutoModel.from_pretrained(tmp_path / "merged").state_dict().items():
        assert "pooler" in name or torch.equal(tensor, plain[name]), name
    assert (tmp_path / "merged" / "heads" / "e" / "config.json").is_file() == (heads == "keep")
    loaded = BertForMaskedLM.from_pretrained(
        sources[0],
        device_map={"bert.embeddings": "cpu", "bert.encoder": "disk", "cls": "cpu"},
        offload_folder=tmp_path / "more",
    )
    with pytest.raises(CoramError, match="load it without device_map, or pass its folder"):
        CoramMerger(loaded, sources[1], heads=heads)


def test_a_backbone_that_differs_is_still_refused(saved, tmp_path):
    base = bert(BertForMaskedLM)
    base.save_pretrained(tmp_path / "base")
    expert = classifier(base, BertForSequenceClassification, 0)
    expert.save_pretrained(tmp_path / "e")
    tensors = load_file(tmp_path / "e" / "model.safetensors")
    del tensors[f"bert.{QUERY}"]
    save_file(tensors, tmp_path / "e" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CoramError, match="no weight file"):
        CoramMerger(tmp_path / "base", {"e": tmp_path / "e"})


def test_on_the_command_line_and_in_recipes(tmp_path, saved):
    base = bert()
    sources = saved(base, {"e": classifier(base, BertForSequenceClassification, 0)})
    run = coram_hf("merge", sources[0], f"e={sources[1]['e']}", "--heads", "keep", "-o", tmp_path / "cli")
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "cli" / "heads" / "e" / "config.json").is_file()
    recipe = {"base": str(sources[0]), "experts": {"e": str(sources[1]["e"])}, "heads": "drop"}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    run = coram_hf("inspect", "--config", tmp_path / "recipe.yaml")
    assert run.returncode == 0, run.stderr
    assert "dropped; the merge is a BertModel" in run.stdout
    run = coram_hf("inspect", "--config", tmp_path / "recipe.yaml", "--heads", "all")
    assert run.returncode == 2
