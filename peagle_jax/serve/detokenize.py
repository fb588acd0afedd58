"""Tokens to text, as they come: whole characters only, and cut before a stop string.

Pure host code, shared by the server and the command line. The text of a request is defined here
once, as the concatenation of the deltas, so a streamed answer equals the answer at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from peagle_jax.speculative.sampling import TokenLogprob

REPLACEMENT = "\ufffd"
"""What a decoder shows for bytes that are not (or not yet) a character."""


class Detokenizer:
    """Decodes one token at a time over a short window, never the whole answer again.

    A window starts where text was last shown, so that decoders which treat the first token of a
    text specially (a stripped leading space) see the same left neighbour each time.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._window: list[int] = []
        self._shown_tokens = 0  # how many tokens of the window have been shown
        self._shown_text = ""  # what these tokens decode to

    def push(self, token: int) -> str:
        """The text that ``token`` completes: empty while a character is unfinished."""
        self._window.append(token)
        text = self._decode()
        if len(text) <= len(self._shown_text) or text.endswith(REPLACEMENT):
            return ""
        new = text[len(self._shown_text) :]
        self._window = self._window[self._shown_tokens :]
        self._shown_tokens = len(self._window)
        self._shown_text = self._decode()
        return new

    def flush(self) -> str:
        """What is left at the end: bytes that never became a character, shown as U+FFFD."""
        text = self._decode()
        new = text[len(self._shown_text) :]
        self._shown_text, self._shown_tokens = text, len(self._window)
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(
            self._window, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False
        )


class StopStrings:
    """Holds back text that may begin a stop string, and cuts before the first one that is whole."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The part of the text so far that can be shown and was not."""
        text = self._held + text
        places = [place for place in (text.find(s) for s in self._stop) if place >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        keep = max((_overlap(text, s) for s in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop`` without being all of it."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


@dataclasses.dataclass(frozen=True)
class Delta:
    """A step of an answer. ``token_ids`` holds the stop token, ``text`` does not.

    ``finish_reason`` is None but in the last: "stop", "length", "abort", or "error" with its ``error``.
    ``stop_reason`` is the stop string or stop id that ended it. ``logprobs`` has an entry a token, or
    none; ``prompt_logprobs`` and ``cached_tokens`` come once, in the first delta; ``accepted`` of
    ``drafted`` tokens are this round's.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    error: str | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    accepted: int = 0
    drafted: int = 0
    cached_tokens: int = 0


class Answer:
    """One request's tokens as deltas. The earliest of stop string, stop token and limit ends it.

    A round brings several tokens at once. They are walked one by one: what follows the one that
    completes a stop string is dropped, uncounted.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = StopStrings(stop)

    def add(self, tokens: Sequence[int], finish_reason: str | None = None) -> Delta:
        """Takes a round. With finish_reason "stop" the last token is a stop token: counted, not shown."""
        text: list[str] = []
        finish, used = finish_reason, 0
        for used, token in enumerate(tokens, start=1):
            if finish_reason == "stop" and used == len(tokens):
                break
            text.append(self._stop.push(self._detokenizer.push(token)))
            if self._stop.found:
                finish = "stop"
                break
        if finish and not self._stop.found:
            text.append(self._stop.push(self._detokenizer.flush()))
            text.append(self._stop.flush())
            if self._stop.found:
                finish = "stop"
        return Delta("".join(text), tuple(tokens[:used]), finish)
