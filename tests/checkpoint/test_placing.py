"""Tensors go to their shards as they are read."""

import dataclasses
import tracemalloc

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from peagle_jax.checkpoint.head import load_head, save_head
from peagle_jax.checkpoint.huggingface import load_folder
from peagle_jax.checkpoint.placing import same_array
from peagle_jax.config import BlockConfig, ConfigError, RopeConfig
from peagle_jax.models.stack import stack_layers
from peagle_jax.parallel.mesh import decoding_mesh
from peagle_jax.parallel.tensor import spread_weights
from tests.checkpoint.files import target_json, target_tensors, write_folder
from tests.tiny import TARGET, WIDE, head_config, head_params, target_params

CONFIG = dataclasses.replace(TARGET, vocab_size=56, eos_token_ids=(55,))
HEAD = head_config(
    block=BlockConfig(12, 16, 4, 2, 4, 1e-5, RopeConfig(theta=500.0)), vocab_size=56, draft_vocab=32
)


@pytest.fixture(scope="module")
def mesh():
    return decoding_mesh(jax.devices(), 4)


@pytest.mark.parametrize("stacked", [True, False])
def test_a_target_is_read_in_parts_with_its_kv_heads_where_they_are_read(tmp_path, mesh, stacked):
    params = target_params(CONFIG)
    folder = write_folder(tmp_path, target_json(CONFIG), target_tensors(params))
    cfg, loaded = load_folder(folder, stacked=stacked, mesh=mesh)
    assert cfg.block.num_kv_heads == 4
    expected = spread_weights(CONFIG, stack_layers(params) if stacked else params, 4)
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)
    layer = loaded.layers if stacked else loaded.layers[2]
    lead = (None,) if stacked else ()
    assert layer.wk.sharding.spec == PartitionSpec(*lead, "tensor", None)
    assert layer.w_down.sharding.spec == PartitionSpec(*lead, None, "tensor")
    assert loaded.embed.addressable_shards[3].data.shape == (14, 12)
    with pytest.raises(ConfigError, match="size of 3 does not divide the model's num_attention_heads, 4"):
        load_folder(folder, mesh=decoding_mesh(jax.devices()[:3], 3))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_quantised_target_is_read_in_parts(tmp_path, mesh, kind):
    cfg = dataclasses.replace(WIDE, vocab_size=56, eos_token_ids=(55,))
    cfg = dataclasses.replace(cfg, block=dataclasses.replace(cfg.block, head_dim=32, intermediate_size=512))
    folder = write_folder(tmp_path, target_json(cfg), target_tensors(target_params(cfg)))
    _, alone = load_folder(folder, stacked=True, quantization=kind)
    _, loaded = load_folder(folder, stacked=True, quantization=kind, mesh=mesh)
    jax.tree.map(np.testing.assert_array_equal, loaded, spread_weights(cfg, alone, 4))
    assert loaded.layers.wk.scale.sharding.spec == PartitionSpec(None, "tensor", None)
    assert loaded.layers.w_down.values.sharding.spec == PartitionSpec(None, None, "tensor")
    assert loaded.lm_head.values.addressable_shards[3].data.shape == (14, 64)
    odd = dataclasses.replace(cfg, block=dataclasses.replace(cfg.block, intermediate_size=96 * 4))
    folder = write_folder(tmp_path / "odd", target_json(odd), target_tensors(target_params(odd)))
    if kind == "int4":
        with pytest.raises(ConfigError, match="the 6 groups of w_down, 64 of .* ask for 1 or 2, or"):
            load_folder(folder, quantization=kind, mesh=mesh)
    else:
        load_folder(folder, quantization=kind, mesh=mesh)


def test_a_host_holds_a_few_tensors_of_a_model_at_a_time(tmp_path, mesh):
    block = dataclasses.replace(TARGET.block, hidden_size=256, intermediate_size=512)
    cfg = dataclasses.replace(CONFIG, block=block, num_layers=16)
    params = target_params(cfg)
    model = sum(x.nbytes for x in jax.tree.leaves(params))
    largest = 512 * 256 * 4
    assert model > 40 * largest
    folder = write_folder(tmp_path, target_json(cfg), target_tensors(params))
    load_folder(folder, stacked=True, mesh=mesh)  # compiles what fills the stacks
    tracemalloc.start()
    load_folder(folder, stacked=True, mesh=mesh)
    _, peak = tracemalloc.get_traced_memory()  # of NumPy; devices' memory is XLA's
    tracemalloc.stop()
    assert largest < peak < 4 * largest


@pytest.mark.parametrize("split", [True, False])
def test_whether_a_head_shares_the_targets_table_is_seen_on_the_whole_table(tmp_path, mesh, split):
    target = target_params(CONFIG)
    folder = write_folder(tmp_path / "target", target_json(CONFIG), target_tensors(target))
    cfg, placed = load_folder(folder, mesh=mesh)
    head_cfg = HEAD if split else dataclasses.replace(HEAD, draft_vocab_size=31)  # which 4 does not divide
    params = head_params(head_cfg).replace(embed=target.embed)
    other = params.replace(embed=target.embed.at[50].add(1))  # in the rows of the last device only
    for name, head, shared in (("same", params, True), ("own", other, False)):
        save_head(tmp_path / name, head_cfg, head, target=CONFIG, dtype=np.float32, share_embed=False)
        found, loaded = load_head(tmp_path / name, cfg, placed, mesh=mesh, split=split)
        assert (loaded.embed is placed.embed) == shared
        np.testing.assert_array_equal(loaded.embed, head.embed)
        assert found.block.num_kv_heads == (4 if split else 2)
        wq = loaded.layers[0].wq
        assert wq.sharding.is_fully_replicated != split and len(wq.sharding.device_set) == 4


def test_arrays_are_compared_part_by_part_in_the_files_dtype(mesh):
    own = np.arange(24, dtype=np.float32).reshape(8, 3)
    where = jax.sharding.NamedSharding(mesh, PartitionSpec("tensor"))
    assert same_array(own.astype(np.float16), jax.device_put(own, where))
    assert not same_array(own + (np.arange(8) == 7)[:, None], jax.device_put(own, where))
    assert not same_array(own[:4], jax.device_put(own, where))
