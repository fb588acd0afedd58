"""A context that no memory holds is told before anything is decoded."""

from __future__ import annotations

import dataclasses
import os

import jax
import pytest

from peagle_jax import memory
from peagle_jax.config import ConfigError
from peagle_jax.speculative.decoder import Decoder
from tests.tiny import TARGET, target_params


def test_a_cpus_memory_is_its_machines():
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory.device_memory(jax.devices("cpu")[0]) == pages


def test_a_context_larger_than_the_memory_is_refused():
    long = dataclasses.replace(TARGET, max_position=2**31 - 1)
    decoder = Decoder(long, target_params(), max_model_len=2**31 - 1)
    with pytest.raises(ConfigError, match=r"2147483647 tokens needs 1030\.8 GB of KV cache at batch 1"):
        memory.check_memory(decoder)
    memory.check_memory(Decoder(long, target_params(), max_model_len=4096))


class Accelerator:
    platform = "gpu"

    def __init__(self, stats):
        self.memory_stats = lambda: stats


def test_an_accelerator_says_its_own_and_a_silent_one_is_not_checked(monkeypatch):
    assert memory.device_memory(Accelerator({"bytes_limit": 12})) == 12
    assert memory.device_memory(Accelerator(None)) is None
    decoder = Decoder(TARGET, target_params(), max_model_len=40)
    decoder.device = Accelerator({"bytes_limit": 12})
    with pytest.raises(ConfigError, match=r"the device has 0\.0 GB"):
        memory.check_memory(decoder)
