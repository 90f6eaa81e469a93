"""Says what is wrong with an experiment: one line a mistake, with file, key, value and remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from pydantic import ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from shardmark.core.errors import InputError

Location = tuple[str | int, ...]

_SHOWN_CHARACTERS = 60
_LISTED_NAMES = 20
_WANTED = {
    "model_type": "a mapping (key: value)",
    "dict_type": "a mapping (key: value)",
    "list_type": "a list in brackets, e.g. [a, b]",
    "tuple_type": "a list in brackets, e.g. [a, b]",
    "string_type": "text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
}


def show(value: object) -> str:
    """A value as a message quotes it: as YAML has it, on one line, not too long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def nearest(value: object, names: Iterable[str], count: int = 1) -> str:
    """` (nearest: 'fsdp')`, or nothing where no name is near."""
    near = difflib.get_close_matches(str(value), list(names), n=count, cutoff=0.5)
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
    where, found, allowed = errors[0].args
    return InputError(where, found, "\n".join([allowed, *map(str, errors[1:])]))


def explain(
    error: ValidationError,
    where: Callable[[Location], str],
    names_at: Callable[[Location], Sequence[str]],
) -> InputError:
    """Pydantic's findings as one `InputError`, in pydantic's order, which is the schema's.

    `where` says in which file and key (or option) a location is, `names_at` the keys allowed there.
    """
    lines: dict[str, InputError] = {}
    for item in error.errors(include_url=False):
        found, allowed = found_and_allowed(item, names_at(item["loc"][:-1]))
        line = InputError(where(item["loc"]), found, allowed)
        lines.setdefault(str(line), line)
    return join(list(lines.values()))


def found_and_allowed(item: ErrorDetails, names: Sequence[str]) -> tuple[str, str]:
    """One finding of pydantic in our words; `names` are the keys allowed where it is."""
    kind, context = item["type"], item.get("ctx", {})
    found = f"found {show(item['input'])}"
    if kind == "mistake":
        return context["found"], context["allowed"]
    if kind == "extra_forbidden":
        return "no such key", choices(item["loc"][-1], names)
    if kind == "missing":
        return "missing", "this key is required"
    if kind == "value_error":
        said, _, allowed = str(context["error"]).partition("; ")
        return said, allowed or f"change {show(item['input'])}"
    if kind == "literal_error":
        return found, choices(item["input"], re.findall(r"'([^']*)'", str(context["expected"])))
    wanted = _WANTED.get(kind) or item["msg"].removeprefix("Input should be ")
    return found, f"allowed is {wanted}"


def given_at(data: Any, location: Iterable[str | int]) -> bool:
    """Whether the mappings have something at that place."""
    for part in location:
        if not isinstance(data, Mapping) or part not in data:
            return False
        data = data[part]
    return True
