"""Heads from every dialect to every other that can hold them, and back: the same head, bit for bit."""

from __future__ import annotations

import dataclasses
import itertools
import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from peagle_jax.checkpoint import conversion
from peagle_jax.checkpoint.calibration import read_calibration, write_calibration
from peagle_jax.checkpoint.conversion import Reading, convert_head, is_head, verify_head
from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.head import load_head
from peagle_jax.checkpoint.layouts import LAYOUTS
from peagle_jax.checkpoint.stored_head import read_stored_head
from peagle_jax.checkpoint.target_store import EMBEDDED, read_target_facts
from peagle_jax.checkpoint.weights import open_weights
from peagle_jax.config import RopeConfig
from peagle_jax.layers.rope import rope_tables
from tests.checkpoint.files import MISSING, target_json, target_tensors, write_folder
from tests.checkpoint.heads import (
    SAME_WIDTH,
    assert_same,
    saved_head,
    to_aws,
    to_nemo,
    to_original_eagle3,
    to_specforge,
    to_speculators,
    to_vllm_names,
    without_own_keys,
)
from tests.tiny import TARGET, head_config, head_params, target_params

DEEP = dataclasses.replace(TARGET, num_layers=9)
DEFAULT_TAPS = (2, 4, 6)
LLAMA3 = dataclasses.replace(SAME_WIDTH, rope=RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    write_folder(folder, target_json(DEEP), target_tensors(target_params(DEEP)))
    return read_target_facts(str(folder))


def with_norms(cfg):
    """The head with Qwen3's q and k norms."""
    rng = np.random.default_rng(7)

    def norm():
        return jnp.asarray(rng.normal(size=cfg.block.head_dim), jnp.float32)

    params = head_params(cfg)
    return params.replace(layers=tuple(a.replace(q_norm=norm(), k_norm=norm()) for a in params.layers))


HEADS = {
    "P-EAGLE": dict(num_layers=2, num_depths=5),
    "P-EAGLE, whole vocabulary, llama3 RoPE": dict(num_layers=1, draft_vocab=53, block=LLAMA3),
    "P-EAGLE, Qwen3 block, norms": dict(
        num_layers=2, num_depths=6, norm_before_residual=True, norm_before_fc=True, taps=(0, 2, 4, 5)
    ),
    "EAGLE-3": dict(method="eagle3", num_layers=1, taps=DEFAULT_TAPS),
    "EAGLE-3 of another width": dict(method="eagle3", num_layers=1, taps=(2, 3, 5), block=None),
}
MAPPED = [name for name in HEADS if "whole" not in name]
PARALLEL = [name for name in HEADS if name.startswith("P-EAGLE")]
PUBLISHED = {
    without_own_keys: list(HEADS),
    to_aws: PARALLEL[:2],
    to_nemo: PARALLEL,
    to_speculators: PARALLEL,
    to_specforge: [*PARALLEL[:2], "EAGLE-3"],
    to_vllm_names: MAPPED,
    to_original_eagle3: ["EAGLE-3"],
}
"""Which of the heads each dialect can hold."""


def written(folder, name: str, dialect):
    """One of HEADS in a dialect, with tensors in bfloat16."""
    changes = {"block": SAME_WIDTH, **HEADS[name]}
    changes = {key: value for key, value in changes.items() if value is not None}
    params = with_norms(head_config(**changes)) if "Qwen3" in name else None
    saved = saved_head(folder, target=DEEP, params=params, **changes)

    def change(config, tensors):
        for key, value in tensors.items():
            if value.dtype == np.float32:
                tensors[key] = value.astype(ml_dtypes.bfloat16)
        dialect(config, tensors)

    return saved.edit(change)


def meaning(head):
    """What a head says, without how its taps were found."""
    outline = dataclasses.replace(head.outline, taps=head.outline.taps.boundaries)
    return outline, head.about.bos_token_id, head.about.eos_token_ids


def assert_same_head(a, b) -> None:
    assert meaning(a) == meaning(b)
    assert a.tensors.keys() == b.tensors.keys()
    for name, value in a.tensors.items():
        assert conversion.same_bits(value, b.tensors[name]), name


def convertible(head, layout: str) -> bool:
    """By the layouts' own documents, not by our checks."""
    o = head.outline
    if layout == "speculators":
        return o.target_hidden_size == o.block.hidden_size
    if layout == "eagle3":
        plain = not (o.norm_before_fc or o.norm_before_residual)
        return o.method == "eagle3" and o.taps.boundaries == DEFAULT_TAPS and plain
    return True


def test_the_calibration_goes_with_the_weights_and_not_with_others(tmp_path, target):
    name = next(iter(PUBLISHED))
    saved = written(tmp_path / "head", PUBLISHED[name][0], name)
    convert_head(saved.folder, tmp_path / "plain", "orbax", target)
    rows = np.float32([[1.5, 0.25]])
    write_calibration(saved.folder, rows)
    convert_head(saved.folder, tmp_path / "other", "orbax", target)
    np.testing.assert_array_equal(read_calibration(str(tmp_path / "other")), rows)
    assert read_calibration(str(tmp_path / "plain")) is None
    convert_head(tmp_path / "plain", tmp_path / "other", "orbax", target)  # weights without one
    assert read_calibration(str(tmp_path / "other")) is None


@pytest.mark.parametrize(
    ("dialect", "name"),
    [(dialect, name) for dialect, names in PUBLISHED.items() for name in names],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_there_and_back(tmp_path, target, name, dialect):
    saved = written(tmp_path / "head", name, dialect)
    original = read_stored_head(saved.folder, DEEP)
    assert {a.dtype.name for a in original.tensors.values()} <= {"bfloat16", "int64", "bool"}
    possible = [layout for layout in LAYOUTS if convertible(original, layout)]
    for layout in set(LAYOUTS) - set(possible):
        with pytest.raises(CheckpointError, match=f"{layout} cannot hold"):
            convert_head(saved.folder, tmp_path / "refused", layout, target)
    assert not (tmp_path / "refused").exists()
    for there in possible:
        convert_head(saved.folder, tmp_path / there, there, target)
        assert_same_head(read_stored_head(tmp_path / there, DEEP), original)
    every_pair = itertools.product(possible, possible)
    in_turn = zip(possible, possible[1:] + possible[:1], strict=True)
    for there, back in every_pair if dialect is without_own_keys else in_turn:
        convert_head(tmp_path / there, tmp_path / back / "again", back, target)
        assert_same_head(read_stored_head(tmp_path / back / "again", DEEP), original)
    cfg, params = load_head(tmp_path / possible[-1], DEEP, target.tables(), dtype=jnp.bfloat16)
    assert_same(params, saved.load(dtype=jnp.bfloat16)[1])
    assert cfg.method == original.outline.method


def test_the_layouts_use_their_own_names(tmp_path):
    saved = saved_head(
        tmp_path / "h", "eagle3", num_layers=1, block=SAME_WIDTH, taps=DEFAULT_TAPS, target=DEEP
    )
    saved.edit(eagle_aux_hidden_state_layer_ids=MISSING, eagle_config=MISSING, peagle_jax=MISSING)
    for layout in LAYOUTS:
        convert_head(saved.folder, tmp_path / layout, layout)
    names = {layout: set(open_weights(tmp_path / layout).names()) for layout in LAYOUTS}
    assert names["orbax"] == names["vllm"] == names["speculators"]
    assert "midlayer.hidden_norm.weight" in names["eagle3"] - names["vllm"]
    assert "layers.0.hidden_norm.weight" in names["vllm"] - names["eagle3"]
    configs = {layout: json.loads((tmp_path / layout / "config.json").read_text()) for layout in LAYOUTS}
    assert configs["orbax"] == configs["vllm"]
    # Silent about its taps, as it was: loaders take the default of their target.
    assert "taps" not in configs["vllm"]["peagle_jax"]
    assert configs["speculators"]["eagle_aux_hidden_state_layer_ids"] is None
    assert configs["speculators"]["transformer_layer_config"]["num_hidden_layers"] == 1
    assert "eagle_config" not in configs["eagle3"]


def test_a_target_is_asked_for_only_where_it_is_needed(tmp_path, target):
    saved = saved_head(tmp_path / "h", share_embed=True, block=SAME_WIDTH, target=DEEP)
    for layout in ("orbax", "vllm"):
        convert_head(saved.folder, tmp_path / layout, layout)
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight, and .* target's; name the target"):
        convert_head(saved.folder, tmp_path / "s", "speculators")
    head = convert_head(saved.folder, tmp_path / "s", "speculators", target)
    np.testing.assert_array_equal(head.tensors["embed_tokens.weight"], target.table("embed"))
    verifier = json.loads((tmp_path / "s" / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": target.ref, "architectures": ["LlamaForCausalLM"]}
    ours = dataclasses.replace(target, ref=EMBEDDED)  # a name that no other loader knows
    unnamed = convert_head(saved.folder, tmp_path / "u", "speculators", ours).about.verifier
    assert unnamed == verifier | {"name_or_path": None}

    saved.edit(vocab_size=MISSING, peagle_jax=MISSING)
    assert convert_head(saved.folder, tmp_path / "t2d", "vllm").outline.vocab_size == 53  # the map's length
    saved.edit(lambda config, tensors: tensors.pop("t2d"))
    with pytest.raises(CheckpointError, match="has no vocab_size, and no table tells it; name the target"):
        convert_head(saved.folder, tmp_path / "v", "vllm")
    assert convert_head(saved.folder, tmp_path / "v", "vllm", target).outline.vocab_size == 53


def test_unnamed_taps_become_the_targets_default_where_it_is_known(tmp_path, target):
    saved = saved_head(tmp_path / "h", taps=DEFAULT_TAPS, target=DEEP)
    saved.edit(eagle_aux_hidden_state_layer_ids=MISSING, eagle_config=MISSING, peagle_jax=MISSING)
    assert convert_head(saved.folder, tmp_path / "a", "vllm").outline.taps.boundaries is None
    head = convert_head(saved.folder, tmp_path / "b", "vllm", target)
    assert head.outline.taps.boundaries == DEFAULT_TAPS
    assert json.loads((tmp_path / "b" / "config.json").read_text())["peagle_jax"]["taps"] == [2, 4, 6]


@pytest.mark.parametrize(
    ("reading", "taps"),
    [
        (Reading(), [2, 3, 5]),
        (Reading(convention="boundary"), [1, 2, 4]),
        (Reading(taps=(0, 1, 2)), [0, 1, 2]),
    ],
    ids=["auto", "boundary", "given"],
)
def test_the_reading_of_layer_ids_is_written_as_boundaries(tmp_path, reading, taps):
    saved = saved_head(tmp_path / "h", taps=(2, 3, 5)).edit(to_specforge)
    head = convert_head(saved.folder, tmp_path / "v", "vllm", reading=reading)
    config = json.loads((tmp_path / "v" / "config.json").read_text())
    assert config["peagle_jax"]["taps"] == config["eagle_aux_hidden_state_layer_ids"] == taps
    assert list(head.outline.taps.boundaries or ()) == taps


def test_an_absolute_map_is_rewritten_as_offsets(tmp_path):
    saved = saved_head(tmp_path / "h")

    def change(config, tensors):
        tensors["d2t"] = (tensors["d2t"] + np.arange(31)).astype(np.int32)

    saved.edit(change)
    convert_head(saved.folder, tmp_path / "v", "vllm", reading=Reading(map_kind="absolute"))
    found = load_file(tmp_path / "v" / "model.safetensors")["d2t"]
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found + np.arange(31), saved.params.draft_to_target)


def test_an_identity_map_is_kept(tmp_path):
    def change(config, tensors):
        tensors |= {"d2t": np.zeros(53, np.int64), "t2d": np.ones(53, bool)}

    saved = saved_head(tmp_path / "h", draft_vocab=53).edit(change)
    convert_head(saved.folder, tmp_path / "o", "orbax")
    assert_same_head(read_stored_head(tmp_path / "o"), read_stored_head(saved.folder))
    assert load_head(tmp_path / "o", TARGET, saved.target_params)[1].draft_to_target is None


def test_rope_tables_survive_every_layout(tmp_path, target):
    saved = saved_head(tmp_path / "h", "eagle3", num_layers=1, block=LLAMA3, taps=DEFAULT_TAPS, target=DEEP)
    positions = jnp.array([[0, 9000]])
    expected = rope_tables(LLAMA3.rope, LLAMA3.head_dim, positions)
    for layout in LAYOUTS:
        convert_head(saved.folder, tmp_path / layout, layout, target)
        found = load_head(tmp_path / layout, DEEP, target.tables())[0].block
        assert found.rope == LLAMA3.rope
        for a, b in zip(rope_tables(found.rope, found.head_dim, positions), expected, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


def test_a_conversion_onto_itself_replaces_the_weights(tmp_path):
    saved = saved_head(tmp_path / "h")
    (saved.folder / "README.md").write_text("about")
    before = read_stored_head(saved.folder)
    convert_head(saved.folder, saved.folder, "orbax")
    names = sorted(path.name for path in saved.folder.iterdir())
    assert names == ["README.md", "arrays", "config.json", "orbax.json"]
    convert_head(saved.folder, saved.folder, "vllm")
    assert sorted(path.name for path in saved.folder.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    assert_same_head(read_stored_head(saved.folder), before)


def test_verification_compares_tensors_facts_and_logits(tmp_path, target):
    saved = saved_head(tmp_path / "h", target=DEEP, norm_before_residual=True)
    head = convert_head(saved.folder, tmp_path / "v", "vllm", target)

    def verify(facts=target):
        return verify_head(head, saved.folder, tmp_path / "v", facts, Reading())

    assert verify() == {"tensors": len(head.tensors), "logits": [8, 31]}
    assert verify(None)["logits"] is None
    config = (tmp_path / "v" / "config.json").read_text()
    (tmp_path / "v" / "config.json").write_text(config.replace('"rope_theta": 500.0', '"rope_theta": 501.0'))
    with pytest.raises(CheckpointError, match="has block .*theta=501"):
        verify()
    (tmp_path / "v" / "config.json").write_text(config)
    tensors = load_file(tmp_path / "v" / "model.safetensors")
    tensors["norm.weight"][3] = np.nextafter(tensors["norm.weight"][3], np.float32(9))
    save_file(tensors, tmp_path / "v" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"does not hold tensor norm.weight as"):
        verify()


def test_a_head_is_told_from_a_target(tmp_path):
    saved = saved_head(tmp_path / "h", "eagle3", num_layers=1).edit(to_original_eagle3)
    folder = write_folder(tmp_path / "t", target_json(TARGET), target_tensors(target_params()))
    assert is_head(saved.folder)
    assert not is_head(folder)
    saved.edit(draft_vocab_size=MISSING)
    assert is_head(saved.folder)
