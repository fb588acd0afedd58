"""What a model's own sampling defaults may be, and how they are told."""

from __future__ import annotations

import pytest

from peagle_jax.arguments import CommandError
from peagle_jax.serve.sampling_defaults import SamplingDefaults, unserved_defaults


def test_known_keys_are_read_and_null_is_absent():
    read = SamplingDefaults.from_generation_config(
        {"temperature": 1, "top_k": 20, "top_p": None, "min_p": 0.1, "bos_token_id": 5}
    )
    assert read == SamplingDefaults(temperature=1, top_k=20, top_p=1.0, min_p=0.1)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("temperature", "hot", 'valid number, found "hot"'),
        ("temperature", True, "valid number, found true"),
        ("temperature", float("nan"), "finite number, found NaN"),
        ("temperature", -0.5, "greater than or equal to 0, found -0.5"),
        ("temperature", 101, "less than or equal to 100, found 101"),
        ("temperature", 10**400, "valid number, found 1000"),
        ("temperature", [1], "valid number"),
        ("top_k", 1.5, "valid integer, found 1.5"),
        ("top_k", -2, "greater than or equal to -1, found -2"),
        ("top_p", 0, "greater than 0, found 0"),
        ("top_p", float("inf"), "finite number, found Infinity"),
        ("min_p", "0.1", 'valid number, found "0.1"'),
    ],
)
def test_a_default_that_no_request_could_have_ends_the_start_in_one_line(key, value, words):
    with pytest.raises(CommandError) as error:
        SamplingDefaults.from_generation_config({key: value})
    message = str(error.value)
    assert f"is wrong: {key}: input should be " in message
    assert words in message
    assert "\n" not in message
    assert len(message) < 400


def test_settings_that_are_not_applied_are_told_whatever_they_are():
    told = unserved_defaults(
        {
            "encoder_repetition_penalty": "high\n\ud800",
            "typical_p": float("nan"),
            "no_repeat_ngram_size": [1] * 99,
        }
    )
    assert told == [
        "no_repeat_ngram_size " + str([1] * 99)[:40],
        "typical_p nan",
        "encoder_repetition_penalty 'high\\n\\ud800'",
    ]
