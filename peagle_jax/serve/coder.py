"""Function calls as Qwen3-Coder writes them: every argument between markers of its own.

Between ``<tool_call>`` and ``</tool_call>`` stands ``<function=f>``, for every argument a line
``<parameter=x>``, its value, a line ``</parameter>``, and then ``</function>``. Values are text as it is, or
JSON where the function's schema has another type.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

START, END = "<tool_call>", "</tool_call>"

_CLOSE = re.compile(r"</function>\s*(</tool_call>)")
_CALL = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
# A value may hold the end marker: what follows the real one is another argument, or the end.
_ARGUMENT = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|\Z)", re.DOTALL)


def closing(text: str) -> int:
    """Where the end marker of an open call starts; -1 if there is none."""
    found = _CLOSE.search(text) if END in text else None
    return found.start(1) if found else -1


def read_call(text: str, schemas: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """(name, arguments) of the text between the markers; None if it is not a call.

    ``schemas`` are the functions' JSON schemas by name; an argument that none describes is text.
    """
    call = _CALL.fullmatch(text)
    if call is None:
        return None
    properties = _properties(schemas.get(call[1]))
    body, at, arguments = call[2], 0, {}
    while found := _ARGUMENT.match(body, at):
        arguments[found[1]] = _value(found[2], properties.get(found[1]))
        at = found.end()
    return None if body[at:].strip() else (call[1], arguments)


def call_tag(name: str, schema: Any) -> dict:
    """The structural tag of one call: the schema's arguments in its order, of which it may require some."""
    schema = schema if isinstance(schema, dict) else {}
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    nothing = {"type": "const_string", "value": ""}
    elements: list[dict] = []
    for key, value in _properties(schema).items():
        begin, end = f"<parameter={key}>\n", "\n</parameter>\n"
        tag = {"type": "tag", "begin": begin, "content": _value_format(value, shared), "end": end}
        optional = key not in _list(schema.get("required"))
        elements.append({"type": "or", "elements": [tag, nothing]} if optional else tag)
    content = {"type": "sequence", "elements": elements} if elements else nothing
    begin, end = f"{START}\n<function={name}>\n", f"</function>\n{END}"
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _value_format(schema: Any, shared: dict[str, Any]) -> dict:
    """The structural tag format of a value; ``shared`` are the definitions that its schema may refer to."""
    kinds = _types(schema)
    if kinds and "string" not in kinds:
        return {"type": "json_schema", "json_schema": schema | shared}
    words = _list(schema.get("enum")) if kinds else []
    if words and all(isinstance(word, str) and word for word in words):
        return {"type": "or", "elements": [{"type": "const_string", "value": word} for word in words]}
    return {"type": "any_text"}


def _properties(schema: Any) -> dict[str, Any]:
    found = schema.get("properties") if isinstance(schema, dict) else None
    return found if isinstance(found, dict) else {}


def _list(value: Any) -> list:
    """What a schema has where a list belongs; nothing for anything else, which clients may send."""
    return value if isinstance(value, list) else []


def _types(schema: Any) -> set[str]:
    """The JSON types that a schema names; none for one that leaves them open."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type")
    found = {kind for kind in [named, *_list(named)] if isinstance(kind, str)}
    return found.union(*(_types(part) for word in ("anyOf", "oneOf") for part in _list(schema.get(word))))


def _value(text: str, schema: Any) -> Any:
    """An argument's value. The template shows a model its earlier values as Python spells them."""
    kinds = _types(schema)
    if not kinds or ("string" in kinds and not ("null" in kinds and text in ("null", "None"))):
        return text
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text.strip())
            json.dumps(value, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        return value
    return text
