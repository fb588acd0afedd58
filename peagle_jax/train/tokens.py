"""Conversations to token ids with a loss flag on every token that the target itself would write.

The flags come from the chat template alone: the text that the template adds when an assistant
message is appended to the conversation is the assistant's, and no pattern is searched for.
"""

from __future__ import annotations

import collections
import dataclasses
import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from peagle_jax.train.recipe import TrainError

MAX_SKIPPED = 0.05


@dataclasses.dataclass(frozen=True)
class Document:
    """``tokens`` int32 (T,); ``flags`` bool (T,), true on tokens whose prediction is trained."""

    id: str
    tokens: np.ndarray
    flags: np.ndarray


@dataclasses.dataclass
class Summary:
    """What became of the records. ``skipped`` counts reasons."""

    documents: int = 0
    tokens: int = 0
    supervised: int = 0
    skipped: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    def line(self) -> str:
        dropped = sum(self.skipped.values())
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.skipped.items())
        return (
            f"{self.documents} documents, {self.tokens} tokens, {self.supervised} supervised; "
            f"skipped {dropped}" + (f" ({reasons})" if dropped else "")
        )


def read_records(paths: Iterable[str | Path], limit: int = 0) -> Iterator[dict[str, Any]]:
    """Records of JSON-lines files (.gz too), in order; at most ``limit`` of them unless 0.

    Raises TrainError: no such file, or a line that is not a JSON object.
    """
    seen = 0
    for path in paths:
        if not Path(path).is_file():
            raise TrainError(f"data file {path} does not exist")
        opener = gzip.open if str(path).endswith(".gz") else open
        with opener(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                if limit and seen >= limit:
                    return
                try:
                    record = json.loads(line)
                except json.JSONDecodeError as error:
                    raise TrainError(f"{path} line {number} is not JSON: {error.msg}") from error
                if not isinstance(record, dict):
                    raise TrainError(
                        f"{path} line {number} holds {type(record).__name__}, expected an object"
                    )
                seen += 1
                yield record


def record_id(record: dict[str, Any]) -> str:
    """The record's id, or a hash of its content where it has none."""
    if record.get("id") is not None:
        return str(record["id"])
    content = json.dumps(record.get("messages", record.get("prompt")), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def is_heldout(identifier: str, share: float) -> bool:
    """Whether a document is validation data; depends on its id alone."""
    bits = int.from_bytes(hashlib.sha256(identifier.encode()).digest()[:8], "big")
    return bits < share * 2**64


class ConversationEncoder:
    """Encodes conversations with a tokenizer's chat template.

    ``stop_ids`` close a turn (the tokenizer's eos and the target's). ``template`` holds extra
    arguments of the template, such as ``enable_thinking``.
    """

    def __init__(self, tokenizer: Any, stop_ids: Iterable[int] = (), template: dict | None = None):
        self.tokenizer = tokenizer
        self.template = dict(template or {})
        eos = getattr(tokenizer, "eos_token_id", None)
        self.stop_ids = frozenset(stop_ids) | (frozenset() if eos is None else {eos})

    def render(self, messages: list[dict], generation: bool) -> str:
        """The template's text. Raises TrainError naming the template's own complaint."""
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generation, **self.template
            )
        except Exception as error:  # templates raise what they like
            raise TrainError(f"the chat template refused a record: {' '.join(str(error).split())}") from error

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def prompt_ids(self, messages: list[dict]) -> list[int]:
        """Ids of a conversation that awaits an answer, as serving encodes it."""
        return self._ids(self.render(messages, True))

    def encode(self, messages: list[dict], finish: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int32 (T,) and loss flags bool (T,).

        Every assistant message is flagged, its closing token included, unless it is the last one
        and ``finish`` is "length": that answer was cut and has no end. What follows the last
        flagged token is dropped, since no prediction depends on it.

        Raises TrainError: the template writes earlier turns differently once later ones follow,
        so that no prefix of the text is what the target saw.
        """
        ids: list[int] = []
        flags: list[bool] = []
        done = ""
        turns = [i for i, m in enumerate(messages) if m.get("role") == "assistant"]
        for i in turns:
            before = self.render(messages[:i], True)
            after = self.render(messages[: i + 1], False)
            if not before.startswith(done) or not after.startswith(before):
                raise TrainError(
                    f"the chat template rewrites earlier text when message {i + 1} of {len(messages)} is "
                    "added, so answers cannot be located; give one answer a record, or set data.template"
                )
            context = self._ids(before[len(done) :])
            answer = self._answer(before, after)
            ends = [j for j, token in enumerate(answer) if token in self.stop_ids]
            close = ends[-1] if ends else len(answer)
            cut = i == turns[-1] and finish == "length"
            supervised = close if cut or not ends else close + 1
            ids += context + answer
            flags += [False] * len(context)
            flags += [True] * supervised + [False] * (len(answer) - supervised)
            done = after
        length = max((j + 1 for j, flag in enumerate(flags) if flag), default=0)
        return np.array(ids[:length], np.int32), np.array(flags[:length], bool)

    def _answer(self, before: str, after: str) -> list[int]:
        """Ids of what the assistant wrote after the prompt ``before``.

        The prompt's own ids end at its last character, as in serving, even where the whole text
        would merge a token across that point.
        """
        prompt, whole = self._ids(before), self._ids(after)
        if whole[: len(prompt)] == prompt:
            return whole[len(prompt) :]
        return self._ids(after[len(before) :])


def encode_records(
    records: Iterable[dict[str, Any]], encoder: ConversationEncoder, summary: Summary
) -> Iterator[Document]:
    """Documents of records with ``messages``; fills ``summary``.

    Records without a supervised token, or which the template refuses, are skipped and counted.

    Raises TrainError: a record without messages, or more than 5 % skipped.
    """
    refusal = ""
    for record in records:
        messages = record.get("messages")
        if not isinstance(messages, list):
            hint = "; write the answers first with `python -m peagle_jax.train regenerate`"
            raise TrainError(
                f"record {record_id(record)} has no messages" + (hint if "prompt" in record else "")
            )
        try:
            tokens, flags = encoder.encode(messages, record.get("finish"))
        except TrainError as error:
            refusal = refusal or f"; first: {error}"
            summary.skipped["refused by the template"] += 1
            continue
        if not flags.any():
            summary.skipped["without a supervised token"] += 1
            continue
        summary.documents += 1
        summary.tokens += len(tokens)
        summary.supervised += int(flags.sum())
        yield Document(record_id(record), tokens, flags)
    skipped = sum(summary.skipped.values())
    if skipped > MAX_SKIPPED * (skipped + summary.documents):
        reasons = ", ".join(f"{count} {reason}" for reason, count in summary.skipped.items())
        name = getattr(encoder.tokenizer, "name_or_path", "") or "this tokenizer"
        raise TrainError(
            f"{skipped} of {skipped + summary.documents} records cannot be used with the chat template of "
            f"{name}: {reasons} (at most {MAX_SKIPPED:.0%} are tolerated){refusal}"
        )
