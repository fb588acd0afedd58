"""The draft vocabulary, and the id that stands for a mask slot: choices by counts of tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np


class VocabularyError(ValueError):
    """A draft vocabulary or mask token that cannot be had."""


def choose_draft_ids(counts: np.ndarray, size: int, required: Collection[int]) -> np.ndarray:
    """Target ids of the draft vocabulary, int32 (size,), ascending.

    ``required`` ids are always in; the rest are the most frequent by ``counts`` (V,). Ties, also
    those among ids that never occur, go to the lower id, so that the choice is reproducible.

    Raises VocabularyError: no such size, or too small for the required ids.
    """
    if not 0 < size <= len(counts):
        raise VocabularyError(f"a draft vocabulary has 1..{len(counts)} tokens, found {size}")
    needed = sorted(set(required))
    if needed and not 0 <= needed[0] <= needed[-1] < len(counts):
        raise VocabularyError(
            f"required token ids lie in 0..{len(counts) - 1}, found {needed[0]} and {needed[-1]}"
        )
    if len(needed) > size:
        raise VocabularyError(f"a draft vocabulary of {size} cannot hold the {len(needed)} required tokens")
    rest = np.argsort(-counts, kind="stable")
    rest = rest[~np.isin(rest, needed)][: size - len(needed)]
    return np.sort(np.concatenate([np.array(needed, np.int64), rest])).astype(np.int32)


def coverage(counts: np.ndarray, ids: np.ndarray) -> float:
    """Share of all counted tokens that ``ids`` cover."""
    total = int(counts.sum())
    return float(counts[ids].sum() / total) if total else 1.0


def choose_mask_token(
    counts: np.ndarray, tokenizer_size: int, special: Iterable[int], reserved: Collection[int]
) -> int:
    """An id that no text contains: the first row past the tokenizer, else the highest free special.

    ``counts`` (V,) are over all training tokens; the tokenizer names ids below ``tokenizer_size`` only;
    ``special`` are its special ids;
    ``reserved`` are those with a meaning: eos, bos, pad, and what the chat template writes.

    Raises VocabularyError: none is free.
    """
    free = [i for i in range(tokenizer_size, len(counts)) if counts[i] == 0 and i not in reserved][:1]
    free += [
        i
        for i in sorted(special, reverse=True)
        if 0 <= i < len(counts) and counts[i] == 0 and i not in reserved
    ]
    if not free:
        raise VocabularyError(
            "no id of the target's vocabulary is free for the mask token: every special id has a meaning or "
            "occurs in the data, and no row lies past the tokenizer; set head.mask_token_id"
        )
    return free[0]


def check_mask_token(token: int, counts: np.ndarray, reserved: Collection[int]) -> None:
    """Raises VocabularyError when ``token`` has a meaning already or occurs in the data."""
    if not 0 <= token < len(counts):
        raise VocabularyError(f"mask token id {token} is outside the vocabulary of {len(counts)}")
    if token in reserved:
        raise VocabularyError(
            f"mask token id {token} is an eos, bos or pad token or a marker of the chat template; "
            "choose a free id"
        )
    if counts[token]:
        raise VocabularyError(
            f"mask token id {token} occurs {int(counts[token])} times in the training data; choose a free id"
        )
