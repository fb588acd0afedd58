import math
import typing

import pytest

from peagle_jax.train.ranges import RANGES, check_number, ends
from peagle_jax.train.recipe import Recipe, TrainError, parse_recipe


def numeric_fields():
    """Dotted names of every number, or list of numbers, of a recipe, with its kind."""
    found = {}
    for section, kind in typing.get_type_hints(Recipe).items():
        inner = typing.get_type_hints(kind) if hasattr(kind, "__dataclass_fields__") else {"": kind}
        for key, hint in inner.items():
            kinds = {k for k in (hint, *typing.get_args(hint)) if k in (int, float)}
            if kinds:
                found[f"{section}.{key}".removesuffix(".")] = (kinds.pop(), typing.get_origin(hint) is tuple)
    return found


FIELDS = numeric_fields()


def test_every_number_of_a_recipe_has_a_range():
    assert set(FIELDS) == set(RANGES)
    assert {"seed", "head.taps", "head.mask_token_id", "loss.depth_weights"} <= set(FIELDS)


@pytest.mark.parametrize("name", RANGES)
def test_a_number_past_an_end_of_its_range_is_refused(name):
    kind, many = FIELDS[name]
    interval = RANGES[name]
    low, high = ends(interval)
    section, _, key = name.rpartition(".")
    wrong = [low if interval[0] == "(" else low - 1, high if interval[-1] == ")" else 2 * high + 1]
    if kind is float:
        wrong += [math.nan, math.inf, -math.inf]
    for value in map(kind, wrong):
        raw = {key: [value] if many else value}
        with pytest.raises(TrainError) as raised:
            parse_recipe({section: raw} if section else raw)
        place = f"{name}[0]" if many else name
        assert str(raised.value) == f"{place} must lie in {interval}, found {value}"


@pytest.mark.parametrize(
    ("interval", "inside", "outside"),
    [
        ("[0, 1]", [0, 1, 0.5], [-1e-9, 1.1, math.nan]),
        ("(0, 1]", [1e-9, 1], [0, 2]),
        ("[0, 1)", [0, 0.99], [1, math.inf]),
        ("[0, 4294967295]", [0, 2**32 - 1], [2**32, -1]),
    ],
)
def test_brackets_say_whether_an_end_belongs_to_a_range(interval, inside, outside):
    for value in inside:
        check_number("x", value, interval)
    for value in outside:
        with pytest.raises(TrainError):
            check_number("x", value, interval)
