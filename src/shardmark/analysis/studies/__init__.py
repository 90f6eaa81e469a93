"""Published studies as data, one YAML file each, so that runs can be held against them."""

from __future__ import annotations

from importlib.resources import files

from pydantic import ValidationError

from shardmark.analysis.studies.schema import Paper
from shardmark.config.problems import dotted, nearest
from shardmark.core.errors import InputError
from shardmark.core.strict_yaml import parse_yaml


def paper_names() -> tuple[str, ...]:
    """In alphabetical order; a file whose name begins with `_` is no study."""
    names = (entry.name for entry in files("shardmark.analysis.studies").iterdir())
    studies = (name for name in names if name.endswith(".yaml") and not name.startswith("_"))
    return tuple(sorted(name.removesuffix(".yaml") for name in studies))


def load_paper(name: str) -> Paper:
    """The study of that name.  Raises `InputError`, with the nearest names, for any other."""
    names = paper_names()
    if name not in names:
        allowed = f"allowed are {', '.join(names)}{nearest(name, names, count=3)}"
        raise InputError("--against", f"there is no paper {name!r}", allowed)
    text = files("shardmark.analysis.studies").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return parse_paper(text, f"paper {name}")


def parse_paper(text: str, where: str) -> Paper:
    """The study in a YAML text; `where` names it in messages."""
    data = parse_yaml(text, where)
    try:
        return Paper.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InputError(f"{where}: {dotted(first['loc'])}", first["msg"], "correct it") from None


def papers() -> dict[str, str]:
    """Name -> authors, year, what was compared and on what, on one line."""
    return {name: load_paper(name).summary for name in paper_names()}
