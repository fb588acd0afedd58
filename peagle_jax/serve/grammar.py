"""Structured output: what a request may say, as masks over the vocabulary (llguidance).

A matcher follows one answer. Only committed tokens advance it; the masks of a verification window
come from a look ahead that is taken back, so rejected drafts leave no trace.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import numpy as np
from llguidance import LLMatcher, LLTokenizer, grammar_from, hf

from peagle_jax.serve.structural_tag import json_lark, structural_tag_lark

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "structural_tag"]

CACHED_GRAMMARS = 128
ALL_ONES = 0xFFFFFFFF


@dataclasses.dataclass(frozen=True)
class GrammarSpec:
    """What an answer must be. ``value`` is "" for json_object, JSON text for json_schema, choice (a
    list of strings) and structural_tag, a pattern for regex, Lark or GBNF for grammar.

    Raises:
        ValueError: the kind is unknown.
    """

    kind: Kind
    value: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"grammar kind {self.kind!r} is unknown; expected one of {get_args(Kind)}")


def _one_line(message: str) -> str:
    return " ".join(message.split())


def _fault(message: str) -> str:
    """llguidance's message in one line, without its own excerpt of a grammar that the user never saw and
    without a matcher's inner state. It has a name for a grammar of no text."""
    if "NoExtension" in message:
        return "no text satisfies it"
    message = message.split("<state>")[0]
    message = re.sub(r"\s\d+ \| .*$", "", _one_line(message))
    return re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", message)[:300]


