"""Training rows and what they attend to: all at once, and in our parts. Eight positions, K = 3."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from svg import BLUE, DIM, GREEN, GREY, ORANGE, Picture, save

POSITIONS, DEPTHS, SIZE = 8, 3, 11
ROWS = [(a, d) for d in range(DEPTHS) for a in range(POSITIONS - d)]


def sees(query: tuple[int, int], key: tuple[int, int]) -> bool:
    """The rule: real context up to the anchor, and the own rollout so far."""
    (a, d), (b, e) = query, key
    return (e == 0 and b <= a) or (a == b and e <= d)


def grid(
    picture: Picture, x: float, y: float, rows: list[tuple[int, int]], keys: list[tuple[int, int]]
) -> None:
    for i, row in enumerate(rows):
        for j, key in enumerate(keys):
            inside = GREEN if row[1] == 0 else BLUE if key[1] == 0 else ORANGE
            picture.cell(x + SIZE * j, y + SIZE * i, SIZE, inside if sees(row, key) else GREY)


def draw() -> Picture:
    picture = Picture(820, 316)
    first = [row for row in ROWS if row[1] == 0]
    picture.text(20, 28, "The flat pass: all rows, all keys", 14, anchor="start")
    grid(picture, 20, 44, ROWS, ROWS)
    picture.text(20, 44 + SIZE * len(ROWS) + 18, "rows (anchor, depth), depth by depth", 11, DIM, "start")

    left = 360
    picture.text(left, 28, "1. Depth 0 once: an ordinary causal pass", 14, anchor="start")
    grid(picture, left, 44, first, first)
    picture.text(left, 44 + SIZE * 8 + 16, "its keys and values are kept", 11, DIM, "start")

    below = 186
    picture.text(
        left, below - 14, "2. Segments of rollouts, one after another (lax.scan)", 14, anchor="start"
    )
    for s, x in enumerate((left, left + 215)):
        rollouts = [row for row in ROWS if row[1] and row[0] * 2 // (POSITIONS - 1) == s]
        rollouts.sort()
        grid(picture, x, below, rollouts, first)
        for i, row in enumerate(rollouts):  # at most K - 1 rows of its own
            for j in range(DEPTHS - 1):
                own = (row[0], j + 1)
                fill = ORANGE if own in rollouts and sees(row, own) else GREY
                picture.cell(x + SIZE * (9 + j), below + SIZE * i, SIZE, fill)
        picture.text(x, below + SIZE * len(rollouts) + 16, f"segment {s + 1}", 11, DIM, "start")
    for i, (fill, words) in enumerate(
        [(GREEN, "depth 0 sees depth 0"), (BLUE, "a mask row sees its context"), (ORANGE, "its own rollout")]
    ):
        picture.cell(left + 270, 48 + 22 * i, SIZE, fill)
        picture.text(left + 288, 58 + 22 * i, words, 12, anchor="start")
    return picture


if __name__ == "__main__":
    save(__file__, draw())
