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
    "model_attributes_type": "a mapping (key: value)",
    "dict_type": "a mapping (key: value)",
    "list_type": "a list in brackets, e.g. [a, b]",
    "tuple_type": "a list in brackets, e.g. [a, b]",
    "too_short": "at least one value",
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
    where, found, allowed = errors[0].args
    return InputError(where, found, "\n".join([allowed, *map(str, errors[1:])]))


def explain(
    error: ValidationError, where: Callable[[Location], str], prefix: Location = ()
) -> InputError:
    """Pydantic's findings as one `InputError`, in pydantic's order, which is the schema's.

    `where` says in which file and key (or option) a location is; `prefix` is the location of what
    was validated.
    """
    lines: dict[str, InputError] = {}
    for item in error.errors(include_url=False):
        item["loc"] = (*prefix, *item["loc"])
        location = _in_file(item)
        line = InputError(where(location), *_found_and_allowed(item, location))
        lines.setdefault(str(line), line)
    return join(list(lines.values()))


def _in_file(item: ErrorDetails) -> Location:
    """Where the user wrote it: pydantic puts in the name of a union's member."""
    location = list(item["loc"])
    tag = 3 if location[:2] == ["matrix", "strategy"] else 1
    if len(location) > tag and (tag == 3 or location[0] in ("workload", "engine")):
        del location[tag]
    if item["type"].startswith("union_tag"):
        location.append("name")
    return tuple(location)


def _found_and_allowed(  # noqa: PLR0911  (a kind of mistake each)
    item: ErrorDetails, location: Location
) -> tuple[str, str]:
    """One finding of pydantic in our words."""
    kind, context, value = item["type"], item.get("ctx", {}), item["input"]
    found = f"found {show(value)}"
    if kind == "mistake":
        return context["found"], context["allowed"]
    if kind == "extra_forbidden":
        from shardmark.config.json_schema import keys_at

        what = "axis" if location[0] == "matrix" and len(location) == 2 else "key"
        return f"no such {what}", choices(item["loc"][-1], keys_at(item["loc"][:-1]))
    if kind == "union_tag_not_found":
        from shardmark.config.json_schema import names_at

        return "missing", choices("", names_at(item["loc"]))
    if kind == "missing":
        return "missing", "this key is required"
    if kind == "union_tag_invalid":
        return f"found {show(context['tag'])}", choices(
            context["tag"], _quoted(context["expected_tags"])
        )
    if kind == "value_error":
        said, _, allowed = str(context["error"]).partition("; ")
        return said, allowed or f"change {show(value)}"
    if kind == "literal_error":
        allowed = choices(value, _quoted(context["expected"]))
    elif kind == "string_pattern_mismatch":
        allowed = "allowed are letters, digits, '.', '_' and '-', a letter or digit first"
    else:
        allowed = f"allowed is {_WANTED.get(kind) or item['msg'].removeprefix('Input should be ')}"
    if isinstance(value, list) and location[0] in ("recipe", "measure", "placement", "workload"):
        key = dotted(location)
        allowed += f"; to compare them, make it an axis: matrix: {{{key}: {show(value)}}}"
    return found, allowed


def _quoted(text: object) -> list[str]:
    return re.findall(r"'([^']*)'", str(text))


def given_at(data: Any, location: Iterable[str | int]) -> bool:
    """Whether the mappings have something at that place."""
    for part in location:
        if not isinstance(data, Mapping) or part not in data:
            return False
        data = data[part]
    return True
