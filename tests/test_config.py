"""Configs refuse what contradicts itself, whoever built them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from peagle_jax.config import BlockConfig, ConfigError, RopeConfig, SpecConfig
from tests.tiny import TARGET, head_config

BLOCK, ROPE, HEAD = TARGET.block, RopeConfig(), head_config()


@pytest.mark.parametrize(
    ("config", "changes", "said"),
    [
        (ROPE, {"theta": float("nan")}, "theta must be a finite number, found nan"),
        (ROPE, {"theta": 1.0}, "rope_theta must be above 1"),
        (ROPE, {"factor": 0.5}, "rope's factor must be at least 1, found 0.5"),
        (ROPE, {"beta_fast": float("inf")}, "beta_fast must be a finite number"),
        (ROPE, {"attention_factor": -1.0}, "rope's attention_factor must be positive"),
        (ROPE, {"mscale": "1"}, "mscale must be a finite number, found '1'"),
        (ROPE, {"truncate": "false"}, "truncate must be true or false, found 'false'"),
        (ROPE, {"original_max_position": 0}, "rope's original_max_position must be positive"),
        (
            ROPE,
            {"low_freq_factor": 4.0},
            r"low_freq_factor \(4.0\) must be below its high_freq_factor \(4.0\)",
        ),
        (BLOCK, {"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
        (BLOCK, {"rms_norm_eps": -1e-5}, "rms_norm_eps must not be negative"),
        (BLOCK, {"hidden_size": 12.0}, "hidden_size must be a whole number below 2..31, found 12.0"),
        (BLOCK, {"num_heads": True}, "num_heads must be a whole number"),
        (BLOCK, {"intermediate_size": 2**31}, "intermediate_size must be a whole number"),
        (TARGET, {"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, found 1"),
        (TARGET, {"eos_token_ids": (3, 53)}, r"eos_token_id \[53\] is outside the vocabulary of 53"),
        (TARGET, {"bos_token_id": -1}, r"bos_token_id \[-1\] is outside the vocabulary of 53"),
        (TARGET, {"eos_token_ids": tuple(range(17))}, "17 eos token ids; expected at most 16"),
        (HEAD, {"taps": (1, 3, 3)}, r"taps \[1, 3, 3\] name a boundary twice"),
        (HEAD, {"num_depths": 0}, "num_depths must be at least 1"),
        (HEAD, {"max_position": 0}, "max_position must be positive"),
        (HEAD, {"norm_before_fc": "no"}, "norm_before_fc must be true or false"),
        (SpecConfig(), {"rounds": 1.5}, "rounds must be a whole number"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_value_that_cannot_be_right_is_named(config, changes, said):
    with pytest.raises(ConfigError, match=said) as caught:
        dataclasses.replace(config, **changes)
    assert "\n" not in str(caught.value)


def test_numbers_of_numpy_are_numbers():
    block = BlockConfig(np.int64(12), 20, 4, 2, 6, np.float32(1e-5))
    assert block.hidden_size == 12


def test_sixteen_eos_ids_are_held():
    assert len(dataclasses.replace(TARGET, eos_token_ids=tuple(range(16))).eos_token_ids) == 16
