"""An end to what a client may send: a body is cut off before it is read whole or parsed."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ESCAPED = 12
"""Bytes of a character in JSON at most: two escapes of a surrogate pair."""
REST = 2**20
"""Bytes of a request beside its prompt."""
LARGEST = 2**26
"""What is parsed at once, however long the context is: parsing holds everybody else up."""


def body_limit(max_characters: int) -> int:
    """Bytes that a request with a prompt of so many characters can need."""
    return min(max_characters * ESCAPED + REST, LARGEST)


class BodyLimit:
    """ASGI middleware that ends a request whose body has more than ``limit`` bytes with 413.

    It counts what comes, so it holds for bodies that do not tell their length, and for those that lie.
    The error is raised where the body is read, so the application's handlers give it its shape.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise HTTPException(
                    413,
                    f"the body has more than {self._limit} bytes, which is more than a prompt that fits "
                    f"this model's context; shorten it",
                )
            return message

        await self._app(scope, limited, send)
