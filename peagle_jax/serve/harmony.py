"""The answer of a gpt-oss model: messages on channels, told apart by special tokens.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>``: the
analysis is reasoning, the final message is content, commentary with a recipient ``functions.x`` is a
call, commentary without one is content. The text must hold its special tokens; none reaches a client.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from peagle_jax.serve.parsing import ChatDelta, ToolCall, held_back, new_call_id
from peagle_jax.serve.tools import parse_arguments

MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
MARKERS = (MESSAGE, *ENDS, "<|channel|>", "<|constrain|>")
HEADER_SIGNS = ("<|channel|>", "<|start|>", " to=", MESSAGE)

_MARKER = re.compile("|".join(map(re.escape, MARKERS)))


def _first(text: str, markers: tuple[str, ...]) -> tuple[int, str] | None:
    found = [(i, m) for m in markers if (i := text.find(m)) >= 0]
    return min(found) if found else None


class HarmonyParser:
    """Reasoning, content and calls of one answer that follows ``<|start|>assistant``.

    ``calls`` False leaves calls in the content (tool_choice "none"). A call whose arguments are no
    JSON object is content, as is text outside any message.
    """

    def __init__(self, calls: bool = True, make_id: Callable[[], str] = new_call_id) -> None:
        self._calls, self._make_id = calls, make_id
        self._text = ""  # not yet told
        self._kind = "header"  # then reasoning, content, or a function's name after "call:"
        self._first = True
        self._count = 0
        self._told = {"reasoning": False, "content": False}
        self._new = False  # the message has not told anything yet

    def feed(self, text: str) -> ChatDelta:
        self._text += text
        delta = ChatDelta()
        while (step := self._step()) is not None:
            delta += step
        return delta

    def _step(self) -> ChatDelta | None:
        """Takes one marker off the text; None when more text is needed."""
        if self._kind == "header":
            return self._read_header()
        found = _first(self._text, ENDS)
        if found is None:
            if self._kind.startswith("call:"):
                return None
            keep = held_back(self._text, MARKERS)
            told, self._text = self._text[: len(self._text) - keep], self._text[len(self._text) - keep :]
            return self._tell(self._kind, told) if told else None
        body, (at, marker) = self._text[: found[0]], found
        self._text = self._text[at + len(marker) :]
        return self._close(body)

    def _read_header(self) -> ChatDelta | None:
        if self._first:
            signs = [sign for sign in HEADER_SIGNS if self._text.startswith(sign)]
            if not signs:
                if any(sign.startswith(self._text) for sign in HEADER_SIGNS):
                    return None
                self._open("content")  # no header at all: show what there is
                self._first = False
                return ChatDelta()
            self._first = False
        at = self._text.find(MESSAGE)
        broken = _first(self._text, ENDS[:3])
        if broken is not None and (at < 0 or broken[0] < at):
            header, self._text = self._text[: broken[0]], self._text[broken[0] + len(broken[1]) :]
            return self._lost(header)
        if at < 0:
            return None
        header, self._text = self._text[:at], self._text[at + len(MESSAGE) :]
        _, _, channel = header.partition("<|channel|>")
        recipient = re.search(r"\bto=([^\s<]+)", header)
        name = recipient[1] if recipient else ""
        if name.startswith("functions.") and self._calls:
            self._open("call:" + name.removeprefix("functions."))
        else:
            reasons = channel.strip().startswith("analysis") or bool(
                name and not name.startswith("functions.")
            )
            self._open("reasoning" if reasons else "content")
        return ChatDelta()

    def _open(self, kind: str) -> None:
        self._kind, self._new = kind, True

    def _tell(self, kind: str, text: str) -> ChatDelta:
        text = _MARKER.sub("", text)
        if text and self._new and self._told[kind]:
            text = "\n" + text  # messages of one kind are told apart
        if text:
            self._new, self._told[kind] = False, True
        return ChatDelta(**{kind: text})

    def _lost(self, header: str) -> ChatDelta:
        """A header without a message: what it says besides role and channel is shown."""
        text = _MARKER.sub(
            "", re.sub(r"^(<\|start\|>\w*|assistant(?=<\|| to=|$))|<\|channel\|>\w*", "", header)
        )
        self._new = True
        return self._tell("content", text) if text.strip() else ChatDelta()

    def _close(self, body: str) -> ChatDelta:
        kind, self._kind = self._kind, "header"
        if not kind.startswith("call:"):
            return self._tell(kind, body)
        try:
            arguments = parse_arguments(_MARKER.sub("", body))
        except (ValueError, RecursionError):
            return self._tell("content", body)
        self._count += 1
        call = ToolCall(self._count - 1, self._make_id(), kind.removeprefix("call:"), arguments)
        return ChatDelta(tool_calls=(call,))

    def finish(self) -> ChatDelta:
        text, self._text = self._text, ""
        if self._kind == "header":
            return self._lost(text)
        return self._close(text)
