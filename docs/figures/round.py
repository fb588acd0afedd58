"""The round: what each pass reads, with K = 3 and one draft accepted."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from svg import BLUE, DIM, GREEN, GREY, ORANGE, RED, Picture, save


def draw() -> Picture:
    picture = Picture(890, 462)
    left = 190

    def row(y: float, name: str, note: str) -> None:
        picture.text(16, y + 14, name, 15, anchor="start")
        picture.text(16, y + 31, note, 11, DIM, "start")

    row(34, "draft", "one pass of the head")
    picture.text(left, 24, "tokens that are certain, with the target's features", 11, DIM, "start")
    picture.tokens(left, 34, ["t4, h3", "t5, h4", "mask", "mask"], [GREEN, GREEN, GREY, GREY], 80)
    for i, x in enumerate([left + 126, left + 212, left + 298]):
        picture.line(x, 66, x, 92, True)
        picture.text(x, 107, f"d{i + 1}")
    picture.text(
        left + 356, 55, "slot p: token p + 1, feature p; its logits guess token p + 2", 11, DIM, "start"
    )

    row(146, "verify", "one pass of the target")
    picture.tokens(left, 146, ["t5", "d1", "d2", "d3"], [GREEN, BLUE, BLUE, BLUE], 80)
    for i in range(4):
        picture.line(left + 40 + 86 * i, 178, left + 40 + 86 * i, 204, True)
        picture.text(left + 40 + 86 * i, 219, f"c{i + 1}")
    picture.text(left + 356, 167, "c: what the target itself chooses after each", 11, DIM, "start")

    row(258, "accept", "compare, left to right")
    verdicts = [("d1 = c1", GREEN), ("d2 ≠ c2", RED), ("d3", GREY)]
    picture.tokens(left, 258, [word for word, _ in verdicts], [fill for _, fill in verdicts], 80)
    picture.text(left + 356, 277, "a = 1 draft accepted; c2 takes d2's place", 11, DIM, "start")

    row(338, "commit", "lengths go on by a + 1")
    words, fills = ["t5", "t6 = d1", "t7 = c2", "d3"], [GREEN, GREEN, ORANGE, GREY]
    picture.tokens(left, 338, words, fills, 80)
    picture.line(left + 258, 352, left + 338, 352)
    picture.text(left + 356, 357, "what is beyond the length is overwritten later", 11, DIM, "start")

    picture.text(
        16, 420, "The next draft pass reads (t6, h5), (t7, h6) and two mask slots again.", 13, anchor="start"
    )
    note = "Two tokens came from this round: its acceptance length is 2. K + 1 = 4 would be the most."
    picture.text(16, 444, note, 13, anchor="start")
    return picture


if __name__ == "__main__":
    save(__file__, draw())
