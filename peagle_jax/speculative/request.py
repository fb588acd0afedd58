"""What the host gives a decoder and gets from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from peagle_jax.config import MAX_STOP_IDS
from peagle_jax.speculative.rules import TokenMatcher, check_rules, rules_state
from peagle_jax.speculative.sampling import SamplingParams, TokenLogprob
from peagle_jax.speculative.state import RoundOutput, Settings


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt (token ids) and how to continue it. ``stop_ids`` end it, and are part of it.

    ``matcher`` is a grammar of the answer for ``Decoder.run``, which advances it.
    """

    prompt: Sequence[int]
    sampling: SamplingParams = SamplingParams()
    max_tokens: int = 128
    stop_ids: frozenset[int] = frozenset()
    matcher: TokenMatcher | None = None


@dataclasses.dataclass(frozen=True)
class RoundResult:
    """New tokens of one round. ``finish_reason`` is set ("stop" or "length") on the last one.

    ``logprobs`` (if asked) has an entry for each token; ``prompt_logprobs`` (if asked) comes with each of
    a prompt's chunks, an entry for each of the prompt's tokens that follows one of the chunk's.
    """

    tokens: list[int]
    accepted: int = 0
    drafted: int = 0
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None


@dataclasses.dataclass(frozen=True)
class PromptChunk:
    """``count`` of a request's tokens from ``start`` on, for ``slot``, where all before are stored.

    ``tokens`` is the prompt, with the answer so far if the request was interrupted.
    """

    slot: int
    request: Request
    tokens: Sequence[int]
    start: int
    count: int
    mask: np.ndarray | None = None  # uint32 (ceil(V/32),): what a grammar allows as the first token

    @property
    def final(self) -> bool:
        return self.start + self.count == len(self.tokens)


@dataclasses.dataclass(frozen=True)
class Flight:
    """A dispatch whose results are not read yet. ``slots[r]`` are those of replica r, in its rows.

    ``chunks`` are those of a prefill.
    """

    output: RoundOutput
    slots: tuple[Sequence[int], ...]
    chunks: tuple[PromptChunk, ...] = ()


def kept_by_grammar(result: RoundResult, matcher: TokenMatcher) -> tuple[RoundResult, bool]:
    """A round's result cut where the grammar's text ends, and whether a stop id is still its last token.

    The matcher advances. Raises ValueError if it has failed.
    """
    used = matcher.advance(result.tokens)
    stopped = result.finish_reason == "stop" and used == len(result.tokens)
    logprobs = None if result.logprobs is None else result.logprobs[:used]
    reason = "stop" if matcher.finished else result.finish_reason
    return dataclasses.replace(
        result, tokens=result.tokens[:used], logprobs=logprobs, finish_reason=reason
    ), stopped


def check_request(request: Request, vocab_size: int, room: int) -> None:
    """Raises ValueError, in one line, for a request that cannot be decoded."""
    ids = request.prompt
    if not len(ids):
        raise ValueError("the prompt is empty; expected at least one token")
    if len(ids) >= room:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, but the context holds {room} (prompt and answer); "
            f"shorten it to at most {room - 1}"
        )
    wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise ValueError(f"token id {wrong} is outside the vocabulary of {vocab_size}")
    if request.max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, found {request.max_tokens}")
    if len(request.stop_ids) > MAX_STOP_IDS:
        raise ValueError(f"at most {MAX_STOP_IDS} stop ids are supported, found {len(request.stop_ids)}")
    check_rules(request.sampling, vocab_size, request.max_tokens)


def settings_of(
    request: Request, max_model_len: int, vocab_size: int, answer: Sequence[int] = ()
) -> Settings:
    """A request's settings as the device wants them: leaves (1, ...). ``answer`` is what it has said already,
    if it was interrupted."""
    limit = min(len(request.prompt) + request.max_tokens, max_model_len)
    rules = rules_state([request.sampling], [request.prompt], [request.stop_ids], vocab_size, [answer])
    return Settings(limit=np.array([limit], np.int32), rules=rules)
