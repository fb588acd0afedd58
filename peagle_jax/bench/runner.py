"""Conversations with an engine in this process, one request at a time, and the times of what comes."""

from __future__ import annotations

import argparse
import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import Any

from peagle_jax.arguments import CommandError
from peagle_jax.bench.datasets import Conversation
from peagle_jax.bench.tally import Tally
from peagle_jax.generate import sampling_of
from peagle_jax.serve.detokenize import Delta
from peagle_jax.serve.engine import Engine
from peagle_jax.serve.live import EngineRequest
from peagle_jax.serve.prompt import PromptError, encode, render_chat
from peagle_jax.speculative.sampling import SamplingParams


@dataclasses.dataclass(frozen=True)
class Asking:
    """How prompts are asked."""

    sampling: SamplingParams
    max_tokens: int
    later_turns: bool = False
    ignore_eos: bool = False
    raw: bool = False

    @classmethod
    def of(cls, args: argparse.Namespace) -> Asking:
        """As the flags say. Raises CommandError for sampling that cannot be."""
        return cls(sampling_of(args), args.max_tokens, args.turns == "all", args.ignore_eos, args.raw)

    def stops(self, target: Any) -> frozenset[int]:
        """The token ids that end an answer."""
        return frozenset() if self.ignore_eos else frozenset(target.config.eos_token_ids)

    def prompt_ids(self, target: Any, messages: Sequence[dict[str, str]], context: int) -> list[int] | None:
        """Token ids of messages in the chat template, or of their texts alone if ``raw``; None where the
        context has no room for them and the answer.

        Raises:
            CommandError: the model's template or tokenizer refuses them, or there is nothing in them.
        """
        try:
            texts = (m["content"] for m in messages)
            text = "\n".join(texts) if self.raw else render_chat(target.tokenizer, messages)
            ids = encode(target.tokenizer, text, special=self.raw)
        except PromptError as error:
            raise CommandError(f"{error}; --raw sends prompts as they are") from error
        if not ids:
            raise CommandError("a prompt is empty; leave it out of the set")
        return ids if len(ids) + self.max_tokens <= context else None


@dataclasses.dataclass
class Reply:
    """An answer: monotonic seconds of its beginning and of each round's tokens."""

    prompt_ids: list[int]
    begun: float
    token_ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    arrivals: list[float] = dataclasses.field(default_factory=list)
    first: int = 0
    tally: Tally = dataclasses.field(default_factory=Tally)
    finish: str = ""

    def add(self, delta: Delta) -> None:
        """A round, on the engine's thread."""
        if delta.token_ids:
            self.arrivals.append(time.monotonic())
            self.first = self.first or len(delta.token_ids)
            self.token_ids += delta.token_ids
        self.text += delta.text
        self.tally.add(delta.accepted, delta.drafted, len(delta.token_ids))
        self.finish = delta.error or delta.finish_reason or ""

    @property
    def time_to_first_token(self) -> float:
        return self.arrivals[0] - self.begun

    @property
    def latency(self) -> float:
        return self.arrivals[-1] - self.begun

    @property
    def decode_tokens(self) -> int:
        """Those after the first round's."""
        return len(self.token_ids) - self.first

    @property
    def decode_seconds(self) -> float:
        return self.arrivals[-1] - self.arrivals[0]


def ask(engine: Engine, prompt_ids: list[int], asking: Asking, stops: frozenset[int]) -> Reply:
    """One answer. Raises CommandError if the engine gives none."""
    done = threading.Event()
    positions = len(engine.snapshot().accepted_per_pos)
    reply = Reply(prompt_ids, 0.0, tally=Tally(per_position=[0] * positions))

    def deliver(delta: Delta) -> None:
        reply.add(delta)
        if delta.finish_reason is not None:
            done.set()

    request = EngineRequest("bench", tuple(prompt_ids), asking.sampling, asking.max_tokens, stops)
    reply.begun = time.monotonic()
    engine.submit(request, deliver)
    done.wait()
    if reply.finish not in ("stop", "length"):
        raise CommandError(f"an answer ended with {reply.finish}")
    return reply


def converse(
    engine: Engine, target: Any, conversation: Conversation, context: int, asking: Asking
) -> list[Reply]:
    """The answers to a conversation's first turn, or to all, each asked after the model's own answers. It
    ends where the context is full; a first turn that does not fit has none.

    Raises:
        CommandError: the model's template or tokenizer refuses it.
    """
    messages, stops = conversation.opening, asking.stops(target)
    replies: list[Reply] = []
    for turn in conversation.turns if asking.later_turns else conversation.turns[:1]:
        if replies:
            messages.append({"role": "assistant", "content": replies[-1].text})
            messages.append({"role": "user", "content": turn})
        ids = asking.prompt_ids(target, messages, context)
        if ids is None:
            break
        replies.append(ask(engine, ids, asking, stops))
    return replies
