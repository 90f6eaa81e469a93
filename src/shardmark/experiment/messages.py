"""Formatting of values, names and places in error messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import NoReturn

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from shardmark.base.errors import InputError
from shardmark.base.files.strict_yaml import parse_yaml

Location = tuple[str | int, ...]

_SHOWN_CHARACTERS = 60
_LISTED_NAMES = 20
LEAST_PART = 5
"""Characters from which names that contain a text are the nearest."""
_MOST_LISTED_NAMES = 60


def show(value: object) -> str:
    """Format a value for a message, on one line and shortened if it is long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def nearest(value: object, names: Iterable[str], count: int = 1) -> str:
    """Return a hint such as ` (nearest: 'fsdp')`, or an empty text if no name is similar."""
    near = near_names(value, names, count)
    return f" (nearest: {', '.join(map(repr, near))})" if near else ""


def near_names(value: object, names: Iterable[str], count: int = 1) -> list[str]:
    """Return names that equal the value up to case and `-_`, a synonym's name, or names that
    contain it or are similar.
    """
    allowed, text = list(names), str(value)
    for key in (_normalised(text), _normalised(text.rpartition(".")[2])):
        for targets in ([key], [*map(_normalised, _synonyms().get(key, "").split())]):
            for sections in (0, -1):  # first with the sections before the key
                if equal := [
                    name
                    for name in allowed
                    if _normalised(name.split(".", sections)[-1]) in targets
                ]:
                    return equal
    normalised, key = {_normalised(name): name for name in allowed}, _normalised(text)
    similar = difflib.get_close_matches(key, normalised, n=count, cutoff=0.5) if count else []
    longer = [name for name in normalised if len(key) >= LEAST_PART and key in name]
    return [normalised[name] for name in dict.fromkeys((*longer, *similar))][:count]


@cache
def _synonyms() -> dict[str, str]:
    """Names of this package, separated by blanks, by the normalised names of other libraries."""
    text = files("shardmark.experiment").joinpath("synonyms.yaml").read_text(encoding="utf-8")
    rows = parse_yaml(text, "synonyms.yaml").items()
    return {alias: name for name, aliases in rows for alias in aliases.split()}


def _normalised(text: str) -> str:
    return re.sub(r"[-_ ]", "", text.lower())


def choices(value: object, names: Sequence[str]) -> str:
    """Describe the allowed names; of a long list only the similar names, if there are any."""
    near = nearest(value, names, 3)
    if near and len(names) > _LISTED_NAMES:
        return near.strip(" ()")
    if len(names) > _MOST_LISTED_NAMES:
        return "`shardmark schema` lists those that there are"
    return f"allowed are {', '.join(names)}{nearest(value, names)}" if names else "remove it"


def dotted(location: Iterable[str | int]) -> str:
    """Format a location, such as `("matrix", "strategy", 1)` as `matrix.strategy[1]`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def mistake(location: Location, problem: str, allowed: str, value: object) -> InitErrorDetails:
    """Describe a mistake for `refuse`.  The location is relative to the validated field."""
    error = PydanticCustomError(
        "mistake", "{problem}; {allowed}", {"problem": problem, "allowed": allowed}
    )
    return InitErrorDetails(type=error, loc=location, input=value)


def refuse(mistakes: Sequence[InitErrorDetails]) -> NoReturn:
    """Raise the mistakes inside a validator; pydantic prepends the location of the field."""
    raise ValidationError.from_exception_data("experiment", list(mistakes))


def join(errors: Sequence[InputError]) -> InputError:
    """Return one error whose text has a line for every error."""
    place, problem, allowed, *more = errors[0].args
    return InputError(place, problem, allowed, *more, *errors[1:])
