import errno
import json
import os
import resource
import shutil
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from peagle_jax.models import stack
from peagle_jax.train import features, prepare
from peagle_jax.train.data import RowStore
from peagle_jax.train.recipe import DataRecipe, TrainError
from peagle_jax.train.tokens import ConversationEncoder, Summary, encode_records
from tests.tiny import TARGET
from tests.train import tiny_run


def plain_features(params, tokens, taps):
    """A document alone, through the cache-free stack with a dense causal mask."""

    def attend(q, k, v):
        n, g = q.shape[1], k.shape[2]
        k, v = (jnp.repeat(x, q.shape[2] // g, axis=2) for x in (k, v))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
        scores = jnp.where(jnp.tril(jnp.ones((n, n), bool)), scores, -jnp.inf)
        p = jnp.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        return jnp.einsum("bnts,bsnh->btnh", p, v).reshape(*q.shape[:2], -1)

    @jax.jit
    def run(tokens):
        positions = jnp.arange(tokens.shape[1])[None]
        out = stack.forward_packed(params, TARGET, tokens, positions, attend, taps)
        return out.features[0], stack.final_hidden(params, TARGET, out.hidden)[0]

    padded = np.pad(tokens, (0, 32 - len(tokens)))[None]  # what follows does not matter
    return [np.asarray(x)[: len(tokens)] for x in run(padded)]


def test_stored_rows_equal_each_document_run_alone(prepared, tiny_target):
    store = RowStore([prepared / "features"], "train", (1, 3, 4, 5))
    compared = 0
    for i in range(3):
        row = {k: v[0] for k, v in store.rows(np.array([i])).items()}
        for segment in range(row["segment_ids"].max() + 1):
            where = row["segment_ids"] == segment
            found = plain_features(tiny_target.params, row["tokens"][where], (1, 3, 4, 5))
            np.testing.assert_allclose(row["features"][where], found[0], rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(row["hidden"][where], found[1], rtol=1e-4, atol=1e-4)
            compared += 1
    assert compared > 3


def test_every_document_is_in_one_split(prepared, tiny_target, conversations):
    rows = {
        split: np.concatenate(
            [features.read_shard(prepared / "features", n, "float32", 10**6)["tokens"] for n in names]
        )
        for split, names in (
            (s, sorted(p.name for p in (prepared / "features").glob(f"{s}-*"))) for s in features.SPLITS
        )
    }
    encoder = ConversationEncoder(tiny_target.tokenizer)
    documents = list(encode_records(conversations, encoder, Summary(), DataRecipe()))
    text = {s: [",".join(map(str, r)) for r in found.tolist()] for s, found in rows.items()}
    homes = [
        [s for s in features.SPLITS if any(",".join(map(str, d.tokens.tolist())) in row for row in text[s])]
        for d in documents
    ]
    assert all(len(home) == 1 for home in homes)
    assert {home[0] for home in homes} == set(features.SPLITS)


def test_resume_computes_only_what_is_missing(prepared, console):
    folder = prepared / "features"
    before = {p.name: p.stat().st_mtime_ns for p in folder.glob("train-*")}
    kept = (folder / "train-00001" / "features.npy").read_bytes()
    shutil.rmtree(folder / "train-00001")
    (folder / ".train-00001.77.part").mkdir()
    (folder / ".train-00001.77.part" / "features.npy").write_bytes(b"cut short")
    prepare.compute_features(tiny_run.recipe(prepared), console)
    assert "1 shards computed" in console.file.getvalue()
    assert (folder / "train-00001" / "features.npy").read_bytes() == kept
    after = {p.name: p.stat().st_mtime_ns for p in folder.glob("train-*")}
    assert {k for k in before if before[k] != after[k]} == {"train-00001"}


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("features", {"taps": [1, 2, 5]}, r"features of other taps \[1, 3, 4, 5\], not \[1, 2, 5\]"),
        ("features", {"dtype": "bfloat16"}, "features of other dtype float32, not bfloat16"),
        ("features", {"row_length": 48}, "features of other"),
        ("data", {"limit": 50}, "features of other data"),
    ],
)
def test_a_folder_of_other_features_is_refused(prepared, console, section, change, message):
    with pytest.raises(TrainError, match=message):
        prepare.compute_features(tiny_run.recipe(prepared, **{section: change}), console)


def test_a_folder_of_another_target_is_refused(prepared, console, tiny_target):
    tiny_target.params = tiny_run.target(seed=5).params
    with pytest.raises(
        TrainError, match="features of other weights; choose another features.folder or delete"
    ):
        prepare.compute_features(tiny_run.recipe(prepared), console)


def test_the_size_is_said_before_and_is_right(prepared, console):
    prepare.compute_features(tiny_run.recipe(prepared), console)
    said = float(console.file.getvalue().split("will hold ")[1].split(" MB")[0])
    folder = prepared / "features"
    stored = sum(
        json.loads(p.read_text())[key]["bytes"]
        for p in folder.glob("*/shard.json")
        for key in features.ARRAYS
    )
    assert said == round(stored / 1e6, 2) > 0
    manifest = features.read_manifest(folder)
    identity = features.Identity(
        *(tuple(manifest[k]) if k == "taps" else manifest[k] for k in features.Identity.__dataclass_fields__)
    )
    rows = sum(sum(plan) for plan in manifest["shards"].values())
    assert stored == rows * identity.row_length * features.bytes_per_token(identity)


def test_too_little_disk_stops_before_anything_is_computed(tiny_target, tmp_path, console, monkeypatch):
    tiny_run.write_data(tmp_path / "data.jsonl", tiny_run.conversations(20))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(features.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(TrainError, match="GB are free"):
        prepare.compute_features(tiny_run.recipe(tmp_path), console)
    assert not (tmp_path / "features").exists()


def test_a_disk_that_fills_up_keeps_finished_shards_and_nothing_else(
    tiny_target, tmp_path, console, monkeypatch, conversations
):
    tiny_run.write_data(tmp_path / "data.jsonl", conversations)
    original, calls = np.save, []

    def save(file, array):
        calls.append(array)
        if len(calls) == len(features.ARRAYS) + 5:  # the big array of the second shard
            file.write(b"a part")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(file, array)

    monkeypatch.setattr(features.np, "save", save)
    message = (
        r"shard train-00001 cannot be written: No space left on device; finished shards are kept. Make room"
    )
    with pytest.raises(TrainError, match=message):
        prepare.compute_features(tiny_run.recipe(tmp_path), console)
    folder = tmp_path / "features"
    assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", "train-00000"]
    features.verify_shard(folder, "train-00000")
    before = (folder / "train-00000" / "features.npy").stat().st_mtime_ns
    monkeypatch.setattr(features.np, "save", original)
    prepare.compute_features(tiny_run.recipe(tmp_path), console)
    assert len(RowStore([folder], "train", (1,))) > 7
    assert (folder / "train-00000" / "features.npy").stat().st_mtime_ns == before


def test_a_write_that_the_system_refuses_midway_is_one_line(tmp_path):
    """A real short write: the limit on the size of a file ends it as a full disk would."""
    arrays = dict.fromkeys(features.ARRAYS, np.zeros((64, 1024), np.float32))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(
            TrainError, match="shard train-00000 cannot be written: .*finished shards are kept"
        ):
            features.write_shard(tmp_path, "train-00000", arrays)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
    features.write_shard(tmp_path, "train-00000", arrays)
    features.verify_shard(tmp_path, "train-00000")


def test_bfloat16_survives_storage(tmp_path):
    values = np.arange(-12, 12, dtype=np.float32).reshape(1, 4, 6).astype(ml_dtypes.bfloat16) / 7
    small = np.zeros((1, 4), np.int32)
    arrays = {**dict.fromkeys(("tokens", "segment_ids", "positions"), small), "flags": small.astype(np.uint8)}
    features.write_shard(tmp_path, "train-00000", {**arrays, "features": values, "hidden": values})
    read = features.read_shard(tmp_path, "train-00000", "bfloat16", 10**6)
    assert read["features"].dtype == ml_dtypes.bfloat16
    assert (read["features"] == values).all()
    features.verify_shard(tmp_path, "train-00000")


def test_parts_of_killed_processes_are_removed_when_they_are_old(prepared, console):
    for name, age in ((".train-00000.7.part", 7200), (".train-00000.8.part", 60)):
        part = prepared / "features" / name
        part.mkdir()
        os.utime(part, (time.time() - age,) * 2)
    prepare.compute_features(tiny_run.recipe(prepared), console)
    assert [p.name for p in (prepared / "features").glob(".*.part")] == [".train-00000.8.part"]


def test_a_second_run_compares_what_is_there_with_its_checksums(prepared, console):
    path = prepared / "features" / "train-00001" / "tokens.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(TrainError, match=r"train-00001/tokens.npy has a wrong checksum; delete"):
        prepare.compute_features(tiny_run.recipe(prepared), console)


def test_damage_is_named(tmp_path, prepared):
    folder = prepared / "features"
    features.verify_shard(folder, "train-00000")
    path = folder / "train-00000" / "features.npy"
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    with pytest.raises(TrainError, match=r"features.npy has a wrong checksum"):
        features.verify_shard(folder, "train-00000")
    path.write_bytes(content[:100])
    with pytest.raises(TrainError, match=r"features.npy is not readable"):
        features.read_shard(folder, "train-00000", "float32", 10**6)
    path.write_bytes(content)
    tokens = folder / "train-00000" / "tokens.npy"
    array = np.load(tokens)
    array[0, 0] = 2**31 - 1
    np.save(tokens, array)
    with pytest.raises(TrainError, match=r"tokens.npy holds \d+ to 2147483647, expected 0 to 52"):
        features.read_shard(folder, "train-00000", "float32", 53)
    with pytest.raises(TrainError, match="lacks the shard train-00099"):
        features.read_shard(folder, "train-00099", "float32", 10**6)
    with pytest.raises(TrainError, match="holds no features"):
        features.read_manifest(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "is not what `features` wrote"),
        ("null", "is not what `features` wrote"),
        ("[" * 100_000, "is not readable"),
        ({"dtype": "x"}, "is not what `features` wrote"),
        ({"taps": ["1"]}, "is not what `features` wrote"),
        ({"row_length": "x"}, "is not what `features` wrote"),
        ({"shards": None}, "is not what `features` wrote"),
        ({"shards": {"train": 5, "heldout": []}}, "is not what `features` wrote"),
        ({"hidden_size": 13}, r"train-00000 holds rows, features and states of sizes \(32, 48, 12\)"),
        ({"row_length": 33}, r"but its manifest says \(33, 48, 12\); delete the folder"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_manifest_of_another_kind_is_refused(prepared, content, words):
    path = prepared / "features" / "manifest.json"
    path.write_text(
        content if isinstance(content, str) else json.dumps(json.loads(path.read_text()) | content)
    )
    with pytest.raises(TrainError, match=words):
        RowStore([prepared / "features"], "train", (1,))


@pytest.mark.parametrize("key", features.ARRAYS)
@pytest.mark.parametrize("change", [lambda x: x[:-1], lambda x: x.astype(str), lambda x: x[..., 0]])
def test_an_array_of_another_shape_or_kind_is_refused(prepared, key, change):
    path = prepared / "features" / "train-00000" / f"{key}.npy"
    np.save(path, change(np.load(path)))
    with pytest.raises(TrainError, match=r"not what `features` wrote; delete .*train-00000"):
        RowStore([prepared / "features"], "train", (1,))


@pytest.mark.parametrize("what", ["a file", "above it"])
def test_a_folder_that_cannot_be_one_is_told_before_the_model_loads(tmp_path, console, monkeypatch, what):
    monkeypatch.setattr(prepare, "load_target", None)
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "file" / ("deep" if what == "above it" else "")
    with pytest.raises(TrainError, match="file is a file.* choose another features.folder"):
        prepare.compute_features(tiny_run.recipe(tmp_path, features={"folder": str(folder)}), console)


def test_taps_that_are_refused_leave_nothing_behind(tiny_target, tmp_path, console):
    tiny_run.write_data(tmp_path / "data.jsonl", tiny_run.conversations(20))
    with pytest.raises(ValueError, match="99"):
        prepare.compute_features(tiny_run.recipe(tmp_path, features={"taps": [99]}), console)
    assert not (tmp_path / "features").exists()
