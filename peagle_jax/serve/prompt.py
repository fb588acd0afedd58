"""Text to token ids, for the server and the command line alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class PromptError(ValueError):
    """A prompt that the model's template or tokenizer does not take; the message is one line."""


def render_chat(tokenizer: Any, messages: Sequence[dict[str, Any]], /, **options: Any) -> str:
    """The messages in the model's chat template, ending where the answer begins.

    ``options`` are the template's: ``tools``, ``documents``, ``add_generation_prompt`` (True unless given),
    ``continue_final_message``, ``chat_template`` to use another, and whatever it reads besides.

    Raises:
        PromptError: there is no template, or it refuses the messages (it is a program of the
            model's author, and may raise anything).
    """
    if not (getattr(tokenizer, "chat_template", None) or options.get("chat_template")):
        raise PromptError("the model has no chat template")
    options = {"add_generation_prompt": True} | options

    def render() -> str:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, **options)

    return _or_refuse(render, "the model's chat template refused the messages")


def encode(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    """The text's token ids, with the tokenizer's first and last special tokens if ``special``.

    The tokenizer's own warning of a long text is left out: callers check the context.

    Raises:
        PromptError: the tokenizer refuses the text (one without a token for unknown characters does).
    """
    return _or_refuse(
        lambda: tokenizer.encode(text, add_special_tokens=special, verbose=False),
        "the model's tokenizer refused the prompt",
    )


def longest_token(tokenizer: Any) -> int:
    """Characters of the longest entry of the vocabulary, so about the most that one token stands for."""
    return max(map(len, tokenizer.get_vocab()), default=1)


def _or_refuse(do: Callable[[], T], what: str) -> T:
    try:
        return do()
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise PromptError(f"{what}: {reason[:200]}") from error
