"""Feeding an answer's text to a parser in pieces."""

from __future__ import annotations

import random
from collections.abc import Callable

from peagle_jax.serve.parsing import ChatDelta, ChatParser


def parse(parser: ChatParser, pieces) -> ChatDelta:
    return sum((parser.feed(piece) for piece in pieces), ChatDelta()) + parser.finish()


def counter() -> Callable[[], str]:
    ids = iter(range(1000))
    return lambda: f"call_{next(ids)}"


def every_cut(make: Callable[[], ChatParser], text: str, tries: int = 60) -> ChatDelta:
    """The parse of the text in one piece, after checking that cuts of many kinds give the same."""
    whole = parse(make(), [text])
    rng = random.Random(len(text))
    for size in range(1, 7):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert parse(make(), pieces) == whole, pieces
    for _ in range(tries):
        cuts = sorted(rng.sample(range(len(text) + 1), min(len(text) + 1, rng.randint(0, 6))))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse(make(), pieces) == whole, pieces
    return whole


def fuzz(make: Callable[[], ChatParser], words: list[str], tries: int = 400) -> list[tuple[str, ChatDelta]]:
    """(text, parse) of random strings of the words, each checked as in ``every_cut``."""
    rng = random.Random(7)
    texts = ["".join(rng.choices(words, k=rng.randint(0, 9))) for _ in range(tries)]
    return [(text, every_cut(make, text, tries=4)) for text in texts]
