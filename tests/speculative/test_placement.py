"""A decoder over a mesh: the tokens of one device, weights and caches in parts, few and small collectives."""

from __future__ import annotations

import collections
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from peagle_jax.config import ConfigError
from peagle_jax.speculative import round as steps
from peagle_jax.speculative.placement import Placement
from peagle_jax.speculative.results import local_rows
from tests.speculative.mesh_run import DRAFTED, HEAD_BLOCK, VOCAB, K, config_of, decoder, said

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(1200)  # some twenty programs, which a busy machine compiles slowly
@pytest.mark.parametrize(
    ("method", "meshes"),
    [
        ("peagle", ["8x1", "4x2tree", "2x4", "1x8"]),
        ("eagle3", ["2x4whole"]),
        ("none", ["2x4"]),
        ("mixture", ["1x8tree"]),
    ],
)
def test_every_mesh_of_eight_devices_gives_the_tokens_of_one(method, meshes):
    flags = os.environ["XLA_FLAGS"].replace("device_count=4", "device_count=8")
    run = subprocess.run(
        [sys.executable, "-m", "tests.speculative.mesh_run", method, *meshes],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout)
    alone = found.pop("1")
    assert [len(answer["tokens"]) for answer in alone] == [12 + i for i in range(8)]
    assert list(found) == meshes
    for mesh, answers in found.items():
        for one, other in zip(alone, answers):
            assert other["tokens"] == one["tokens"], mesh
            for (logprob, rank, top), (expected, rank_there, top_there) in zip(
                other["logprobs"], one["logprobs"], strict=True
            ):
                assert rank == rank_there and [i for i, _ in top] == [i for i, _ in top_there]
                assert logprob == pytest.approx(expected, abs=1e-4)


@pytest.fixture(scope="module")
def split():
    return decoder("peagle", 2, 2)


