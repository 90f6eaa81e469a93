"""Reads an experiment from a file or a preset, and writes one out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shardmark.config.experiment import Experiment
from shardmark.config.keys import full_key, names_at
from shardmark.config.overrides import Override, apply_overrides, parse_override
from shardmark.config.problems import Location, dotted, explain, given_at, nearest, show
from shardmark.core.errors import InputError
from shardmark.core.strict_yaml import format_yaml, parse_yaml

MOST_BYTES = 2**20
"""No experiment is as large: something else was given."""


def load_experiment(source: str | Path, overrides: Sequence[str] = ()) -> Experiment:
    """The experiment of a file, or of the preset of that name, changed by `key=value` overrides.

    Raises `InputError` for whatever is wrong, all mistakes at once where they are independent.
    """
    where, text = _read(str(source))
    data = parse_yaml(text, where)
    if data is None:
        raise InputError(
            where, "it is empty", "allowed is a mapping with name, workload, recipe ..."
        )
    return from_mapping(data, overrides, where=where)


def from_mapping(
    data: object, overrides: Sequence[str] = (), *, where: str = "experiment"
) -> Experiment:
    """The experiment of data such as a YAML file has; `where` names them in messages."""
    if not isinstance(data, Mapping):
        allowed = "allowed is a mapping with name, workload, recipe ..."
        raise InputError(where, f"found {show(data)}", allowed)
    parsed = [parse_override(text) for text in overrides]
    changed = apply_overrides(data, parsed)
    try:
        return Experiment.model_validate(changed)
    except ValidationError as error:
        place = partial(_place, where=where, data=changed, overrides=parsed)
        workload = changed.get("workload")
        raise explain(error, place, lambda location: names_at(location, workload)) from None


def to_yaml(experiment: Experiment) -> str:
    """The resolved experiment as a file that loads to an equal one."""
    return format_yaml(experiment.model_dump(mode="json"))


def presets() -> dict[str, str]:
    """Name of each experiment in the package -> what it is for, on one line."""
    return {name: _purpose(preset_text(name)) for name in preset_names()}


def preset_names() -> tuple[str, ...]:
    folder = files("shardmark.config").joinpath("presets")
    names = (entry.name for entry in folder.iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def preset_text(name: str) -> str:
    """The file of a preset, comments included."""
    folder = files("shardmark.config").joinpath("presets")
    return folder.joinpath(f"{name}.yaml").read_text(encoding="utf-8")


def _purpose(text: str) -> str:
    """The first sentence of the comment at the top."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return " ".join(lines).partition(". ")[0].rstrip(".")


def _read(source: str) -> tuple[str, str]:
    """What to call it in messages, and its text."""
    try:
        path = Path(source).expanduser()
        if source in preset_names() and not path.is_file():
            return f"preset {source}", preset_text(source)
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise _missing(source) from None
    except IsADirectoryError:
        inside = path / "experiment.yaml"
        allowed = f"its experiment is {inside}" if inside.is_file() else "allowed is a YAML file"
        raise InputError(source, "it is a folder", allowed) from None
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(source, f"cannot be read: {reason}", "allowed is a YAML file") from None
    if len(content) > MOST_BYTES:
        raise InputError(source, "larger than 1 MiB", "allowed is an experiment in YAML")
    try:
        return source, content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(source, "not UTF-8 text", "allowed is an experiment in YAML") from None


def _missing(source: str) -> InputError:
    names = preset_names()
    near = nearest(Path(source).stem, names, count=3)
    allowed = f"allowed is a file or one of the presets {', '.join(names)}{near}"
    return InputError(source, "no such file, and no such preset", allowed)


def _place(
    location: Location, *, where: str, data: Mapping[str, Any], overrides: Sequence[Override]
) -> str:
    """File and dotted key, or the option that set it, or the axis that the base took it from."""
    matrix = data.get("matrix")
    axes = {full_key(str(key)) for key in matrix} if isinstance(matrix, Mapping) else set()
    for length in range(len(location), 1, -1):
        key = dotted(location[:length])
        if key in axes and not given_at(data, location[:length]):
            rest = dotted(location[length:])
            location = ("matrix", key, 0, *([rest] if rest else []))
            break
    for override in overrides:
        if location[: len(override.path)] == override.path:
            rest = dotted(location[len(override.path) :])
            inside = f" at {rest.lstrip('.')}" if rest else ""
            return f"{override.option}{inside}"
    return f"{where}: {dotted(location)}" if location else where
