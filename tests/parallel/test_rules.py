import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from peagle_jax.drafter.head import DrafterParams
from peagle_jax.layers.block import BlockParams
from peagle_jax.layers.moe import Experts
from peagle_jax.layers.quantized import quantize
from peagle_jax.models.stack import TargetParams, stack_layers
from peagle_jax.parallel.mesh import MeshError, MeshShape, decoding_mesh, training_mesh
from peagle_jax.parallel.rules import RULES, WEIGHTS, constrain, gathered, spec, weight_shardings
from tests.tiny import TARGET, WIDE, head_config, head_params, target_params

FSDP = {"data": 2, "fsdp": 2, "sequence": 1}


def fsdp_mesh():
    return training_mesh(MeshShape(2, 2, 1), jax.devices())


def specs(tree, mesh):
    found = jax.tree_util.tree_leaves_with_path(weight_shardings(tree, mesh))
    return {jax.tree_util.keystr(path): sharding.spec for path, sharding in found}


def test_every_weight_of_heads_and_targets_has_names_that_have_rules():
    kinds = (BlockParams, DrafterParams, Experts, TargetParams)
    fields = {f.name for kind in kinds for f in dataclasses.fields(kind)}
    assert fields - {"layers", "experts"} <= set(WEIGHTS)
    assert {name for names in WEIGHTS.values() for name in names} <= set(RULES)


def test_matrices_are_split_along_the_first_axis_that_divides_and_vectors_stay_whole():
    params = head_params(head_config())  # of width 10, which 2 divides
    found = specs(params, fsdp_mesh())
    assert found[".layers[0].w_down"] == found[".fc"] == PartitionSpec("fsdp", None)
    assert found[".layers[1].w_up"] == found[".embed"] == PartitionSpec(None, "fsdp")
    assert found[".final_norm"] == found[".mask_hidden"] == PartitionSpec()
    odd = {"fc": jnp.zeros((6, 5)), "lm_head": jnp.zeros((4, 3)), "wk": jnp.zeros((7, 2))}
    assert specs(odd, fsdp_mesh()) == {
        "['fc']": PartitionSpec("fsdp", None),
        "['lm_head']": PartitionSpec("fsdp", None),
        "['wk']": PartitionSpec(None, "fsdp"),
    }


def test_a_stack_of_layers_is_split_within_its_layers():
    found = specs(stack_layers(target_params(TARGET)), fsdp_mesh())
    assert found[".layers.wo"] == PartitionSpec(None, "fsdp", None)
    assert found[".layers.attn_norm"] == PartitionSpec()


def test_moments_lie_where_their_weights_do():
    params = head_params(head_config()).replace(draft_to_target=None)
    weights = specs(params, fsdp_mesh())
    moments = specs(optax.adamw(1e-3).init(params), fsdp_mesh())
    for name, where in weights.items():
        for moment in ("mu", "nu"):
            (found,) = [s for path, s in moments.items() if path.endswith(f".{moment}{name}")]
            assert found == where


def test_a_weight_that_does_not_divide_or_is_unknown_is_told():
    with pytest.raises(MeshError, match=r"mesh.fsdp 2 divides no axis of fc, which is \(3, 5\)"):
        weight_shardings({"fc": jnp.zeros((3, 5))}, fsdp_mesh())
    with pytest.raises(MeshError, match="name no axes for the weight 'router'; add it to WEIGHTS"):
        weight_shardings({"router": jnp.zeros((4, 4))}, fsdp_mesh())


def test_experts_that_do_not_divide_are_split_within_and_their_biases_stay_whole():
    shapes = {"gate": jnp.zeros((6, 8, 5)), "down": jnp.zeros((6, 5, 8)), "gate_bias": jnp.zeros((6, 8))}
    assert specs(shapes, decoding_mesh(jax.devices(), 4)) == {
        "['gate']": PartitionSpec(None, "tensor", None),
        "['down']": PartitionSpec(None, None, "tensor"),
        "['gate_bias']": PartitionSpec(),
    }


def test_mesh_axes_of_one_device_are_left_out():
    assert spec(("batch", "sequence", None), FSDP) == PartitionSpec(("data", "fsdp"), None, None)
    assert spec(("batch", "sequence"), {"data": 4}) == PartitionSpec("data", None)
    whole = weight_shardings({"router": jnp.zeros((3, 5))}, training_mesh(MeshShape(4), jax.devices()))
    assert whole["router"].spec == PartitionSpec()


def test_names_mean_something_only_where_there_is_a_mesh():
    x = jnp.arange(24.0).reshape(4, 6)
    assert constrain(x, "batch", None) is x
    with jax.set_mesh(fsdp_mesh()):
        split = jax.jit(lambda x: constrain(x * 2, "batch", None))(x)
        whole = jax.jit(lambda x: gathered({"w": constrain(x, "batch", None)}))(x)["w"]
    assert split.addressable_shards[0].data.shape == (1, 6)
    assert whole.sharding.is_fully_replicated
    np.testing.assert_array_equal(split, x * 2)


def test_names_mean_nothing_inside_a_mapped_replica():
    x = jnp.arange(8.0).reshape(4, 2)
    mapped = jax.pmap(lambda x: constrain(x, "batch") + 1, axis_name="data")
    np.testing.assert_array_equal(mapped(x), x + 1)


def test_the_arrays_of_a_quantised_weight_follow_its_field():
    params = target_params(WIDE)
    layers = jax.tree.map(lambda w: quantize(w, "int4") if w.ndim == 2 else w, params.layers)
    found = specs(stack_layers(params.replace(layers=layers)), fsdp_mesh())
    assert found[".layers.w_down.values"] == PartitionSpec(None, "fsdp", None)
    assert found[".layers.w_up.scale"] == PartitionSpec(None, "fsdp", None)  # (L, F, 1)
    assert found[".layers.wq.steps"] == PartitionSpec(None, None, "fsdp")
