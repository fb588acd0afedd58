"""Targets from one GGUF file: its config, its weights (any type the gguf package decodes)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from peagle_jax.checkpoint import fields
from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.experts import read_gguf
from peagle_jax.checkpoint.gguf_format import TensorData, read_header
from peagle_jax.checkpoint.placing import Places
from peagle_jax.checkpoint.quantization import block_weight
from peagle_jax.checkpoint.tensors import Reader, Shape, gguf_name, read_target
from peagle_jax.config import BlockConfig, ConfigError, MoeConfig, RopeConfig, TargetConfig
from peagle_jax.layers.quantized import QuantizedWeight
from peagle_jax.layers.rope import inverse_frequencies
from peagle_jax.models import registry
from peagle_jax.models.family import MODEL_NAMES, Family
from peagle_jax.models.stack import TargetParams

_FREQUENCIES = "rope_freqs.weight"

GPT_OSS_LIMIT = 7.0
"""``swiglu_limit`` of every gpt-oss; GGUF has no key for it."""

LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192}
"""Llama 3.1's and 3.2's scaling. GGUF keeps only the divisors that follow from it."""


class GGUFFile:
    """A GGUF file's metadata and tensors. A TensorSource; matrices read as (out, in) float32.

    Raises:
        CheckpointError: the file is not readable as GGUF, or no family runs its architecture.
    """

    def __init__(self, path: str | Path) -> None:
        self.place = str(path)
        header = read_header(Path(path))
        self._metadata, self._tensors = header.metadata, header.tensors
        self._data = TensorData(Path(path), header.tensors)
        self.architecture: str = self.require("general.architecture")
        try:
            self.family: Family = registry.by_gguf_architecture(self.architecture)
        except registry.UnsupportedModelError as error:
            raise CheckpointError(f"{path}: {error}") from error

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value; ``{arch}`` in the key stands for the file's architecture."""
        return self._metadata.get(self.named(key), default)

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number, as ``get``. Raises CheckpointError for another kind, or without a default."""
        key = self.named(key)
        if default is None:
            self.require(key)
        return fields.integer(self._metadata, key, self.place, default)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number, as ``integer``."""
        key = self.named(key)
        value = default if default is not None else self.require(key)
        return fields.number(self._metadata, key, self.place, value)

    def require(self, key: str) -> Any:
        """A metadata value. Raises CheckpointError when the file has none."""
        value = self.get(key)
        if value is None:
            raise CheckpointError(
                f"{self.place} has no metadata key {self.named(key)}; it is not a whole GGUF model"
            )
        return value

    def named(self, key: str) -> str:
        """The key with the file's architecture in its place."""
        return key.replace("{arch}", self.architecture) if "{arch}" in key else key

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> Shape:
        return self._tensors[name].shape

    def read(self, name: str) -> np.ndarray:
        values = self._data.read(name)
        return self._half_split(name, values) if self.family.gguf_permutes_qk else values

    def packed(self, name: str, dtype: np.dtype) -> QuantizedWeight | None:
        """The tensor in the file's own blocks; None for a type that is not kept so."""
        data, kind = self._data.blocks(name)
        weight = block_weight(data, kind, self.shape(name), dtype)
        if weight is None or not self.family.gguf_permutes_qk:
            return weight
        return jax.tree.map(lambda part: self._half_split(name, part), weight)

    def _half_split(self, name: str, values: np.ndarray) -> np.ndarray:
        """Undoes the row order that llama.cpp gives q and k: (pair, half) back to (half, pair)."""
        part = name.split(".", 2)[-1]
        if part in ("attn_q.weight", "attn_q.bias"):
            heads = self.integer("{arch}.attention.head_count")
        elif part in ("attn_k.weight", "attn_k.bias"):
            heads = _kv_heads(self)
        else:
            return values
        pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
        return pairs.swapaxes(1, 2).reshape(values.shape)


def _kv_heads(file: GGUFFile) -> int:
    for key in ("{arch}.attention.head_count", "{arch}.attention.head_count_kv"):
        if isinstance(file.get(key), list):
            raise CheckpointError(
                f"{file.place}: {file.named(key)} differs from layer to layer; expected one number"
            )
    return file.integer("{arch}.attention.head_count_kv", file.integer("{arch}.attention.head_count"))


