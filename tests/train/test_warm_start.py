import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.drafter.head import draft_logits, fuse, run_head
from peagle_jax.layers.attention import packed_attention
from peagle_jax.models import stack
from peagle_jax.train import warm_start
from peagle_jax.train.recipe import TrainError
from tests.tiny import TARGET, head_config, target_params

MEAN = np.arange(36, dtype=np.float32)
IDS = np.array([1, 4, 30, 52], np.int32)


def config(**changes):
    return head_config(
        **({"block": TARGET.block, "draft_vocab": 4, "num_layers": 2, "taps": (1, 2, 3)} | changes)
    )


def test_a_warm_head_computes_the_targets_last_layers():
    """Before training, the head over boundary L - N gives the target's own next-token logits."""
    cfg, params = config(), target_params()
    head = warm_start.from_target(cfg, TARGET, params, IDS, MEAN)
    rng = np.random.default_rng(0)
    tokens, positions = jnp.array(rng.integers(0, 50, (1, 9))), jnp.arange(9)[None]

    def attend(q, k, v):
        return packed_attention(q, k, v, jnp.zeros((1, 9), jnp.int32))

    out = stack.forward_packed(params, TARGET, tokens, positions, attend, cfg.taps)
    head = head.replace(embed=params.embed)
    hidden, _ = run_head(head, cfg, tokens, fuse(head, cfg, out.features), positions, [attend] * 2)
    expected = stack.logits(params, TARGET, out.hidden)[..., IDS]
    np.testing.assert_allclose(draft_logits(head, cfg, hidden), expected, rtol=1e-4, atol=1e-4)


def test_stacked_and_unrolled_targets_give_the_same_head():
    params = target_params()
    heads = [
        warm_start.from_target(config(), TARGET, p, IDS, MEAN, noise=0.1, seed=3)
        for p in (params, stack.stack_layers(params))
    ]
    for a, b in zip(*map(jax.tree.leaves, heads), strict=True):
        np.testing.assert_array_equal(a, b)


def test_noise_goes_to_the_embedding_half_alone():
    plain = warm_start.from_target(config(), TARGET, target_params(), IDS, MEAN)
    noisy = warm_start.from_target(config(), TARGET, target_params(), IDS, MEAN, noise=0.1)
    d = TARGET.hidden_size
    for name in ("wq", "wk", "wv"):
        a, b = getattr(plain.layers[0], name), getattr(noisy.layers[0], name)
        assert not a[:, :d].any() and 0.05 < float(jnp.std(b[:, :d])) < 0.2
        np.testing.assert_array_equal(a[:, d:], b[:, d:])
    np.testing.assert_array_equal(plain.mask_hidden, MEAN)


def test_a_narrower_ffn_keeps_the_strongest_units():
    block = dataclasses.replace(TARGET.block, intermediate_size=7)
    params = target_params()
    last = params.layers[-1]
    strong = jnp.zeros(20).at[jnp.array([0, 3, 4, 9, 11, 15, 19])].set(10.0) + 1.0
    layers = (*params.layers[:-1], last.replace(w_down=last.w_down * strong))
    head = warm_start.from_target(config(block=block), TARGET, params.replace(layers=layers), IDS, MEAN)
    np.testing.assert_array_equal(head.layers[-1].w_gate, last.w_gate[jnp.array([0, 3, 4, 9, 11, 15, 19])])
    assert head.layers[-1].w_down.shape == (12, 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 4}, "needs head.num_kv_heads 2, found 4; leave it 0 or set init.source: random"),
        ({"head_dim": 8}, "needs head.head_dim 6, found 8"),
        ({"intermediate_size": 21}, "allows head.intermediate_size up to 20, found 21"),
    ],
)
def test_other_shapes_cannot_start_from_the_target(changes, message):
    block = dataclasses.replace(TARGET.block, **changes)
    with pytest.raises(TrainError, match=message):
        warm_start.from_target(config(block=block), TARGET, target_params(), IDS, MEAN)


def test_more_layers_than_the_target_has_are_refused():
    with pytest.raises(TrainError, match="num_layers 6 exceeds the target's 5"):
        warm_start.from_target(config(num_layers=6), TARGET, target_params(), IDS, MEAN)


def test_random_weights_have_the_shapes_of_the_config():
    cfg = config(norm_before_fc=True)
    made = warm_start.at_random(cfg, target_params(), IDS, seed=1)
    warm = warm_start.from_target(cfg, TARGET, target_params(), IDS, MEAN)
    shapes = [jax.tree.map(jnp.shape, tree) for tree in (made, warm)]
    assert shapes[0] == shapes[1]
    np.testing.assert_array_equal(made.lm_head, target_params().lm_head[IDS])
    other = warm_start.at_random(cfg, target_params(), IDS, seed=2)
    assert (made.fc != other.fc).any()
