"""Draw the slots of three KV heads as SVG: `python docs/slots.py` writes docs/slots.svg.

The picture shows B = 16 slots of a request: 2 sinks, 6 long-range slots and a window of 8. All heads have the same
slots, and hold different tokens in the long-range ones.
"""

from pathlib import Path

OUT = Path(__file__).with_suffix(".svg")
WIDTH, HEIGHT = 760, 232
CELL, GAP, LEFT, TOP = 36, 4, 96, 58
SINKS, WINDOW, LAST = 2, 8, 99
"""Sinks and window in slots, and the position of the newest token."""
LONG_RANGE = ((5, 17, 23, 41, 66, 90), (9, 12, 38, 39, 71, 86), (17, 30, 52, 60, 61, 77))
"""Positions that each head holds in its long-range slots."""
INK, PAPER, LINE = "#1f2328", "#ffffff", "#59636e"
COLORS = {"sink": "#e8e8e8", "long range": "#a6d8f5", "window": "#f9d9a0"}


def text(x: float, y: float, words: str, size: int = 14, anchor: str = "middle") -> str:
    """Return a line of text at ``(x, y)`` in pixels."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def cell(column: int, row: int, token: int, kind: str) -> str:
    """Return the slot at a column and row, with the position of its token."""
    x, y = LEFT + column * (CELL + GAP), TOP + row * (CELL + GAP)
    shape = f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" rx="4" fill="{COLORS[kind]}"/>'
    return shape + text(x + CELL / 2, y + CELL / 2 + 5, str(token))


def brace(first: int, count: int, words: str) -> str:
    """Return a line above ``count`` columns, and what they are."""
    x, end = LEFT + first * (CELL + GAP), LEFT + (first + count) * (CELL + GAP) - GAP
    line = f'<path d="M{x} {TOP - 8}v-6H{end}v6" fill="none" stroke="{LINE}"/>'
    return line + text((x + end) / 2, TOP - 22, words)


def arrow(start: int, end: int, y: float) -> str:
    """Return an arrow from one column to another, below the slots."""
    x, tip = (LEFT + column * (CELL + GAP) + CELL / 2 for column in (start, end))
    head = f'<path d="M{tip - 5:g} {y + 7:g}l5 -8l5 8z" fill="{LINE}"/>'
    return f'<path d="M{x:g} {y:g}v16H{tip:g}v-14" fill="none" stroke="{LINE}"/>{head}'


def picture() -> str:
    """Return the SVG."""
    count = len(LONG_RANGE[0])
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="Helvetica, Arial, sans-serif" fill="{INK}">',
        "<title>Slots of three KV heads and the tokens that they hold</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{PAPER}"/>',
        brace(0, SINKS, "first tokens"),
        brace(SINKS, count, "highest scores, for each head"),
        brace(SINKS + count, WINDOW, "latest tokens"),
    ]
    for row, long_range in enumerate(LONG_RANGE):
        elements.append(text(LEFT - 12, TOP + row * (CELL + GAP) + CELL / 2 + 5, f"KV head {row}", anchor="end"))
        tokens = [(token, "sink") for token in range(SINKS)] + [(token, "long range") for token in long_range]
        tokens += [(token, "window") for token in range(LAST - WINDOW + 1, LAST + 1)]
        elements += [cell(column, row, token, kind) for column, (token, kind) in enumerate(tokens)]
    below = TOP + len(LONG_RANGE) * (CELL + GAP)
    elements.append(arrow(SINKS + count, SINKS + 2, below))
    words = f"Token {LAST - WINDOW + 1} leaves the window next: it takes the slot of a lower score, or is evicted."
    elements.append(text(LEFT, below + 40, words, anchor="start"))
    return "\n".join([*elements, "</svg>", ""])


if __name__ == "__main__":
    OUT.write_text(picture(), encoding="utf-8")
    print(f"wrote {OUT}")
