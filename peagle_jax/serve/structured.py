"""The ways in which a request asks for an answer in a form, and the one grammar that they mean."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from peagle_jax.serve.errors import invalid
from peagle_jax.serve.grammar import GrammarSpec

if TYPE_CHECKING:
    from peagle_jax.serve.protocol import GenerationRequest


class JsonSchema(BaseModel):
    """``json_schema`` of a response format."""

    model_config = ConfigDict(strict=True)
    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """``response_format``; a structural tag keeps the fields that vLLM gives it."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_is_there(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise PydanticCustomError("no_schema", "{name} is missing", {"name": "json_schema"})
        return self


class StructuredOutputs(BaseModel):
    """``structured_outputs``: exactly one of its fields."""

    model_config = ConfigDict(strict=True, extra="forbid")
    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None


def grammar_of(body: GenerationRequest) -> tuple[GrammarSpec | None, str]:
    """The grammar that a request asks for, None if it asks for none, and the field that asks.

    Raises:
        APIError: more than one, or one that cannot be read.
    """
    wanted: list[tuple[str, GrammarSpec]] = []
    form, outputs = body.response_format, body.structured_outputs
    if form is not None and form.type == "json_object":
        wanted.append(("response_format", GrammarSpec("json_object", "")))
    elif form is not None and form.json_schema is not None and form.type == "json_schema":
        schema = json.dumps(form.json_schema.schema_)
        wanted.append(("response_format", GrammarSpec("json_schema", schema)))
    elif form is not None and form.type == "structural_tag":
        tag = json.dumps(form.model_dump(exclude={"json_schema"}))
        wanted.append(("response_format", GrammarSpec("structural_tag", tag)))
    if outputs is not None:
        found = _one("structured_outputs", outputs)
        if not found:
            raise invalid(
                "structured_outputs names no constraint; give one of json, regex, choice, grammar, "
                "json_object, structural_tag",
                "structured_outputs",
            )
        wanted += found
    for name in ("json", "regex", "choice", "grammar"):
        value = getattr(body, f"guided_{name}")
        if value is not None:
            wanted.append((f"guided_{name}", _spec(f"guided_{name}", name, value)))
    if len(wanted) > 1:
        first, second = wanted[0][0], wanted[1][0]
        if first == second:
            raise invalid(f"{first} has {len(wanted)} constraints; send one of them", first)
        raise invalid(f"{first} and {second} both constrain the answer; send one of them", second)
    param, spec = wanted[0] if wanted else ("response_format", None)
    return spec, param


def _one(param: str, outputs: StructuredOutputs) -> list[tuple[str, GrammarSpec]]:
    values = {
        "json": outputs.json_,
        "regex": outputs.regex,
        "choice": outputs.choice,
        "grammar": outputs.grammar,
        "structural_tag": outputs.structural_tag,
    }
    found = [(param, _spec(param, name, value)) for name, value in values.items() if value is not None]
    if outputs.json_object:
        found.append((param, GrammarSpec("json_object", "")))
    return found


def _spec(param: str, name: str, value: Any) -> GrammarSpec:
    if name == "json":
        return GrammarSpec("json_schema", _schema(param, value))
    if name == "choice":
        if not value or "" in value:
            raise invalid(f"{param}: expected choices that are not empty", param)
        return GrammarSpec("choice", json.dumps(value))
    if name == "structural_tag":
        return GrammarSpec("structural_tag", value if isinstance(value, str) else json.dumps(value))
    if not value:
        raise invalid(f"{param}: the {name} is empty", param)
    return GrammarSpec(name, value)


def _schema(param: str, value: str | dict[str, Any]) -> str:
    """A JSON schema as text; one that came as text is parsed, so that every client sees the same error."""
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise invalid(f"{param}: the schema is not JSON: {str(error)[:80]}", param) from error
        if not isinstance(parsed, dict):
            raise invalid(f"{param}: expected a JSON schema, found {value[:40]!a}", param)
        value = parsed
    return json.dumps(value)
