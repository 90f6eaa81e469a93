"""The colour, dash, marker and hatch of every style, the same in both drawings."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

REFERENCE = "reference"
"""Style of what nobody measured: ideal scaling, the border of a pareto front."""
LONGEST_SHOWN = 60
"""Signs of a name in an image; the page has room for all."""
LONGEST_TICK = 12
MOST_MARKED = 20
"""Points of a panel's longest line that still get a marker each."""
MOST_WHISKERS = 12
"""Points of a line that get whiskers; more get a band."""


@dataclass(frozen=True, slots=True)
class Look:
    """Colour is never the only channel: lines differ in dash and marker, bars in hatch."""

    colour: str
    """`#rrggbb`, with a contrast of at least 3:1 on white and on #111111."""
    dash: int
    """Index into `DASHES`."""
    marker: int
    """Index into `MARKERS`."""
    hatch: int
    """Index into `HATCHES`."""


DASHES = ("solid", "5px,2px", "2px,2px", "8px,2px,2px,2px", "8px,2px,2px,2px,2px,2px", "10px,3px")
"""As plotly writes them; `images` reads the numbers."""
MARKERS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star")
"""By plotly's names."""
HATCHES = ("", "/", "\\", "x", "-", "|", "+", ".")
"""Both libraries know these signs."""

_COLOURS = ("#0072b2", "#d55e00", "#00a37a", "#cf66ae", "#b58900", "#7350d6", "#4d8b00", "#bc3f4c")

_STYLES = {
    "single": Look("#808080", 0, 0, 0),
    "dp": Look("#b58900", 4, 5, 3),
    "ddp": Look("#0072b2", 0, 1, 0),
    "fsdp": Look("#d55e00", 0, 2, 1),
    "fsdp-grad-op": Look("#bc3f4c", 1, 6, 2),
    "fsdp-hybrid": Look("#9c6a2b", 3, 2, 3),
    "zero-0": Look("#9c7bd0", 2, 1, 4),
    "zero-1": Look("#a63a86", 3, 5, 5),
    "zero-2": Look("#cf66ae", 1, 3, 2),
    "zero-3": Look("#7350d6", 4, 6, 6),
    "ps-sync": Look("#007a5e", 3, 7, 4),
    "ps-async": Look("#00a37a", 2, 4, 7),
    "ps-bounded": Look("#4d8b00", 1, 7, 6),
    # parts of a rank's memory
    "parameters": Look("#0072b2", 0, 0, 0),
    "gradients": Look("#d55e00", 0, 0, 1),
    "optimizer state": Look("#00a37a", 0, 0, 2),
    "activations and other": Look("#808080", 0, 0, 0),
    # parts of a step
    "data": Look("#b58900", 0, 0, 3),
    "forward": Look("#0072b2", 0, 0, 0),
    "backward": Look("#7350d6", 0, 0, 2),
    "optimizer": Look("#00a37a", 0, 0, 4),
    "exposed communication": Look("#d55e00", 0, 0, 1),
    "rest": Look("#808080", 0, 0, 0),
    REFERENCE: Look("#808080", 1, 0, 0),
    # interfaces of all nodes, in order
    **{f"interface {n}": Look(colour, n % 6, n, n) for n, colour in enumerate(_COLOURS)},
}


def look_of(style: str, variant: int = 0) -> Look:
    """That of the style; one that is not known gets one by its name, the same in every run."""
    found = _STYLES.get(style)
    if found is None:
        number = int.from_bytes(sha256(style.encode(errors="replace")).digest()[:4])
        found = Look(_COLOURS[number % len(_COLOURS)], number // 8, number // 64, number // 512)
    return Look(
        found.colour,
        (found.dash + variant) % len(DASHES),
        (found.marker + variant) % len(MARKERS),
        (found.hatch + variant) % len(HATCHES),
    )


def plain_text(text: str) -> str:
    """On one line, and without what no file of text may hold: control signs, half pairs."""
    line = " ".join(text.split())
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in line)


def short(text: str, longest: int) -> str:
    """The same, cut where it is long."""
    line = plain_text(text)
    return line if len(line) <= longest else f"{line[: longest - 1].rstrip()}…"
