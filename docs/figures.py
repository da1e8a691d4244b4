# SPDX-License-Identifier: Apache-2.0
"""Draws two figures of the documentation from the package's own code; a test holds the files in docs/assets to it.

Run it with
    python docs/figures.py
"""

from pathlib import Path

import torch

from dspark_hf.scheduling import (
    LookaheadScheduler,
    PrefixScheduler,
    RoundOutlook,
    SPSCurve,
    mean_survival,
    prefix_survival,
)
from dspark_hf.training.blocks import block_attention_mask, label_blocks


ASSETS = Path(__file__).parent / "assets"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
INK, GREY, BLUE, ORANGE, GREEN, RED = "#1f2933", "#6b7280", "#3b5bdb", "#b26a00", "#2b8a3e", "#c92a2a"
PALE = {GREY: "#eef0f3", BLUE: "#e7ecff", ORANGE: "#fff1d6", GREEN: "#def5e3", RED: "#ffe3e3"}


class Drawing:
    """An SVG picture, one shape after the other; lengths are in pixels."""

    def __init__(self, title: str, description: str, width: int, height: int) -> None:
        self._size = (width, height)
        self._parts = [f'<title id="title">{title}</title>', f'<desc id="desc">{description}</desc>']
        self._parts.append(f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>')

    def text(self, x: float, y: float, words: str, color: str = INK, size: int = 13, anchor: str = "start") -> None:
        """Words on one line; size 15 is a heading."""
        weight = ' font-weight="600"' if size == 15 else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}"{weight} text-anchor="{anchor}" '
            f'fill="{color}">{words}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, color: str, words: str = "") -> None:
        """A rectangle in the pale shade of a colour, with words in its middle."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="{PALE[color]}" '
            f'stroke="{color}"/>'
        )
        if words:
            self.text(x + width / 2, y + height / 2 + 5, words, anchor="middle")

    def line(self, points: list[tuple[float, float]], color: str, arrow: bool = False, dashed: bool = False) -> None:
        """A line through points; an arrow head is drawn for a last stretch that is level or upright."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        style = ' stroke-dasharray="6 4"' if dashed else ""
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"{style}/>')
        if arrow:
            (x0, y0), (x, y) = points[-2:]
            dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
            left, right = (x - 7 * dx + 4 * dy, y - 7 * dy + 4 * dx), (x - 7 * dx - 4 * dy, y - 7 * dy - 4 * dx)
            head = " ".join(f"{px:g},{py:g}" for px, py in ((x, y), left, right))
            self._parts.append(f'<polygon points="{head}" fill="{color}"/>')

    def svg(self) -> str:
        """The file's text."""
        width, height = self._size
        body = "\n".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'aria-labelledby="title desc" font-family="{FONT}">\n{body}\n</svg>\n'
        )


def attention() -> str:
    """How the context enters the draft, and what each slot sees."""
    picture = Drawing(
        "The draft's attention",
        "Left: hidden states of three of the target's layers are concatenated, projected and normed, and enter every "
        "layer of the draft as keys and values. Right: the mask of two blocks of one text. A slot sees the context "
        "strictly before its anchor, and all slots of its own block.",
        960,
        440,
    )
    _draw_context(picture)
    _draw_mask(picture, ("The", "capital", "of", "France", "is", "Paris", ",", "the"), anchors=(4, 6), block_size=3)
    return picture.svg()


def _draw_context(picture: Drawing) -> None:
    picture.text(24, 40, "Where the context comes from", size=15)
    picture.text(24, 72, "target, over committed text", GREY)
    for layer in range(6):
        taken = layer in (1, 3, 4)
        y = 262 - 30 * layer
        picture.box(24, y, 140, 24, BLUE if taken else GREY, f"layer {layer}")
        if taken:
            picture.line([(164, y + 12), (186, y + 12), (186, 208), (212, 208)], BLUE, arrow=layer == 3)
    picture.box(212, 168, 170, 80, BLUE)
    for row, words in enumerate(("concatenate", "project to d", "norm: the context")):
        picture.text(297, 191 + 22 * row, words, BLUE, anchor="middle")
    picture.line([(297, 248), (297, 322)], BLUE, arrow=True)
    picture.text(306, 290, "one vector per token", BLUE)
    picture.text(24, 316, "every layer of the draft", GREY)
    picture.box(24, 326, 126, 44, ORANGE, "slots: Q, K, V")
    picture.box(234, 326, 126, 44, BLUE, "context: K, V")
    picture.line([(150, 348), (160, 348), (160, 394), (172, 394)], ORANGE)
    picture.line([(234, 348), (224, 348), (224, 394), (212, 394)], BLUE)
    picture.box(172, 380, 40, 28, GREEN, "attn")
    picture.text(222, 414, "keys: context, then block", GREY)


