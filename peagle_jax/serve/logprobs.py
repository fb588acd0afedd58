"""Log-probabilities in the shapes of OpenAI's two endpoints and of vLLM's ``prompt_logprobs``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peagle_jax.serve.token_text import TokenText
from peagle_jax.speculative.sampling import TokenLogprob

LOWEST = -9999.0
"""What JSON has for minus infinity (OpenAI's and vLLM's value)."""


def finite(logprob: float) -> float:
    """A log-probability that JSON can spell."""
    return max(logprob, LOWEST)


def chat_logprobs(
    entries: Sequence[TokenLogprob], top: int, text: TokenText, *, as_ids: bool
) -> dict[str, Any]:
    """``logprobs`` of a chat choice: an entry a token, each with the ``top`` best."""

    def spelled(token: int, logprob: float) -> dict[str, Any]:
        raw = text.bytes(token)
        return {"token": text.text(token, as_id=as_ids), "logprob": finite(logprob), "bytes": list(raw)}

    content = [
        spelled(entry.token_id, entry.logprob)
        | {"top_logprobs": [spelled(*best) for best in entry.top[:top]]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """``logprobs`` of a completion choice, part by part: parallel lists, with offsets into the text."""

    def __init__(self, top: int, text: TokenText, *, as_ids: bool) -> None:
        self._top, self._text, self._as_ids = top, text, as_ids
        self._offset = 0

    def part(self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """The next tokens' lists. An entry is None for a prompt's first token, which nothing predicts."""
        tokens, offsets, values, tops = [], [], [], []
        for token, entry in zip(token_ids, entries, strict=True):
            name = self._name(token)
            tokens.append(name)
            offsets.append(self._offset)
            self._offset += len(name)
            values.append(None if entry is None else finite(entry.logprob))
            tops.append(None if entry is None else self._best(entry))
        return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}

    def _best(self, entry: TokenLogprob) -> dict[str, float]:
        """The best tokens and, as OpenAI and vLLM do, the chosen one."""
        pairs = [*entry.top[: self._top], (entry.token_id, entry.logprob)]
        best: dict[str, float] = {}
        for token, logprob in pairs:
            best.setdefault(self._name(token), finite(logprob))
        return best

    def _name(self, token: int) -> str:
        return self._text.text(token, as_id=self._as_ids)


def joined(parts: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """Several parts of a completion's lists as one."""
    names = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
    return {name: [item for part in parts for item in part[name]] for name in names}


def prompt_logprobs(
    entries: Sequence[TokenLogprob | None], top: int, text: TokenText, *, as_ids: bool
) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: for each prompt token its own and the best ones, by token id."""

    def spelled(token: int, logprob: float, rank: int) -> dict[str, Any]:
        name = text.text(token, as_id=as_ids)
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": name}

    found: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            found.append(None)
            continue
        named = {str(entry.token_id): spelled(entry.token_id, entry.logprob, entry.rank)}
        for place, (token, logprob) in enumerate(entry.top[:top], start=1):
            named.setdefault(str(token), spelled(token, logprob, place))
        found.append(named)
    return found
