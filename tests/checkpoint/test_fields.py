"""Reads of every kind of value: right ones unchanged, wrong ones named, none converted."""

from __future__ import annotations

import json

import pytest

from peagle_jax.checkpoint import fields
from peagle_jax.checkpoint.errors import CheckpointError

KINDS = {
    fields.optional_integer: ([0, -3, 2**31 - 1], "a whole number below 2**31"),
    fields.optional_number: ([0, 1.5, -2, 1e30], "a finite number"),
    fields.optional_boolean: ([True, False], "true or false"),
    fields.text: (["", "llama"], "a string"),
    fields.texts: ([["a", "b"]], "a list of strings"),
    fields.integers: ([[1, 2]], "a list of whole numbers"),
    fields.section: ([{"a": 1}], "an object or null"),
}
VALUES = json.loads(
    '[0, 2147483648, 1.5, NaN, Infinity, 1e400, true, "5", "false", [1], ["a"], [null], {"a": 1}]'
)
VALUES += [10**400]


def right(read, value) -> bool:
    """Whether ``value`` is of the kind that ``read`` reads, said once more by hand."""
    whole = type(value) is int and abs(value) < 2**31
    return {
        fields.optional_integer: whole,
        fields.optional_number: whole or (type(value) is float and abs(value) < 1e300),
        fields.optional_boolean: type(value) is bool,
        fields.text: type(value) is str,
        fields.texts: value == ["a"],
        fields.integers: value == [1],
        fields.section: type(value) is dict,
    }[read]


@pytest.mark.parametrize("read", KINDS, ids=lambda read: read.__name__)
@pytest.mark.parametrize("value", VALUES, ids=lambda v: repr(v)[:12])
def test_only_values_of_the_kind_are_read(read, value):
    if right(read, value):
        found = read({"key": value}, "key", "config.json")
        assert (list(found) if isinstance(found, tuple) else found) == value
        return
    with pytest.raises(CheckpointError) as caught:
        read({"key": value}, "key", "config.json")
    assert str(caught.value) == f"config.json: key is {fields.shown(value)}; expected {KINDS[read][1]}"
    assert len(str(caught.value)) < 160


@pytest.mark.parametrize("config", [{}, {"key": None}], ids=["missing", "null"])
def test_what_is_silent_is_the_default(config):
    assert fields.optional_integer(config, "key", "c") is None
    assert fields.optional_number(config, "key", "c") is None
    assert fields.optional_boolean(config, "key", "c") is None
    assert fields.text(config, "key", "c") is None
    assert fields.integers(config, "key", "c") is None
    assert fields.texts(config, "key", "c") == ()
    assert fields.section(config, "key", "c") == {}
    assert fields.token_ids(config, "key", "c") == ()
    assert fields.integer(config, "key", "c", 7) == 7
    assert fields.number(config, "key", "c", 0.5) == 0.5
    assert fields.boolean(config, "key", "c", True) is True
    with pytest.raises(CheckpointError, match=r"^c has no key; expected a whole number$"):
        fields.integer(config, "key", "c")


def test_dotted_keys_lead_through_sections_or_are_keys_themselves():
    assert fields.optional_integer({"a": {"b": 3}}, "a.b", "c") == 3
    assert fields.optional_integer({"a.b": 4, "a": {"b": 3}}, "a.b", "c") == 4
    assert fields.optional_integer({"a": None}, "a.b", "c") is None
    with pytest.raises(CheckpointError, match=r"^c: a is \[1\]; expected an object or null$"):
        fields.optional_integer({"a": [1]}, "a.b", "c")


def test_a_number_below_the_least_is_refused():
    assert fields.optional_integer({"n": 1}, "n", "c", least=1) == 1
    with pytest.raises(CheckpointError, match="^c: n is 0; expected at least 1$"):
        fields.optional_integer({"n": 0}, "n", "c", least=1)


@pytest.mark.parametrize(("value", "ids"), [(3, (3,)), ([3, 5], (3, 5)), ([], ()), (None, ())])
def test_token_ids_are_one_or_a_list(value, ids):
    assert fields.token_ids({"eos": value}, "eos", "c") == ids


@pytest.mark.parametrize("value", [True, "3", [True], [[3]], 1.0, {"a": 3}], ids=repr)
def test_token_ids_of_another_kind_are_refused(value):
    with pytest.raises(CheckpointError, match="c: eos is .*; expected a list of token ids, or one"):
        fields.token_ids({"eos": value}, "eos", "c")


def test_places_that_differ_are_both_named():
    assert fields.agreed({"a": None, "b": 2, "c": 2}, "the size", "f") == 2
    with pytest.raises(
        CheckpointError, match="^f gives the size twice: a = 1 but b = 2; remove the wrong one$"
    ):
        fields.agreed({"a": 1, "b": 2}, "the size", "f")
