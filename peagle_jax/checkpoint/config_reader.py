"""Hugging Face ``config.json`` keys as our configs. Every key is read in one place, and a key that
two places give differently is an error that names both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.fields import (
    Config,
    agreed,
    boolean,
    integer,
    number,
    optional_boolean,
    optional_integer,
    optional_number,
    section,
    text,
    texts,
    token_ids,
)
from peagle_jax.config import BlockConfig, ConfigError, MoeConfig, RopeConfig, TargetConfig
from peagle_jax.layers.block import SWIGLU_ALPHA
from peagle_jax.models import registry
from peagle_jax.models.family import Family
from peagle_jax.models.llama import LLAMA

_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ROPE_GROUPS = ("rope_parameters", "rope_scaling")


def _rope_value(
    read: Callable[[Config, str, str], Any],
    config: Config,
    names: tuple[str, ...],
    place: str,
    top: tuple[str, ...] = (),
) -> Any:
    keys = (*top, *(f"{group}.{name}" for group in _ROPE_GROUPS for name in names))
    return agreed({key: read(config, key, place) for key in keys}, f"RoPE's {names[0]}", place)


def read_rope(
    config: Config, place: str, *, default_theta: float = 10000.0, default_original: int | None = None
) -> RopeConfig:
    """RoPE from ``rope_parameters`` (transformers 5), ``rope_scaling`` and the top level.

    ``default_original`` is the context length that YaRN scales when no key says it.

    Raises:
        CheckpointError: places disagree, a needed key is missing, or the type is not supported.
    """
    for group in _ROPE_GROUPS:
        if any(isinstance(value, Mapping) for value in section(config, group, place).values()):
            raise CheckpointError(
                f"{place}: {group} differs from layer to layer; expected one for all layers"
            )
    factor = "partial_rotary_factor"
    partial = _rope_value(optional_number, config, (factor,), place, (factor,))
    if partial is not None and partial != 1:
        raise CheckpointError(f"{place}: {factor} is {partial}; expected 1, RoPE on the whole head")
    theta = _rope_value(optional_number, config, ("rope_theta",), place, ("rope_theta",))
    variant = _rope_value(text, config, ("rope_type", "type"), place) or "default"

    def optional(name: str) -> float | None:
        return _rope_value(optional_number, config, (name,), place)

    def needed(name: str, value: Any) -> Any:
        if value is None:
            raise CheckpointError(
                f"{place}: RoPE of type {variant} needs {name}; expected it in rope_parameters"
            )
        return value

    values: dict[str, Any] = {"theta": default_theta if theta is None else theta, "variant": variant}
    if variant in ("linear", "llama3", "yarn"):
        values["factor"] = needed("factor", optional("factor"))
    if variant in ("llama3", "yarn"):
        name = "original_max_position_embeddings"
        original = _rope_value(optional_integer, config, (name,), place, (name, "initial_context_length"))
        if original is None and variant == "yarn":
            original = default_original
        values["original_max_position"] = needed(name, original)
    if variant == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            values[name] = needed(name, optional(name))
    if variant == "yarn":
        # Absent keys keep the config's defaults, which are the YaRN paper's.
        for name in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"):
            values[name] = optional(name)
        values["truncate"] = _rope_value(optional_boolean, config, ("truncate",), place)
    try:
        return RopeConfig(**{name: value for name, value in values.items() if value is not None})
    except ConfigError as error:
        raise CheckpointError(f"{place}: {error}") from error


def read_windows(config: Config, family: Family, num_layers: int, place: str) -> tuple[int, ...]:
    """Each layer's window, 0 where it sees all positions; empty where all layers do.

    ``layer_types`` say it, or ``use_sliding_window`` with ``max_window_layers`` (Qwen2, Qwen3); gpt-oss's
    layers alternate where neither does, from a sliding one on.

    Raises:
        CheckpointError: a kind of layer is not supported, or there is no width for a sliding one.
    """
    kinds = texts(config, "layer_types", place)
    window = optional_integer(config, "sliding_window", place, 1)
    on = boolean(config, "use_sliding_window", place)
    # transformers' Qwen3-MoE, unlike the dense ones, slides all of its layers or none.
    windowed_from = 0 if family.experts == "each" else integer(config, "max_window_layers", place, 28)
    sliding, full = "sliding_attention", "full_attention"
    if not kinds and family.alternates:
        kinds = tuple((sliding, full)[i % 2] for i in range(num_layers))
    elif not kinds and on and window:
        kinds = tuple(sliding if i >= windowed_from else full for i in range(num_layers))
    if not kinds:
        return ()
    wrong = sorted({kind for kind in kinds if kind not in (sliding, full)})
    if wrong or len(kinds) != num_layers:
        found = ", ".join(wrong) if wrong else f"{len(kinds)} for {num_layers} layers"
        raise CheckpointError(f"{place}: layer_types has {found}; expected {sliding} or {full} for each")
    if sliding in kinds and window is None:
        raise CheckpointError(
            f"{place}: layers are of {sliding}, but there is no sliding_window; expected one"
        )
    windows = tuple((window or 0) if kind == sliding else 0 for kind in kinds)
    return windows if any(windows) else ()


def check_full_attention(config: Config, num_layers: int, place: str) -> None:
    """Raises CheckpointError when a layer of a head attends through a sliding window."""
    kinds = texts(config, "layer_types", place)[:num_layers]  # its trainer may have left its target's
    windows = read_windows({**config, "layer_types": list(kinds)}, LLAMA, num_layers, place)
    if windows:
        raise CheckpointError(
            f"{place} asks for sliding_attention (window {max(windows)}); expected full attention only"
        )


def read_moe(config: Config, family: Family, place: str) -> MoeConfig | None:
    """The mixture of experts of a family that has one.

    Raises:
        CheckpointError: a dense family's config names experts, a key is missing, or some layers are dense.
    """
    found = {key: count for key in _EXPERT_KEYS if (count := optional_integer(config, key, place))}
    if family.experts is None:
        for key, experts in found.items():
            raise CheckpointError(
                f"{place} is a mixture of experts ({key} {experts}); expected a dense model"
            )
        return None
    experts = agreed(found, "the number of experts", place)
    if experts is None:
        raise CheckpointError(f"{place} has no {_EXPERT_KEYS[0]}; expected the number of experts")
    chosen = {
        key: optional_integer(config, key, place) for key in ("num_experts_per_tok", "experts_per_token")
    }
    top_k = agreed(chosen, "the number of experts a token", place)
    if top_k is None:
        raise CheckpointError(
            f"{place} has no num_experts_per_tok; expected how many experts a token goes to"
        )
    if config.get("mlp_only_layers") or integer(config, "decoder_sparse_step", place, 1) != 1:
        raise CheckpointError(
            f"{place}: some layers are dense (mlp_only_layers, decoder_sparse_step); "
            "expected a mixture of experts in each"
        )
    shared = optional_integer(config, "shared_expert_intermediate_size", place)
    if shared:
        raise CheckpointError(f"{place}: has a shared expert of width {shared}; expected none")
    alpha = number(config, "swiglu_alpha", place, SWIGLU_ALPHA)
    if alpha != SWIGLU_ALPHA:
        raise CheckpointError(f"{place}: swiglu_alpha is {alpha}; expected {SWIGLU_ALPHA}")
    normed = family.name == "gpt_oss" or boolean(config, "norm_topk_prob", place)
    try:
        return MoeConfig(experts, top_k, normed)
    except ConfigError as error:
        raise CheckpointError(f"{place}: {error}") from error


def read_block(
    config: Config, place: str, *, default_theta: float = 10000.0, default_eps: float = 1e-6
) -> BlockConfig:
    """A decoder block. Missing ``head_dim`` and ``num_key_value_heads`` follow from the heads.

    Raises:
        CheckpointError: a width is missing or contradicts another, or the activation is not SwiGLU's.
    """
    activation = text(config, "hidden_act", place) or "silu"
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"{place}: hidden_act is {activation!r}; expected 'silu'")
    hidden, heads = (integer(config, key, place) for key in ("hidden_size", "num_attention_heads"))
    if config.get("head_dim") is None and heads > 0 and hidden % heads:
        raise CheckpointError(
            f"{place}: hidden_size {hidden} is not a multiple of num_attention_heads {heads} and there is "
            "no head_dim; expected one"
        )
    original = optional_integer(config, "max_position_embeddings", place)
    try:
        return BlockConfig(
            hidden_size=hidden,
            intermediate_size=integer(config, "intermediate_size", place),
            num_heads=heads,
            num_kv_heads=integer(config, "num_key_value_heads", place, heads),
            head_dim=integer(config, "head_dim", place, hidden // max(heads, 1)),
            rms_norm_eps=number(config, "rms_norm_eps", place, default_eps),
            rope=read_rope(config, place, default_theta=default_theta, default_original=original),
        )
    except ConfigError as error:
        raise CheckpointError(f"{place}: {error}") from error


def text_config(config: Config, place: str) -> Config:
    """The language model's keys: those of ``text_config``, the outer ones where it has none."""
    return {**config, **section(config, "text_config", place)}


