"""Every rule against a plain reference, alone and inside a verification window."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.layers.attention import NEGATIVE
from peagle_jax.speculative.rules import (
    advance,
    apply_rules,
    check_rules,
    choose,
    only,
    pack_ids,
    rules_state,
    token_counts,
)
from peagle_jax.speculative.sampling import SamplingParams, choose_tokens, first_argmax

V, B, W = 43, 3, 4
LOGITS = np.random.default_rng(0).normal(size=(B, W, V)).astype(np.float32) * 3
PROMPTS = [[1, 2, 3, 3], [7, 8], [40, 0, 5, 6, 7]]
ANSWERS = [[3, 9, 9], [], [11]]
WINDOW = np.array([[9, 20, 20, 21], [8, 7, 7, 7], [11, 40, 41, 11]])
CHAIN = (WINDOW, np.tile(np.tri(4, dtype=bool), (3, 1, 1)))
POSITIONS = np.array([[len(p) + len(a) + i for i in range(W)] for p, a in zip(PROMPTS, ANSWERS, strict=True)])
STOPS = [frozenset({4, 5}), frozenset(), frozenset({42})]

RULES = {
    "presence": SamplingParams(presence_penalty=1.5),
    "frequency": SamplingParams(frequency_penalty=-0.7),
    "repetition": SamplingParams(repetition_penalty=1.8),
    "penalties": SamplingParams(presence_penalty=0.3, frequency_penalty=0.4, repetition_penalty=0.6),
    "min_tokens": SamplingParams(min_tokens=5),
    "bias": SamplingParams(logit_bias=((41, -100.0), (0, 6.5), (7, 3.0))),
    "allowed": SamplingParams(allowed_token_ids=(0, 5, 31, 32, 42)),
}
RULES["all"] = dataclasses.replace(
    RULES["penalties"],
    min_tokens=4,
    logit_bias=RULES["bias"].logit_bias,
    allowed_token_ids=RULES["allowed"].allowed_token_ids,
)


def reference(logits, p: SamplingParams, prompt, answer, stops, legal=None) -> np.ndarray:
    """One row, one rule after another, as vLLM's sampler orders them."""
    x = logits.astype(np.float64)
    for token, bias in p.logit_bias:
        x[token] += bias
    for token in set(prompt) | set(answer):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(answer):
        x[token] -= p.frequency_penalty * answer.count(token) + p.presence_penalty
    banned = set() if p.allowed_token_ids is None else set(range(V)) - set(p.allowed_token_ids)
    if len(answer) < p.min_tokens:
        banned |= stops
    if legal is not None:
        banned |= set(range(V)) - legal
    x[list(banned)] = NEGATIVE
    return x


def state_of(params):
    return rules_state(params, PROMPTS, STOPS, V, ANSWERS)


@pytest.mark.parametrize("name", RULES)
def test_row_i_of_a_window_is_what_plain_decoding_would_see_there(name):
    params = [RULES[name], SamplingParams(), RULES[name]]
    got = jax.jit(apply_rules)(LOGITS, POSITIONS, CHAIN, state_of(params))
    for b in range(B):
        for i in range(W):
            answer = [*ANSWERS[b], *WINDOW[b, 1 : i + 1].tolist()]
            expected = reference(LOGITS[b, i], params[b], PROMPTS[b], answer, STOPS[b])
            np.testing.assert_allclose(got[b, i], expected, rtol=1e-5, atol=1e-5)
    assert not np.allclose(got[0], LOGITS[0])  # the rule did something in this very case


def test_counts_advance_by_the_accepted_tokens_and_only_where_they_are_needed():
    params = [RULES["presence"], SamplingParams(), RULES["repetition"]]
    state = jax.jit(advance)(state_of(params), WINDOW[:, 1:], np.array([2, 3, 0]))
    np.testing.assert_array_equal(state.counts[0], token_counts(PROMPTS[0], [*ANSWERS[0], 20, 20], V))
    np.testing.assert_array_equal(state.counts[1], 0)
    np.testing.assert_array_equal(state.counts[2], token_counts(PROMPTS[2], ANSWERS[2], V))


