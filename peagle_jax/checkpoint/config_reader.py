"""Hugging Face ``config.json`` keys as our configs. Every key is read in one place, and a key that
two places give differently is an error that names both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.config import BlockConfig, ConfigError, RopeConfig, TargetConfig
from peagle_jax.models import registry
from peagle_jax.models.family import Family

Config = Mapping[str, Any]

_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def integer(config: Config, key: str, place: str, default: int | None = None) -> int:
    """A whole number; missing and null mean the default. Raises CheckpointError without one."""
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"{place} has no {key}; expected a whole number")
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"{place}: {key} is {value!r}; expected a whole number")
    return value


def agreed(values: Mapping[str, Any], what: str, place: str) -> Any:
    """The one value that all places give; None where no place gives any.

    Raises:
        CheckpointError: two places differ; the message names both.
    """
    present = {where: value for where, value in values.items() if value is not None}
    for where, value in present.items():
        first = next(iter(present))
        if value != present[first]:
            raise CheckpointError(
                f"{place} gives {what} twice: {first} = {present[first]!r} but {where} = {value!r}; "
                "remove the wrong one"
            )
    return next(iter(present.values()), None)


def _rope_value(config: Config, names: tuple[str, ...], place: str, top: tuple[str, ...] = ()) -> Any:
    found = {key: config.get(key) for key in top}
    for group in ("rope_parameters", "rope_scaling"):
        for name in names:
            found[f"{group}.{name}"] = (config.get(group) or {}).get(name)
    return agreed(found, f"RoPE's {names[0]}", place)


def read_rope(
    config: Config, place: str, *, default_theta: float = 10000.0, default_original: int | None = None
) -> RopeConfig:
    """RoPE from ``rope_parameters`` (transformers 5), ``rope_scaling`` and the top level.

    ``default_original`` is the context length that YaRN scales when no key says it.

    Raises:
        CheckpointError: places disagree, a needed key is missing, or the type is not supported.
    """
    for group in ("rope_parameters", "rope_scaling"):
        section = config.get(group)
        if section is not None and not isinstance(section, Mapping):
            raise CheckpointError(f"{place}: {group} is {section!r}; expected an object or null")
        if section and any(isinstance(value, Mapping) for value in section.values()):
            raise CheckpointError(
                f"{place}: {group} differs from layer to layer; expected one for all layers"
            )
    top = ("partial_rotary_factor",)
    partial = _rope_value(config, ("partial_rotary_factor",), place, top)
    if partial is not None and partial != 1:
        raise CheckpointError(
            f"{place}: partial_rotary_factor is {partial}; expected 1, RoPE on the whole head"
        )
    theta = _rope_value(config, ("rope_theta",), place, ("rope_theta",))
    theta = float(default_theta if theta is None else theta)
    variant = _rope_value(config, ("rope_type", "type"), place) or "default"

    def number(name: str, default: float | None = None) -> Any:
        value = _rope_value(config, (name,), place)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(
                f"{place}: RoPE of type {variant} needs {name}; expected it in rope_parameters"
            )
        return value

    def optional(name: str) -> float | None:
        return _rope_value(config, (name,), place)

    values: dict[str, Any] = {"theta": theta, "variant": variant}
    if variant in ("linear", "llama3", "yarn"):
        values["factor"] = float(number("factor"))
    if variant in ("llama3", "yarn"):
        names = ("original_max_position_embeddings",)
        original = _rope_value(config, names, place, (*names, "initial_context_length"))
        if original is None and variant == "yarn":
            original = default_original
        values["original_max_position"] = original if original is not None else number(*names)
    if variant == "llama3":
        values["low_freq_factor"] = float(number("low_freq_factor"))
        values["high_freq_factor"] = float(number("high_freq_factor"))
    if variant == "yarn":
        values["beta_fast"] = float(number("beta_fast", 32.0))
        values["beta_slow"] = float(number("beta_slow", 1.0))
        values["truncate"] = bool(number("truncate", True))
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            values[name] = optional(name)
    try:
        return RopeConfig(**values)
    except ConfigError as error:
        raise CheckpointError(f"{place}: {error}") from error


def check_full_attention(config: Config, num_layers: int, place: str) -> None:
    """Raises CheckpointError when a layer attends through a sliding window.

    A window that no layer uses (``use_sliding_window`` false, or all layers below
    ``max_window_layers``) does not matter.
    """
    kinds = config.get("layer_types")
    if kinds:
        other = sorted({kind for kind in kinds[:num_layers] if kind != "full_attention"})
        used = ", ".join(other)
    else:
        windowed = config.get("use_sliding_window") and config.get("sliding_window")
        used = "sliding_attention" if windowed and num_layers > config.get("max_window_layers", 28) else ""
    if used:
        raise CheckpointError(
            f"{place} asks for {used} (window {config.get('sliding_window')}); expected full attention only"
        )


def read_block(
    config: Config, place: str, *, default_theta: float = 10000.0, default_eps: float = 1e-6
) -> BlockConfig:
    """A decoder block. Missing ``head_dim`` and ``num_key_value_heads`` follow from the heads.

    Raises:
        CheckpointError: a width is missing or contradicts another, or the activation is not SwiGLU's.
    """
    activation = config.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"{place}: hidden_act is {activation!r}; expected 'silu'")
    hidden, heads = (integer(config, key, place) for key in ("hidden_size", "num_attention_heads"))
    if config.get("head_dim") is None and heads > 0 and hidden % heads:
        raise CheckpointError(
            f"{place}: hidden_size {hidden} is not a multiple of num_attention_heads {heads} and there is "
            "no head_dim; expected one"
        )
    original = config.get("max_position_embeddings")
    try:
        return BlockConfig(
            hidden_size=hidden,
            intermediate_size=integer(config, "intermediate_size", place),
            num_heads=heads,
            num_kv_heads=integer(config, "num_key_value_heads", place, heads),
            head_dim=integer(config, "head_dim", place, hidden // max(heads, 1)),
            rms_norm_eps=float(config.get("rms_norm_eps") or default_eps),
            rope=read_rope(config, place, default_theta=default_theta, default_original=original),
        )
    except ConfigError as error:
        raise CheckpointError(f"{place}: {error}") from error


def text_config(config: Config) -> dict[str, Any]:
    """The language model's keys: those of ``text_config``, the outer ones where it has none."""
    inner = config.get("text_config") or {}
    return {**{key: value for key, value in config.items() if key != "text_config"}, **inner}


