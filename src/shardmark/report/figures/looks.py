"""The colour, dash and marker of every style, the same in every figure."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

REFERENCE = "reference"
"""Style of what nobody measured: ideal scaling, the border of a pareto front."""


@dataclass(frozen=True, slots=True)
class Look:
    """Colour is never the only channel: lines differ in dash and marker, bars have names."""

    colour: str
    """`#rrggbb`, with a contrast of at least 3:1 on white and on #111111."""
    dash: int
    """Index into `DASHES`."""
    marker: int
    """Index into `MARKERS`."""


DASHES = ((1, 0), (5, 2), (2, 2), (8, 2, 2, 2), (8, 2, 2, 2, 2, 2), (10, 3))
"""Pixels drawn and left out."""
MARKERS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "triangle-right",
           "triangle-left")  # fmt: skip
"""By Vega's names."""

_COLOURS = ("#0072b2", "#d55e00", "#00a37a", "#cf66ae", "#b58900", "#7350d6", "#4d8b00", "#bc3f4c")

_STYLES = {
    "single": Look("#808080", 0, 0),
    "dp": Look("#b58900", 4, 5),
    "ddp": Look("#0072b2", 0, 1),
    "fsdp": Look("#d55e00", 0, 2),
    "fsdp-grad-op": Look("#bc3f4c", 1, 6),
    "fsdp-hybrid": Look("#9c6a2b", 3, 2),
    "zero-0": Look("#9c7bd0", 2, 1),
    "zero-1": Look("#a63a86", 3, 5),
    "zero-2": Look("#cf66ae", 1, 3),
    "zero-3": Look("#7350d6", 4, 6),
    "ps-sync": Look("#007a5e", 3, 7),
    "ps-async": Look("#00a37a", 2, 4),
    "ps-bounded": Look("#4d8b00", 1, 7),
    # parts of a rank's memory
    "parameters": Look("#0072b2", 0, 0),
    "gradients": Look("#d55e00", 0, 0),
    "optimizer state": Look("#00a37a", 0, 0),
    "activations and other": Look("#808080", 0, 0),
    # parts of a step
    "data": Look("#b58900", 0, 0),
    "forward": Look("#0072b2", 0, 0),
    "backward": Look("#7350d6", 0, 0),
    "optimizer": Look("#00a37a", 0, 0),
    "exposed communication": Look("#d55e00", 0, 0),
    "rest": Look("#808080", 0, 0),
    REFERENCE: Look("#808080", 1, 0),
    # interfaces of all nodes, in order
    **{f"interface {n}": Look(colour, n % 6, n) for n, colour in enumerate(_COLOURS)},
}


def look_of(style: str, variant: int = 0) -> Look:
    """That of the style; one that is not known gets one by its name, the same in every run."""
    known = _STYLES.get(style)
    if known is None:
        number = int.from_bytes(sha256(style.encode(errors="replace")).digest()[:4])
        known = Look(_COLOURS[number % len(_COLOURS)], number // 8, number // 64)
    return Look(
        known.colour,
        (known.dash + variant) % len(DASHES),
        (known.marker + variant) % len(MARKERS),
    )


def plain_text(text: str) -> str:
    """On one line, and without the characters that vl-convert cannot take.

    It aborts the process at a NUL, and where it cuts a long label it may cut a pair of surrogates.
    """
    line = " ".join(text.split())
    return "".join(
        sign if sign.isprintable() and sign <= "\uffff" else "\N{REPLACEMENT CHARACTER}"
        for sign in line
    )


def short(text: str, longest: int) -> str:
    """The same, cut where it is long."""
    line = plain_text(text)
    return line if len(line) <= longest else f"{line[: longest - 1].rstrip()}…"
