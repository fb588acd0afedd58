"""What must divide, and kv heads that several devices share."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.config import ConfigError
from peagle_jax.models.stack import stack_layers
from peagle_jax.parallel.tensor import check_split, kv_copies, spread, spread_weights, with_copies
from tests.tiny import TARGET, head_config, target_params

BLOCK = TARGET.block  # 4 query heads of width 6 over 2 kv heads


@pytest.mark.parametrize(
    ("tensor", "changes", "words"),
    [
        (3, {}, "does not divide the model's num_attention_heads, 4; ask for 1$"),
        (2, {}, "does not divide the model's vocab_size, 53"),
        (8, {"block": dataclasses.replace(BLOCK, num_heads=8)}, "intermediate_size, 20"),
        (
            4,
            {"block": dataclasses.replace(BLOCK, num_heads=12, num_kv_heads=6), "vocab_size": 56},
            "neither divides the model's num_key_value_heads, 6, nor",
        ),
    ],
)
def test_a_model_that_cannot_be_split_is_told_by_its_dimension(tensor, changes, words):
    cfg = dataclasses.replace(TARGET, **changes)
    with pytest.raises(ConfigError, match=words) as error:
        check_split(cfg, tensor)
    assert "\n" not in str(error.value) and f"of {tensor} " in str(error.value)


def test_a_head_that_cannot_be_split_may_stay_whole():
    block = dataclasses.replace(BLOCK, num_heads=6)
    cfg = head_config(vocab_size=56, draft_vocab=31, block=block)
    said = "the head's draft_vocab_size, 31; ask for 1, or for a draft_tensor_parallel_size of 1"
    with pytest.raises(ConfigError, match=said):
        check_split(cfg, 2)
    check_split(head_config(vocab_size=56, draft_vocab=30, block=block), 2)


def test_the_advice_names_sizes_that_both_models_can_have():
    target = dataclasses.replace(TARGET, vocab_size=56, block=dataclasses.replace(BLOCK, num_heads=8))
    block = dataclasses.replace(BLOCK, num_heads=6, num_kv_heads=6, intermediate_size=36)
    cfg = head_config(vocab_size=56, draft_vocab=32, block=block, taps=(1, 2, 3, 4))
    for known, advice in ((None, "1 or 2"), (dataclasses.replace(target, vocab_size=57), "1")):
        with pytest.raises(ConfigError, match=f"num_attention_heads, 6; ask for {advice}, or for a draft_"):
            check_split(cfg, 4, known)


def test_every_device_has_the_kv_head_of_its_query_heads():
    cfg = dataclasses.replace(TARGET, vocab_size=56)
    assert [kv_copies(BLOCK, tensor) for tensor in (1, 2, 4)] == [1, 1, 2]
    assert spread(cfg, 2) == cfg and spread(cfg, 4).block.num_kv_heads == 4
    params = target_params(cfg)
    for whole, copied in (
        (params.layers[3].wk, spread_weights(cfg, params, 4).layers[3].wk),
        (stack_layers(params).layers.wv, spread_weights(cfg, stack_layers(params), 4).layers.wv),
    ):
        rows = copied.reshape(*whole.shape[:-2], 4, 6, 12)
        for device in range(4):  # query head i reads kv head i // 2
            first = device // 2 * 6
            np.testing.assert_array_equal(rows[..., device, :, :], whole[..., first : first + 6, :])
    bias = np.arange(12)
    np.testing.assert_array_equal(
        with_copies("bk", bias, BLOCK, 2), np.concatenate([bias[:6], bias[:6], bias[6:], bias[6:]])
    )
    assert with_copies("wq", params.layers[0].wq, BLOCK, 2) is params.layers[0].wq
    assert isinstance(with_copies("wk", jnp.zeros((12, 12)), BLOCK, 2), type(params.embed))