def family_of(config: Config, place: str) -> Family:
    """The family by ``architectures``, or by ``model_type`` where that is missing.

    A composite model is known by its ``text_config``.

    Raises:
        CheckpointError: no family runs it.
    """
    sections = [section for section in (config.get("text_config"), config) if section]
    names = [name for section in sections for name in section.get("architectures") or ()]
    kinds = [section["model_type"] for section in sections if section.get("model_type")]
    try:
        if config.get("text_config") is not None and kinds:
            return registry.by_model_type(kinds[0])
        if names:
            return registry.by_architecture(names[0])
        if kinds:
            return registry.by_model_type(kinds[0])
    except registry.UnsupportedModelError as error:
        raise CheckpointError(f"{place}: {error}") from error
    raise CheckpointError(f"{place} has neither architectures nor model_type; expected a model's config")


def token_ids(value: Any, key: str, place: str) -> tuple[int, ...]:
    """A token id, a list of them or null, as a tuple."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(v, bool) or not isinstance(v, int) for v in values):
        raise CheckpointError(f"{place}: {key} is {value!r}; expected a token id or a list of them")
    return tuple(values)


def read_target_config(config: Config, generation: Config, place: str) -> TargetConfig:
    """A target's config. ``generation`` is its ``generation_config.json``, empty when there is none.

    ``eos_token_ids`` are the generation config's, then the model config's.

    Raises:
        CheckpointError: a key is missing, contradicts another, or asks for what is not supported.
    """
    family, text = family_of(config, place), text_config(config)
    if text.get("quantization_config"):
        method = text["quantization_config"].get("quant_method", "an unnamed method")
        raise CheckpointError(
            f"{place}: the weights are quantised ({method}); load the unquantised checkpoint, or a GGUF file"
        )
    for key in _EXPERT_KEYS:
        if text.get(key):
            raise CheckpointError(
                f"{place} is a mixture of experts ({key} {text[key]}); expected a dense model"
            )
    num_layers = integer(text, "num_hidden_layers", place)
    check_full_attention(text, num_layers, place)
    block = read_block(
        text, place, default_theta=family.default_rope_theta, default_eps=family.default_rms_norm_eps
    )
    eos = [
        *token_ids(generation.get("eos_token_id"), "eos_token_id", place),
        *token_ids(text.get("eos_token_id"), "eos_token_id", place),
    ]
    bos = token_ids(text.get("bos_token_id"), "bos_token_id", place)
    try:
        return TargetConfig(
            family=family.name,
            block=block,
            vocab_size=integer(text, "vocab_size", place),
            num_layers=num_layers,
            max_position=integer(text, "max_position_embeddings", place),
            tie_word_embeddings=bool(text.get("tie_word_embeddings", False)),
            eos_token_ids=tuple(dict.fromkeys(eos)),
            bos_token_id=bos[0] if bos else None,
        )
    except ConfigError as error:
        raise CheckpointError(f"{place}: {error}") from error
