"""Heads as files hold them, read without their target wherever they say enough."""

from __future__ import annotations

import dataclasses

import pytest

from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.folder import read_json
from peagle_jax.checkpoint.stored_head import dialect_of, read_stored_head
from peagle_jax.checkpoint.weights import open_weights
from tests.checkpoint.files import MISSING
from tests.checkpoint.heads import (
    SAME_WIDTH,
    saved_head,
    to_aws,
    to_nemo,
    to_original_eagle3,
    to_specforge,
    to_speculators,
    to_vllm_names,
)
from tests.tiny import TARGET

DEEP = dataclasses.replace(TARGET, num_layers=9)


@pytest.mark.parametrize("shape", [(36,), (1, 36), (1, 1, 36)])
def test_mask_hidden_has_three_axes_however_it_was_stored(tmp_path, shape):
    def change(config, tensors):
        tensors["mask_hidden"] = tensors["mask_hidden"].reshape(shape)

    saved = saved_head(tmp_path / "h").edit(change)
    stored = read_stored_head(saved.folder)
    assert stored.tensors["mask_hidden"].shape == (1, 1, 36)


@pytest.mark.parametrize(
    ("keys", "width"),
    [
        ({"target_hidden_size": 12}, 12),
        ({"target_hidden_size": MISSING}, 12),
        ({"target_hidden_size": MISSING, "eagle_aux_hidden_state_layer_ids": [0, 2, 3, 4, 5, 6]}, 6),
        ({"target_hidden_size": MISSING, "num_aux_hidden_states": 2}, 18),
    ],
    ids=range(4),
)
def test_the_targets_width_is_stated_or_follows_from_the_taps(tmp_path, keys, width):
    absent = {"peagle_jax": MISSING, "eagle_config": MISSING}
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 2, 4] if width == 12 else [0, 3]}
    saved = saved_head(tmp_path / "h").edit(**absent | ids | keys)
    assert read_stored_head(saved.folder).outline.target_hidden_size == width


def test_a_width_that_nothing_tells_asks_for_the_target(tmp_path):
    absent = ("peagle_jax", "eagle_config", "eagle_aux_hidden_state_layer_ids", "target_hidden_size")
    saved = saved_head(tmp_path / "h").edit(**dict.fromkeys(absent, MISSING))
    with pytest.raises(CheckpointError, match=r"no multiple of the head's width 10; name the target"):
        read_stored_head(saved.folder)
    assert read_stored_head(saved.folder, DEEP).outline.tap_count == 3


@pytest.mark.parametrize(
    ("dialect", "method", "name"),
    [
        (None, "peagle", "vLLM, as peagle_jax writes it"),
        (to_aws, "peagle", "AWS"),
        (to_nemo, "peagle", "NeMo"),
        (to_speculators, "peagle", "speculators"),
        (to_specforge, "peagle", "SpecForge"),
        (to_specforge, "eagle3", "EAGLE-3, as SpecForge and others train it"),
        (to_original_eagle3, "eagle3", "original EAGLE-3"),
        (to_vllm_names, "peagle", "vLLM"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_each_dialect_is_known(tmp_path, dialect, method, name):
    saved = saved_head(tmp_path / "h", method, num_layers=1, block=SAME_WIDTH)
    folder = saved.folder if dialect is None else saved.edit(dialect).folder
    assert dialect_of(read_json(folder / "config.json"), open_weights(folder), "safetensors") == name
