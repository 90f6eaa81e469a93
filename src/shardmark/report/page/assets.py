"""What the report page is made of beside its content: template, style, scripts, their policy."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from shardmark.report.page.library import plotly_library

TEMPLATE = "report.html.j2"
STYLE = "report.css"
SCRIPT = "report.js"
_CODE = re.compile(r"`([^`\n]+)`")
_UNIT = re.compile(r"(\d) (?=(?:%|[KMG]iB|ms|s|samples/s|ranks?|steps?|trials?)(?![\w/]))")


def fill(values: Mapping[str, object]) -> str:
    """The page with these values: all of them are escaped, save `Markup`."""
    style, script, library = template_text(STYLE), template_text(SCRIPT), plotly_library()
    environment = Environment(
        loader=FunctionLoader(template_text),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["sentence"] = sentence
    return environment.get_template(TEMPLATE).render(
        values,
        style=Markup(style),
        script=Markup(script),
        library=Markup(library),
        policy=policy([library, script]),
    )


def sentence(text: str) -> Markup:
    """A sentence of ours, escaped: names in backquotes are code, a number keeps its unit."""
    escaped = str(escape(text))
    return Markup(_UNIT.sub("\\1\N{NO-BREAK SPACE}", _CODE.sub("<code>\\1</code>", escaped)))


def policy(scripts: Sequence[str]) -> str:
    """A content security policy that runs these inline scripts alone, and loads nothing.

    Styles are not restricted to hashes: plotly writes rules of its own.
    """
    hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:;"
        " base-uri 'none'; form-action 'none'"
    )


def json_block(value: object) -> Markup:
    """JSON as the content of a script element that is data: no text in it can end the element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), default=_plain_list)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


@cache
def template_text(name: str) -> str:
    """A file of `templates/`, with the line ends that a browser sees."""
    text = files("shardmark.report.page").joinpath("templates", name).read_text(encoding="utf-8")
    return text.replace("\r\n", "\n")


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode()


def _plain_list(value: Any) -> list[Any]:
    """Arrays and tuples of other libraries: whatever can tell its items."""
    return list(value)
