"""Typed reads of a checkpoint's config. Missing and null are a key's default; any other kind of value
than the expected one is an error, never converted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.config import LARGEST, is_number, is_whole

Config = Mapping[str, Any]


def shown(value: Any) -> str:
    """A value as an error quotes it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_number(value: Any) -> bool:
    return is_whole(value) if isinstance(value, int) else is_number(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list_of(ok: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(ok, value))


def lookup(config: Config, key: str, place: str) -> Any:
    """The value of ``key``, None where it is missing. A dotted key leads through sections, unless the
    config has it as it is (GGUF metadata).

    Raises:
        CheckpointError: a section on the way is not an object.
    """
    if key in config or "." not in key:
        return config.get(key)
    outer, inner = key.rsplit(".", 1)
    return section(config, outer, place).get(inner)


def _read(
    config: Config, key: str, place: str, ok: Callable[[Any], bool], expected: str, default: Any = None
) -> Any:
    value = lookup(config, key, place)
    if value is None:
        return default
    if not ok(value):
        raise CheckpointError(f"{place}: {key} is {shown(value)}; expected {expected}")
    return value


def section(config: Config, key: str, place: str) -> Config:
    """An object of the config; empty when it is missing. Raises CheckpointError for another kind."""
    return _read(config, key, place, lambda v: isinstance(v, Mapping), "an object or null", {})


def optional_integer(config: Config, key: str, place: str, least: int = -LARGEST) -> int | None:
    """A whole number. Raises CheckpointError for another kind, or one below ``least``."""
    value = _read(config, key, place, is_whole, "a whole number below 2**31")
    if value is not None and value < least:
        raise CheckpointError(f"{place}: {key} is {value}; expected at least {least}")
    return value


def integer(config: Config, key: str, place: str, default: int | None = None) -> int:
    """A whole number, needed where there is no default. Raises CheckpointError without one."""
    value = optional_integer(config, key, place)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"{place} has no {key}; expected a whole number")
    return value


def optional_number(config: Config, key: str, place: str) -> float | None:
    """A finite number. Raises CheckpointError for another kind."""
    value = _read(config, key, place, _is_number, "a finite number")
    return None if value is None else float(value)


def number(config: Config, key: str, place: str, default: float) -> float:
    """A finite number. Raises CheckpointError for another kind."""
    value = optional_number(config, key, place)
    return default if value is None else value


def optional_boolean(config: Config, key: str, place: str) -> bool | None:
    """True, false, or None where the config is silent. Raises CheckpointError for another kind."""
    return _read(config, key, place, lambda v: isinstance(v, bool), "true or false")


def boolean(config: Config, key: str, place: str, default: bool = False) -> bool:
    """True or false. Raises CheckpointError for another kind."""
    value = optional_boolean(config, key, place)
    return default if value is None else value


def text(config: Config, key: str, place: str) -> str | None:
    """A string. Raises CheckpointError for another kind."""
    return _read(config, key, place, _is_text, "a string")


def texts(config: Config, key: str, place: str) -> tuple[str, ...]:
    """A list of strings; empty when it is missing. Raises CheckpointError for another kind."""
    return tuple(_read(config, key, place, _is_list_of(_is_text), "a list of strings", []))


def integers(config: Config, key: str, place: str, what: str = "whole numbers") -> tuple[int, ...] | None:
    """A list of whole numbers; None where it is missing or empty. Raises CheckpointError for another kind."""
    return tuple(_read(config, key, place, _is_list_of(is_whole), f"a list of {what}", [])) or None


def token_ids(config: Config, key: str, place: str) -> tuple[int, ...]:
    """A token id, a list of them or null, as a tuple. Raises CheckpointError for another kind."""
    value = lookup(config, key, place)
    value = [value] if is_whole(value) else value
    return integers({key: value}, key, place, "token ids, or one") or ()


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
                f"{place} gives {what} twice: {first} = {shown(present[first])} but {where} = "
                f"{shown(value)}; remove the wrong one"
            )
    return next(iter(present.values()), None)
