"""Drafts that stood before: found as the definition says, and never another answer for them."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle_jax.config import ConfigError
from peagle_jax.speculative.decoder import Decoder
from peagle_jax.speculative.lookup import Lookup, LookupDecoder, find_drafts
from peagle_jax.speculative.request import Request
from peagle_jax.speculative.rules import all_allowed
from peagle_jax.speculative.sampling import SamplingParams
from tests.tiny import TARGET, VOCAB, target_params

K = 4
CONFIG = dataclasses.replace(TARGET, num_layers=2)
PARAMS = target_params(CONFIG)


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 1]),
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2]),  # the most recent one
        ([9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2], [3, 8, 1, 2]),  # the longest one
        ([7, 7, 7, 7], [7]),
        ([1, 2, 3, 4], []),
        ([5, 1, 2, 1], []),  # one token alone is too few
        ([1], []),
        ([], []),
    ],
)
def test_drafts_follow_the_last_tokens_where_they_stood_before(tokens, found):
    assert find_drafts(tokens, K, Lookup(3, 2)) == found


@given(st.lists(st.integers(0, 2), max_size=24), st.integers(1, 4), st.integers(1, 4))
def test_drafts_are_those_of_the_definition(tokens, most, least):
    expected: list[int] = []
    for n in range(most, least - 1, -1):
        places = [i for i in range(len(tokens) - n) if tokens[i : i + n] == tokens[len(tokens) - n :]]
        if places and not expected:
            expected = tokens[places[-1] + n :][:K]
    assert find_drafts(tokens, K, Lookup(most, least)) == expected


@pytest.fixture(scope="module")
def decoders():
    options = {"max_model_len": 96, "batch": 2, "widths": (2,), "prefill_chunk": 48}
    return Decoder(CONFIG, PARAMS, **options), LookupDecoder(CONFIG, PARAMS, K, Lookup(3, 1), **options)


def answers(decoder, *requests: Request) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Each request's tokens, and (accepted, drafted) of all rounds that drafted."""
    said: list[list[int]] = [[] for _ in requests]
    rounds = []
    for results in decoder.run(requests):
        for tokens, result in zip(said, results, strict=True):
            if result is not None:
                tokens += result.tokens
                if result.drafted:
                    rounds.append((result.accepted, result.drafted))
    return said, rounds


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.9, seed=3)])
def test_answers_are_those_of_plain_decoding(decoders, sampling):
    plain, lookup = decoders
    prompts = [[1, 2, 3, 4, 1, 2, 3], list(range(20, 50))]
    requests = [Request(p, sampling, 30) for p in prompts]
    expected, none = answers(plain, *requests)
    found, rounds = answers(lookup, *requests)
    assert (found, none) == (expected, [])
    assert rounds and all(0 <= accepted <= drafted <= K for accepted, drafted in rounds)


def test_what_an_answer_repeats_is_accepted(decoders):
    plain, lookup = decoders
    prompt = [3, 1, 4, 1, 5]
    ((answer,), _) = answers(plain, Request(prompt, max_tokens=12))
    # The prompt holds its own answer: every full draft out of it is right.
    again = [*prompt, *answer, *prompt]
    ((expected,), _) = answers(plain, Request(again, max_tokens=20))
    ((found,), rounds) = answers(lookup, Request(again, max_tokens=20))
    assert found == expected
    assert sum(accepted for accepted, _ in rounds) > 0


def test_nothing_compiles_after_warm_up(decoders):
    _, lookup = decoders
    told = []
    lookup.warm_up(lambda what, number, count: told.append(what))
    compiled = lookup.compilations
    assert "verification of 2 sequences" in told
    answers(lookup, Request([1, 2, 1, 2, 1], max_tokens=9), Request([5], max_tokens=3))
    assert set(lookup.idle_rounds(iter(range(10**6)).__next__)) == {(2, 0, 0), (2, K, K)}
    assert lookup.compilations == compiled


class Nothing:
    """A grammar that forbids nothing."""

    finished = False

    def window(self, drafts):
        return list(drafts), all_allowed(VOCAB, len(drafts) + 1)

    def advance(self, tokens):
        return len(tokens)


def test_a_request_with_a_grammar_goes_without_drafts(decoders):
    plain, lookup = decoders
    prompt = [1, 2, 1, 2, 1]
    expected, _ = answers(plain, Request(prompt, max_tokens=9))
    assert answers(lookup, Request(prompt, max_tokens=9, matcher=Nothing())) == (expected, [])


def test_settings_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="prompt_lookup_min must be in 1..prompt_lookup_max, found 3 and 2"):
        LookupDecoder(CONFIG, PARAMS, K, Lookup(2, 3), max_model_len=96)
    with pytest.raises(ConfigError, match="num_speculative_tokens must be in 1..95, found 96"):
        LookupDecoder(CONFIG, PARAMS, 96, Lookup(), max_model_len=96)
    with pytest.raises(ConfigError, match="ngram takes 1 round a dispatch, found 2"):
        LookupDecoder(CONFIG, PARAMS, K, Lookup(), 2, max_model_len=96)
