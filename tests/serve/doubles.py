"""Stand-ins for the server's tests: a byte-level tokenizer and a decoder that says what it is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from peagle_jax.config import SpecConfig
from peagle_jax.speculative.sizes import Pool, Sizes

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
    logprobs: list | None = None
    prompt_logprobs: list | None = None


class ScriptedDecoder:
    """Says ``script(prompt_ids)``, ``width`` tokens a round, and stops as a decoder does.

    ``pause`` is the seconds that a round takes. ``fail`` raises after one round if it is true of the prompt
    of any request in it. ``slots`` requests run side by side.
    """

    replicas, scratch, lookahead, compilations = 1, 0, 0, 0
    drafter = None

    def __init__(
        self,
        script: Callable[[list[int]], Sequence[int]],
        *,
        width: int = 4,
        pause: float = 0.0,
        fail: Callable[[list[int]], bool] = lambda prompt: False,
        warm_up: Callable[[], object] = lambda: None,
        slots: int = 4,
    ) -> None:
        self.script, self.width, self.pause, self.fail, self._warm_up = script, width, pause, fail, warm_up
        self.sizes = Sizes((Pool(slots, 10**6),), (slots,), (width - 1,), (10**6,))
        self.spec = SpecConfig(width - 1, "peagle")
        self.rounds = 0
        self.closed: list[bool] = []  # one a request: True if it was left before its end
        self.busy = threading.Event()
        self.seen: list[tuple] = []
        self._slots: dict[int, tuple[list[int], list[int], str]] = {}

    def warm_up(self, progress: Callable[[str, int, int], None] = lambda what, number, count: None) -> None:
        progress("a script", 1, 1)
        self._warm_up()

    def idle_rounds(self, clock) -> dict[tuple[int, int], float]:
        return {}

    def check(self, request) -> None:
        assert len(request.prompt) > 0

    # What the engine drives: a slot's prompt, the tokens left to say, and how they end.

    def prefill(self, chunks):
        found = {}
        for chunk in chunks:
            request = chunk.request
            prompt = list(request.prompt)
            self.seen.append((prompt, request.sampling, request.max_tokens, set(request.stop_ids)))
            said = len(chunk.tokens) - len(prompt)
            tokens, finish = self._answer(prompt, request.max_tokens, request.stop_ids)
            self._slots[chunk.slot] = prompt, tokens[said:], finish
            found[chunk.slot] = self._say(chunk.slot, 1)
        return self._flight(found)

    def width_for(self, active) -> int:
        return self.sizes.widths[-1]

    def round(self, active, k, drafting=None, pace=None):
        found, self._left = {}, set(self._slots) - set(active)
        for slot in self._left:
            del self._slots[slot]
            self.closed.append(True)
        for slot in [slot for slot in active if slot in self._slots]:
            if self.fail(self._slots[slot][0]):
                raise RuntimeError("the accelerator is on fire\nwith details")
            found[slot] = self._say(slot, self.width)
        return self._flight(found)

    def copy(self, source: int, target: int, count: int) -> None:
        if source in self._slots:
            self._slots[target] = self._slots[source]

    def start_over(self, pool) -> None:
        self._slots.clear()

    def results(self, flight):
        return [flight]

    def _flight(self, found):
        self.busy.set()
        time.sleep(self.pause)
        self.rounds += 1
        if not self._slots:
            self.busy.clear()
        return found

    def _say(self, slot: int, size: int) -> Result:
        prompt, tokens, finish = self._slots[slot]
        part, rest = tokens[:size], tokens[size:]
        self._slots[slot] = prompt, rest, finish
        if not rest:
            del self._slots[slot]
            self.closed.append(False)
        return Result(part, len(part) - 1, self.width - 1 if size > 1 else 0, None if rest else finish)

    def _answer(self, prompt, max_tokens, stop_ids) -> tuple[list[int], str]:
        tokens = list(self.script(prompt))[:max_tokens]
        stop = next((i for i, token in enumerate(tokens) if token in stop_ids), None)
        return (tokens, "length") if stop is None else (tokens[: stop + 1], "stop")

    def generate(self, prompt_ids, sampling, max_tokens, stop_ids) -> Iterator[Result]:
        """One request alone, as the command line decodes it."""
        tokens, finish = self._answer(list(prompt_ids), max_tokens, stop_ids)
        for start, size in [(0, 1), *((i, self.width) for i in range(1, len(tokens), self.width))]:
            part, done = tokens[start : start + size], start + size >= len(tokens)
            drafted = self.width - 1 if size > 1 else 0
            yield Result(part, len(part) - 1, drafted, finish if done else None)


TOKENIZER = byte_tokenizer()
END = TOKENIZER.get_vocab()[EOS]


def says(text: str, **options) -> ScriptedDecoder:
    """A decoder that answers every prompt with ``text`` and the end token."""
    return ScriptedDecoder(lambda prompt: [*TOKENIZER.encode(text), END], **options)