def _load(spec: GrammarSpec) -> Any:
    try:
        return json.loads(spec.value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON, found {spec.value[:60]!r} ({error})") from None


class Matcher:
    """One answer under a grammar. Not thread-safe; it belongs to one request.

    Raises:
        ValueError: (any method) the grammar became too complex, or a token was not allowed: this
            request fails, others are untouched.
    """

    def __init__(self, matcher: LLMatcher, words: int, end_ids: Iterable[int]) -> None:
        self._matcher, self._words, self._end = matcher, words, frozenset(end_ids)

    @property
    def finished(self) -> bool:
        """The grammar is complete and nothing but the end of text may follow, or that has come."""
        return self._matcher.is_stopped()

    def _mask(self) -> np.ndarray:
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        self._check()
        return mask[: self._words]

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(f"the grammar failed: {_fault(self._matcher.get_error())}")

    def window_masks(self, drafts: Sequence[int]) -> np.ndarray:
        """Uint32 (len(drafts) + 1, ceil(V / 32)): row i has the bits of what may follow ``drafts[:i]``.

        Rows after the first draft that is not allowed, and after the end of text, are all ones: an
        accepted run never reaches them.
        """
        return self._walk(list(drafts), repair=False)

    def window(self, drafts: Sequence[int]) -> tuple[list[int], np.ndarray]:
        """Better drafts, as many, and their ``window_masks``: where a draft is not allowed and the
        grammar leaves one text only, that text is drafted. Any draft is safe, so this only saves rounds.
        """
        better = list(drafts)
        masks = self._walk(better, repair=True)
        return better, masks

    def _walk(self, drafts: list[int], repair: bool) -> np.ndarray:
        masks = np.full((len(drafts) + 1, self._words), ALL_ONES, np.uint32)
        ahead = 0

        def legal(i: int) -> bool:
            return bool(masks[i, drafts[i] // 32] >> (drafts[i] % 32) & 1)

        try:
            for i in range(len(drafts) + 1):
                masks[i] = self._mask()
                if i == len(drafts):
                    break
                if repair and not legal(i):
                    forced = self._matcher.compute_ff_tokens()[: len(drafts) - i]
                    drafts[i : i + len(forced)] = forced
                # A stopped matcher takes the end of text without counting it, so none is given.
                if not legal(i) or drafts[i] in self._end or not self._matcher.consume_token(drafts[i]):
                    break
                ahead += 1
        finally:
            if ahead:
                self._matcher.rollback(ahead)
        self._check()
        return masks

    def advance(self, tokens: Sequence[int]) -> int:
        """Takes committed tokens; returns how many belong to the answer, which may end before the last."""
        for count, token in enumerate(tokens):
            if self.finished:
                return count
            self._matcher.consume_token(int(token))
            self._check()
        return len(tokens)


class GrammarCompiler:
    """Compiles grammars for one tokenizer; thread-safe, and remembers the latest ones.

    ``tokenizer`` is a fast transformers tokenizer; ``vocab_size`` the number of the model's logits,
    which may exceed it (those ids are never allowed). ``end_ids`` end an answer besides the
    tokenizer's own end of text.

    Raises:
        ValueError: the tokenizer cannot be read.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Iterable[int] = ()) -> None:
        own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.end_ids = tuple(dict.fromkeys([*own, *sorted(end_ids)]))
        if not self.end_ids:
            raise ValueError(
                "structured output needs a tokenizer with an end-of-text token; this one has none"
            )
        try:
            self._tokenizer: LLTokenizer = hf.from_tokenizer(
                tokenizer, n_vocab=vocab_size, eos_token=list(self.end_ids)
            )
        except Exception as error:  # the library raises bare exceptions of several kinds
            raise ValueError(
                f"structured output cannot read this tokenizer: {_one_line(str(error))}"
            ) from error
        special = [t for t, i in tokenizer.get_vocab().items() if self._tokenizer.is_special_token(i)]
        self._special = frozenset(special)
        self._words = -(-vocab_size // 32)
        self._compiled: collections.OrderedDict[GrammarSpec, LLMatcher] = collections.OrderedDict()
        self._lock = threading.Lock()

    def _text(self, spec: GrammarSpec) -> str:
        """The grammar in llguidance's own form."""
        if spec.kind == "json_object":
            return LLMatcher.grammar_from_lark("start: " + json_lark({"type": "object"}))
        if spec.kind == "json_schema":
            return LLMatcher.grammar_from_lark("start: " + json_lark(_load(spec)))
        if spec.kind == "structural_tag":
            return LLMatcher.grammar_from_lark(structural_tag_lark(_load(spec), self._special))
        if spec.kind == "choice":
            words = _load(spec)
            if not (isinstance(words, list) and words and all(isinstance(w, str) and w for w in words)):
                raise ValueError("expected a list of one or more strings that are not empty")
            # One terminal: as rules of their own, llguidance takes no more than 2,000.
            lark = " | ".join(json.dumps(w, ensure_ascii=False) for w in words)
            return LLMatcher.grammar_from_lark(f"start: WORD\nWORD: {lark}")
        if not spec.value.strip():
            raise ValueError("it is empty")
        if spec.kind == "regex" and re.search(r"(?<!\\)(\\\\)*\\\Z", spec.value):
            raise ValueError("it ends in a backslash that escapes nothing")
        return grammar_from("regex" if spec.kind == "regex" else "grammar", spec.value)

    def compile(self, spec: GrammarSpec) -> Matcher:
        """A matcher at the start of an answer.

        Raises:
            ValueError: in one line, what is wrong with the grammar or not supported in it.
        """
        with self._lock:
            known = self._compiled.get(spec)
            if known is not None:
                self._compiled.move_to_end(spec)
                return Matcher(known.deep_copy(), self._words, self.end_ids)
        try:
            text = self._text(spec)
            message = LLMatcher.validate_grammar(text, self._tokenizer)
            if message and not message.startswith("WARNING"):
                raise ValueError(message)
            fresh = LLMatcher(self._tokenizer, text, log_level=0)
            # A grammar of no text fails with its first mask only, one that is too large with its second
            # matcher, since matchers share the lexer.
            for first in (fresh.deep_copy(), fresh.deep_copy()):
                if not first.is_error():
                    first.compute_bitmask()
                if first.is_error():
                    raise ValueError(first.get_error())
        except RecursionError:
            raise ValueError(f"{spec.kind} cannot be used: it is nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"{spec.kind} cannot be used: {_fault(str(error))}") from None
        with self._lock:
            self._compiled[spec] = fresh
            while len(self._compiled) > CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
            return Matcher(fresh.deep_copy(), self._words, self.end_ids)
