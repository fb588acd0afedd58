"""Reasoning apart from the answer, for models that write ``<think>...</think>`` before it.

White space around the markers belongs to neither side.
"""

from __future__ import annotations

from peagle_jax.serve.parsing import ChatDelta, ChatParser, held_back, split_blank_end

START, END = "<think>", "</think>"


def is_opened(prompt: str) -> bool:
    """Whether the prompt (a rendered template) leaves reasoning open, so that the answer starts in it."""
    return prompt.rfind(START) > prompt.rfind(END) and prompt.rstrip().endswith(START)


class ThinkParser:
    """Reasoning up to ``</think>``, then whatever ``answer`` makes of the rest.

    An answer reasons if the prompt opened it (``opened``) or if its first word is ``<think>``; one
    that never closes it is reasoning throughout. Later markers are ordinary text.
    """

    def __init__(self, answer: ChatParser, opened: bool = False) -> None:
        self._answer = answer
        self._state = "open" if opened else "start"
        self._text = ""  # not yet told
        self._told = False  # some reasoning was

    def feed(self, text: str) -> ChatDelta:
        self._text += text
        delta = ChatDelta()
        if self._state == "start":
            self._start()
        if self._state == "open":
            delta += self._reason()
        if self._state == "blank":  # between </think> and the answer
            self._text = self._text.lstrip()
            self._state = "answer" if self._text else "blank"
        if self._state == "answer":
            text, self._text = self._text, ""
            delta += self._answer.feed(text)
        return delta

    def _start(self) -> None:
        word = self._text.lstrip()
        if word.startswith(START):
            self._state, self._text = "open", word[len(START) :]
        elif word and not START.startswith(word):
            self._state = "answer"

    def _reason(self) -> ChatDelta:
        inside, closed, rest = self._text.partition(END)
        if closed:
            self._state, self._text = "blank", rest
            inside = inside.rstrip()
        else:
            keep = held_back(inside, [END])
            inside, blank = split_blank_end(inside[: len(inside) - keep])
            self._text = blank + self._text[len(self._text) - keep :]
        if not self._told:
            inside = inside.lstrip()
        self._told = self._told or bool(inside)
        return ChatDelta(reasoning=inside)

    def finish(self) -> ChatDelta:
        held, self._text = self._text, ""
        if self._state == "open":
            inside = held.rstrip() if self._told else held.strip()
            return ChatDelta(reasoning=inside) + self._answer.finish()
        delta = self._answer.feed(held) if held and self._state == "start" else ChatDelta()
        return delta + self._answer.finish()
