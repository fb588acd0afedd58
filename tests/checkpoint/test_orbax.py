"""Heads through Orbax, bit for bit."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest

from peagle_jax.checkpoint import orbax
from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.config import BlockConfig, RopeConfig
from tests.checkpoint.heads import assert_same
from tests.tiny import head_config, head_params


def head(dtype=jnp.float32, **changes):
    cfg = head_config(**changes)
    params = jax.tree.map(lambda a: a.astype(dtype) if a.dtype == jnp.float32 else a, head_params(cfg))
    return cfg, params


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"method": "eagle3", "num_layers": 1, "draft_vocab": 53}])
def test_a_head_comes_back_bit_for_bit(tmp_path, dtype, changes):
    cfg, params = head(dtype, **changes)
    params = params.replace(fc_bias=jnp.arange(10, dtype=jnp.float32))
    orbax.save(tmp_path / "head", cfg, params)
    found, restored = orbax.restore(tmp_path / "head")
    assert found == cfg
    assert_same(restored, params)


def test_the_config_survives_json():
    rope = RopeConfig(5e5, "yarn", 8.0, original_max_position=64, truncate=False, mscale=0.7)
    cfg = head_config(block=BlockConfig(10, 14, 6, 3, 4, 1e-6, rope), norm_before_fc=True)
    assert orbax.config_from_json(json.loads(json.dumps(orbax.config_to_json(cfg)))) == cfg


def test_a_shared_embedding_is_given_at_restore(tmp_path):
    cfg, params = head()
    orbax.save(tmp_path / "head", cfg, params, share_embed=True)
    with pytest.raises(CheckpointError, match="saved without its embedding"):
        orbax.restore(tmp_path / "head")
    embed = jnp.ones((53, 10))
    _, restored = orbax.restore(tmp_path / "head", embed=embed)
    assert restored.embed is embed
    assert_same(restored, params.replace(embed=embed))


def test_arrays_are_placed_as_asked(tmp_path):
    cfg, params = head()
    orbax.save(tmp_path / "head", cfg, params)
    mesh = jax.make_mesh((1,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    _, restored = orbax.restore(tmp_path / "head", sharding=sharding)
    assert {leaf.sharding for leaf in jax.tree.leaves(restored)} == {sharding}


def test_saving_again_replaces(tmp_path):
    for method in ("peagle", "eagle3"):
        cfg, params = head(method=method)
        orbax.save(tmp_path / "head", cfg, params)
    assert orbax.restore(tmp_path / "head")[0].method == "eagle3"
    assert [p.name for p in tmp_path.iterdir()] == ["head"]


def edit_header(folder, **changes):
    header = json.loads((folder / "head.json").read_text())
    (folder / "head.json").write_text(json.dumps(header | changes))


def test_what_cannot_be_restored_is_one_line(tmp_path):
    cfg, params = head()
    orbax.save(tmp_path / "head", cfg, params)
    header = json.loads((tmp_path / "head" / "head.json").read_text())

    def fails() -> str:
        with pytest.raises(CheckpointError) as caught:
            orbax.restore(tmp_path / "head")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    edit_header(tmp_path / "head", format_version=9)
    assert "has format_version 9; expected 1" in fails()
    edit_header(tmp_path / "head", format_version=1, config={"method": "peagle"})
    assert "does not describe a head" in fails()
    edit_header(tmp_path / "head", config=header["config"], arrays={"norm": [[3], "float32"]})
    assert "cannot be restored" in fails() or "saved without its embedding" in fails()
    (tmp_path / "head" / "head.json").unlink()
    assert "has no head.json" in fails()
