# Copyright (c) the d2_memfit developers.
"""A window on two ranks, one of which runs out of memory, as a diagram."""

from pathlib import Path
from typing import NamedTuple

HEIGHT, UNIT = 46, 31
LEFT = 96  # where time begins


class Box(NamedTuple):
    begin: float  # in units of time
    length: float
    kind: str
    text: str


RANKS = {
    "rank 0": [
        Box(0, 4, "run", "images 1, 2"),
        Box(4, 4, "run", "images 3, 4"),
        Box(8, 8.5, "wait", "waits"),
    ],
    "rank 1": [
        Box(0, 4, "run", "images 5, 6"),
        Box(4, 2, "error", "7, 8"),
        Box(6, 4.5, "undo", "undone"),
        Box(10.5, 3, "run", "image 7"),
        Box(13.5, 3, "run", "image 8"),
    ],
}
ALL = [
    Box(16.5, 2.5, "together", "vote"),
    Box(19, 3, "together", "all-reduce"),
    Box(22, 3.5, "together", "clip, step"),
]
TITLE = "A window is a transaction: one iteration on two ranks"
NOTES = [
    "Each rank runs its share of the iteration, 4 images, 2 at a time. No rank communicates yet.",
    "Rank 1 runs out of memory in a forward. What that forward began is put back: random numbers,",
    "buffers, logged scalars. The same images run again, one at a time. Rank 0 waits at the vote,",
    "and nowhere else. After an error in a backward the whole window starts over.",
]

STYLE = """text { font-family: sans-serif; text-anchor: middle; fill: #1f2328; font-size: 13px; }
.title { font-size: 17px; font-weight: bold; text-anchor: start; }
.left { text-anchor: start; }
.run { fill: #cfe8f7; stroke: #0072B2; }
.error { fill: #f8d9c4; stroke: #D55E00; stroke-width: 2.5; }
.undo { fill: #fff6d0; stroke: #9a6700; stroke-dasharray: 5 4; }
.wait { fill: none; stroke: #818b98; stroke-dasharray: 2 4; }
.together { fill: #d5efe6; stroke: #009E73; }
.line { stroke: #1f2328; }"""


def draw(path: Path) -> None:
    width = LEFT + int(26 * UNIT)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 300" role="img" '
        'aria-labelledby="title">',
        f'<title id="title">{TITLE}</title>',
        f"<style>\n{STYLE}\n</style>",
        f'<rect width="{width}" height="300" fill="#ffffff"/>',
        f'<text class="title" x="20" y="30">{TITLE}</text>',
    ]
    for row, (rank, boxes) in enumerate(RANKS.items()):
        top = 60 + row * (HEIGHT + 18)
        lines.append(f'<text class="left" x="20" y="{top + 28}">{rank}</text>')
        lines += [line for box in boxes for line in drawn(box, top, HEIGHT)]
        if row:
            error = next(box for box in boxes if box.kind == "error")
            x = LEFT + (error.begin + error.length / 2) * UNIT
            lines.append(f'<text x="{x}" y="{top + HEIGHT + 17}">out of memory</text>')
    lines += [line for box in ALL for line in drawn(box, 60, 2 * HEIGHT + 18)]
    for number, note in enumerate(NOTES):
        lines.append(f'<text class="left" x="20" y="{226 + 19 * number}">{note}</text>')
    path.write_text("\n".join([*lines, "</svg>", ""]))


def drawn(box: Box, top: float, height: float) -> list[str]:
    x, width = LEFT + box.begin * UNIT, box.length * UNIT - 4
    place = f'x="{x:g}" y="{top:g}" width="{width:g}" height="{height:g}"'
    return [
        f'<rect class="{box.kind}" {place} rx="5"/>',
        f'<text x="{x + width / 2:g}" y="{top + height / 2 + 5:g}">{box.text}</text>',
    ]
