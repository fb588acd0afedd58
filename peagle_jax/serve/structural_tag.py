"""Structural tags (free text with constrained parts, as vLLM and xgrammar write them) as Lark.

Both spellings: ``{"structures": [{"begin", "schema", "end"}], "triggers"}`` and ``{"format": ...}`` with
the types below. llguidance takes special tokens by name only, so literals are split at them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""Between JSON tokens. Bounded: small models otherwise fill an answer with line breaks."""

TEXT = r"/(.|\n)*/"
FORMATS = "any_text, const_string, json_schema, or, regex, sequence, tag, tags_with_separator, triggered_tags"


def json_lark(schema: Any) -> str:
    """The Lark term for JSON that satisfies ``schema`` (a JSON value, already parsed)."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise ValueError(f"a JSON schema is an object or a boolean, found {json.dumps(schema)[:60]}")
    options = schema.get("x-guidance")
    options = dict(options) if isinstance(options, dict) else {}
    if not {"whitespace_pattern", "whitespace_flexible"} & options.keys():
        options["whitespace_pattern"] = WHITESPACE
    return "%json " + json.dumps(schema | {"x-guidance": options}, ensure_ascii=False)


class _Lark:
    """Rules under construction; each method returns the term that stands for its argument."""

    def __init__(self, special: Collection[str]) -> None:
        names = sorted(special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names))) if names else re.compile(r"(?!)")
        self.rules: list[str] = []

    def add(self, body: str, option: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{option}: {body}")
        return name

    def literal(self, text: str) -> str:
        parts, at = [], 0
        for found in self._special.finditer(text):
            parts += [json.dumps(text[at : found.start()], ensure_ascii=False)] * (found.start() > at)
            name = found[0]
            if not re.fullmatch(r"<[^<>\s]+>", name):
                raise ValueError(f"the special token {name!r} cannot be part of a grammar")
            parts.append(name)
            at = found.end()
        parts += [json.dumps(text[at:], ensure_ascii=False)] * (at < len(text))
        return " ".join(parts) or '""'

    def text_up_to(self, end: str) -> str:
        """Any text, then the first ``end``."""
        found = self._special.match(end)
        if not end:
            return TEXT
        if found:  # free text has no special tokens
            return f"{TEXT} {self.literal(end)}"
        cut = self._special.search(end)
        plain = end[: cut.start()] if cut else end
        head = self.add(TEXT, f"[suffix={json.dumps(plain, ensure_ascii=False)}]")
        return head + (" " + self.literal(end[len(plain) :]) if cut else "")

    def tag(self, tag: dict, skip: str = "") -> str:
        """begin, content, end; ``skip`` of ``begin`` has been read already."""
        begin, content, end = _text(tag, "begin"), _field(tag, "content", dict), _text(tag, "end")
        start = self.literal(begin[len(skip) :]) if begin != skip else ""
        if content.get("type") == "any_text":
            return f"{start} {self.text_up_to(end)}".strip()
        return f"{start} {self.format(content)} {self.literal(end) if end else ''}".strip()

    def _triggered(self, form: dict) -> str:
        triggers, tags = _field(form, "triggers", list), _field(form, "tags", list)
        first, later = [], []
        for tag in tags:
            begin = _text(tag, "begin")
            trigger = next((t for t in triggers if t and begin.startswith(t)), None)
            if trigger is None:
                raise ValueError(f"no trigger starts {begin!r}; triggers are {triggers}")
            first.append(self.add(self.tag(tag)))
            later.append(self.add(f"{self.text_up_to(trigger)} {self.tag(tag, trigger)}"))
        once, must = form.get("stop_after_first", False), form.get("at_least_one", False)
        one, more = " | ".join(first), " | ".join(later)
        if must:
            return f"({one})" if once else f"({one}) ({more})* {TEXT}"
        return f"(({more}) | {TEXT})" if once else f"({more})* {TEXT}"

    def _separated(self, form: dict) -> str:
        tags = " | ".join(self.add(self.tag(tag)) for tag in _field(form, "tags", list))
        tag, separator = self.add(tags), _text(form, "separator")
        more = "" if form.get("stop_after_first", False) else f" ({self.literal(separator)} {tag})*"
        return f"({tag}{more})" + ("" if form.get("at_least_one", False) else "?")

    def format(self, form: Any) -> str:
        kind = form.get("type") if isinstance(form, dict) else None
        if kind == "any_text":
            return TEXT
        if kind == "const_string":
            return self.literal(_text(form, "value"))
        if kind == "json_schema":
            return self.add(json_lark(form.get("json_schema")))
        if kind == "regex":
            pattern = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", _text(form, "pattern"))
            return f"/{pattern}/"
        if kind == "sequence":
            return self._sequence(_field(form, "elements", list))
        if kind == "or":
            return "(" + " | ".join(self.add(self.format(e)) for e in _field(form, "elements", list)) + ")"
        if kind == "tag":
            return self.add(self.tag(form))
        if kind == "triggered_tags":
            return self._triggered(form)
        if kind == "tags_with_separator":
            return self._separated(form)
        raise ValueError(f"structural tag format {kind!r} is not supported; expected one of {FORMATS}")

    def _sequence(self, elements: list) -> str:
        """Free text before a literal ends at the literal's first appearance."""
        terms, skip = [], False
        for element, following in zip(elements, [*elements[1:], {}], strict=True):
            if skip:
                skip = False
            elif element.get("type") == "any_text" and following.get("type") == "const_string":
                terms.append(self.text_up_to(_text(following, "value")))
                skip = True
            else:
                terms.append(self.format(element))
        return " ".join(terms)


def _field(form: Any, name: str, kind: type) -> Any:
    value = form.get(name) if isinstance(form, dict) else None
    if not isinstance(value, kind) or (kind is list and not value):
        raise ValueError(
            f"{name!r} must be a {kind.__name__} that is not empty, found {json.dumps(value)[:60]}"
        )
    return value


def _text(form: Any, name: str) -> str:
    return form[name] if isinstance(form, dict) and form.get(name) == "" else _field(form, name, str)


def structural_tag_lark(value: Any, special: Collection[str]) -> str:
    """The Lark grammar of a structural tag (parsed JSON). ``special`` are the tokenizer's special tokens.

    Raises:
        ValueError: in one line, what is missing or not supported.
    """
    form = value.get("format") if isinstance(value, dict) else None
    if form is None:
        tags = [
            {
                "begin": _text(s, "begin"),
                "end": _text(s, "end"),
                "content": {"type": "json_schema", "json_schema": s.get("schema", {})},
            }
            for s in _field(value, "structures", list)
        ]
        form = {"type": "triggered_tags", "triggers": _field(value, "triggers", list), "tags": tags}
    lark = _Lark(special)
    start = lark.format(form)
    return "\n".join([f"start: {start}", *lark.rules, ""])
