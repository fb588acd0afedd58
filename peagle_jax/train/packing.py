"""Packing documents into rows of equal length."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from peagle_jax.train.tokens import Document

OPEN_ROWS = 128  # rows that first-fit still looks at; bounds the time to pack


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """R rows of n tokens: all (R, n). ``segment_ids`` number a row's documents from 0 and are -1
    on padding; ``positions`` restart at 0 in every document; ``flags`` mark supervised tokens."""

    tokens: np.ndarray  # int32
    segment_ids: np.ndarray  # int32
    positions: np.ndarray  # int32
    flags: np.ndarray  # uint8

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: slice) -> PackedRows:
        return PackedRows(*(getattr(self, f.name)[rows] for f in dataclasses.fields(self)))


def pack(documents: Sequence[Document], row_length: int, seed: int = 0) -> PackedRows:
    """First-fit packing of documents in a shuffled order.

    A document longer than a row is cut into pieces, each with positions from 0; pieces without a
    supervised token are dropped. No other document is split.
    """
    pieces: list[tuple[np.ndarray, np.ndarray]] = []
    for document in documents:
        for start in range(0, len(document.tokens), row_length):
            part = slice(start, start + row_length)
            if document.flags[part].any():
                pieces.append((document.tokens[part], document.flags[part]))
    order = np.random.default_rng(seed).permutation(len(pieces))

    rows: list[list[int]] = []
    free: list[int] = []
    first_open = 0
    for index in order:
        size = len(pieces[index][0])
        for row in range(max(first_open, len(rows) - OPEN_ROWS), len(rows)):
            if free[row] >= size:
                break
        else:
            row = len(rows)
            rows.append([])
            free.append(row_length)
        rows[row].append(int(index))
        free[row] -= size

    shape = (len(rows), row_length)
    out = PackedRows(
        np.zeros(shape, np.int32),
        np.full(shape, -1, np.int32),
        np.zeros(shape, np.int32),
        np.zeros(shape, np.uint8),
    )
    for r, members in enumerate(rows):
        at = 0
        for segment, index in enumerate(members):
            tokens, flags = pieces[index]
            span = slice(at, at + len(tokens))
            out.tokens[r, span] = tokens
            out.segment_ids[r, span] = segment
            out.positions[r, span] = np.arange(len(tokens))
            out.flags[r, span] = flags
            at = span.stop
    return out
