"""What the report page is made of beside its content: template, style, script, their policy."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

TEMPLATE = "report.html.j2"
STYLE = "report.css"
SCRIPT = "report.js"
_CODE = re.compile(r"`([^`\n]+)`")
_UNIT = re.compile(r"(\d) (?=(?:%|[KMG]iB|ms|s|samples/s|ranks?|steps?|trials?)(?![\w/]))")


def fill(values: Mapping[str, object]) -> str:
    """The page with these values: all of them are escaped, save `Markup`."""
    style, script = template_text(STYLE), template_text(SCRIPT)
    environment = Environment(
        loader=FunctionLoader(template_text),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["sentence"] = sentence
    return environment.get_template(TEMPLATE).render(
        values, style=Markup(style), script=Markup(script), policy=policy(script, style)
    )


def sentence(text: str) -> Markup:
    """A sentence of ours, escaped: names in backquotes are code, a number keeps its unit."""
    escaped = str(escape(text))
    return Markup(_UNIT.sub("\\1\N{NO-BREAK SPACE}", _CODE.sub("<code>\\1</code>", escaped)))


def policy(script: str, style: str) -> str:
    """A content security policy for this inline script and style alone; nothing is loaded."""
    return (
        f"default-src 'none'; script-src 'sha256-{_sha256(script)}';"
        f" style-src 'sha256-{_sha256(style)}'; base-uri 'none'; form-action 'none'"
    )


def json_block(value: object) -> Markup:
    """JSON as the content of a script element that is data: no text in it can end the element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
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
