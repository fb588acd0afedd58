"""The sampling rule: one choice for plain decoding and for verification. The numbers are an example."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from svg import BLUE, DIM, GREEN, GREY, ORANGE, Picture, save

WORDS = ["blue", "clear", "big", "grey", "falling"]
LOGITS = [2.4, 2.0, 1.1, 0.6, -1.0]
NOISE = [0.2, 1.3, -0.4, 0.9, 0.1]
KEPT = 4  # top-k


def bars(picture: Picture, x: float, values: list[float], fill: str) -> None:
    floor = 190
    for i, value in enumerate(values):
        height = abs(value) * 28
        kept = i < KEPT
        picture.box(x + 34 * i, floor - height if value > 0 else floor, 26, height, fill if kept else GREY)
        picture.text(x + 34 * i + 13, 250, WORDS[i], 10, fill="#1f2933" if kept else DIM)
    picture.line(x - 4, floor, x + 34 * len(values), floor)


def draw() -> Picture:
    picture = Picture(760, 346)
    total = [a + b for a, b in zip(LOGITS, NOISE, strict=True)]
    best = max(range(KEPT), key=total.__getitem__)
    picture.text(110, 30, "filtered logits / temperature", 13)
    picture.text(110, 48, "(top-k 4 drops one)", 11, DIM)
    bars(picture, 24, LOGITS, BLUE)
    picture.text(224, 150, "+", 22)
    picture.text(340, 30, "Gumbel noise", 13)
    picture.text(340, 48, "of (seed, position, token id), nothing else", 11, DIM)
    bars(picture, 254, NOISE, ORANGE)
    picture.text(484, 150, "=", 22)
    picture.text(610, 30, "argmax: the token at this position", 13)
    picture.text(610, 48, f"{WORDS[best]!r}, with any head, any K, any batch", 11, DIM)
    bars(picture, 524, total, GREEN)
    picture.box(524 + 34 * best - 3, 190 - total[best] * 28 - 4, 32, total[best] * 28 + 8, "none")
    lines = [
        "Plain decoding takes this token. Verification computes it at every drafted position, and accepts a",
        "draft that equals it. Greedy is the case without noise. Nobody asks how likely a draft was, so it",
        "cannot change the answer.",
    ]
    for i, line in enumerate(lines):
        picture.text(16, 290 + 22 * i, line, 12, anchor="start")
    return picture


if __name__ == "__main__":
    save(__file__, draw())
