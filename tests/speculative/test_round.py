"""Speculation never changes the output; the drafter's rows are the training rows."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.config import ConfigError, SpecConfig
from peagle_jax.drafter.head import draft_logits, forward_cached, fuse
from peagle_jax.layers.attention import causal_mask
from peagle_jax.models.stack import stack_layers, unstack_layers
from peagle_jax.speculative.cache import create_cache, write
from peagle_jax.speculative.decoder import Decoder, PromptChunk, Request
from peagle_jax.speculative.sampling import SamplingParams
from peagle_jax.train.depth_zero import depth_zero
from peagle_jax.train.partition import Batch, depth_zero_inputs, rollout_hidden, with_mask_row
from tests.tiny import TARGET, VOCAB, head_config, head_params, target_params

PARAMS = stack_layers(target_params())  # scanned layers compile faster; one test below unrolls them
CONTEXT = 48
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=7),
    SamplingParams(temperature=1.5, top_k=20, top_p=0.9, min_p=0.01, seed=2**40 + 3),
]


def decoder(method=None, k=0, target=PARAMS, **options) -> Decoder:
    cfg = head_config(method, num_depths=8) if method else None
    params = head_params(cfg) if cfg else None
    options = {"max_model_len": CONTEXT, "prefill_chunk": 8} | options
    return Decoder(TARGET, target, cfg, params, SpecConfig(k, method), **options)


def tokens(d: Decoder, prompt, sampling, max_tokens=64, stop_ids=()) -> tuple[list[int], str | None, int]:
    out, reason, accepted = [], None, 0
    for result in d.generate(prompt, sampling, max_tokens, frozenset(stop_ids)):
        assert reason is None
        out += result.tokens
        accepted += result.accepted
        reason = result.finish_reason
    return out, reason, accepted


@pytest.fixture(scope="module")
def plain():
    return decoder()


@pytest.fixture(scope="module")
def heads():
    pairs = [("peagle", 1), ("peagle", 3), ("peagle", 5), ("peagle", 7), ("eagle3", 3)]
    return {pair: decoder(*pair) for pair in pairs}


PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7], list(range(8)), list(range(2, 40))]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "filtered"])
def test_every_head_and_k_gives_the_plain_tokens_up_to_the_end_of_the_context(plain, heads, sampling):
    accepted = 0
    for prompt in PROMPTS:
        expected, reason, _ = tokens(plain, prompt, sampling)
        assert len(expected) + len(prompt) == CONTEXT and reason == "length"
        for pair, d in heads.items():
            got, got_reason, hits = tokens(d, prompt, sampling)
            assert got == expected, pair
            assert got_reason == "length"
            accepted += hits
    assert accepted > 0  # some drafts were accepted, so that acceptance itself was exercised


def test_output_stops_at_the_first_stop_id_and_at_max_tokens(plain, heads):
    expected, _, _ = tokens(plain, PROMPTS[0], SAMPLINGS[1])
    stop = expected[6]
    cut = expected[: expected.index(stop) + 1]
    for d in [plain, *heads.values()]:
        assert tokens(d, PROMPTS[0], SAMPLINGS[1], stop_ids=[stop])[:2] == (cut, "stop")
        for n in (1, 2, 5):
            assert tokens(d, PROMPTS[0], SAMPLINGS[1], max_tokens=n)[:2] == (expected[:n], "length")
        assert tokens(d, PROMPTS[0], SAMPLINGS[1], max_tokens=len(cut), stop_ids=[stop])[1] == "stop"


def test_nothing_compiles_after_warm_up():
    d = decoder("peagle", 3, unstack_layers(PARAMS), max_model_len=100)
    d.warm_up()
    before, compiled = d.compilations, []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    try:
        idle = d.idle_rounds(time.perf_counter)
        for sampling in SAMPLINGS:
            tokens(d, PROMPTS[3], sampling)
    finally:
        jax.monitoring.clear_event_listeners()
    assert d.compilations == before == 2
    assert compiled == []
    assert idle.keys() == {(1, 3, 3)}
    assert idle[1, 3, 3] > 0


def test_batch_mates_rounds_and_late_reading_do_not_change_a_sequence(plain):
    d = Decoder(
        TARGET,
        PARAMS,
        head_config(),
        head_params(head_config()),
        SpecConfig(3, "peagle", rounds=2),
        max_model_len=CONTEXT,
        prefill_chunk=8,
        batch=4,
        lookahead=1,
    )
    requests = [Request(p, SAMPLINGS[i % 3], 20) for i, p in enumerate(PROMPTS[:3])]
    out = [[], [], []]
    for results in d.run(requests):
        for row, result in zip(out, results, strict=True):
            row += result.tokens if result else []
    assert out == [tokens(plain, r.prompt, r.sampling, 20)[0] for r in requests]


def test_draft_caches_after_acceptance_equal_a_fresh_prefill(heads):
    """Committed slots are rewritten from the target's features."""
    d = heads["peagle", 3]
    answer, _, _ = tokens(d, PROMPTS[0], SAMPLINGS[0], max_tokens=20)
    text = [*PROMPTS[0], *answer]

    def drafter_cache(prompt, rounds):
        request = Request(prompt, SAMPLINGS[0], 30)
        for start in range(0, len(prompt), 8):
            d.prefill([PromptChunk(0, request, prompt, start, min(8, len(prompt) - start))])
        for _ in range(rounds):
            d.round([0], 3)
        state = d._programs.state
        committed = int(state.length[0, 0] - state.pending.count[0, 0])
        return np.asarray(state.drafter_cache.k[1])[0, 0], committed

    rolled, count = drafter_cache(PROMPTS[0], 4)
    fresh, fresh_count = drafter_cache(text, 0)
    assert count > len(PROMPTS[0]) and fresh_count >= count
    np.testing.assert_allclose(rolled[:, :count], fresh[:, :count], atol=1e-5)