def _draw_mask(picture: Drawing, tokens: tuple[str, ...], anchors: tuple[int, ...], block_size: int) -> None:
    s, g = len(tokens), block_size
    positions = torch.tensor([anchors])
    ids = torch.zeros(1, s, dtype=torch.long)
    blocks = label_blocks(ids, torch.ones_like(ids), positions, torch.ones_like(positions, dtype=torch.bool), g)
    mask = block_attention_mask(blocks, s)[0, 0]
    rows = [tokens[anchor] if slot == 0 else "mask" for anchor in anchors for slot in range(g)]
    left, top, cell = 516, 168, 29
    picture.text(440, 40, "What a slot sees", size=15)
    picture.text(440, 62, "two blocks of one text, as in training; generation has one block at a time", GREY)
    for column, words in enumerate((*tokens, *rows)):
        color = BLUE if column < s else ORANGE
        # Slanted labels would need a transform; short words in two heights do.
        y = top - 12 - 20 * (column % 2)
        picture.text(left + cell * column + cell / 2, y, words, color, size=12, anchor="middle")
    picture.text(left + cell * s / 2, top - 56, "keys of the context", BLUE, anchor="middle")
    picture.text(left + cell * (s + g), top - 56, "keys of the blocks", ORANGE, anchor="middle")
    for row, words in enumerate(rows):
        y = top + cell * row + 10 * (row // g)
        picture.text(left - 10, y + 19, words, ORANGE, anchor="end")
        for column in range(s + len(rows)):
            seen = bool(mask[row, column])
            color = (BLUE if column < s else ORANGE) if seen else GREY
            x = left + cell * column
            picture.box(x, y, cell - 3, cell - 3, color, "•" if seen else "")
    bottom = top + cell * len(rows) + 10 * (len(anchors) - 1) + 24
    picture.text(440, bottom, "The context ends strictly before the anchor.", GREY)
    picture.text(440, bottom + 19, "The slots of a block see each other both ways, and no other block.", GREY)


def schedule() -> str:
    """One decision: survival, round times, tokens per second, and where two rules stop."""
    confidence = torch.tensor([[0.9, 0.8, 0.9, 0.8, 0.7]])
    # Made-up seconds, with the stair that kernels have: the third token costs a step, the next two hardly anything.
    curve = SPSCurve((1, 2, 3, 4, 5, 6), (0.020, 0.021, 0.030, 0.031, 0.0315, 0.040), draft_s=0.002)
    outlook = RoundOutlook(curve, mean_survival([0.8, 0.75, 0.75, 0.7, 0.7]))
    survival = prefix_survival(confidence)[0].tolist()
    seconds = [curve.round_s(1 + n) for n in range(6)]  # the block is drafted already
    rates = [(1 + sum(survival[:n])) / seconds[n] for n in range(6)]
    stops = {
        "Algorithm 1": (int(PrefixScheduler().verify_lengths(confidence, outlook)), RED),
        "look-ahead": (int(LookaheadScheduler().verify_lengths(confidence, outlook)), GREEN),
    }
    picture = Drawing(
        "How many drafts are sent",
        "Left: the survival of each prefix, the product of confidences. Middle: the time of a round, which rises in "
        "stairs. Right: tokens per second for each number of drafts. "
        + ", ".join(f"{rule} sends {count}" for rule, (count, _) in stops.items())
        + ".",
        960,
        330,
    )
    bars = [(str(slot), value, f"{value:.2f}", ORANGE) for slot, value in enumerate(survival)]
    _draw_bars(picture, 24, "Survival: chance to be kept", "slot", bars)
    bars = [(str(n), value, f"{1000 * value:.1f}", BLUE) for n, value in enumerate(seconds)]
    _draw_bars(picture, 344, "Time of a round, ms", "drafts sent", bars)
    colors = dict(stops.values())
    bars = [(str(n), value, f"{value:.0f}", colors.get(n, GREY)) for n, value in enumerate(rates)]
    _draw_bars(picture, 664, "Tokens per second", "drafts sent", bars)
    for row, (rule, (count, color)) in enumerate(stops.items()):
        picture.text(664, 296 + 20 * row, f"{rule} sends {count}", color)
    return picture.svg()


def _draw_bars(picture: Drawing, left: int, heading: str, axis: str, bars: list[tuple[str, float, str, str]]) -> None:
    """Bars (label, height, figure, colour) on one base line."""
    base, tallest, step = 230, 150, 44
    picture.text(left, 40, heading, size=15)
    highest = max(value for _, value, _, _ in bars)
    for number, (label, value, figure, color) in enumerate(bars):
        x, height = left + step * number, tallest * value / highest
        picture.box(x, round(base - height, 2), 34, round(height, 2), color)
        picture.text(x + 17, round(base - height - 6, 2), figure, GREY, size=12, anchor="middle")
        picture.text(x + 17, base + 18, label, anchor="middle")
    picture.line([(left, base), (left + step * len(bars) - 10, base)], GREY)
    picture.text(left + step * len(bars) / 2 - 5, base + 40, axis, GREY, anchor="middle")


FIGURES = {"attention.svg": attention, "schedule.svg": schedule}


def main() -> None:
    for name, draw in FIGURES.items():
        (ASSETS / name).write_text(draw(), encoding="utf-8")
        print(f"docs/assets/{name}")


if __name__ == "__main__":
    main()
