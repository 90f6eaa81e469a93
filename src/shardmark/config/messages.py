"""How mistakes are worded: values, names and places as a message shows them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import NoReturn

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from shardmark.core.errors import InputError

Location = tuple[str | int, ...]

_SHOWN_CHARACTERS = 60
_LISTED_NAMES = 20


def show(value: object) -> str:
    """A value as a message quotes it: as YAML has it, on one line, not too long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def nearest(value: object, names: Iterable[str], count: int = 1) -> str:
    """` (nearest: 'fsdp')`, or nothing where no name is near."""
    known = list(names)
    near = [name for name in known if name.endswith(f".{value}")] or difflib.get_close_matches(
        str(value), known, n=count, cutoff=0.5
    )
    return f" (nearest: {', '.join(map(repr, near))})" if near else ""


def choices(value: object, names: Sequence[str]) -> str:
    """What is allowed instead; of a long list only the nearest names, if any is near."""
    near = nearest(value, names, 3)
    if near and len(names) > _LISTED_NAMES:
        return near.strip(" ()")
    return f"allowed are {', '.join(names)}{nearest(value, names)}" if names else "remove it"


def dotted(location: Iterable[str | int]) -> str:
    """`("matrix", "strategy", 1)` as `matrix.strategy[1]`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def mistake(location: Location, found: str, allowed: str, value: object) -> InitErrorDetails:
    """One mistake for `refuse`; the location is relative to the field that is validated."""
    error = PydanticCustomError(
        "mistake", "{found}; {allowed}", {"found": found, "allowed": allowed}
    )
    return InitErrorDetails(type=error, loc=location, input=value)


def refuse(mistakes: Sequence[InitErrorDetails]) -> NoReturn:
    """Raise them inside a validator: pydantic puts the field's own location in front."""
    raise ValidationError.from_exception_data("experiment", list(mistakes))


def join(errors: Sequence[InputError]) -> InputError:
    """One error whose text has a line for each."""
    where, found, allowed, *more = errors[0].args
    return InputError(where, found, allowed, *more, *errors[1:])