def test_logits_of_training_rows_equal_the_inference_pass():
    """The one test (architecture section 4): rows (a, 0..K-1) against a pass after slots <= a."""
    cfg = head_config()
    params = head_params(cfg).replace(draft_to_target=None)
    k, n, anchor = 4, 14, 8
    rng = np.random.default_rng(1)
    features = jnp.array(rng.normal(size=(1, n, cfg.feature_size)), jnp.float32)
    text = jnp.array(rng.integers(0, VOCAB, (1, n)))
    zeros = jnp.zeros((1, n), jnp.int32)
    batch = Batch(
        tokens=text,
        segment_ids=zeros,
        positions=jnp.arange(n)[None],
        loss_flags=zeros + 1,
        features=features,
        target_hidden=jnp.zeros((1, n, 12)),
        anchors=jnp.full((1, 1, 1), anchor),
        lengths=jnp.full((1, 1, 1), k - 1),
    )

    @jax.jit
    def training_rows(params, batch):
        hidden0, context = depth_zero(params, cfg, depth_zero_inputs(batch))
        counts = (1,) * (k - 1)
        masked = with_mask_row(params, cfg)
        rows = rollout_hidden(masked, cfg, batch, context, batch.anchors[0], batch.lengths[0], counts)
        return draft_logits(params, cfg, jnp.concatenate([hidden0[:, anchor : anchor + 1], rows], axis=1))[0]

    @jax.jit
    def inference_rows(params):
        cache = create_cache(cfg.num_layers, 1, 3, 32, 4, jnp.float32, False)
        start = jnp.array([0])
        committed = anchor - 2  # the last three committed slots arrive with the masks, as in a round
        g = fuse(params, cfg, features)
        h, key, value = forward_cached(
            params,
            cfg,
            text[:, 1 : committed + 1],
            g[:, :committed],
            jnp.arange(committed)[None],
            cache.k,
            cache.v,
            start,
            causal_mask(1, committed),
        )
        cache = write(cache, key, value, start, h)
        masks = jnp.broadcast_to(params.mask_hidden, (1, k + 2, cfg.feature_size))
        window = jnp.concatenate([features[:, committed : anchor + 1], masks], axis=1)
        mask_ids = jnp.full((1, k + 2), cfg.mask_token_id)
        ids = jnp.concatenate([text[:, committed + 1 : anchor + 2], mask_ids], axis=1)
        width = window.shape[1]
        h, _, _ = forward_cached(
            params,
            cfg,
            ids,
            fuse(params, cfg, window),
            committed + jnp.arange(width)[None],
            cache.k,
            cache.v,
            jnp.array([committed]),
            causal_mask(1, width),
        )
        return draft_logits(params, cfg, h[:, 2 : 2 + k])[0]

    trained, drafted = training_rows(params, batch), inference_rows(params)
    np.testing.assert_allclose(trained, drafted, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "k", "words"),
    [
        ({"num_depths": 4}, 5, "trained for 4"),
        ({"target_hidden_size": 16}, 2, "hidden size 16"),
        ({"vocab_size": 60}, 2, "vocabulary of 60"),
        ({"taps": (1, 3, 6)}, 2, "0..5"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_in_one_line(changes, k, words):
    cfg = head_config(**changes)
    with pytest.raises(ConfigError, match=words) as error:
        Decoder(TARGET, PARAMS, cfg, head_params(cfg), SpecConfig(k, "peagle"), max_model_len=CONTEXT)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request([]), "empty"),
        (Request([1] * CONTEXT), f"has {CONTEXT} tokens"),
        (Request([VOCAB]), f"token id {VOCAB}"),
        (Request([1], max_tokens=0), "max_tokens"),
        (Request([1], stop_ids=frozenset(range(20))), "stop ids"),
    ],
)
def test_a_request_that_cannot_be_decoded_is_refused_before_any_work(plain, request_, words):
    with pytest.raises(ValueError, match=words):
        plain.run([request_])


def test_synthetic_rates_accept_each_position_in_that_share_of_the_rounds():
    rates = (0.9, 0.5, 0.5, 0.1)
    d = decoder("peagle", 4, synthetic_rates=rates, batch=8)
    requests = [Request([3, seed], SamplingParams(seed=seed), 40) for seed in range(8)]
    hits, lengths = np.zeros(4), [0] * 8
    counted = 0
    for results in d.run(requests):
        for i, result in enumerate(results):
            if result is None:
                continue
            lengths[i] += len(result.tokens)
            if result.drafted == 4 and lengths[i] < 40:  # the last round may be cut
                counted += 1
                hits += np.arange(4) < result.accepted
                assert len(result.tokens) == result.accepted + 1
    assert lengths == [40] * 8
    assert counted > 80
    np.testing.assert_allclose(hits / counted, rates, atol=4 * 0.5 / np.sqrt(counted))
    assert hits[1] == hits[2]  # of one draw