def test_a_draft_vocabulary_sees_the_rules_of_its_target_ids():
    ids = jnp.array([3, 9, 20, 31, 41, 42])
    params = [RULES["all"], RULES["penalties"], RULES["bias"]]
    whole = apply_rules(LOGITS, POSITIONS, CHAIN, state_of(params))
    part = apply_rules(LOGITS[..., ids], POSITIONS, CHAIN, state_of(params), token_ids=ids)
    np.testing.assert_allclose(part, whole[..., ids], rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_grammar_mask_cuts_each_row_by_itself(temperature):
    legal = [[{1, 2}, {33}, set(range(V)), {0, 42}] for _ in range(B)]
    masks = np.array([[pack_ids(sorted(row), V) for row in rows] for rows in legal])
    params = [SamplingParams(temperature=temperature, seed=b) for b in range(B)]
    chosen = np.asarray(jax.jit(choose)(LOGITS, POSITIONS, CHAIN, state_of(params), masks))
    for b in range(B):
        for i in range(W):
            assert chosen[b, i] in legal[b][i]
    free = choose(LOGITS, POSITIONS, CHAIN, state_of(params))
    np.testing.assert_array_equal(chosen[:, 2], free[:, 2])


def test_a_complete_grammar_ends_even_before_min_tokens():
    masks = np.broadcast_to(pack_ids(sorted(STOPS[0]), V), (B, W, 2))
    params = [RULES["min_tokens"]] * B
    chosen = choose(LOGITS, POSITIONS, CHAIN, state_of(params), masks)
    assert set(np.asarray(chosen[0]).tolist()) <= STOPS[0]


def test_ended_slots_keep_no_rule():
    active = np.array([False, True, False])
    params = [dataclasses.replace(RULES["all"], temperature=1.0), SamplingParams(), RULES["all"]]
    quiet = only(state_of(params), active)
    got = choose(LOGITS, POSITIONS, CHAIN, quiet)
    np.testing.assert_array_equal(got, first_argmax(jnp.array(LOGITS)))
    assert not np.asarray(quiet.sampling.temperature).any()


def test_without_rules_the_tokens_are_those_of_sampling_alone():
    params = [SamplingParams(temperature=t, top_p=0.9, seed=4) for t in (0.0, 0.7, 1.3)]
    state = state_of(params)
    expected = choose_tokens(LOGITS, POSITIONS, state.sampling)
    np.testing.assert_array_equal(choose(LOGITS, POSITIONS, CHAIN, state), expected)


def test_greedy_rows_without_rules_run_none_of_it():
    program = jax.make_jaxpr(choose)(LOGITS, POSITIONS, CHAIN, state_of([SamplingParams()] * B))
    (outer,) = [e for e in program.jaxpr.eqns if e.primitive.name == "cond"]
    plain, full = (str(branch) for branch in outer.params["branches"])
    size = f"{B},{W},{V}"
    assert size in plain and "cond" in full
    assert not any(word in plain for word in ("mul", "scatter", "sort", "threefry", "cond"))
    outside = [v.aval.shape for e in program.jaxpr.eqns if e is not outer for v in e.outvars]
    assert (B, W, V) not in outside


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty must be in -2..2, found 2.5"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"logit_bias": ((3, 101.0),)}, "logit_bias must be in -100..100, found 101.0 for token 3"),
        ({"logit_bias": ((-1, 1.0),)}, "id -1"),
        ({"logit_bias": ((3, 1.0), (3, 2.0))}, "one token twice"),
        ({"logit_bias": tuple((i, 1.0) for i in range(1025))}, "at most 1024 tokens, found 1025"),
        ({"allowed_token_ids": ()}, "allowed_token_ids must be at least one id"),
        ({"allowed_token_ids": (-3,)}, "allowed_token_ids"),
        ({"logprobs": 21}, "logprobs must be in 0..20, found 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused_in_one_line(values, words):
    with pytest.raises(ValueError, match=words) as error:
        SamplingParams(**values)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SamplingParams(logit_bias=((V, 1.0),)), f"logit_bias: token id {V}"),
        (SamplingParams(allowed_token_ids=(1, V + 2)), f"allowed_token_ids: token id {V + 2}"),
        (SamplingParams(min_tokens=9), "min_tokens is 9; expected at most max_tokens, 8"),
    ],
    ids=str,
)
def test_values_that_the_model_or_the_limit_cannot_honour_are_refused(params, words):
    with pytest.raises(ValueError, match=words):
        check_rules(params, V, 8)


def test_biases_are_kept_in_order_of_their_ids():
    assert SamplingParams(logit_bias=((9, 1.0), (2, -3.0))).logit_bias == ((2, -3.0), (9, 1.0))
