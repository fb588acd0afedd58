"""python -m tests.train.mesh_run METHOD MESH...

Two steps and one evaluation of a tiny head on one device and on each MESH (such as 2x2x2 for data, fsdp and
sequence) over 8 devices that XLA makes out of the host. Prints JSON: what each of them found.
"""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.config import BlockConfig, RopeConfig
from peagle_jax.parallel.mesh import MeshShape, training_mesh
from peagle_jax.train.cod import CodOptions, depth_counts, sample_batch
from peagle_jax.train.online import online_target
from peagle_jax.train.partition import Batch, peagle_loss
from peagle_jax.train.placement import Placement
from peagle_jax.train.recipe import OptimizerRecipe
from peagle_jax.train.step import Frozen, TrainState, make_evaluation, make_optimizer, make_step
from peagle_jax.train.ttt import eagle3_loss
from tests.tiny import TARGET, head_config, head_params, target_params

ROWS, MICRO, N = 16, 8, 16
TAPS = (1, 3, 5)
BLOCK = BlockConfig(20, 28, 6, 3, 4, 1e-5, RopeConfig(theta=500.0))  # 2 and 4 divide every dimension


def batch_of(method: str, online: bool, segments: int) -> tuple[Batch, tuple[int, ...]]:
    rng = np.random.default_rng(0)
    ids = np.zeros((ROWS, N), np.int32)
    ids[:, 7:] = 1
    ids[::3, 13:] = -1
    flags = (rng.random((ROWS, N)) < 0.8) & (ids >= 0)
    options = CodOptions(num_depths=3, ratio=0.8, segments=segments)
    keys = [(0, 0, i) for i in range(ROWS)]
    anchors, lengths = sample_batch(flags, ids, keys, options)
    if method == "eagle3":
        anchors = lengths = np.zeros((1, ROWS, 0), np.int32)
    width = 0 if online else 1
    batch = Batch(
        tokens=rng.integers(0, 50, (ROWS, N)).astype(np.int32),
        segment_ids=ids,
        positions=np.where(ids == 1, np.arange(N) - 7, np.arange(N)).astype(np.int32),
        loss_flags=flags,
        features=rng.normal(size=(ROWS, N, 36 * width)).astype(np.float32),
        target_hidden=rng.normal(size=(ROWS, N, 12 * width)).astype(np.float32),
        anchors=anchors,
        lengths=lengths,
    )
    return batch, depth_counts(N, options)


def run(method: str, placement: Placement, online: bool, dtype: str) -> dict:
    parts, kind = placement.sequence, jnp.dtype(dtype)
    cfg = head_config(
        method, 1, block=BLOCK, num_depths=3 if method == "peagle" else 1, target_hidden_size=12
    )
    if online:  # the head reads the target's own table then
        cfg = head_config(method, 1, block=TARGET.block, num_depths=3 if method == "peagle" else 1)
    whole = head_params(cfg).replace(draft_to_target=None)
    batch, counts = batch_of(method, online, 2 * parts.count)

    def objective(params, head, batch):
        if method == "eagle3":
            return eagle3_loss(params, cfg, head, batch, (1.0, 0.8), parts=parts)
        return peagle_loss(params, cfg, head, batch, counts, parts=parts)

    optimizer = make_optimizer(OptimizerRecipe(learning_rate=1e-2, warmup=0.0, eps=1e-2), 10)
    rng = np.random.default_rng(5)
    frozen = Frozen(whole.embed.astype(kind), jnp.asarray(rng.normal(size=(31, 12)), kind))
    if online:
        target = jax.tree.map(lambda w: w.astype(kind), target_params())
        frozen = frozen.replace(target=online_target(target, TARGET, TAPS, parts))
    params = whole.replace(embed=None)
    state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
    state, frozen = placement.place((state, frozen))
    shardings = jax.tree.map(lambda x: x.sharding, state)
    step = make_step(optimizer, objective, kind, placement, shardings)
    evaluate = make_evaluation(objective, kind, placement)
    losses = []
    for _ in range(2):
        state, report = step(state, frozen, placement.place_batch(batch))
        losses.append(float(report.loss))
    metrics = evaluate(state.params, frozen, placement.place_rows(batch, ROWS))
    moved = jax.tree.leaves(state.params)
    moments = jax.tree.leaves(state.optimizer)
    shards = {}
    for name, leaves in {"params": moved, "moments": moments, "frozen": jax.tree.leaves(frozen)}.items():
        leaves = [x for x in leaves if x.ndim > 1]
        shards[name] = [x.size / x.addressable_shards[0].data.size for x in leaves]
    return {
        "losses": losses,
        "evaluation": [np.asarray(x).tolist() for x in (metrics.loss_sum, metrics.correct, metrics.count)],
        "params": [np.asarray(x, np.float32).reshape(-1).tolist() for x in moved],
        "shards": shards,
    }


def main(method: str, words: list[str]) -> None:
    assert jax.device_count() == 8
    online, dtype = "online" in words, "bfloat16" if "bfloat16" in words else "float32"
    found = {"1": run(method, Placement(micro=MICRO), online, dtype)}
    for word in words:
        if "x" in word:
            shape = MeshShape(*map(int, word.split("x")))
            placement = Placement(training_mesh(shape, jax.devices()), shape, MICRO)
            found[word] = run(method, placement, online, dtype)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