def parts(tree) -> dict[str, int]:
    """Into how many parts each matrix is split."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path): x.size // x.addressable_shards[0].data.size
        for path, x in leaves
        if x.ndim > 1
    }


def test_weights_and_caches_lie_in_parts(split):
    target, head = split._programs.params
    assert set(parts(head).values()) == {2}
    whole = [name for name, count in parts(target).items() if count != 2]
    assert whole == [".layers.attn_norm", ".layers.mlp_norm"]  # vectors of a stack
    assert target.layers.wo.sharding.spec == PartitionSpec(None, None, "tensor")
    assert head.fc.sharding.spec == PartitionSpec(None, "tensor")
    state = split._programs.state
    for cache in (state.target_cache, state.drafter_cache):
        assert set(parts(cache).values()) == {4}  # 2 replicas, 2 parts of the kv heads each
    assert state.target_cache.k.addressable_shards[0].data.shape[3] == 1


def test_a_head_may_stay_whole_but_for_what_it_shares():
    cfg = config_of("eagle3")
    made = decoder("eagle3", 1, 2, 1)
    target, head = made._programs.params
    assert set(parts(head).values()) == {1} and target.embed.sharding.spec == PartitionSpec("tensor", None)
    assert set(parts(made._programs.state.drafter_cache).values()) == {1}
    assert made.drafter == cfg
    shared = made.placement.weights((target, head.replace(embed=target.embed)))[1]
    assert shared.embed is target.embed


def test_the_head_is_split_as_the_target_or_not_at_all():
    devices = jax.devices()
    with pytest.raises(ConfigError, match="must be 1 or 4, the target's, found 3"):
        Placement.on(devices, 4, None, 3)
    with pytest.raises(ConfigError, match="draft_tensor_parallel_size must be 1, found 2"):
        Placement.on(devices, draft_tensor=2)
    with pytest.raises(ConfigError, match="pmap holds neither a tensor axis"):
        Placement.on(devices, 2, "pmap")
    assert Placement.on(devices).backend == "pmap"
    assert Placement.on(devices, 2).backend == "shard_map"


def test_nothing_compiles_after_warm_up(split):
    split.warm_up()
    before, compiled = split.compilations, []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    try:
        answers = said(split)
    finally:
        jax.monitoring.clear_event_listeners()
    assert [len(answer["tokens"]) for answer in answers] == [12 + i for i in range(8)]
    assert (split.compilations - before, compiled) == (0, [])


KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"


def collectives(program: str) -> collections.Counter:
    """(kind, elements of a part) of every collective of a compiled program; one that takes several arrays at
    once counts for each."""
    found: collections.Counter = collections.Counter()
    for shapes, kind in re.findall(rf"= ([^=]*?) ({KINDS})(?:-start)?\(", program):
        for dims in re.findall(r"\w+\[([\d,]*)\]", shapes):
            found[kind, math.prod(map(int, filter(None, dims.split(","))))] += 1
    return found


def assert_sums_twice_a_layer_and_never_gathers_logits(made):
    """The contract of tensor parallelism: what crosses devices, by kind and size."""
    programs, b = made._programs, 4
    program = programs._program(steps.run_rounds, models=programs.models, width=b, k=K, rounds=1).lower(
        programs.params, programs.state, made._turn((), None)
    )
    found = collectives(program.compile().as_text())
    verified, drafted = b * (K + 1), b * (2 * K)  # rows; the head's are K + 1 committed and K - 1 masks
    target = verified * made.target.hidden_size
    # A scanned layer's two; then the embedding's. The head: two of each layer and fc's, then its embedding's.
    assert found.pop(("all-reduce", target)) == 2 + 1
    assert found.pop(("all-reduce", drafted * HEAD_BLOCK.hidden_size)) == 2 * 2 + 1 + 1
    # The best 20 of each part, if log-probabilities are asked for: ids and values.
    assert found.pop(("all-gather", verified * 2 * 20)) == 2
    # All else is a number or three (the ends that a threshold is sought between) a row.
    assert {kind for kind, _ in found} == {"all-reduce"}
    assert max(size for _, size in found) <= 3 * verified < min(VOCAB, DRAFTED) * b
    assert sum(found.values()) < 60


def test_a_round_sums_twice_a_layer_and_never_gathers_logits(split):
    assert_sums_twice_a_layer_and_never_gathers_logits(split)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "data", "tensor"), [("int8", 1, 4), ("int4", 2, 2), ("Q4_1", 1, 2)])
def test_quantised_weights_in_parts_give_the_tokens_of_one_device(kind, data, tensor):
    alone, made = (decoder("peagle", *mesh, quantization=kind) for mesh in ((1, 1), (data, tensor)))
    layers = made._programs.params[0].layers
    counts = {name: count for name, count in parts(layers).items() if "norm" not in name}
    whole = {name for name, count in counts.items() if count == 1}
    assert set(counts.values()) <= {1, tensor}
    assert whole == (set() if kind == "Q4_1" else {".wo.scale", ".w_down.scale"})  # of outputs
    assert [a["tokens"] for a in said(made)] == [a["tokens"] for a in said(alone)]
    if kind == "int4":
        assert_sums_twice_a_layer_and_never_gathers_logits(made)


def test_parts_of_a_quantised_weight_are_whole_groups():
    with pytest.raises(ConfigError) as caught:
        decoder("none", 1, 4, quantization="Q8_0", ffn=192)
    assert str(caught.value) == (
        "a tensor parallel size of 4 does not divide the 6 groups of w_down, 32 of its 192 inputs each; "
        "ask for 1 or 2, or for int8"
    )
    with pytest.raises(ConfigError, match=r"the 6 groups of w_down, 64 .* ask for 1 or 2, or for int8"):
        decoder("none", 1, 4, quantization="int4", ffn=384)


def test_local_rows_are_read_once_from_devices_that_have_the_same(split):
    where = split._programs.state.length.sharding
    rows = np.arange(8).reshape(2, 4)
    np.testing.assert_array_equal(local_rows(jax.device_put(rows, where)), rows)
