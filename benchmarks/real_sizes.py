"""Published targets and heads for them as shapes alone, at their real sizes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from peagle_jax.checkpoint.tensors import layer_shapes
from peagle_jax.config import BlockConfig, DrafterConfig, MoeConfig, RopeConfig, TargetConfig, default_taps
from peagle_jax.drafter.head import DrafterParams
from peagle_jax.layers.block import BlockParams
from peagle_jax.layers.moe import Experts
from peagle_jax.layers.mxfp4 import Mxfp4
from peagle_jax.models import registry
from peagle_jax.models.family import COMMON_FIELDS
from peagle_jax.models.stack import TargetParams, stacks_of

DTYPE = jnp.dtype(jnp.bfloat16)
MEMORY = {"v5e": 16, "v6e": 32, "v5p": 95, "v4": 32}  # GB a chip, as Google states it
LLAMA3 = RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)


def _gpt_oss(layers: int, experts: int) -> TargetConfig:
    rope = RopeConfig(150000.0, "yarn", 32.0, original_max_position=4096, truncate=False)
    block = BlockConfig(2880, 2880, 64, 8, 64, 1e-5, rope, MoeConfig(experts, 4), 7.0)
    return TargetConfig("gpt_oss", block, 201088, layers, 131072, windows=(128, 0) * (layers // 2))


CODER = BlockConfig(2048, 768, 32, 4, 128, 1e-6, RopeConfig(1e7), MoeConfig(128, 8))
# The published configs' numbers, and the topologies to compile for.
TARGETS: dict[str, tuple[TargetConfig, tuple[str, ...]]] = {
    "gpt-oss-20b": (_gpt_oss(24, 32), ("v5e:2x2", "v6e:2x2")),
    "gpt-oss-120b": (_gpt_oss(36, 128), ("v6e:2x4",)),
    "qwen3-coder-30b-a3b": (TargetConfig("qwen3_moe", CODER, 151936, 48, 262144), ("v6e:2x4",)),
    "qwen3-8b": (
        TargetConfig("qwen3", BlockConfig(4096, 12288, 32, 8, 128, 1e-6, RopeConfig(1e6)), 151936, 36, 40960),
        ("v5e:2x2",),
    ),
    "llama-3.1-8b": (
        TargetConfig("llama", BlockConfig(4096, 14336, 32, 8, 128, 1e-5, LLAMA3), 128256, 32, 131072),
        ("v6e:2x2",),
    ),
}
# Of heads whose target has the width of an expert: train/gpt-oss-20b.yaml, train/qwen3-coder-30b-a3b.yaml.
HEAD_WIDTHS = {"gpt_oss": 14336, "qwen3_moe": 12288}


def head_of(target: TargetConfig, taps: tuple[int, ...] | None = None) -> DrafterConfig:
    """A P-EAGLE head of four layers, as released ones are."""
    block = target.block
    width = HEAD_WIDTHS.get(target.family, block.intermediate_size)
    block = dataclasses.replace(block, intermediate_size=width, moe=None, swiglu_limit=None, rope=LLAMA3)
    vocabulary = (target.vocab_size, target.vocab_size, target.hidden_size)
    taps = taps or default_taps(target.num_layers)
    return DrafterConfig("peagle", block, 4, *vocabulary, taps, target.max_position, 8, vocabulary[0] - 1)


def shape(*sizes: int, dtype: Any = DTYPE) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def packed(*sizes: int) -> Mxfp4:
    *lead, width = sizes
    values, scales = (shape(*lead, width // of, dtype=jnp.uint8) for of in (2, 32))
    return Mxfp4(values, scales, DTYPE)


def target_weights(cfg: TargetConfig) -> TargetParams:
    """Shapes of the scanned form, experts of gpt-oss packed."""
    family = registry.by_name(cfg.family)
    block, shapes, count = cfg.block, layer_shapes(cfg.block), cfg.num_layers // cfg.cycle
    layer: dict[str, Any] = {name: shape(count, *shapes[name]) for name in family.layer_fields({})}
    if block.moe is not None:
        e, d, f = block.moe.num_experts, block.hidden_size, block.intermediate_size
        weight = packed if cfg.family == "gpt_oss" else shape
        matrices = [weight(count, e, *sizes) for sizes in ((f, d), (f, d), (d, f))]
        biases = [shape(count, e, n) for n in (f, f, d)] if cfg.family == "gpt_oss" else []
        layer |= {"experts": Experts(*matrices, *biases), "w_gate": None, "w_up": None, "w_down": None}
    stack = BlockParams(**layer)
    table = shape(cfg.vocab_size, cfg.hidden_size)
    layers = (stack,) * cfg.cycle if cfg.cycle > 1 else stack
    return TargetParams(table, layers, shape(cfg.hidden_size), table)  # pyright: ignore[reportArgumentType]


def head_weights(cfg: DrafterConfig) -> DrafterParams:
    d, table = cfg.hidden_size, shape(cfg.vocab_size, cfg.hidden_size)

    def layer(inputs: int) -> BlockParams:
        shapes = layer_shapes(cfg.block, inputs)
        return BlockParams(**{name: shape(*shapes[name]) for name in COMMON_FIELDS})

    layers = (layer(2 * d), *(layer(d) for _ in range(cfg.num_layers - 1)))
    vectors = {"hidden_norm": shape(d), "final_norm": shape(d), "mask_hidden": shape(cfg.feature_size)}
    return DrafterParams(embed=table, fc=shape(d, cfg.feature_size), layers=layers, lm_head=table, **vectors)


@dataclasses.dataclass(frozen=True)
class Load:
    """A round's: K drafts for so many sequences of so many stored positions."""

    k: int
    sequences: int
    positions: int

    def touched(self, target: TargetConfig) -> float:
        """Share of the experts that the round's tokens are expected to go to, if all are as likely."""
        moe = target.block.moe
        return (
            1.0 if moe is None else 1 - (1 - moe.top_k / moe.num_experts) ** (self.sequences * (self.k + 1))
        )

    def must_move(self, target: TargetConfig, params: tuple, caches: tuple) -> dict[str, float]:
        """Bytes of a device that no program can leave out, by what they are. The arrays (or shapes with
        shardings) are the target's, the head's (or None), and those of both caches."""
        weights, head = (None if p is None else p.replace(embed=None) for p in params)
        experts = bytes_on_a_device([stack.experts for stack in stacks_of(weights)])
        return {
            "target": bytes_on_a_device(weights) - experts,
            "experts": self.touched(target) * experts,
            "head": bytes_on_a_device(head),
            "keys and values": bytes_on_a_device(caches),
        }


def bytes_on_a_device(tree: Any) -> int:
    return sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree))
