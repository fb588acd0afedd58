"""The supported families, by the names that checkpoints use for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from peagle_jax.models.family import Family
from peagle_jax.models.gpt_oss import GPT_OSS
from peagle_jax.models.llama import LLAMA
from peagle_jax.models.qwen2 import QWEN2
from peagle_jax.models.qwen3 import QWEN3
from peagle_jax.models.qwen3_moe import QWEN3_MOE

FAMILIES: tuple[Family, ...] = (LLAMA, QWEN2, QWEN3, QWEN3_MOE, GPT_OSS)


class UnsupportedModelError(ValueError):
    """No family runs the named architecture."""


def _find(value: str, what: str, names: Callable[[Family], Iterable[str]]) -> Family:
    for family in FAMILIES:
        if value in names(family):
            return family
    known = ", ".join(name for family in FAMILIES for name in names(family))
    raise UnsupportedModelError(f"{what} {value!r} is not supported; expected one of {known}")


def by_architecture(name: str) -> Family:
    """The family of a Hugging Face ``architectures`` entry. Raises UnsupportedModelError."""
    return _find(name, "architecture", lambda f: f.architectures)


def by_model_type(name: str) -> Family:
    """The family of a Hugging Face ``model_type``. Raises UnsupportedModelError."""
    return _find(name, "model_type", lambda f: f.model_types)


def by_gguf_architecture(name: str) -> Family:
    """The family of a GGUF file's ``general.architecture``. Raises UnsupportedModelError."""
    return _find(name, "GGUF architecture", lambda f: f.gguf_architectures)


def by_name(name: str) -> Family:
    """The family that a ``TargetConfig`` names. Raises UnsupportedModelError."""
    return _find(name, "family", lambda f: (f.name,))
