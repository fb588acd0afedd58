"""What greedy answers must be, from the same prompts answered alone. Pure: nothing here asks a server."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

BROKEN = "\ufffd"
"""What is shown for bytes that are no whole character (yet); an answer that is cut may end with some."""


@dataclasses.dataclass(frozen=True)
class Expected:
    """A prompt's greedy answer: ``pieces`` are the texts that its tokens completed, ``finish`` its end."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]
    finish: str

    def text(self, count: int) -> str:
        """What the first ``count`` tokens say, without an unfinished character."""
        return "".join(self.pieces[:count]).rstrip(BROKEN)


@dataclasses.dataclass(frozen=True)
class Ask:
    """A request for (a part of) an expected answer. ``leave_after``: how many chunks the client reads of a
    stream, or how many seconds it waits for a whole answer, before it disconnects; None: it stays."""

    expected: Expected
    max_tokens: int
    n: int = 1
    stop: str | None = None
    stream: bool = True
    leave_after: float | None = None

    @property
    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"prompt": list(self.expected.prompt), "temperature": 0.0, "n": self.n}
        body |= {"max_tokens": self.max_tokens, "stream": self.stream, "return_token_ids": True}
        return body | ({} if self.stop is None else {"stop": [self.stop]})


@dataclasses.dataclass
class Received:
    """One choice of an answer, as far as it has come."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    finish: str | None = None

    def add(self, choice: dict[str, Any]) -> None:
        """A chunk's choice, or a whole answer's."""
        self.token_ids += choice.get("token_ids") or []
        self.text += choice["text"]
        self.finish = choice["finish_reason"] or self.finish


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where an answer is not what was expected. ``position`` and ``found`` are of the first token that
    differs; None if the tokens agree and something else does not."""

    what: str
    position: int | None = None
    found: int | None = None


def random_ask(rng: random.Random, expected: Expected, *, leave: float, most_choices: int = 3) -> Ask:
    """Any length, sometimes a stop string out of the answer, sometimes several choices, streamed or not; with
    the chance ``leave`` a client that disconnects."""
    stream = rng.random() < 0.7
    most = len(expected.token_ids)
    leave_after = None
    if rng.random() < leave:
        leave_after = float(rng.randint(0, 20)) if stream else rng.uniform(0.0, 2.0)
    return Ask(
        expected,
        max_tokens=rng.randint(1, most + 4) if expected.finish == "stop" else rng.randint(1, most),
        n=rng.randint(1, most_choices) if rng.random() < 0.3 else 1,
        stop=_stop_in(rng, expected.text(most)) if rng.random() < 0.3 else None,
        stream=stream,
        leave_after=leave_after,
    )


def _stop_in(rng: random.Random, text: str) -> str | None:
    """Some letters of a text; None if there are none that a request may spell."""
    start = rng.randrange(len(text) + 1)
    stop = text[start : start + rng.randint(2, 8)].partition(BROKEN)[0]
    return stop if stop.strip() else None


def wanted(ask: Ask) -> tuple[int, int, str, str]:
    """What the answer must be: the fewest and the most tokens, the text and the finish reason. A stop string
    ends it with the token that completes the string, or with others of that token's round."""
    expected = ask.expected
    most = min(ask.max_tokens, len(expected.token_ids))
    text = expected.text(most)
    at = -1 if ask.stop is None else text.find(ask.stop)
    if ask.stop is not None and at >= 0:
        least = next(m for m in range(1, most + 1) if ask.stop in expected.text(m))
        return least, most, text[:at], "stop"
    return most, most, text, expected.finish if most == len(expected.token_ids) else "length"


def difference(ask: Ask, received: Received, *, whole: bool = True) -> Difference | None:
    """Where an answer, or if not ``whole`` the beginning that a client has read, differs; None if nowhere."""
    least, most, text, finish = wanted(ask)
    expected, found = ask.expected.token_ids[:most], received.token_ids
    for position, (want, have) in enumerate(zip(expected, found, strict=False)):
        if want != have:
            return Difference("another token", position, have)
    if len(found) > most:
        return Difference(f"{len(found)} tokens, at most {most} expected")
    said = received.text.rstrip(BROKEN)
    if not whole:
        return None if text.startswith(said) else Difference(f"text {said[-40:]!r} is not in the answer")
    if received.finish is None:
        return Difference("no finish reason")
    if len(found) < least:
        return Difference(f"{len(found)} tokens, at least {least} expected")
    if received.finish != finish:
        return Difference(f"finish reason {received.finish}, {finish} expected")
    if said != text.rstrip(BROKEN):
        return Difference(f"text ends with {said[-40:]!r}, {text[-40:]!r} expected")
    return None
