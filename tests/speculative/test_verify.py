"""Verification of trees: rows are those of each path alone, caches a fresh prompt's, text the target's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.config import ConfigError, SpecConfig
from peagle_jax.models import stack
from peagle_jax.models.stack import stack_layers
from peagle_jax.speculative.decoder import Decoder, PromptChunk, Request
from peagle_jax.speculative.sampling import SamplingParams
from peagle_jax.speculative.tree import Marginals, ancestors, best_tree
from tests.tiny import GPT_OSS, TARGET, VOCAB, head_config, head_params, target_params

HEAD = head_config(num_layers=1)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
SEEDED = SamplingParams(temperature=1.2, top_k=30, seed=11)
FIXED = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 2))
SPECS = {
    "best": SpecConfig(4, "peagle", num_speculative_nodes=13),
    "fixed": SpecConfig(4, "peagle", speculative_token_tree=FIXED),
    "widths": SpecConfig(4, "peagle", num_speculative_nodes=12, verify_widths=(2, 6)),
    "narrow chain": SpecConfig(4, "peagle", verify_widths=(1, 2)),
    "eagle3 chain": SpecConfig(3, "eagle3", verify_widths=(1,)),
}


def make(spec, target=TARGET, params=None, **options) -> Decoder:
    cfg = head_config(spec.method, num_layers=1) if spec.method else None
    params = stack_layers(target_params(target), target.cycle) if params is None else params
    options = {"max_model_len": 80, "prefill_chunk": 16} | options
    return Decoder(target, params, cfg, cfg and head_params(cfg), spec, **options)


def fill(d: Decoder, prompt, sampling=SamplingParams(), most=40) -> None:
    request = Request(prompt, sampling, most)
    for start in range(0, len(prompt), 16):
        d.prefill([PromptChunk(0, request, prompt, start, min(16, len(prompt) - start))])


@pytest.mark.parametrize("target", [TARGET, GPT_OSS], ids=["full", "windows"])
def test_every_node_has_the_logits_of_its_path_decoded_by_itself(target):
    d = make(SpecConfig(), target)
    fill(d, PROMPT)
    state = jax.tree.map(lambda x: x[0], d._programs.state)
    params, cache, n = d._programs.params[0], state.target_cache, len(PROMPT)
    rng = np.random.default_rng(4)
    log_probs = jnp.asarray(np.sort(np.log(rng.dirichlet(np.ones(5), (1, 3))))[..., ::-1], jnp.float32)
    tokens = jnp.asarray(np.argsort(rng.random((1, 3, VOCAB)))[..., :5], jnp.int32)
    tree = best_tree(state.last_token[:1], Marginals(tokens, log_probs), log_probs, 14)

    @jax.jit
    def logits(tokens, depths, seen):
        known = jnp.array([n])
        out = stack.forward(params, d.target, tokens, n + depths, cache.k, cache.v, known, seen)
        return stack.logits(params, d.target, out.hidden)[0]

    got, parents = logits(tree.tokens, tree.depths, ancestors(tree)), np.asarray(tree.parents[0])
    for node in range(15):
        path = [node]
        while path[0]:
            path.insert(0, parents[path[0]])
        rows = jnp.pad(tree.tokens[:, np.array(path)], ((0, 0), (0, 4 - len(path))))
        alone = logits(rows, jnp.arange(4)[None], jnp.tri(4, dtype=bool)[None])
        np.testing.assert_allclose(got[node], alone[len(path) - 1], atol=2e-4)


@pytest.mark.parametrize("target", [TARGET, GPT_OSS], ids=["full", "windows"])
def test_the_caches_after_tree_rounds_are_those_of_a_fresh_prompt(target):
    d = make(SPECS["best"], target)
    answer = [t for r in d.generate(PROMPT, SEEDED, 40) for t in r.tokens]

    def caches(prompt, rounds):
        fill(d, prompt, SEEDED, most=60)
        flights = [d.round([0], 4) for _ in range(rounds)]
        accepted = sum(r[0].accepted for f in flights for r in d.results(f))
        state = d._programs.state
        length = int(state.length[0, 0])
        kv = jax.tree.leaves((state.target_cache.k, state.target_cache.v))
        return [np.asarray(x)[0] for x in kv], length, accepted

    rolled, length, accepted = caches(PROMPT, 9)
    text = [*PROMPT, *answer]
    fresh, fresh_length, _ = caches(text[:length], 0)
    assert accepted > 0 and length == fresh_length
    for a, b in zip(rolled, fresh, strict=True):
        np.testing.assert_allclose(a[..., :length, :], b[..., :length, :], atol=2e-5)


@pytest.mark.parametrize("name", SPECS)
def test_every_tree_and_width_gives_the_plain_tokens(name, plain_texts):
    d = make(SPECS[name], batch=2)
    rng, k = np.random.default_rng(0), SPECS[name].num_speculative_tokens
    widths, used = SPECS[name].nodes_of(k), set()
    for sampling, expected in plain_texts:
        texts: list[list[int]] = [[], []]
        d.start_over(d.pool)
        for slot, prompt in enumerate((PROMPT, PROMPT[5:])):
            request = Request(prompt, sampling, 30)
            for start in range(0, len(prompt), 16):
                flight = d.prefill([PromptChunk(slot, request, prompt, start, min(16, len(prompt) - start))])
            texts[slot] += d.results(flight)[0][slot].tokens
        while min(map(len, texts)) < 30:
            pace = {nodes: float(rng.random()) for nodes in widths}
            for found in d.results(d.round([0, 1], k, pace=pace)):
                for slot, result in found.items():
                    texts[slot] += result.tokens
                    used.add(result.drafted)
        assert texts == expected
    assert used == set(widths)  # every width was the best of some round


@pytest.fixture(scope="module")
def plain_texts():
    d = make(SpecConfig())
    return [
        (s, [[t for r in d.generate(p, s, 30) for t in r.tokens] for p in (PROMPT, PROMPT[5:])])
        for s in (SamplingParams(), SEEDED)
    ]


def test_the_width_with_the_most_tokens_a_second_is_verified():
    """The estimates are calibrated to certainty or to nothing; the times decide what that is worth."""
    d = make(SPECS["narrow chain"])
    fill(d, PROMPT)

    def verified(offset, pace):
        d.calibration = np.float32([[0, offset]] * 4)
        ((result,),) = [r.values() for r in d.results(d.round([0], 4, pace=pace))]
        return result.drafted

    sure, hopeless = 12.0, -12.0
    assert verified(sure, {1: 1.0, 2: 1.0, 4: 1.0}) == 4
    assert verified(hopeless, {1: 1.0, 2: 1.1, 4: 1.2}) == 1
    assert verified(sure, {1: 1.0, 2: 1.0, 4: 2.0}) == 2  # 2, 3 and 2.5 tokens a unit of time
    assert verified(0.0, {1: 1.0, 2: 1.1, 4: 2.0}) == 2  # 1.5, 1.59 and 0.97


def test_drafts_are_reported_with_what_became_of_them():
    d = make(SPECS["widths"])
    fill(d, PROMPT, SEEDED)
    seen = accepted = 0
    for _ in range(8):
        flight = d.round([0], 4, pace={2: 9.0, 6: 1.0, 12: 9.0})
        report = jax.tree.map(lambda x: np.asarray(x)[0, 0, 0], flight.output.drafts)
        (result,) = d.results(flight)[0].values()
        assert report.confidence.shape == (12,) and not report.reached[6:].any()
        assert report.accepted.sum() == result.accepted and not (report.accepted & ~report.reached).any()
        assert report.depths[report.accepted].tolist() == list(range(1, result.accepted + 1))
        first = report.depths[:6] == 1
        assert report.reached[:6][first].all()
        seen, accepted = seen + report.reached.sum(), accepted + result.accepted
    assert seen > accepted > 0


def test_synthetic_rates_go_along_the_likeliest_path_of_a_tree():
    rates = (0.9, 0.6, 0.3)
    d = make(SpecConfig(3, "peagle", num_speculative_nodes=9), synthetic_rates=rates, batch=8)
    requests = [Request([3, seed], SamplingParams(seed=seed), 40) for seed in range(8)]
    hits, counted, lengths = np.zeros(3), 0, np.zeros(8, int)
    for results in d.run(requests):
        for i, result in enumerate(results):
            lengths[i] += len(result.tokens) if result else 0
            if result is not None and result.drafted and lengths[i] < 40:
                assert result.drafted == 9 and len(result.tokens) == result.accepted + 1
                counted, hits = counted + 1, hits + (np.arange(3) < result.accepted)
    assert lengths.tolist() == [40] * 8
    # A tree that does not go so deep accepts no more than it has.
    assert (hits / counted <= np.array(rates) + 2 / np.sqrt(counted)).all()
    np.testing.assert_allclose(hits[0] / counted, rates[0], atol=2 / np.sqrt(counted))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_speculative_nodes": 3}, "expected at least num_speculative_tokens, 4"),
        ({"num_speculative_nodes": -1}, "must not be negative"),
        ({"num_speculative_nodes": 8, "speculative_token_tree": ((0,),)}, "not both"),
        ({"speculative_token_tree": ((0,), (1, 0))}, r"\(1, 0\) has no parent; add \(1,\)"),
        ({"speculative_token_tree": ((0,), (0,))}, "a path twice"),
        ({"speculative_token_tree": ((0,), (-1,))}, "no path of 1 to 4"),
        ({"speculative_token_tree": ((0,), (0,) * 5)}, "no path of 1 to 4"),
        ({"verify_widths": (2, 2)}, "must ascend"),
        ({"verify_widths": (4,)}, "stay under 4"),
        ({"method": "eagle3", "num_speculative_nodes": 8}, "EAGLE-3"),
        ({"num_speculative_tokens": 0, "num_speculative_nodes": 8}, "num_speculative_tokens is 0"),
    ],
)
def test_a_tree_that_makes_no_sense_is_refused_in_one_line(changes, words):
    with pytest.raises(ConfigError, match=words):
        SpecConfig(**({"num_speculative_tokens": 4, "method": "peagle"} | changes))


def test_a_tree_wider_than_the_draft_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="draft vocabulary has, 31"):
        make(SpecConfig(4, "peagle", num_speculative_nodes=40))
