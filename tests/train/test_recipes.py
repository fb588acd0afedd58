"""Every recipe of train/ builds its training step: all shapes meet, for the target that it names."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from peagle_jax.checkpoint.model import LoadedTarget
from peagle_jax.checkpoint.tensors import layer_shapes
from peagle_jax.config import BlockConfig, MoeConfig, RopeConfig, TargetConfig
from peagle_jax.layers.block import BlockParams
from peagle_jax.models import registry
from peagle_jax.models.stack import TargetParams
from peagle_jax.train import setup, warm_start
from peagle_jax.train.cod import depth_counts
from peagle_jax.train.partition import Batch
from peagle_jax.train.recipe import TrainError, load_recipe
from peagle_jax.train.step import Frozen, TrainState, make_optimizer, make_step

RECIPES = sorted((Path(__file__).parents[2] / "train").glob("*.yaml"))

LLAMA3 = RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)
YARN = RopeConfig(150000.0, "yarn", 32.0, original_max_position=4096, truncate=False)


def gpt_oss(layers: int, experts: int) -> TargetConfig:
    block = BlockConfig(2880, 2880, 64, 8, 64, 1e-5, YARN, MoeConfig(experts, 4), 7.0)
    return TargetConfig("gpt_oss", block, 201088, layers, 131072, windows=(128, 0) * (layers // 2))


CODER = BlockConfig(2048, 768, 32, 4, 128, 1e-6, RopeConfig(1e7), MoeConfig(128, 8))
TARGETS = {
    None: TargetConfig(
        "llama", BlockConfig(576, 1536, 9, 3, 64, 1e-5, RopeConfig(1e5)), 49152, 30, 8192, True
    ),
    "Qwen/Qwen3-8B": TargetConfig(
        "qwen3", BlockConfig(4096, 12288, 32, 8, 128, 1e-6, RopeConfig(1e6)), 151936, 36, 40960
    ),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": TargetConfig("qwen3_moe", CODER, 151936, 48, 262144),
    "meta-llama/Llama-3.1-8B-Instruct": TargetConfig(
        "llama", BlockConfig(4096, 14336, 32, 8, 128, 1e-5, LLAMA3), 128256, 32, 131072
    ),
    "openai/gpt-oss-20b": gpt_oss(24, 32),
    "openai/gpt-oss-120b": gpt_oss(36, 128),
}
"""The published configs' numbers: what a head of a target depends on."""

TRAINED_MILLIONS = {
    "gpt-oss-120b": (1700, 1900),  # the released heads: 1.7 and 1.8 B
    "gpt-oss-20b": (1700, 1900),
    "llama-3.1-8b-eagle3": (380, 480),
    "smollm2-135m": (19, 20),
}


def abstract(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def from_target(recipe, cfg, target: TargetConfig, table):
    """Abstract head weights that start as the target's last layers."""
    family = next(f for f in registry.FAMILIES if f.name == target.family)
    shapes, fields = layer_shapes(target.block), family.layer_fields({})
    layer = BlockParams(**{field: abstract(*shapes[field]) for field in fields})
    params = TargetParams(table, (layer,) * target.num_layers, abstract(target.hidden_size), table)
    ids = jnp.arange(cfg.draft_vocab_size)
    mean = abstract(cfg.feature_size, dtype=jnp.float32)
    return jax.eval_shape(
        lambda params, mean: warm_start.from_target(cfg, target, params, ids, mean, 0.01), params, mean
    )


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_builds_its_step(path):
    recipe = load_recipe(path)
    target = TARGETS[recipe.target]
    loaded = LoadedTarget(target, None, None, str(recipe.target), {}, "nowhere")  # type: ignore[arg-type]
    mask = recipe.head.mask_token_id
    if recipe.method == "peagle" and mask is None:
        mask = target.vocab_size - 1
    cfg = setup.drafter_config(recipe, loaded, mask)
    assert all(0 <= tap <= target.num_layers for tap in cfg.taps)
    objective, cod = setup.make_objective(recipe, cfg, recipe.features.row_length)

    table = abstract(target.vocab_size, target.hidden_size)
    ids = jnp.arange(cfg.draft_vocab_size)
    if recipe.init.source == "random":
        whole = TargetParams(table, (), abstract(target.hidden_size), table)
        params = jax.eval_shape(lambda p: warm_start.at_random(cfg, p, ids), whole)
    else:
        params = from_target(recipe, cfg, target, table)
    if recipe.head.train_embed:
        params = params.replace(embed=abstract(*table.shape, dtype=jnp.float32))
    count = sum(w.size for w in jax.tree.leaves(params)) / 1e6
    low, high = TRAINED_MILLIONS.get(path.stem, (1, 10**4))
    assert low < count < high

    micro = recipe.optimizer.micro_rows or recipe.optimizer.batch_rows
    parts, n = recipe.optimizer.batch_rows // micro, recipe.features.row_length
    rollouts = (parts, 0, micro, 0) if cod is None else (parts, cod.segments, micro, depth_counts(n, cod)[0])
    whole_numbers = {"tokens", "segment_ids", "positions"}
    batch = Batch(
        **{name: abstract(parts, micro, n, dtype=jnp.int32) for name in whole_numbers},
        loss_flags=abstract(parts, micro, n, dtype=bool),
        features=abstract(parts, micro, n, cfg.feature_size),
        target_hidden=abstract(parts, micro, n, target.hidden_size),
        anchors=abstract(*rollouts, dtype=jnp.int32),
        lengths=abstract(*rollouts, dtype=jnp.int32),
    )
    frozen = Frozen(embed=table, target_head=abstract(cfg.draft_vocab_size, target.hidden_size))
    optimizer = make_optimizer(recipe.optimizer, 1000)
    state = TrainState(abstract(dtype=jnp.int32), params, jax.eval_shape(optimizer.init, params))
    new, report = jax.eval_shape(
        make_step(optimizer, objective, jnp.dtype(jnp.bfloat16)), state, frozen, batch
    )
    assert jax.tree.map(lambda w: (w.shape, w.dtype), new) == jax.tree.map(
        lambda w: (w.shape, w.dtype), state
    )
    depths = recipe.head.num_depths if recipe.method == "peagle" else recipe.loss.ttt_steps
    assert report.metrics.loss_sum.shape == (depths,)


def test_the_width_of_one_expert_is_no_heads_width():
    recipe = load_recipe(next(p for p in RECIPES if p.stem == "gpt-oss-20b"))
    recipe = dataclasses.replace(recipe, head=dataclasses.replace(recipe.head, intermediate_size=0))
    loaded = LoadedTarget(TARGETS[recipe.target], None, None, str(recipe.target), {}, "nowhere")  # type: ignore[arg-type]
    with pytest.raises(TrainError, match=r"one's 2880 is the width of one of 32 experts; set it, such as to"):
        setup.drafter_config(recipe, loaded, 3)
