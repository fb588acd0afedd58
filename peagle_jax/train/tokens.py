"""Conversations to token ids with a loss flag on every token that the target itself would write.

The flags come from the chat template alone: the text that the template adds when an assistant
message is appended to the conversation is the assistant's, and no pattern is searched for.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from peagle_jax.train.recipe import DataRecipe, TrainError
from peagle_jax.train.records import RecordError, name_of, record_id

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning. Templates read the first, gpt-oss's the second."""

CHANNEL = "<|channel|>"
_HARMONY = re.compile(
    r"(?:<\|channel\|>analysis<\|message\|>(?P<reasoning_content>.*?)<\|end\|><\|start\|>assistant)?"
    r"<\|channel\|>final<\|message\|>(?P<content>.*)",
    re.DOTALL,
)
EXACTLY = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}


@dataclasses.dataclass(frozen=True)
class Document:
    """``tokens`` int32 (T,); ``flags`` bool (T,), true on tokens whose prediction is trained."""

    id: str
    tokens: np.ndarray
    flags: np.ndarray


@dataclasses.dataclass
class Summary:
    """What became of the records. ``skipped`` counts reasons, ``first`` holds the first message of each;
    ``long`` counts what was done about conversations longer than ``row_length``."""

    documents: int = 0
    tokens: int = 0
    supervised: int = 0
    row_length: int = 0
    skipped: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    first: dict[str, str] = dataclasses.field(default_factory=dict)
    long: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    def skip(self, error: RecordError) -> None:
        """Counts a bad record."""
        self.skipped[error.reason] += 1
        self.first.setdefault(error.reason, str(error))

    def line(self) -> str:
        dropped = sum(self.skipped.values())
        text = (
            f"{self.documents} documents, {self.tokens} tokens, {self.supervised} supervised; "
            f"skipped {dropped}" + (f" ({_counts(self.skipped)})" if dropped else "")
        )
        if self.long:
            text += f"; longer than {self.row_length} tokens: {_counts(self.long)}"
        return text

    def notes(self) -> list[str]:
        """One line for every reason: the first record that was skipped for it."""
        return [f"first of {self.skipped[reason]} {reason}: {text}" for reason, text in self.first.items()]


def _counts(counter: collections.Counter) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counter.items())


