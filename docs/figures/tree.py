"""A tree of candidates: the M nodes with the highest products, and the mask that verifies them at once."""

from __future__ import annotations

import heapq
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from svg import BLUE, DIM, GREEN, GREY, INK, Picture, save

MARGINALS = [  # of the K positions, from one pass of the head; the numbers are an example
    [("the", 0.6), ("a", 0.3), ("my", 0.1)],
    [("sky", 0.5), ("sea", 0.4), ("air", 0.1)],
    [("is", 0.7), ("was", 0.2), ("looks", 0.1)],
]
NODES = 7


def best_first(count: int) -> list[tuple[float, tuple[int, ...]]]:
    """The ``count`` paths with the highest products; a parent always comes before its children."""
    waiting = [(-MARGINALS[0][0][1], (0,))]
    found = []
    while len(found) < count:
        negative, path = heapq.heappop(waiting)
        found.append((-negative, path))
        depth, rank = len(path), path[-1]
        if rank + 1 < len(MARGINALS[depth - 1]):  # the next best in its place
            before, after = MARGINALS[depth - 1][rank][1], MARGINALS[depth - 1][rank + 1][1]
            heapq.heappush(waiting, (negative / before * after, (*path[:-1], rank + 1)))
        if depth < len(MARGINALS):
            heapq.heappush(waiting, (negative * MARGINALS[depth][0][1], (*path, 0)))
    return found


def draw() -> Picture:
    picture = Picture(860, 344)
    nodes = best_first(NODES)
    order = {path: i for i, (_, path) in enumerate(nodes)}
    picture.text(20, 28, f"The {NODES} best nodes of three positions", 14, anchor="start")
    picture.text(20, 46, "score: product of the marginals along the path", 11, DIM, "start")
    leaves = sorted(path for path in order if not any(p[:-1] == path for p in order))
    height = {path: 90 + 78 * i for i, path in enumerate(leaves)}

    def place(path: tuple[int, ...]) -> tuple[float, float]:
        below = [height[leaf] for leaf in leaves if leaf[: len(path)] == path]
        return 60 + 130 * len(path), sum(below) / len(below)

    middle = sum(height.values()) / len(height)
    for path in order:
        x, y = place(path)
        px, py = place(path[:-1]) if len(path) > 1 else (60, middle)
        picture.line(px + 40, py, x - 44, y)
    picture.box(20, middle - 16, 80, 32, GREEN)
    picture.text(60, middle + 5, "last token", 12)
    for score, path in nodes:
        x, y = place(path)
        picture.box(x - 44, y - 20, 88, 40, BLUE)
        picture.text(x, y - 3, f"{order[path] + 1}: {MARGINALS[len(path) - 1][path[-1]][0]}", 12)
        picture.text(x, y + 13, f"{score:.3f}", 11, DIM)

    left, top, size = 580, 92, 26
    picture.text(left - 30, 28, "The mask of the one pass that verifies them", 14, anchor="start")
    picture.text(left - 30, 46, "a node sees the context, its ancestors and itself", 11, DIM, "start")
    for i, (_, row) in enumerate(nodes):
        picture.text(left - 12, top + size * i + 18, f"{i + 1}", 12, INK)
        picture.text(left + size * i + 13, top - 8, f"{i + 1}", 12, INK)
        for j, (_, key) in enumerate(nodes):
            seen = row[: len(key)] == key
            picture.cell(left + size * j, top + size * i, size, BLUE if seen else GREY)
    notes = ("A node's position is that of its depth,", "not of its place in the row.")
    for i, note in enumerate(notes):
        picture.text(left - 30, top + size * NODES + 24 + 16 * i, note, 11, DIM, "start")
    return picture


if __name__ == "__main__":
    save(__file__, draw())
