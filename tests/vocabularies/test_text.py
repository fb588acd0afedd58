"""Text of many scripts through real vocabularies: encoding, streams, stop strings, single tokens."""

from __future__ import annotations

import base64
import hashlib
import itertools
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from peagle_jax.serve.chat_protocol import ChatRequest
from peagle_jax.serve.detokenize import Answer
from peagle_jax.serve.errors import APIError
from peagle_jax.serve.logprobs import CompletionLogprobs, chat_logprobs, joined
from peagle_jax.serve.token_text import TokenText
from peagle_jax.speculative.sampling import TokenLogprob
from peagle_jax.train.records import RecordError
from peagle_jax.train.tokens import ConversationEncoder
from tests.vocabularies.conftest import ALL

pytestmark = pytest.mark.vocabularies

TEXTS = [
    "The quick brown fox: it's 1,234.56 km , isn't it ?",
    "naïve café, Ærøskøbing, Đặng, İstanbul, ß ẞ ﬁ",
    "日本語と漢字、한국어, 中文标点。",
    "नमस्ते दुनिया, ไทย, ქართული, العربية עברית, ᠮᠣᠩᠭᠣᠯ, 𒀀𐎀",
    "👩‍👩‍👧‍👦🏳️‍🌈🇩🇪 e\u0301 a\u0300\u0323 \u200d\ufeff",
    "\ufffd is a character too \ufffd",
    "  leading, trailing \t\r\n\n\u00a0\u2003\u0085 ",
    "\x00\x01\x1b[0m\x7f\U0010ffff\ue000",
    "def f(x):\n\tif x:\n\t\treturn {'a': [1, 2]}  # done\n",
]

texts = st.one_of(st.sampled_from(TEXTS), st.text(max_size=60))
"""Hypothesis writes any character but halves of surrogate pairs."""


def normal(vocabulary, text):
    """What the tokenizer's own normaliser makes of a text: Qwen's composes characters."""
    return unicodedata.normalize("NFC", text) if vocabulary.name.startswith("qwen") else text


def whole(vocabulary, ids, special=False):
    return vocabulary.tokenizer.decode(
        ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False
    )


@settings(max_examples=100, deadline=None)
@given(text=texts)
def test_text_survives_encoding_and_decoding(vocabulary, text):
    expected = normal(vocabulary, text)
    ids = vocabulary.ids(expected)
    assert vocabulary.ids(text) == ids
    if not any(name in expected for name in vocabulary.tokenizer.get_added_vocab()):
        assert whole(vocabulary, ids) == expected
    assert vocabulary.served.decode(ids) == expected


def rounds(ids, cuts):
    """Ids in rounds that end at the cuts."""
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[i:j] for i, j in itertools.pairwise(edges)]


def said(vocabulary, parts, special, stop=()):
    answer = Answer(vocabulary.tokenizer, stop, skip_special_tokens=not special)
    deltas = []
    for part in parts:
        deltas.append(answer.add(part))
        if deltas[-1].finish_reason:
            return deltas
    return [*deltas, answer.add([], "length")]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_stream_says_what_decoding_at_once_says(vocabulary, data):
    """For texts, and for any ids at all: broken characters, special tokens, rows without a name."""
    some = st.lists(st.integers(0, vocabulary.rows - 1), max_size=30)
    ids = data.draw(st.one_of(texts.map(vocabulary.ids), some), "ids")
    cuts = data.draw(st.lists(st.integers(0, 1000), max_size=8), "cuts")
    special = data.draw(st.booleans(), "special")
    deltas = said(vocabulary, rounds(ids, cuts), special)
    assert "".join(delta.text for delta in deltas) == whole(vocabulary, ids, special)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_stop_string_cuts_at_its_first_place_wherever_tokens_end(vocabulary, data):
    text = normal(vocabulary, data.draw(texts.filter(bool), "text"))
    start = data.draw(st.integers(0, len(text) - 1), "start")
    stop = text[start : start + data.draw(st.integers(1, 6), "size")]
    ids = vocabulary.ids(text)
    cuts = data.draw(st.lists(st.integers(0, 1000), max_size=8), "cuts")
    deltas = said(vocabulary, rounds(ids, cuts), True, [stop])
    assert "".join(delta.text for delta in deltas) == text[: text.find(stop)]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)
    used = [token for delta in deltas for token in delta.token_ids]
    assert used == ids[: len(used)] and stop in whole(vocabulary, used, True)


def test_a_stop_string_of_parts_of_tokens_is_found(vocabulary):
    text = "The capital of France is Paris, and 東京 is Japan's. 🦅🦅"
    ids = vocabulary.ids(text)
    for stop in ("ance is Par", "ris, an", "京 is J", "n's. 🦅", "🦅🦅", "T"):
        deltas = said(vocabulary, [[i] for i in ids], False, [stop])
        assert "".join(delta.text for delta in deltas) == text[: text.index(stop)]


@settings(max_examples=60, deadline=None)
@given(text=texts)
def test_the_bytes_of_tokens_are_those_of_their_text(vocabulary, text):
    spelled = TokenText(vocabulary.tokenizer)
    ids = vocabulary.ids(text)
    assert b"".join(map(spelled.bytes, ids)).decode() == normal(vocabulary, text)
    entries = [TokenLogprob(i, -0.5, 1, ((i, -0.5),)) for i in ids]
    content = chat_logprobs(entries, 1, spelled, as_ids=False)["content"]
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == normal(vocabulary, text)
    parts = CompletionLogprobs(1, spelled, as_ids=False)
    lists = joined([parts.part(ids[:3], entries[:3]), parts.part(ids[3:], entries[3:])])
    assert all(
        "".join(lists["tokens"])[offset:].startswith(token)
        for offset, token in zip(lists["text_offset"], lists["tokens"], strict=True)
    )


def test_every_id_of_the_model_has_a_spelling(vocabulary):
    spelled, tokenizer = TokenText(vocabulary.tokenizer), vocabulary.tokenizer
    named = set(tokenizer.get_vocab().values())
    assert max(named) < vocabulary.rows
    assert all(bool(spelled.bytes(i)) == (i in named) for i in range(vocabulary.rows))
    for name, i in tokenizer.get_added_vocab().items():
        assert spelled.text(i) == name and vocabulary.ids(name) == [i]


def test_the_spellings_of_gpt_oss_are_openais_file():
    """The sum is the one that OpenAI's packages expect of o200k_base.tiktoken."""
    spelled = TokenText(ALL["gpt-oss"].tokenizer)
    lines = (base64.b64encode(spelled.bytes(i)) + b" %d\n" % i for i in range(199998))
    expected = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
    assert hashlib.sha256(b"".join(lines)).hexdigest() == expected


def test_half_of_a_surrogate_pair_is_refused_before_the_tokenizer_sees_it(vocabulary):
    message = {"role": "user", "content": "a\ud83e"}
    with pytest.raises(ValidationError, match="expected valid Unicode, found half of a surrogate pair"):
        ChatRequest.model_validate({"messages": [message]})
    with pytest.raises(RecordError, match="not valid Unicode"):
        ConversationEncoder(vocabulary.tokenizer).prompt_ids([message])
    with pytest.raises(APIError, match="the model's tokenizer refused the prompt"):
        vocabulary.served.encode("a\ud83e", "prompt", special=False)
    text = '{"messages": [{"role": "user", "content": "\\ud83e\\udd85"}]}'
    body = ChatRequest.model_validate_json(text)
    assert "🦅" in vocabulary.served.chat_prompt(body).text
