"""--speculative-config takes vLLM's JSON and says what is wrong with any other."""

from __future__ import annotations

import json

import pytest

from peagle_jax.arguments import CommandError
from peagle_jax.serve.speculative_config import OFF, SpeculativeOptions, parse_speculative_config
from peagle_jax.speculation import Arrangement
from peagle_jax.speculative.lookup import Lookup


def parse(**values) -> SpeculativeOptions:
    return parse_speculative_config(json.dumps(values))


def test_vllms_reference_config_is_p_eagle():
    options = parse(method="eagle3", model="m", num_speculative_tokens=7, parallel_drafting=True)
    assert options == SpeculativeOptions("m", "peagle", 7, speculate=True)


@pytest.mark.parametrize("name", ["peagle", "p_eagle"])
def test_both_names_of_the_method_are_taken(name):
    assert parse(method=name).method == "peagle"


def test_what_is_left_out_is_for_the_head_to_say():
    assert parse() == SpeculativeOptions(None, None, None)
    assert parse(method="eagle3").method is None  # how vLLM names both kinds
    assert parse(method=None, model=None, parallel_drafting=None) == SpeculativeOptions()


@pytest.mark.parametrize(
    "values",
    [{"method": "eagle3"}, {"method": "peagle"}, {"parallel_drafting": True}, {"parallel_drafting": False}],
)
def test_naming_a_method_asks_for_speculation(values):
    assert parse(**values).speculate
    assert not parse(model="m", num_speculative_tokens=2).speculate


def test_parallel_drafting_decides_alone():
    assert parse(parallel_drafting=True).method == "peagle"
    assert parse(parallel_drafting=False).method == "eagle3"
    assert parse(method="eagle3", parallel_drafting=False).method == "eagle3"


def test_ngram_has_a_lookup_and_no_head():
    assert parse(method="ngram").lookup == Lookup(5, 5)
    assert parse(method="ngram", prompt_lookup_max=4).lookup == Lookup(4, 4)
    found = parse(method="ngram", prompt_lookup_max=4, prompt_lookup_min=2, num_speculative_tokens=3)
    assert (found.lookup, found.method, found.num_speculative_tokens) == (Lookup(4, 2), None, 3)
    rows = [[1, 2, 3], [3, 4, 0]]
    fixed = parse(method="ngram", num_speculative_tokens=3, num_speculative_tokens_per_batch_size=rows)
    assert fixed.num_speculative_tokens_per_batch_size == ((1, 2, 3), (3, 4, 0))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"prompt_lookup_max": 3}, "prompt_lookup_max and prompt_lookup_min are for method ngram"),
        ({"method": "ngram", "model": "m"}, "method ngram has no head; leave model out"),
        ({"method": "ngram", "num_speculative_nodes": 8}, "has no head; leave num_speculative_nodes out"),
        ({"method": "ngram", "speculative_token_tree": "[(0,)]"}, "leave speculative_token_tree out"),
        ({"method": "ngram", "parallel_drafting": True}, "leave parallel_drafting out"),
        ({"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 3}, "found 3 and 2"),
        ({"method": "ngram", "prompt_lookup_max": 0}, "must be in 1..prompt_lookup_max"),
        (
            {"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 2, 3]]},
            "method ngram drafts num_speculative_tokens or none",
        ),
    ],
)
def test_what_ngram_cannot_have_is_refused(values, words):
    with pytest.raises(CommandError, match=words):
        parse(**values)


def test_null_and_zero_tokens_are_off():
    assert parse_speculative_config("null") == OFF
    assert parse(num_speculative_tokens=0) == OFF


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"num_spec_tokens": 3},
            "unknown key 'num_spec_tokens'; valid keys are method, model, num_speculative",
        ),
        ({"method": "medusa"}, "method 'medusa' is not supported; expected one of eagle3, peagle, p_eagle"),
        ({"num_speculative_tokens": -1}, "must be 0 (off) or more, found -1"),
        ({"num_speculative_tokens": "5"}, 'must be a whole number, found "5"'),
        ({"num_speculative_tokens": True}, "must be a whole number, found true"),
        ({"num_speculative_tokens": 2.0}, "must be a whole number, found 2.0"),
        ({"parallel_drafting": "true"}, "must be a boolean"),
        ({"model": 3}, "model must be a string"),
        ({"model": ""}, "model is empty; name a folder or a hub id"),
        ({"model": " "}, "model is empty; name a folder or a hub id"),
        (
            {"method": "peagle", "parallel_drafting": False},
            "drafts in parallel, but parallel_drafting is false",
        ),
    ],
)
def test_wrong_values_are_one_line(values, words):
    with pytest.raises(CommandError) as error:
        parse(**values)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"), [("{", "is not JSON"), ("[]", "must be a JSON object"), ("3", "must be a JSON object")]
)
def test_what_is_not_an_object_is_refused(text, words):
    with pytest.raises(CommandError, match=words):
        parse_speculative_config(text)


