"""Who may ask: the API key."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from peagle_jax.serve.errors import APIError

OPEN = frozenset({"/", "/health", "/ping", "/version", "/metrics", "/load"})
"""What orchestrators and scrapers read without a key, as they do from vLLM, and the playground's page.
Everything that reaches the model needs one: an open /invocations would be a way around it."""


class ApiKey:
    """ASGI middleware: without one of the keys as a bearer token, everything that is not OPEN is 401."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        open_path = scope.get("path", "").removeprefix(scope.get("root_path", "")) in OPEN
        if scope["type"] != "http" or scope["method"] == "OPTIONS" or open_path or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        error = APIError(
            "this server needs its API key; send it as Authorization: Bearer KEY",
            status=401,
            code="invalid_api_key",
        )
        await JSONResponse(error.body, 401, headers={"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        found = hashlib.sha256(key).digest()
        matches = [secrets.compare_digest(found, known) for known in self._keys]  # all: time must tell none
        return scheme.lower() == b"bearer" and any(matches)
