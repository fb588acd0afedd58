"""How the commands choose a head, K, a dtype and a context."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from peagle_jax import commands, memory
from peagle_jax.arguments import CommandError
from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.model import LoadedTarget
from peagle_jax.config import ConfigError
from peagle_jax.layers.quantized import quantize
from peagle_jax.speculation import Arrangement
from peagle_jax.speculative.lookup import Lookup
from peagle_jax.speculative.request import Request, settings_of
from tests.serve.tiny_model import CONFIG, PARAMS, TOKENIZER, tiny_head
from tests.tiny import head_params

HEADS = {"parallel": tiny_head("peagle"), "sequential": tiny_head("eagle3")}


@pytest.fixture
def loads(monkeypatch):
    """Loads tiny models in place of files; returns what was loaded."""
    loaded = []

    def load_target(ref, **options):
        loaded.append(("target", ref, options))
        return LoadedTarget(CONFIG, PARAMS, TOKENIZER, "tiny", {}, "memory")

    def load_head(ref, target, params, **options):
        loaded.append(("head", ref, options))
        return HEADS[ref], head_params(HEADS[ref])

    monkeypatch.setattr(commands, "load_target", load_target)
    monkeypatch.setattr(commands, "load_head", load_head)
    monkeypatch.setattr(commands, "read_calibration", lambda head: None)
    monkeypatch.setattr(commands, "default_head_path", lambda: "parallel")
    return loaded


def test_the_embedded_model_has_its_own_head_at_its_trained_depth(loads):
    loaded = commands.load(None, None, None)
    assert [entry[:2] for entry in loads] == [("target", None), ("head", "parallel")]
    assert loaded.head is not None
    assert (loaded.num_speculative_tokens, loaded.head.config.method) == (3, "peagle")
    assert loaded.spec().num_speculative_tokens == 3


def test_a_head_trained_deeper_still_drafts_five(loads, monkeypatch):
    monkeypatch.setitem(HEADS, "parallel", dataclasses.replace(HEADS["parallel"], num_depths=8))
    assert commands.load("m", "parallel", None).num_speculative_tokens == 5
    assert commands.load("m", "parallel", 8).num_speculative_tokens == 8


def test_another_model_has_no_head_unless_named(loads):
    assert commands.load("other", None, None).head is None
    assert commands.load("other", "parallel", 2).num_speculative_tokens == 2


def test_zero_tokens_load_no_head(loads):
    loaded = commands.load(None, "parallel", 0)
    assert (loaded.head, loaded.spec().num_speculative_tokens) == (None, 0)
    assert [kind for kind, *_ in loads] == ["target"]


def test_an_absent_shipped_head_is_said_and_decodes_plainly(loads, monkeypatch, capsys):
    monkeypatch.setattr(commands, "default_head_path", lambda: None)
    assert commands.load(None, None, None).head is None
    assert "not installed; decoding without one" in capsys.readouterr().err
    with pytest.raises(CommandError, match="there is no head"):
        commands.load(None, None, 4)


def test_a_sequential_head_has_a_default_and_no_limit(loads):
    assert commands.load("m", "sequential", None).num_speculative_tokens == commands.DEFAULT_TOKENS
    assert commands.load("m", "sequential", 9).num_speculative_tokens == 9


@pytest.mark.parametrize(
    ("head", "method", "words"),
    [
        ("parallel", "eagle3", "is P-EAGLE .* but EAGLE-3 .* was asked for"),
        ("sequential", "peagle", "is EAGLE-3 .* but P-EAGLE .* was asked for"),
    ],
)
def test_a_head_runs_only_as_what_it_is(loads, head, method, words):
    with pytest.raises(CommandError, match=words):
        commands.load("m", head, 2, method=method)


def test_tokens_without_a_head_or_below_zero_are_refused_before_loading(loads):
    with pytest.raises(CommandError, match="there is no head"):
        commands.load("m", None, 3)
    with pytest.raises(CommandError, match=r"0 .* or more, found -1"):
        commands.load(None, None, -1)
    assert loads == []


@pytest.mark.parametrize("asked", [{"speculate": True}, {"method": "eagle3"}, {"method": "peagle"}])
def test_a_method_without_a_head_is_refused_before_loading_unless_it_is_off(loads, monkeypatch, asked):
    monkeypatch.setattr(commands, "default_head_path", lambda: None)
    with pytest.raises(CommandError, match="a method of speculation is named but there is no head for m;"):
        commands.load("m", None, None, **asked)
    with pytest.raises(CommandError, match="there is no head for the embedded model"):
        commands.load(None, None, None, **asked)
    assert loads == []
    assert commands.load("m", None, 0, **asked).head is None


def test_a_revision_is_for_the_hub_alone(loads, tmp_path):
    file = tmp_path / "model.gguf"
    file.touch()
    for local in (tmp_path, file):
        with pytest.raises(
            CommandError, match=f"'v2' is for a model of the .* hub, but the model is {local}"
        ):
            commands.load(str(local), None, None, revision="v2")
    with pytest.raises(CommandError, match="but the model is the embedded model"):
        commands.load(None, None, None, revision="v2")
    assert loads == []
    commands.load("org/name", None, None, revision="v2")
    assert loads[0][2]["revision"] == "v2"


@pytest.mark.parametrize("ref", ["x" * 5000, "/tmp/" + "x" * 300, "~nobody-here/x"])
@pytest.mark.parametrize("place", ["model", "head", "tokenizer"])
def test_a_name_that_cannot_be_a_path_is_one_line(loads, place, ref):
    named = {"model": "m", "head": None, "num_speculative_tokens": None} | {place: ref}
    with pytest.raises(CheckpointError, match="is no path that can be opened") as error:
        commands.load(**named)
    assert len(str(error.value)) < 200


def test_a_context_beyond_the_memory_is_refused_and_names_what_fits(loads):
    endless = dataclasses.replace(CONFIG, max_position=2**31 - 1)
    loaded = commands.load("m", None, None)
    loaded.target = dataclasses.replace(loaded.target, config=dataclasses.replace(endless, num_layers=10**6))
    with pytest.raises(
        CommandError, match=r"a context of 1000000000 tokens needs .* ask for at most (\d+)"
    ) as e:
        loaded.decoder(10**9)
    fits = int(str(e.value).split("at most ")[1].split()[0])
    commands.check_memory(loaded, fits)
    with pytest.raises(CommandError):
        commands.check_memory(loaded, fits + 1)


def test_a_tree_without_a_heads_drafts_is_refused(loads):
    tree = Arrangement(8)
    for loaded in (commands.load(None, None, 0), commands.load("org/model", None, None)):
        with pytest.raises(CommandError, match="a tree is made of a P-EAGLE head's drafts, but there are no"):
            loaded.decoder(64, arrangement=tree)
    looked_up = dataclasses.replace(commands.load("org/model", None, None), lookup=Lookup(4, 2))
    with pytest.raises(CommandError, match="but the drafts are looked up; leave the tree out"):
        looked_up.decoder(64, arrangement=tree)


def test_the_caches_have_what_the_weights_leave_of_the_memory(loads, monkeypatch):
    loaded = commands.load(None, None, None)
    assert loaded.head is not None
    weights = sum(x.nbytes for x in jax.tree.leaves((loaded.target.params, loaded.head.params)))
    target, head = loaded.target.config, loaded.head.config
    size = loaded.dtype.itemsize
    position = 2 * size * (target.num_layers * 2 * 6 + head.num_layers * 3 * 4)
    row = sum(x.nbytes for x in jax.tree.leaves(settings_of(Request([0]), 500, target.vocab_size)))
    assert row > 4 * target.vocab_size  # counts of every token
    monkeypatch.setattr(memory, "_machine_memory", lambda: 2 * (weights + 8 * row + 1000 * position))
    assert commands.kv_room(loaded, 0.5, 8) == 1000
    assert commands.kv_room(loaded, 0.5, 7) > 1000
    assert commands.kv_room(dataclasses.replace(loaded, head=None), 0.5, 8) > 1000
    decoder = loaded.decoder(500, memory_utilization=0.5, batch=8)
    assert decoder.pool.slots == 1000 // decoder.pool.positions == 1
    monkeypatch.setattr(memory, "_machine_memory", lambda: weights)
    with pytest.raises(CommandError, match="the weights and 8 requests' settings take"):
        commands.kv_room(loaded, 0.5, 8)


def test_more_tokens_than_the_head_was_trained_for_are_refused(loads):
    with pytest.raises(ConfigError, match=r"num_speculative_tokens is 4, but the head was trained for 3"):
        commands.load("m", "parallel", 4).decoder(100)


def test_the_context_is_the_models_and_on_a_cpu_at_most_2048(loads):
    target = commands.load("m", None, None).target
    assert commands.context_limit(target) == 700
    assert commands.context_limit(target, 2) == 2
    for wrong in (1, 0, -5, 701):
        with pytest.raises(CommandError, match=rf"must be in 2\.\.700, .* found {wrong}"):
            commands.context_limit(target, wrong)


@pytest.mark.parametrize(
    ("backend", "flags", "expected"),
    [
        ("cpu", "fpu avx512_bf16 amx_bf16", jnp.bfloat16),
        ("cpu", "fpu avx512f avx512_bf16", jnp.bfloat16),
        ("cpu", "fpu avx2 avx512f", jnp.float32),
        ("tpu", "", jnp.bfloat16),
    ],
)
def test_the_default_dtype_follows_the_machine(monkeypatch, backend, flags, expected):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(commands.Path, "read_text", lambda self, **_: f"model name : x\nflags\t\t: {flags}\n")
    assert commands.resolve_dtype("auto") == expected
    assert commands.resolve_dtype("float32") == jnp.float32


def test_a_machine_without_proc_is_taken_to_have_no_flags(monkeypatch):
    def missing(self, **_):
        raise FileNotFoundError

    monkeypatch.setattr(commands.Path, "read_text", missing)
    assert commands.default_dtype() == jnp.float32


def test_the_report_names_what_was_resolved(loads):
    report = dict(commands.describe(commands.load("m", "parallel", 2), 99))
    assert report["head"] == "P-EAGLE, 1 layers, draft vocabulary 90, trained for K up to 3"
    assert report["taps"] == "0, 1, 2 of boundaries 0..2"
    assert (report["K"], report["max_model_len"]) == (2, 99)


def quantized_target(kind="int8"):
    """The tiny target with two quantised matrices."""
    first = PARAMS.layers[0]
    first = first.replace(wq=quantize(first.wq, kind), wk=quantize(first.wk, kind))
    params = PARAMS.replace(layers=(first, *PARAMS.layers[1:]))
    return LoadedTarget(CONFIG, params, TOKENIZER, "tiny", {}, "memory", kind)


def test_quantisation_is_asked_of_the_target_and_never_of_the_head(loads):
    commands.load(None, None, None, quantization="int8")
    (_, _, target), (_, _, head) = loads
    assert target["quantization"] == "int8"
    assert "quantization" not in head


def test_the_report_says_what_is_quantised():
    loaded = commands.Loaded(quantized_target(), None, 0, jnp.dtype(jnp.float32))
    assert dict(commands.describe(loaded, 99))["quantization"].startswith("int8, ")


def test_quantised_weights_leave_more_of_the_memory_for_the_caches(monkeypatch):
    monkeypatch.setattr(memory, "_machine_memory", lambda: 10**6)
    plain = commands.Loaded(
        LoadedTarget(CONFIG, PARAMS, TOKENIZER, "tiny", {}, "memory"), None, 0, jnp.dtype(jnp.float32)
    )
    saved = dataclasses.replace(plain, target=quantized_target())
    wq, wk = saved.target.params.layers[0].wq, saved.target.params.layers[0].wk
    less = sum(4 * w.values.size - w.nbytes for w in (wq, wk))
    position = 2 * 4 * CONFIG.num_layers * CONFIG.block.num_kv_heads * CONFIG.block.head_dim
    gained = commands.kv_room(saved, 0.5, 1) - commands.kv_room(plain, 0.5, 1)
    assert less // position <= gained <= less // position + 1


def test_an_int8_cache_has_more_positions_in_the_same_memory(loads, monkeypatch):
    kinds, f32 = ("auto", "int8"), {"dtype": "float32"}
    plain, saved = (commands.load(None, None, None, kv_cache_dtype=kind, **f32) for kind in kinds)
    monkeypatch.setattr(memory, "_machine_memory", lambda: 2 * 10**6)
    room = [commands.kv_room(loaded, 0.5, 1) for loaded in (plain, saved)]
    block, size = CONFIG.block, plain.dtype.itemsize
    heads = 2 * CONFIG.num_layers * block.num_kv_heads
    head = plain.head.config
    drafter = 2 * head.num_layers * head.block.num_kv_heads * head.block.head_dim * size
    whole, less = heads * block.head_dim * size, heads * (block.head_dim + 4)
    assert room[0] * (whole + drafter) <= room[1] * (less + drafter) < (room[0] + 2) * (whole + drafter)
    report = dict(commands.describe(saved, 99))
    assert report["KV cache"].startswith("int8, ")
    assert "KV cache" not in dict(commands.describe(plain, 99))


def test_fp8_is_not_for_a_cpu():
    with pytest.raises(CommandError, match="fp8 is for GPUs and TPUs, found a CPU; ask for int8"):
        commands.load(None, None, 0, quantization="fp8")


def test_a_ring_takes_a_slots_memory_and_no_positions(loads, monkeypatch):
    """Half of the layers see a window: a position takes half, and each slot a ring beside."""
    loaded = commands.load("m", None, None, dtype="float32")
    config = dataclasses.replace(loaded.target.config, windows=(8, 0))
    windowed = dataclasses.replace(loaded, target=dataclasses.replace(loaded.target, config=config))
    monkeypatch.setattr(memory, "_machine_memory", lambda: 2 * 10**7)
    whole, half = commands.kv_room(loaded, 0.5, 3), commands.kv_room(windowed, 0.5, 3, (256, 0))
    assert whole * config.num_layers - 3 * 256 - half in range(config.num_layers + 1)
    assert config.num_layers == 2
