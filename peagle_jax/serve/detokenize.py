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
    """Holds back text that may begin a stop string, and cuts before the first one that is whole, or,
    if it is ``included``, after it. ``found`` is that one."""

    def __init__(self, stop: Sequence[str], included: bool = False) -> None:
        self._stop, self._included = tuple(stop), included
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The part of the text so far that can be shown and was not."""
        text = self._held + text
        places = [(place, s) for place, s in ((text.find(s), s) for s in self._stop) if place >= 0]
        if places:
            place, self.found = min(places, key=lambda found: found[0])
            self._held = ""
            return text[: place + len(self.found) if self._included else place]
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

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        *,
        include_stop_str: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens)
        self._stop = StopStrings(stop, include_stop_str)

    def add(
        self, tokens: Sequence[int], finish_reason: str | None = None, stop_token: bool | None = None
    ) -> Delta:
        """Takes a round. The last token is a stop token, counted and not shown, if ``stop_token`` (default:
        if the finish reason is "stop")."""
        text: list[str] = []
        finish, used = finish_reason, 0
        if stop_token is None:
            stop_token = finish_reason == "stop"
        for used, token in enumerate(tokens, start=1):
            if stop_token and used == len(tokens):
                break
            text.append(self._stop.push(self._detokenizer.push(token)))
            if self._stop.found is not None:
                finish = "stop"
                break
        if finish and self._stop.found is None:
            text.append(self._stop.push(self._detokenizer.flush()))
            text.append(self._stop.flush())
            if self._stop.found is not None:
                finish = "stop"
        reason: str | int | None = self._stop.found
        if reason is None and stop_token and tokens:
            reason = tokens[-1]
        return Delta("".join(text), tuple(tokens[:used]), finish, stop_reason=reason)
