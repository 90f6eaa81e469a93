"""Plotly's script, as its Python package holds it, made ready to stand in a page."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_CALL = ".register(["
_REGISTRATION = re.compile(r"\w+\.register\(\[(\w+\(\)(?:,\w+\(\))*)\]\);")
"""Where plotly makes its kinds of traces known: all of them are built for it."""
_NAME_CHARACTERS = 16
_MODULE_CHARACTERS = 4000
"""A kind's module is no longer: its name stands in it."""
KEPT = "bar"
"""Beside `scatter`, which is always there: what `figures.plotly_drawing` draws with."""


@cache
def plotly_library() -> str:
    """The script, with no kind of trace but those that the page draws.

    Building the others (maps, volumes, ...) takes a browser most of the time until the page can be
    used.  Found without importing the package, which takes a second.
    """
    spec = find_spec("plotly")
    assert spec is not None, "plotly is a dependency"
    assert spec.origin is not None, "plotly is a package with files"
    path = Path(spec.origin).parent / "package_data" / "plotly.min.js"
    text = with_fewer_kinds(path.read_text(encoding="utf-8").replace("\r\n", "\n").strip())
    assert "</script" not in text.lower(), "plotly's library cannot be inlined"
    assert "<!--" not in text, "plotly's library cannot be inlined"
    return text


def with_fewer_kinds(library: str) -> str:
    """The library with one kind registered; as it is where another release is built otherwise."""
    call = library.rfind(_CALL)
    before = re.search(r"\w+$", library[max(0, call - _NAME_CHARACTERS) : max(0, call)])
    found = _REGISTRATION.match(library, call - len(before[0])) if before else None
    if found is None:
        return library
    kept = [one for one in found[1].split(",") if _defines(library, one.removesuffix("()"))]
    if len(kept) != 1:
        return library
    return library[: found.start(1)] + kept[0] + library[found.end(1) :]


def _defines(library: str, module: str) -> bool:
    """Whether the module hands on the one that defines the kept kind of trace."""
    handed = re.search(r"exports=(\w+)\(\)", _module(library, module)[:80])
    if handed is None:
        return False
    name = re.search(r'\bname:"(\w+)"', _module(library, handed[1]))
    return name is not None and name[1] == KEPT


def _module(library: str, name: str) -> str:
    """The text from where the module begins; empty where there is none."""
    for sign in ("var ", ","):
        start = library.find(f"{sign}{name}=")
        if start >= 0:
            return library[start : start + _MODULE_CHARACTERS]
    return ""
