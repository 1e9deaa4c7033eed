"""Differences between the configs of base and experts that matter for a merge, which runs with the base's.

What decides shapes, such as depth and width, is always refused. What changes the function of the same
weights, such as rotary frequencies or the activation, is refused unless allowed. The rest is only named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

from coram_hf.errors import CoramError
from coram_hf.inputs.weights import Weights

SHAPES = (
    *(
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "num_decoder_layers",
        "encoder_layers",
        "decoder_layers",
    ),
    *("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "d_kv"),
    *("intermediate_size", "n_inner", "d_ff", "hidden_dim", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"),
    *("moe_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts", "depth", "patch_size"),
)
"""Depth and width, which decide the shapes of tensors."""

FUNCTION = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads", "head_dim"),
    *("hidden_act", "hidden_activation", "activation_function", "activation", "feed_forward_proj"),
    *(
        "partial_rotary_factor",
        "position_embedding_type",
        "alibi",
        "query_pre_attn_scalar",
        "scale_attn_weights",
    ),
    *("attn_logit_softcapping", "final_logit_softcapping", "num_experts_per_tok", "norm_topk_prob"),
    *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling", "is_decoder"),
)
"""Settings that decide what the same weights compute, besides those of rotary positions."""

HARMLESS = (
    *("max_position_embeddings", "n_positions", "sliding_window", "use_sliding_window", "max_window_layers"),
    *("layer_types", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
)
"""Harmless settings, named in the plan: the length of the context and the epsilon of norms."""

ROPE = ("rope_parameters", "rope_scaling", "rope_theta")
NO_ROPE_CHANGE = ("original_max_position_embeddings", "max_position_embeddings")


def config_differences(
    base: Weights, experts: Mapping[str, Weights], allowed: bool
) -> tuple[dict[str, str], list[str]]:
    """What the plan says about harmless differences, and warnings about harmful ones if they are allowed.

    Adapters have no config of their own.
    """
    said: list[str] = []
    warnings: list[str] = []
    for name, expert in experts.items():
        if expert.kind != "full":
            continue
        found = dict(_differences(base.model.config, expert.model.config))
        shapes = {key: pair for key, pair in found.items() if _last(key) in SHAPES}
        harmful = {
            key: pair for key, pair in found.items() if _last(key) in FUNCTION or ".rope." in f".{key}"
        }
        if shapes:
            raise CoramError(
                f"expert {name!r} differs from the base in architecture: {_listed(shapes)}; experts must be "
                "fine-tuned from the base"
            )
        if harmful and not allowed:
            raise CoramError(
                f"expert {name!r} has a config that changes what its weights compute: {_listed(harmful)}; "
                "the merge would run with the base's config, which the expert was not trained with; to merge "
                "anyway, pass "
                "allow_config_differences=True (--allow-config-differences)"
            )
        if harmful:
            warnings.append(
                f"expert {name!r} has a config that changes what its weights compute, but the merge has the "
                f"base's: {_listed(harmful)}"
            )
        harmless = {key: pair for key, pair in found.items() if key not in harmful}
        if harmless:
            said.append(f"{name!r} has {_listed(harmless)}")
    if not said:
        return {}, warnings
    return {"config": f"the base's; {'; '.join(said)}"}, warnings


def _differences(base: PreTrainedConfig, expert: PreTrainedConfig) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Every setting that both configs have, or one of them has a value for, and that differs."""
    ours, theirs = dict(_settings(base)), dict(_settings(expert))
    for key in ours | theirs:
        pair = ours.get(key), theirs.get(key)
        if pair[0] != pair[1] and not (_last(key) in (*SHAPES, *FUNCTION) and None in pair):
            yield key, pair


def _settings(config: PreTrainedConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key in (*SHAPES, *FUNCTION, *HARMLESS):
        value = getattr(config, key, None)
        if value is not None:
            yield prefix + key, value
    for key in ROPE:
        yield from _flat(f"{prefix}rope.", getattr(config, key, None), key)
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if isinstance(part, PreTrainedConfig):
            yield from _settings(part, f"{prefix}{key}.")


def _flat(prefix: str, value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """The entries of nested mappings; the type of rope always under its current name."""
    if isinstance(value, Mapping):
        for inner, entry in value.items():
            name = "rope_type" if inner == "type" else inner
            deeper = f"{prefix}{inner}." if isinstance(entry, Mapping) else prefix
            yield from _flat(deeper, entry, name)
    elif value is not None and key not in NO_ROPE_CHANGE:
        yield prefix + key, value


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _listed(found: Mapping[str, tuple[Any, Any]]) -> str:
    pairs = [
        f"{key.replace('rope.', '')}: base {base}, expert {expert}" for key, (base, expert) in found.items()
    ]
    return ", ".join(pairs)
