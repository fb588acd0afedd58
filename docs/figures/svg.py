"""Draws plain SVG: the figures are small, the same on every machine, and readable as text."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

INK, DIM, PAPER = "#1f2933", "#6b7785", "#ffffff"
BLUE, GREEN, ORANGE, GREY, RED = "#9cc5f0", "#a8dcb0", "#f6c98a", "#e4e8ec", "#eda6a0"


class Picture:
    """Shapes in the order in which they are drawn."""

    def __init__(self, width: int, height: int) -> None:
        self.size = width, height
        self.parts = [f'<rect width="{width}" height="{height}" fill="{PAPER}"/>']

    def box(self, x: float, y: float, w: float, h: float, fill: str = GREY, edge: str = INK) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" fill="{fill}" stroke="{edge}"/>'
        )

    def cell(self, x: float, y: float, size: float, fill: str) -> None:
        side = f'width="{size:g}" height="{size:g}"'
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" {side} fill="{fill}" stroke="{PAPER}"/>')

    def text(
        self, x: float, y: float, words: str, size: int = 13, fill: str = INK, anchor: str = "middle"
    ) -> None:
        style = f'font-size="{size}" fill="{fill}" text-anchor="{anchor}"'
        self.parts.append(f'<text x="{x:g}" y="{y:g}" {style}>{escape(words, quote=False)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, arrow: bool = False) -> None:
        ends = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
        tip = ' marker-end="url(#tip)"' if arrow else ""
        self.parts.append(f'<line {ends} stroke="{DIM}" stroke-width="1.5"{tip}/>')

    def tokens(self, x: float, y: float, words: Sequence[str], fills: Sequence[str], w: float = 58) -> None:
        """A row of boxes with a word each."""
        for i, (word, fill) in enumerate(zip(words, fills, strict=True)):
            self.box(x + i * (w + 6), y, w, 28, fill)
            self.text(x + i * (w + 6) + w / 2, y + 19, word)

    def written(self) -> str:
        width, height = self.size
        tip = (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{DIM}"/></marker></defs>'
        )
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        return "\n".join(
            [f'{head}height="{height}" font-family="sans-serif">', tip, *self.parts, "</svg>", ""]
        )


def save(script: str, picture: Picture) -> None:
    """Writes the picture beside its script, under its name."""
    Path(script).with_suffix(".svg").write_text(picture.written(), encoding="utf-8")
