"""What the flags ask of the decoder and the engine is what these get."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from peagle_jax import commands
from peagle_jax.arguments import CommandError
from peagle_jax.checkpoint.model import load_target
from peagle_jax.config import ConfigError
from peagle_jax.serve import build
from peagle_jax.serve.arguments import EngineOptions
from peagle_jax.serve.speculative_config import SpeculativeOptions
from tests.serve.tiny_model import CONFIG, TOKENIZER, tiny_head, write_model
from tests.tiny import head_params


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    target = load_target(
        str(write_model(tmp_path_factory.mktemp("model") / "tiny")), dtype=jnp.dtype("float32")
    )
    head = tiny_head()
    return commands.Loaded(target, commands.Head(head, head_params(head), "here"), 3, jnp.dtype("float32"))


def test_flags_become_sizes(loaded):
    options = EngineOptions(max_num_seqs=5, rounds_per_dispatch=2)
    fixed = SpeculativeOptions(num_speculative_tokens_per_batch_size=((1, 2, 2), (3, 9, 0)))
    decoder = build.build_decoder(loaded, 100, options, fixed, guided=False)
    assert (decoder.batch, decoder.replicas, decoder.sizes.rounds) == (5, 1, 2)
    assert decoder.sizes.drafts == (0, 2, 3)
    engine = build.build_engine(decoder, TOKENIZER, options, fixed)
    assert [engine._draft_length.choose(8, running) for running in (2, 3, 10)] == [2, 0, 3]


def test_on_a_cpu_eight_requests_run_at_once_and_rounds_draft_all_or_nothing_and_verify_all_or_half(loaded):
    decoder = build.build_decoder(loaded, 100, EngineOptions(), SpeculativeOptions(), guided=True)
    assert (decoder.batch, decoder.sizes.widths) == (8, (1, 2, 4, 8))
    assert decoder.sizes.drafts == (0, 3) and decoder.spec.nodes_of(3) == (2, 3)
    assert decoder.target.vocab_size == CONFIG.vocab_size


def test_little_memory_means_fewer_slots_for_long_requests(loaded, monkeypatch):
    room = []

    def kv_room(loaded, utilization, slots, rings):
        room.append((utilization, slots, rings))
        return 1000

    monkeypatch.setattr(commands, "kv_room", kv_room)
    options = EngineOptions(max_num_seqs=5, gpu_memory_utilization=0.5)
    decoder = build.build_decoder(loaded, 190, options, SpeculativeOptions(), guided=False)
    assert room == [(0.5, 5, ())]
    assert sum(1 for pool in decoder.sizes.pools if pool.slots * pool.positions <= 1000) > 0
    assert decoder.sizes.pools[-1].slots < 5


def test_more_replicas_than_devices_are_refused_in_one_line():
    words = (
        "--data-parallel-size 999 x --tensor-parallel-size 2 asks for 1998 devices, but there are 4 devices"
    )
    with pytest.raises(CommandError, match=words) as error:
        build.placement(EngineOptions(data_parallel_size=999, tensor_parallel_size=2), SpeculativeOptions())
    assert "\n" not in str(error.value)


def test_flags_become_a_mesh():
    options = EngineOptions(data_parallel_size=2, tensor_parallel_size=2)
    placement = build.placement(options, SpeculativeOptions(draft_tensor_parallel_size=1))
    assert (placement.replicas, placement.tensor, placement.backend) == (2, 2, "shard_map")
    assert not placement.split_head
    with pytest.raises(ConfigError, match="must be 1 or 2, the target's, found 3"):
        build.placement(options, SpeculativeOptions(draft_tensor_parallel_size=3))


def test_synthetic_rates_are_one_a_draft(loaded):
    for rates in [(0.9, 0.5), (0.9,) * 4]:
        options = SpeculativeOptions(synthetic_acceptance_rates=rates)
        with pytest.raises(CommandError, match=f"has {len(rates)} rates, but num_speculative_tokens is 3"):
            build.build_decoder(loaded, 100, EngineOptions(), options, guided=False)


def test_a_k_above_the_heads_is_refused():
    with pytest.raises(CommandError, match="K = 7, above num_speculative_tokens, 5"):
        build.draft_lengths(
            5, SpeculativeOptions(num_speculative_tokens_per_batch_size=((1, 2, 7),)), "peagle"
        )
