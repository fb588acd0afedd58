"""Stand-ins for the server's tests: a byte-level tokenizer and a decoder that says what it is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'nobody' %}"
    "{{ raise_exception('nobody may not speak') }}{% endif %}"
    "<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
EOS = "<|end|>"


def byte_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """256 bytes, a few merges, and special tokens: a character of several bytes is several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "t"), ("h", "i")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<|start|>", special=True), AddedToken(EOS, special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=EOS)
    tokenizer.chat_template = template
    return tokenizer


class Result(NamedTuple):
    """The fields of a round that the server reads."""

    tokens: list[int]
    accepted: int = 0
    drafted: int = 0
    finish_reason: str | None = None
    logprobs: None = None
    prompt_logprobs: None = None


class ScriptedDecoder:
    """Says ``script(prompt_ids)``, ``width`` tokens a round, and stops as a decoder does.

    ``pause`` is the seconds that a round takes. ``fail`` raises after one round if it is true of the prompt.
    ``gate``, if given, holds every round after the first until it is set.
    """

    def __init__(
        self,
        script: Callable[[list[int]], Sequence[int]],
        *,
        width: int = 4,
        pause: float = 0.0,
        fail: Callable[[list[int]], bool] = lambda prompt: False,
        warm_up: Callable[[], object] = lambda: None,
    ) -> None:
        self.script, self.width, self.pause, self.fail, self._warm_up = script, width, pause, fail, warm_up
        self.rounds = 0
        self.closed: list[bool] = []  # one a request: True if it was left before its end
        self.busy = threading.Event()
        self.seen: list[tuple] = []

    def warm_up(self) -> None:
        self._warm_up()

    def generate(self, prompt_ids, sampling, max_tokens, stop_ids) -> Iterator[Result]:
        self.seen.append((list(prompt_ids), sampling, max_tokens, set(stop_ids)))
        tokens = list(self.script(prompt_ids))[:max_tokens]
        stop = next((i for i, token in enumerate(tokens) if token in stop_ids), None)
        finish = "length"
        if stop is not None:
            tokens, finish = tokens[: stop + 1], "stop"
        done = False
        try:
            sizes = [1] + [self.width] * len(tokens)
            while not done:
                self.busy.set()
                time.sleep(self.pause)
                size = sizes.pop(0)
                part, tokens = tokens[:size], tokens[size:]
                done = not tokens
                self.rounds += 1
                yield Result(part, len(part) - 1, self.width - 1 if size > 1 else 0, finish if done else None)
                if self.fail(prompt_ids):
                    raise RuntimeError("the accelerator is on fire\nwith details")
        finally:
            self.busy.clear()
            self.closed.append(not done)


TOKENIZER = byte_tokenizer()
END = TOKENIZER.get_vocab()[EOS]


def says(text: str, **options) -> ScriptedDecoder:
    """A decoder that answers every prompt with ``text`` and the end token."""
    return ScriptedDecoder(lambda prompt: [*TOKENIZER.encode(text), END], **options)