@pytest.mark.parametrize(
    ("spec", "method", "tokens"),
    [
        (True, "peagle", None),
        (False, "eagle3", None),
        ({}, "peagle", None),
        ({"depth": 4, "num_trees": 1}, "peagle", 4),
    ],
)
def test_sagemakers_name_of_parallel_drafting(spec, method, tokens):
    options = parse_speculative_config(json.dumps({"method": "eagle3", "parallel_drafting_spec": spec}))
    assert (options.method, options.num_speculative_tokens) == (method, tokens)


def test_widths_by_batch_size_and_synthetic_rates():
    options = parse(
        num_speculative_tokens_per_batch_size=[[1, 4, 5], [5, 64, 0]], synthetic_acceptance_rates=[1, 0.5]
    )
    assert options.num_speculative_tokens_per_batch_size == ((1, 4, 5), (5, 64, 0))
    assert options.synthetic_acceptance_rates == (1.0, 0.5)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"parallel_drafting_spec": 5}, "must be a boolean .* or an object"),
        ({"parallel_drafting_spec": {"deep": 5}}, "unknown key 'deep'; valid keys are depth, num_trees"),
        ({"parallel_drafting_spec": {"depth": 0}}, "at least 1, found 0"),
        ({"parallel_drafting_spec": {"num_trees": 0}}, "at least 1, found 0"),
        (
            {"parallel_drafting_spec": {"num_trees": 2}, "num_speculative_nodes": 9},
            "num_speculative_nodes and parallel_drafting_spec's num_trees are different trees",
        ),
        ({"num_speculative_nodes": -1}, r"must be 0 \(a chain\) or more, found -1"),
        ({"speculative_token_tree": "[(0,), (0, 'a')]"}, "must be a list of paths"),
        ({"speculative_token_tree": "__import__('os')"}, "must be a list of paths"),
        ({"speculative_token_tree": []}, "must be a list of paths"),
        ({"speculative_token_tree": "7"}, "must be a list of paths"),
        ({"parallel_drafting_spec": True, "parallel_drafting": False}, "contradicts parallel_drafting"),
        ({"parallel_drafting_spec": {"depth": 3}, "num_speculative_tokens": 2}, "depth contradicts"),
        ({"num_speculative_tokens_per_batch_size": []}, "is empty"),
        ({"num_speculative_tokens_per_batch_size": [[2, 4, 5]]}, "begins at 1"),
        ({"num_speculative_tokens_per_batch_size": [[1, 4, 5], [6, 7, 1]]}, "begins at 5"),
        ({"num_speculative_tokens_per_batch_size": [[1, 4]]}, r"list of \[from, to, K\]"),
        ({"synthetic_acceptance_rates": [0.5, 0.7]}, "do not rise"),
        ({"synthetic_acceptance_rates": [1.5]}, "in 0..1"),
        ({"synthetic_acceptance_rates": [True]}, "numbers in 0..1"),
        ({"draft_tensor_parallel_size": "2"}, "draft_tensor_parallel_size must be a whole number"),
    ],
)
def test_wrong_values_of_the_newer_keys_are_told(values, words):
    with pytest.raises(CommandError, match=words):
        parse_speculative_config(json.dumps(values))


@pytest.mark.parametrize("tree", ["[(0,), (1,), (0, 0)]", [[0], [1], [0, 0]]])
def test_a_fixed_tree_is_vllms_text_or_lists(tree):
    options = parse_speculative_config(json.dumps({"model": "h", "speculative_token_tree": tree}))
    assert options.arrangement == Arrangement(0, ((0,), (1,), (0, 0)), adaptive=True)


def test_trees_of_any_kind_are_arrangements():
    def of(**values):
        return parse_speculative_config(json.dumps({"model": "h"} | values)).arrangement

    assert of() == Arrangement(adaptive=True)
    assert of(num_speculative_nodes=16) == Arrangement(16, adaptive=True)
    assert of(parallel_drafting_spec={"depth": 4, "num_trees": 3}) == Arrangement(num_trees=3, adaptive=True)
    assert not of(synthetic_acceptance_rates=[0.5]).adaptive
    assert not of(num_speculative_tokens_per_batch_size=[[1, 4, 3]]).adaptive
