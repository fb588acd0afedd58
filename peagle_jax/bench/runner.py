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
from peagle_jax.generate import Run
from peagle_jax.serve.detokenize import Delta
from peagle_jax.serve.engine import Engine
from peagle_jax.serve.live import EngineRequest
from peagle_jax.serve.prompt import PromptError, encode, render_chat
from peagle_jax.speculative.sampling import SamplingParams
from peagle_jax.speculative.statistics import AcceptanceStatistics


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

    def as_run(self) -> Run:
        """For ``generate.compare``."""
        rate = self.decode_tokens / max(self.decode_seconds, 1e-9)
        statistics = AcceptanceStatistics(0)
        return Run(self.text, self.token_ids, self.finish, self.time_to_first_token, rate, statistics)


def ask(
    engine: Engine, prompt_ids: list[int], sampling: SamplingParams, max_tokens: int, stops: Sequence[int]
) -> Reply:
    """One answer. Raises CommandError if the engine gives none."""
    done = threading.Event()
    positions = len(engine.snapshot().accepted_per_pos)
    reply = Reply(prompt_ids, 0.0, tally=Tally(per_position=[0] * positions))

    def deliver(delta: Delta) -> None:
        reply.add(delta)
        if delta.finish_reason is not None:
            done.set()

    request = EngineRequest("bench", tuple(prompt_ids), sampling, max_tokens, frozenset(stops))
    reply.begun = time.monotonic()
    engine.submit(request, deliver)
    done.wait()
    if reply.finish not in ("stop", "length"):
        raise CommandError(f"an answer ended with {reply.finish}")
    return reply


def converse(
    engine: Engine, target: Any, conversation: Conversation, context: int, args: argparse.Namespace
) -> list[Reply]:
    """The answers to a conversation's turns (the first one unless ``--turns all``), each asked after the
    model's own answers. It ends where the context is full; a first turn that does not fit has none.

    Raises:
        CommandError: the model's template or tokenizer refuses it.
    """
    messages = [{"role": "system", "content": conversation.system}] if conversation.system else []
    sampling = SamplingParams(temperature=args.temperature, seed=args.seed)
    stops = () if args.ignore_eos else target.config.eos_token_ids
    replies: list[Reply] = []
    for turn in conversation.turns if args.turns == "all" else conversation.turns[:1]:
        messages.append({"role": "user", "content": turn})
        ids = prompt_ids(target.tokenizer, messages, raw=args.raw)
        if len(ids) + args.max_tokens > context:
            break
        replies.append(ask(engine, ids, sampling, args.max_tokens, stops))
        messages.append({"role": "assistant", "content": replies[-1].text})
    return replies


def prompt_ids(tokenizer: Any, messages: Sequence[dict[str, str]], *, raw: bool) -> list[int]:
    """Token ids of messages in the chat template, or of their texts alone if ``raw``."""
    try:
        text = "\n".join(m["content"] for m in messages) if raw else render_chat(tokenizer, messages)
        return encode(tokenizer, text, special=raw)
    except PromptError as error:
        raise CommandError(f"{error}; --raw sends prompts as they are") from error
