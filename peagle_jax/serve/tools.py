"""Function calls as Hermes and Qwen models write them, and the grammars that force a call.

``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of them; Qwen3-Coder has another form
between the same markers. A call is told when
it is complete; one that is not valid stays in the content as it was written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

from peagle_jax.serve import coder
from peagle_jax.serve.grammar import GrammarSpec
from peagle_jax.serve.parsing import (
    ChatDelta,
    ToolCall,
    held_back,
    new_call_id,
    split_blank_end,
)

START, END = coder.START, coder.END


def parse_arguments(value: Any) -> str:
    """A call's arguments as JSON text; ValueError if they are no JSON object."""
    if isinstance(value, str):
        value = json.loads(value, parse_constant=_refuse)
    if not isinstance(value, dict):
        raise ValueError("arguments are not an object")
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()  # half a surrogate pair cannot be sent; UnicodeEncodeError is a ValueError
    return text


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def _parse_call(text: str) -> tuple[str, str] | None:
    """(name, arguments) of the text between the markers; None if it is not a call."""
    try:
        call = json.loads(text, parse_constant=_refuse)
        if not isinstance(call, dict) or not (isinstance(call.get("name"), str) and call["name"]):
            return None
        call["name"].encode()
        arguments = call.get("arguments", call.get("parameters"))
        return call["name"], parse_arguments({} if arguments is None else arguments)
    except (ValueError, RecursionError):
        return None


def _closing(text: str) -> int:
    """Where the first END outside a JSON string starts; -1 if there is none."""
    if END not in text:  # the usual case while a call grows, at the speed of a string search
        return -1
    quoted, escaped = False, False
    for i, c in enumerate(text):
        if escaped:
            escaped = False
        elif quoted:
            escaped, quoted = c == "\\", c != '"'
        elif c == '"':
            quoted = True
        elif c == "<" and text.startswith(END, i):
            return i
    return -1


class HermesParser:
    """Content and calls. White space before, between and after calls is dropped.

    ``read`` gives name and arguments of the text between the markers, None if it is no call; ``closing``
    says where the end marker starts in it, -1 if it has not come.
    """

    def __init__(
        self,
        make_id: Callable[[], str] = new_call_id,
        read: Callable[[str], tuple[str, str] | None] = _parse_call,
        closing: Callable[[str], int] = _closing,
    ) -> None:
        self._make_id, self._read, self._closing = make_id, read, closing
        self._text = ""  # not yet told; starts with START while a call is open
        self._calls = 0
        self._after_call = False

    def feed(self, text: str) -> ChatDelta:
        self._text += text
        delta = ChatDelta()
        while True:
            blank, inside, opened = self._text.partition(START)
            if not inside:
                return delta + self._content()
            end = self._closing(opened)
            if end < 0:
                kept, white = split_blank_end(blank)
                self._text = white + START + opened
                return delta + self._tell(kept)
            delta += self._call(blank, opened[:end], opened[end + len(END) :], END)

    def _tell(self, text: str) -> ChatDelta:
        if self._after_call:
            text = text.lstrip()
        self._after_call = self._after_call and not text
        return ChatDelta(content=text)

    def _content(self) -> ChatDelta:
        """All but what may become a call's marker, and the white space before one."""
        keep = held_back(self._text, [START])
        told, blank = split_blank_end(self._text[: len(self._text) - keep])
        self._text = blank + self._text[len(self._text) - keep :]
        return self._tell(told)

    def _call(self, before: str, text: str, rest: str, end: str) -> ChatDelta:
        self._text = rest
        parsed = self._read(text)
        if parsed is None:
            return self._tell(before + START + text + end)
        delta = self._tell(before.rstrip())
        self._after_call, self._calls = True, self._calls + 1
        return delta + ChatDelta(tool_calls=(ToolCall(self._calls - 1, self._make_id(), *parsed),))

    def finish(self) -> ChatDelta:
        """An open call counts if only its end marker is missing."""
        before, inside, opened = self._text.partition(START)
        self._text = ""
        if inside:
            return self._call(before, opened, "", "")
        return self._tell(before)


def coder_parser(tools: Sequence[dict], make_id: Callable[[], str] = new_call_id) -> HermesParser:
    """Content and calls of Qwen3-Coder; ``tools`` are OpenAI's, for the types of arguments."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}

    def read(text: str) -> tuple[str, str] | None:
        try:
            found = coder.read_call(text, schemas)
            return found and (found[0], parse_arguments(found[1]))
        except (ValueError, RecursionError):
            return None

    return HermesParser(make_id, read, coder.closing)


# -- forcing calls -------------------------------------------------------------------------------

Style = Literal["hermes", "qwen3_coder", "openai"]
"""vLLM's names of tool parsers: Hermes and Qwen, Qwen3-Coder, or harmony (gpt-oss)."""


