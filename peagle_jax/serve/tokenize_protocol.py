"""The bodies of /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from peagle_jax.serve.chat_protocol import ChatRequest
from peagle_jax.serve.protocol import check_text


class TokenizeText(BaseModel):
    """A text to tokenise."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = False

    @field_validator("prompt")
    @classmethod
    def _readable(cls, value: str) -> str:
        return check_text(value)


class TokenizeChat(ChatRequest):
    """A conversation to tokenise, in the chat template."""

    return_token_strs: bool | None = False


class DetokenizeRequest(BaseModel):
    """Token ids to read."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]