def family_of(config: Config, place: str) -> Family:
    """The family by ``architectures``, or by ``model_type`` where that is missing.

    A composite model is known by its ``text_config``.

    Raises:
        CheckpointError: no family runs it.
    """
    inner = section(config, "text_config", place)
    sections = [keys for keys in (inner, config) if keys]
    names = [name for keys in sections for name in texts(keys, "architectures", place)]
    kinds = [kind for keys in sections if (kind := text(keys, "model_type", place))]
    try:
        if kinds and (inner or not names):
            return registry.by_model_type(kinds[0])
        if names:
            return registry.by_architecture(names[0])
    except registry.UnsupportedModelError as error:
        raise CheckpointError(f"{place}: {error}") from error
    raise CheckpointError(f"{place} has neither architectures nor model_type; expected a model's config")


def _check_precision(keys: Config, family: Family, place: str) -> None:
    """Raises CheckpointError when the weights are quantised in a way that is not read."""
    if not section(keys, "quantization_config", place):
        return
    method = text(keys, "quantization_config.quant_method", place) or "an unnamed method"
    if (family.experts, method) != ("gpt_oss", "mxfp4"):
        raise CheckpointError(
            f"{place}: the weights are quantised ({method}); load the unquantised checkpoint, or a GGUF file"
        )


