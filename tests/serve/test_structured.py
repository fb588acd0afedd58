"""Every spelling of a constraint becomes the one grammar that it means."""

from __future__ import annotations

import json

import pytest

from peagle_jax.serve.grammar import GrammarSpec
from peagle_jax.serve.protocol import CompletionRequest
from peagle_jax.serve.structured import grammar_of
from tests.serve.conftest import user
from tests.serve.engine_double import says

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"type": "structural_tag", "structures": [], "triggers": ["<"]}


@pytest.mark.parametrize(
    ("body", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            "json_schema",
            json.dumps(SCHEMA),
        ),
        ({"response_format": TAG}, "structural_tag", json.dumps(TAG)),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, "regex", "[0-9]{3}"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", '["a", "b"]'),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "grammar", "root ::= x"),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structural_tag", "{}"),
        ({"guided_json": SCHEMA}, "json_schema", json.dumps(SCHEMA)),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a"]}, "choice", '["a"]'),
        ({"guided_grammar": "g"}, "grammar", "g"),
    ],
)
def test_a_spelling_and_its_grammar(body, kind, value):
    assert grammar_of(CompletionRequest.model_validate({"prompt": "x"} | body))[0] == GrammarSpec(kind, value)


@pytest.mark.parametrize("body", [{}, {"response_format": {"type": "text"}}, {"response_format": None}])
def test_no_constraint(body):
    assert grammar_of(CompletionRequest.model_validate({"prompt": "x"} | body))[0] is None


def test_a_grammar_that_does_not_compile_is_a_400_with_its_reason(serve):
    def check(spec):
        raise ValueError("unexpected end\nof the pattern")

    server = serve(says("x"), check_grammar=check)
    response = server.post("/v1/completions", prompt="x", guided_regex="(")
    assert (response.status_code, response.json()["error"]["message"]) == (
        400,
        "guided_regex: unexpected end of the pattern",
    )
    body = {"messages": user("x"), "response_format": {"type": "json_object"}}
    assert server.post("/v1/chat/completions", **body).json()["error"]["param"] == "response_format"