def _tag(style: Style, name: str, schema: Any) -> dict:
    if style == "qwen3_coder":
        return coder.call_tag(name, schema)
    content = {"type": "json_schema", "json_schema": schema if schema is not None else {"type": "object"}}
    if style == "openai":
        begin = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        return {"type": "tag", "begin": begin, "content": content, "end": ""}
    begin = f'{START}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
    return {"type": "tag", "begin": begin, "content": content, "end": "}\n" + END}


def tool_format(
    tools: Sequence[dict], choice: str | dict | None, style: Style, parallel: bool = True
) -> dict | None:
    """The structural tag format that an OpenAI ``tool_choice`` demands; None if it demands nothing.

    ``tools`` are OpenAI's (``{"type": "function", "function": {"name", "parameters"}}``). "required"
    forces one call or more (one, unless ``parallel``), a named function exactly one call of it.

    Raises:
        ValueError: in one line: the named function is not among the tools, or there are none.
    """
    if choice in (None, "none", "auto"):
        return None
    functions = {t["function"]["name"]: t["function"].get("parameters") for t in tools}
    once = not parallel or style == "openai"
    if isinstance(choice, dict):
        name = (choice.get("function") or {}).get("name")
        if name not in functions:
            raise ValueError(
                f"tool_choice names {name!r}, which is not in tools; expected one of {sorted(functions)}"
            )
        functions, once = {name: functions[name]}, True
    elif choice != "required":
        raise ValueError(f"tool_choice {choice!r} is unknown; expected none, auto, required or a function")
    if not functions:
        raise ValueError("tool_choice is required, but tools is empty; give at least one tool")
    return {
        "type": "tags_with_separator",
        "separator": "\n",
        "tags": [_tag(style, name, schema) for name, schema in functions.items()],
        "at_least_one": True,
        "stop_after_first": once,
    }


_ANALYSIS = {
    "type": "tag",
    "begin": "<|channel|>analysis<|message|>",
    "content": {"type": "any_text"},
    "end": "<|end|><|start|>assistant",
}
_THOUGHT = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
_BLANK = {"type": "regex", "pattern": r"[ \n]{0,4}"}
_NOTHING = {"type": "const_string", "value": ""}


def _as_format(spec: GrammarSpec) -> dict:
    if spec.kind == "json_object":
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if spec.kind == "regex":
        return {"type": "regex", "pattern": spec.value}
    if spec.kind == "grammar":
        raise ValueError("a grammar cannot follow reasoning; turn the model's thinking off for this request")
    try:
        value = json.loads(spec.value)
    except ValueError as error:
        raise ValueError(f"{spec.kind}: expected JSON, found {spec.value[:60]!r} ({error})") from None
    if spec.kind == "json_schema":
        return {"type": "json_schema", "json_schema": value}
    if spec.kind == "choice":
        return {"type": "or", "elements": [{"type": "const_string", "value": word} for word in value]}
    if isinstance(value, dict) and isinstance(value.get("format"), dict):
        return value["format"]
    raise ValueError("structural_tag: only the form with 'format' can follow reasoning")


def answer_grammar(
    spec: GrammarSpec | None,
    forced: dict | None,
    reasoning: Literal["think", "opened", "harmony"] | None,
) -> GrammarSpec | None:
    """The grammar of a whole answer: reasoning if the model has it, then what the request demands.

    ``spec`` is the request's own, ``forced`` a ``tool_format`` (which goes first). ``reasoning``:
    "think" if the answer may start with ``<think>``, "opened" if the prompt has opened it, "harmony"
    for gpt-oss's channels (only the final one is constrained), None for none.

    Raises:
        ValueError: in one line: the two cannot be combined.
    """
    if spec is None and forced is None:
        return None
    if reasoning is None and forced is None:
        return spec
    form = forced
    if form is None:
        assert spec is not None
        form = _as_format(spec)
        if reasoning == "harmony":
            final = {"type": "const_string", "value": "<|channel|>final<|message|>"}
            form = {"type": "sequence", "elements": [final, form]}
    if reasoning == "harmony":
        parts = [{"type": "or", "elements": [_ANALYSIS, _NOTHING]}, form]
    elif reasoning == "opened":
        parts = [{**_THOUGHT, "begin": ""}, _BLANK, form]
    elif reasoning == "think":
        thought = {"type": "sequence", "elements": [_THOUGHT, _BLANK]}
        parts = [{"type": "or", "elements": [thought, _NOTHING]}, form]
    else:
        parts = [form]
    value = {"type": "structural_tag", "format": {"type": "sequence", "elements": parts}}
    return GrammarSpec("structural_tag", json.dumps(value, ensure_ascii=False))