def _rope(file: GGUFFile, head_dim: int) -> RopeConfig:
    theta = file.number("{arch}.rope.freq_base", file.family.default_rope_theta)
    if _FREQUENCIES in set(file.names()):
        return _llama3_rope(file, theta, head_dim)
    kind = file.get("{arch}.rope.scaling.type", "none")
    if kind == "none":
        return RopeConfig(theta=theta)
    attention = file.number("{arch}.rope.scaling.attn_factor", 1.0)
    if attention != 1:
        raise CheckpointError(f"{file.place}: RoPE's attn_factor is {attention:g}; expected 1")
    context = file.integer("{arch}.context_length", 8192)
    return RopeConfig(
        theta=theta,
        variant=kind,
        factor=file.number("{arch}.rope.scaling.factor"),
        original_max_position=file.integer("{arch}.rope.scaling.original_context_length", context),
        beta_fast=file.number("{arch}.rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=file.number("{arch}.rope.scaling.yarn_beta_slow", 1.0),
        truncate=file.family.experts != "gpt_oss",  # a rule of the family; GGUF has no key for it
    )


def _llama3_rope(file: GGUFFile, theta: float, head_dim: int) -> RopeConfig:
    """The scaling whose divisors the file lists. Raises CheckpointError unless it is Llama 3.1's."""
    divisors = file.read(_FREQUENCIES)
    rope = RopeConfig(theta=theta, variant="llama3", factor=float(divisors.max()), **LLAMA3_ROPE)
    plain = inverse_frequencies(RopeConfig(theta=theta), head_dim)
    expected = plain / inverse_frequencies(rope, head_dim)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise CheckpointError(
            f"{file.place}: tensor {_FREQUENCIES} is not Llama 3.1's RoPE scaling "
            f"(largest divisor {divisors.max():g}); other scalings are not supported"
        )
    return rope


def _moe(file: GGUFFile) -> MoeConfig | None:
    """The mixture of experts. llama.cpp knows the families' rules, so a file says the numbers alone.

    Raises CheckpointError where the architecture and the numbers disagree.
    """
    experts = file.integer("{arch}.expert_count", 0)
    if file.family.experts is None:
        if experts:
            raise CheckpointError(f"{file.place} is a mixture of experts; expected a dense model")
        return None
    try:
        return MoeConfig(file.integer("{arch}.expert_count"), file.integer("{arch}.expert_used_count"))
    except ConfigError as error:
        raise CheckpointError(f"{file.place}: {error}") from error


def _windows(file: GGUFFile, num_layers: int) -> tuple[int, ...]:
    window = file.integer("{arch}.attention.sliding_window", 0)
    if window and not file.family.alternates:
        raise CheckpointError(f"{file.place} uses sliding-window attention; expected full attention")
    return tuple(0 if i % 2 else window for i in range(num_layers)) if window else ()


def read_config(file: GGUFFile) -> TargetConfig:
    """The target's config from the file's metadata.

    Raises:
        CheckpointError: a key is missing, or asks for what is not supported.
    """
    moe, num_layers = _moe(file), file.integer("{arch}.block_count")
    kv_heads = _kv_heads(file)
    heads = file.integer("{arch}.attention.head_count")
    width = file.integer("{arch}.embedding_length")
    head_dim = file.integer("{arch}.attention.key_length", width // max(heads, 1))
    for key in ("{arch}.attention.value_length", "{arch}.rope.dimension_count"):
        found = file.integer(key, head_dim)
        if found != head_dim:
            raise CheckpointError(
                f"{file.place}: {file.named(key)} is {found}; "
                f"expected the head width {head_dim}, other widths are not supported"
            )
    stops = {name: f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom", "bos")}
    ids = {name: file.integer(key) for name, key in stops.items() if file.get(key) is not None}
    bos = ids.pop("bos", None)
    try:
        block = BlockConfig(
            hidden_size=width,
            intermediate_size=file.integer(
                "{arch}.feed_forward_length" if moe is None else "{arch}.expert_feed_forward_length"
            ),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=round_to_decimal(file.number("{arch}.attention.layer_norm_rms_epsilon")),
            rope=_rope(file, head_dim),
            moe=moe,
            swiglu_limit=GPT_OSS_LIMIT if file.family.experts == "gpt_oss" else None,
        )
        return TargetConfig(
            family=file.family.name,
            block=block,
            vocab_size=_vocab_size(file),
            num_layers=num_layers,
            windows=_windows(file, num_layers),
            max_position=file.integer("{arch}.context_length"),
            tie_word_embeddings=MODEL_NAMES["lm_head"].gguf not in set(file.names()),
            eos_token_ids=tuple(dict.fromkeys(ids.values())),
            bos_token_id=bos,
        )
    except ConfigError as error:
        raise CheckpointError(f"{file.place}: {error}") from error


SAMPLING_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""``general.sampling.*`` by the names of Hugging Face's generation config."""


def read_sampling(file: GGUFFile) -> dict[str, Any]:
    """The file's sampling defaults, under ``generation_config.json``'s keys."""
    found = {name: file.get(f"general.sampling.{key}") for key, name in SAMPLING_KEYS.items()}
    return {
        name: round_to_decimal(value) if isinstance(value, float) else value
        for name, value in found.items()
        if value is not None
    }


def round_to_decimal(value: float) -> float:
    """The short decimal that a float32 of the file was made from (1e-5, not 9.99999974e-06)."""
    return float(str(np.float32(value)))


def _vocab_size(file: GGUFFile) -> int:
    name = MODEL_NAMES["embed"].gguf
    if name not in set(file.names()):
        raise CheckpointError(f"{file.place} has no tensor {name}; expected the embedding table")
    return file.shape(name)[0]


def load_params(
    file: GGUFFile,
    cfg: TargetConfig,
    dtype: DTypeLike = jnp.float32,
    stacked: bool = False,
    places: Places | None = None,
    quantization: str | None = None,
) -> TargetParams:
    """The weights, decoded one tensor at a time. Raises CheckpointError as ``read_target`` does."""
    reader = Reader(file, quantization)
    flags = {"attention_bias": reader.has("blk.0.attn_q.bias"), "mlp_bias": reader.has("blk.0.ffn_up.bias")}
    name_of = partial(gguf_name, family=file.family)
    experts = None if cfg.block.moe is None else read_gguf
    wanted = file.family.layer_fields(flags)
    params = read_target(reader, cfg, wanted, name_of, dtype, stacked, places, experts)
    reader.finish(ignore=lambda name: name == _FREQUENCIES)  # in the config already
    return params
