"""What the parsers of model output share: the deltas that they give, and text that may become a marker."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterable
from typing import Protocol


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """One whole call of a function. ``arguments`` is JSON text, as OpenAI's clients expect it."""

    index: int
    id: str
    name: str
    arguments: str


@dataclasses.dataclass(frozen=True)
class ChatDelta:
    """What some text added to a message. Calls come whole: a half one cannot be taken back."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __add__(self, other: ChatDelta) -> ChatDelta:
        return ChatDelta(
            self.content + other.content,
            self.reasoning + other.reasoning,
            self.tool_calls + other.tool_calls,
        )

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


class ChatParser(Protocol):
    """Splits an answer's text as it comes. The sum of all deltas does not depend on how it was cut."""

    def feed(self, text: str) -> ChatDelta:
        """What is certain after some more text."""
        ...

    def finish(self) -> ChatDelta:
        """What was held back, at the answer's end."""
        ...


class PlainParser:
    """All text is content."""

    def feed(self, text: str) -> ChatDelta:
        return ChatDelta(content=text)

    def finish(self) -> ChatDelta:
        return ChatDelta()


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def held_back(text: str, markers: Iterable[str]) -> int:
    """How many of the last characters may be the start of a marker."""
    longest = 0
    for marker in markers:
        for n in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:n]):
                longest = n
                break
    return longest


def split_blank_end(text: str) -> tuple[str, str]:
    """The text without its last white space, and that white space."""
    kept = text.rstrip()
    return kept, text[len(kept) :]
