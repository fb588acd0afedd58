"""Schemathesis sends what the description allows and forbids: no 5xx, and every answer as described."""

from __future__ import annotations

import pytest

from tests.serve.conftest import running
from tests.serve.engine_double import says

schemathesis = pytest.importorskip("schemathesis")
hypothesis = pytest.importorskip("hypothesis")

from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
OPERATIONS = [
    ("get", "/health"),
    ("get", "/ping"),
    ("post", "/ping"),
    ("get", "/version"),
    ("get", "/load"),
    ("get", "/metrics"),
    ("get", "/v1/models"),
    ("get", "/v1/models/{name}"),
    ("post", "/v1/chat/completions"),
    ("post", "/v1/completions"),
    ("post", "/invocations"),
    ("post", "/tokenize"),
    ("post", "/detokenize"),
]


@pytest.fixture(scope="module")
def described():
    with running(says("naïve 🦅 answer")) as server:
        yield schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_every_operation_is_tried(described):
    found = [result.ok() for result in described.get_all_operations()]
    assert {(operation.method, operation.path) for operation in found} == set(OPERATIONS)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
@pytest.mark.timeout(900)  # a busy machine is slow
def test_every_answer_is_as_described(described, method, path, mode):
    operation = described[path][method]
    if mode is schemathesis.GenerationMode.NEGATIVE and not operation.body:
        pytest.skip("nothing that it takes could be wrong")

    @hypothesis.given(operation.as_strategy(generation_mode=mode))
    @hypothesis.settings(
        max_examples=25,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    def check(case):
        case.call_and_validate(checks=CHECKS)

    check()
