"""How single tokens are spelled in answers: log-probabilities name tokens, and their bytes."""

from __future__ import annotations

import re
from typing import Any

_SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenText:
    """Text and bytes of a tokenizer's single tokens, remembered.

    Only looks tokens up, which is safe while another thread encodes.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._alphabet = _byte_alphabet() if _is_byte_level(tokenizer) else None
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self._bytes: dict[int, bytes] = {}

    def bytes(self, token: int) -> bytes:
        """The bytes that a token adds to a text; a special token's are its name's."""
        if token not in self._bytes:
            self._bytes[token] = self._find(token)
        return self._bytes[token]

    def text(self, token: int, *, as_id: bool = False) -> str:
        """A token as text, with U+FFFD for a part of a character; ``token_id:N`` if ``as_id``."""
        return f"token_id:{token}" if as_id else self.bytes(token).decode("utf-8", "replace")

    def _find(self, token: int) -> bytes:
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # a row of the model's vocabulary that the tokenizer does not name
            return b""
        if token not in self._special:
            if self._alphabet is None:
                if match := _BYTE.fullmatch(piece):
                    return bytes([int(match[1], 16)])
                piece = piece.replace(_SPACE, " ")
            elif all(symbol in self._alphabet for symbol in piece):
                return bytes(self._alphabet[symbol] for symbol in piece)
        return piece.encode("utf-8", "replace")


def _is_byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return False
    return b"ByteLevel" in backend.decoder.__getstate__()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte: printable bytes stand for themselves, the others
    follow from U+0100 on in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    for place, byte in enumerate(byte for byte in range(256) if byte not in printable):
        alphabet[chr(0x100 + place)] = byte
    return alphabet