def on_bad_record(data: DataRecipe, summary: Summary) -> Callable[[RecordError], None]:
    """What ``data.on_error`` asks for: to count the record in ``summary``, or to raise TrainError."""
    if data.on_error == "skip":
        return summary.skip

    def stop(error: RecordError) -> None:
        raise TrainError(f"{error}; correct it, or set data.on_error: skip to count and skip such records")

    return stop


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
        """The template's text. Raises RecordError naming the template's own complaint."""
        try:
            return self.tokenizer.apply_chat_template(
                [_with_reasoning(m) for m in messages],
                tokenize=False,
                add_generation_prompt=generation,
                **self.template,
            )
        except Exception as error:  # templates raise what they like
            reason = " ".join(str(error).split())
            raise RecordError(
                "refused by the template", f"the chat template refused a record: {reason}"
            ) from error

    def _ids(self, text: str) -> list[int]:
        try:
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        except (TypeError, UnicodeError) as error:  # half of a surrogate pair, which JSON can write
            raise RecordError("not valid Unicode", "the text is not valid Unicode") from error

    def prompt_ids(self, messages: list[dict]) -> list[int]:
        """Ids of a conversation that awaits an answer, as serving encodes it."""
        return self._ids(self.render(messages, True))

    def message(self, messages: list[dict], ids: list[int]) -> dict[str, str] | None:
        """The message that the template writes after ``messages`` as an answer's ``ids``, whose close is left
        out; None if there is none: the answer is empty, or cut where the template goes on by itself (in
        reasoning), or of a form that it does not write. White space is the template's own."""
        text = self.tokenizer.decode(ids, **EXACTLY)
        said = {"content": text}
        if CHANNEL in (getattr(self.tokenizer, "chat_template", None) or ""):
            found = _HARMONY.fullmatch(text)
            said = {} if found is None else {k: v for k, v in found.groupdict().items() if v is not None}
        if not said.get("content", "").strip():
            return None
        message = {"role": "assistant"} | said
        try:
            before, after = self.render(messages, True), self.render([*messages, message], False)
        except RecordError:
            return None
        written = "".join(after.removeprefix(before).split())
        return message if written.startswith("".join(text.split())) else None

    def encode(self, messages: list[dict], finish: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int32 (T,) and loss flags bool (T,).

        Every assistant message is flagged, its closing token included, unless it is the last one
        and ``finish`` is "length": that answer was cut and has no end. What follows the last
        flagged token is dropped, since no prediction depends on it.

        Raises RecordError: the template refuses the messages, or writes earlier turns differently once
        later ones follow, so that no prefix of the text is what the target saw; an answer is empty.
        """
        ids: list[int] = []
        flags: list[bool] = []
        done = ""
        turns = _answers(messages)
        for i in turns:
            before, answer, supervised, after = self._turn(messages, i, finish if i == turns[-1] else None)
            if not before.startswith(done):
                raise RecordError(
                    "rewritten by the template",
                    f"the chat template rewrites earlier text when message {i + 1} of {len(messages)} is "
                    "added, so no one text holds all answers; set data.turns: apart, or see data.template",
                )
            context = self._ids(before[len(done) :])
            ids += context + answer
            flags += [False] * len(context)
            flags += [True] * supervised + [False] * (len(answer) - supervised)
            done = after
        length = max((j + 1 for j, flag in enumerate(flags) if flag), default=0)
        return np.array(ids[:length], np.int32), np.array(flags[:length], bool)

    def encode_apart(
        self, messages: list[dict], finish: str | None = None
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Every assistant message after the text that serving would have put before it: a text a turn,
        each as ``encode`` returns it with that turn alone flagged. Raises RecordError as ``encode``."""
        out = []
        turns = _answers(messages)
        for i in turns:
            before, answer, supervised, _ = self._turn(messages, i, finish if i == turns[-1] else None)
            context = self._ids(before)
            flags = np.arange(len(context) + supervised) >= len(context)
            out.append((np.array(context + answer[:supervised], np.int32), flags))
        return out

    def _turn(self, messages: list[dict], i: int, finish: str | None) -> tuple[str, list[int], int, str]:
        """Of message i: the text before it, its ids, how many of them the target would write, and the
        text up to its end."""
        if i == 0:
            fault = f"message 1 of {len(messages)} is the assistant's, and nothing stands before it"
            raise RecordError("with an answer to nothing", fault)
        before = self.render(messages[:i], True)
        after = self.render(messages[: i + 1], False)
        if not after.startswith(before):
            raise RecordError(
                "rewritten by the template",
                f"the chat template rewrites earlier text when message {i + 1} of {len(messages)} is added, "
                "so its answer cannot be located; data.template passes arguments to the template",
            )
        answer = self._answer(before, after)
        ends = [j for j, token in enumerate(answer) if token in self.stop_ids]
        close = ends[-1] if ends else len(answer)
        if (
            ends
        ):  # what follows the close is not the answer's, and Llama-3's template always opens a turn there
            closed = before + self.tokenizer.decode(answer[: close + 1], **EXACTLY)
            if after.startswith(closed):
                answer, after = answer[: close + 1], closed
        message = messages[i]
        said = any(message.get(k) for k in ("tool_calls", *REASONING))
        written = said or str(message.get("content", "")).strip()
        if not written or not self.tokenizer.decode(answer[:close]).strip():
            whose = f"message {i + 1} of {len(messages)}, the assistant's,"
            if written:
                raise RecordError("left out by the template", f"{whose} is left out by the chat template")
            raise RecordError("with an empty assistant turn", f"{whose} is empty")
        return before, answer, close + (bool(ends) and finish != "length"), after

    def _answer(self, before: str, after: str) -> list[int]:
        """Ids of what the assistant wrote after the prompt ``before``.

        The prompt's own ids end at its last character, as in serving, even where the whole text
        would merge a token across that point.
        """
        prompt, whole = self._ids(before), self._ids(after)
        if whole[: len(prompt)] == prompt:
            return whole[len(prompt) :]
        return self._ids(after[len(before) :])


def _with_reasoning(message: dict) -> dict:
    """The message with its reasoning under every name that a template may read."""
    found = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if found is None else message | {"reasoning_content": found, "thinking": found}


def _answers(messages: list[dict]) -> list[int]:
    return [i for i, message in enumerate(messages) if message.get("role") == "assistant"]


def encode_records(
    records: Iterable[dict[str, Any]],
    encoder: ConversationEncoder,
    summary: Summary,
    data: DataRecipe,
    row_length: int = 0,
) -> Iterator[Document]:
    """Documents of records with ``messages``; fills ``summary``.

    A record that cannot be used stops the run or is counted, as ``data.on_error`` says; one longer than
    ``row_length`` tokens (0: no limit) is treated as ``data.too_long`` says.

    Raises TrainError: a bad record under "stop", or more than ``data.max_skipped`` skipped.
    """
    bad = on_bad_record(data, summary)
    summary.row_length = row_length
    for record in records:
        try:
            parts = _encoded(record, encoder, data)
        except RecordError as error:
            bad(RecordError(error.reason, f"{name_of(record)}: {error}"))
            continue
        for tokens, flags in parts:
            if row_length and len(tokens) > row_length:
                tokens, flags = _shortened(record, tokens, flags, row_length, data, summary)
            if not len(tokens):
                continue
            summary.documents += 1
            summary.tokens += len(tokens)
            summary.supervised += int(flags.sum())
            yield Document(record_id(record), tokens, flags)
    skipped = sum(summary.skipped.values())
    if skipped > data.max_skipped * (skipped + summary.documents):
        name = getattr(encoder.tokenizer, "name_or_path", "") or "this tokenizer"
        raise TrainError(
            f"{skipped} of {skipped + summary.documents} records cannot be used with the chat template of "
            f"{name}: {_counts(summary.skipped)} (data.max_skipped allows {data.max_skipped:.0%}); "
            f"first: {next(iter(summary.first.values()))}"
        )


def _encoded(
    record: dict[str, Any], encoder: ConversationEncoder, data: DataRecipe
) -> list[tuple[np.ndarray, np.ndarray]]:
    messages = record.get("messages")
    if not isinstance(messages, list):
        hint = f"it has {', '.join(record) or 'no fields'}"
        if "prompt" in record:
            hint = "write the answers first with `python -m peagle_jax.train regenerate`"
        raise RecordError("without messages", f"no messages; {hint}")
    if data.turns == "apart":
        parts = encoder.encode_apart(messages, record.get("finish"))
    else:
        parts = [encoder.encode(messages, record.get("finish"))]
    if not any(flags.any() for _, flags in parts):
        raise RecordError("without a supervised token", "no token of it carries loss")
    return parts


def _shortened(
    record: dict[str, Any],
    tokens: np.ndarray,
    flags: np.ndarray,
    row_length: int,
    data: DataRecipe,
    summary: Summary,
) -> tuple[np.ndarray, np.ndarray]:
    """A document that does not fit a row, as ``data.too_long`` wants it; empty: left out."""
    if data.too_long == "stop":
        raise TrainError(
            f"{name_of(record)} has {len(tokens)} tokens, more than features.row_length {row_length}; raise "
            "that, or set data.too_long to skip, cut or split"
        )
    if data.too_long == "split":  # where rows are packed
        summary.long["split"] += 1
        return tokens, flags
    kept = row_length if data.too_long == "cut" and flags[:row_length].any() else 0
    if kept:
        summary.long["cut"] += 1
    else:
        summary.long["skipped" if data.too_long == "skip" else "cut away, no answer begins in time"] += 1
    return tokens[:kept], flags[:kept]