def read_target_config(config: Config, generation: Config, place: str) -> TargetConfig:
    """A target's config. ``generation`` is its ``generation_config.json``, empty when there is none.

    ``eos_token_ids`` are the generation config's, then the model config's.

    Raises:
        CheckpointError: a key is missing, contradicts another, or asks for what is not supported.
    """
    family, keys = family_of(config, place), text_config(config, place)
    _check_precision(keys, family, place)
    num_layers = integer(keys, "num_hidden_layers", place)
    moe = read_moe(keys, family, place)
    if moe is not None and family.experts == "each":
        keys = {**keys, "intermediate_size": integer(keys, "moe_intermediate_size", place)}
    block = read_block(
        keys, place, default_theta=family.default_rope_theta, default_eps=family.default_rms_norm_eps
    )
    limit = number(keys, "swiglu_limit", place, 7.0) if family.experts == "gpt_oss" else None
    if family.experts == "gpt_oss" and not boolean(keys, "attention_bias", place, True):
        raise CheckpointError(
            f"{place}: attention_bias is false; expected true, gpt-oss's q, k, v and o have biases"
        )
    eos = [
        *token_ids(generation, "eos_token_id", place),
        *token_ids(keys, "eos_token_id", place),
    ]
    bos = token_ids(keys, "bos_token_id", place)
    try:
        return TargetConfig(
            family=family.name,
            block=dataclasses.replace(block, moe=moe, swiglu_limit=limit),
            vocab_size=integer(keys, "vocab_size", place),
            num_layers=num_layers,
            windows=read_windows(keys, family, num_layers, place),
            max_position=integer(keys, "max_position_embeddings", place),
            tie_word_embeddings=boolean(keys, "tie_word_embeddings", place),
            eos_token_ids=tuple(dict.fromkeys(eos)),
            bos_token_id=bos[0] if bos else None,
        )
    except ConfigError as error:
        raise CheckpointError(f"{place}: {error}") from error
