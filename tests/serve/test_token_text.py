"""Single tokens are spelled by the bytes that they add to a text."""

from __future__ import annotations

import pytest

from peagle_jax.serve.token_text import TokenText
from tests.serve.doubles import END, TOKENIZER, byte_tokenizer


class Pieces:
    """A tokenizer without bytes of its own: SentencePiece's spelling."""

    all_special_ids = (0,)
    backend_tokenizer = None

    def convert_ids_to_tokens(self, token):
        return ["</s>", "\u2581the", "<0xF0>", "<0x9F>", "é", "a\u2581b"][token] if token < 6 else None


def test_a_byte_level_tokenizers_bytes_are_the_texts():
    text = "naïve 🦅 the thing\n\t"
    spelled = TokenText(TOKENIZER)
    ids = TOKENIZER.encode(text)
    assert b"".join(spelled.bytes(i) for i in ids).decode() == text
    eagle = TOKENIZER.encode("🦅")
    assert [spelled.text(i) for i in eagle] == ["\ufffd"] * len(eagle)
    assert spelled.text(END) == "<|end|>"
    assert spelled.text(END, as_id=True) == f"token_id:{END}"


def test_an_added_tokens_name_is_no_sentencepiece_spelling():
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<\uff5ctool\u2581call\uff5c>"])
    (token,) = tokenizer.encode("<\uff5ctool\u2581call\uff5c>")
    assert TokenText(tokenizer).text(token) == "<\uff5ctool\u2581call\uff5c>" == tokenizer.decode([token])


@pytest.mark.parametrize(
    ("token", "raw"),
    [(0, b"</s>"), (1, b" the"), (2, b"\xf0"), (3, b"\x9f"), (4, "é".encode()), (5, b"a b"), (6, b"")],
)
def test_sentencepieces_spelling_is_undone(token, raw):
    assert TokenText(Pieces()).bytes(token) == raw
