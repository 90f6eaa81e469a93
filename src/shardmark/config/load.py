"""Reads an experiment from a file or a preset, changes it by `--set`, and writes one out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shardmark.config.axes import OWN_AXES, assigned, full_key, named
from shardmark.config.experiment import Experiment
from shardmark.config.messages import Location, dotted, nearest, show
from shardmark.config.problems import explain
from shardmark.core.errors import InputError
from shardmark.core.recipe import EXCLUSIVE
from shardmark.core.strict_yaml import format_yaml, parse_yaml
from shardmark.core.text import say
from shardmark.workloads.language.options import HUGGING_FACE
from shardmark.workloads.models import is_user_function

PRESETS = files("shardmark.config").joinpath("presets")
MOST_BYTES = 2**18
"""No experiment is as large: something else was given."""
ALLOWED = "allowed is a mapping with name, workload, recipe and matrix"
USER_CODE = ("task", "model", "path")
"""Keys, and ends of axes, that may name a class or function of the user's."""
FILES = ("model", "tokenizer", "weights")
"""Keys, and ends of axes, that may name a file, beside `data_dir`."""


@dataclass(frozen=True, slots=True)
class Override:
    """One `--set`, or one keyword of Python's `run`."""

    path: tuple[str, ...]
    """Keys from the outside in; an axis is one key, dots and all."""
    value: Any

    @property
    def option(self) -> str:
        return f"--set {dotted(self.path)}"


def load_experiment(source: str | Path, overrides: Sequence[str | Override] = ()) -> Experiment:
    """The experiment of a file, or of the preset of that name, changed by `key=value` overrides.

    Raises `InputError` for whatever is wrong, all mistakes at once where they are independent.
    """
    where, text = _read(str(source))
    data = parse_yaml(text, where)
    if data is None:
        raise InputError(where, "it is empty", ALLOWED)
    return from_mapping(data, overrides, where=where, folder=Path(where).expanduser().parent)


def _found_beside(data: Any, folder: Path, key: str = "") -> Any:
    """Modules and files that lie in the folder by their paths.

    A module there comes before one of the current folder, other files come after it.
    """
    if isinstance(data, Mapping):
        return {
            name: value
            if str(name).endswith("options")
            else _found_beside(value, folder, str(name).rpartition(".")[2])
            for name, value in data.items()
        }
    if isinstance(data, list):
        return [_found_beside(value, folder, key) for value in data]
    if not isinstance(data, str):
        return data
    if key in USER_CODE and is_user_function(data):
        module, _, name = data.rpartition(":")
        file = folder / f"{module.removesuffix('.py')}.py"
        return f"{file}:{name}" if file.is_file() else data
    prefix = "hf:" if data.startswith("hf:") and data not in HUGGING_FACE else ""
    path = Path(data.removeprefix(prefix)).expanduser()
    named = key == "data_dir" or (key in FILES and (prefix or path.suffix))
    return (
        f"{prefix}{folder / path}" if named and not _there(path) and _there(folder / path) else data
    )


def _there(path: Path) -> bool:
    with suppress(OSError, ValueError):  # no path that a file system takes: nothing is there
        return path.exists()
    return False


def from_mapping(
    data: object,
    overrides: Sequence[str | Override] = (),
    *,
    where: str = "experiment",
    folder: Path | None = None,
) -> Experiment:
    """The experiment of data such as a YAML file has; `where` names them in messages.

    Relative paths are looked for in the folder, too.
    """
    if not isinstance(data, Mapping):
        raise InputError(where, f"found {show(data)}", ALLOWED)
    parsed = [each if isinstance(each, Override) else parse_override(each) for each in overrides]
    changed = _overridden(_plain(data, where), parsed)
    if folder is not None and folder.resolve() != Path.cwd():
        changed = _found_beside(changed, folder.resolve())
    if changed.keys().isdisjoint(("workload", "recipe", "matrix")):
        raise InputError(where, "it is no experiment: no workload, recipe or matrix", ALLOWED)

    def place(location: Location) -> str:
        """File and dotted key, or the option that set it, or the axis that it came from."""
        for length in range(len(location), 1, -1):
            key = dotted(location[:length])
            if key in _axes(changed) and not _is_given(changed, location[:length]):
                location = ("matrix", key, 0, *location[length:])
                break
        for override in reversed(parsed):
            if location[: len(override.path)] == override.path:
                rest = dotted(location[len(override.path) :])
                return f"{override.option} at {rest}" if rest else override.option
            if location == override.path[: len(location)] and not isinstance(
                _at(data, location), Mapping
            ):
                return override.option
        return f"{where}: {dotted(location)}" if location else where

    try:
        return Experiment.model_validate(_completed(changed))
    except ValidationError as error:
        raise explain(error, place) from None


def _axes(data: Mapping[str, Any]) -> Mapping[str, Any]:
    matrix = data.get("matrix")
    return matrix if isinstance(matrix, Mapping) else {}


def _plain(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The file's data with full axis keys, without what is the user's own (`x-...`)."""
    plain = {key: value for key, value in data.items() if not str(key).startswith("x-")}
    if isinstance(plain.get("engine"), str):
        plain["engine"] = named(plain["engine"])
    axes: dict[str, Any] = {}
    for key, values in _axes(plain).items():
        full = full_key(str(key))
        if full in axes:
            raise InputError(f"{where}: matrix.{key}", f"the same axis as {full}", "give it once")
        axes[full] = list(values) if isinstance(values, tuple) else values
    return {**plain, "matrix": axes} if axes else plain


def _completed(data: dict[str, Any]) -> dict[str, Any]:
    """With each axis's first value where the base, which is checked as a whole, has none."""
    for key, values in _axes(data).items():
        path = key.split(".")
        holders = (_at(data, path[:depth]) for depth in range(1, len(path)))
        if (
            path[0] in ("recipe", "measure", "workload")
            and all(holder is None or isinstance(holder, Mapping) for holder in holders)
            and not _is_given(data, path)
            and isinstance(values, list)
            and values
        ):
            data = assigned(data, path, values[0])
    return data


def _at(data: Any, path: Iterable[str | int]) -> Any:
    """What the mappings have at that place; None where they have nothing."""
    for part in path:
        data = data.get(part) if isinstance(data, Mapping) else None
    return data


def _is_given(data: Mapping[str, Any], path: Sequence[str | int]) -> bool:
    """Whether the mappings have something at that place, be it null."""
    holder = _at(data, path[:-1])
    return isinstance(holder, Mapping) and path[-1] in holder


def parse_override(text: str) -> Override:
    """`recipe.steps=10` or, where it is clear, `steps=10`; the value is read as YAML."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise InputError(f"--set {text}", "not key=value", "allowed is e.g. recipe.steps=10")
    return override_of(key, parse_yaml(value, f"--set {key}"))


def override_of(key: str, value: Any) -> Override:
    """The key may be short where that is clear; `strategy` and `world_size` are axes."""
    section, _, rest = key.partition(".")
    if key in OWN_AXES:
        return Override(("matrix", key), value if isinstance(value, list | tuple) else [value])
    if section == "matrix" and rest:
        return Override(("matrix", full_key(rest)), value)
    path = key if key in Experiment.model_fields else full_key(key)
    return Override(tuple(path.split(".")), value)


def _overridden(data: dict[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """A copy with the overrides, in order; the last of equal keys holds.

    A key of the file that excludes an overridden one is dropped: `recipe.steps=10` drops `epochs`.
    Another engine's name drops the options of the file's engine.
    """
    for override in overrides:
        if override.path[0] == "engine" and "engine" not in data:
            data = {**data, "engine": {"name": "local"}}
        if override.path == ("engine", "name") and _at(data, override.path) != override.value:
            data = {**data, "engine": {}}
        data = assigned(data, list(override.path), override.value)
        if override.path[0] in ("matrix", "engine"):
            data = _plain(data, override.option)
    for override in overrides:
        key = dotted(override.path)
        for axis in _axes(data):
            if f"{key}.".startswith(f"{axis}."):
                found = f"{axis} is an axis of the matrix, which would hide this"
                raise InputError(override.option, found, f"set matrix.{axis} to a list instead")
    recipe = data.get("recipe")
    given = {override.path: override.value for override in overrides}
    if not isinstance(recipe, Mapping) or ("recipe",) in given:
        return data
    dropped = {
        excluded: kept
        for pair in EXCLUSIVE
        for kept, excluded in (pair, pair[::-1])
        if given.get(("recipe", kept)) is not None and ("recipe", excluded) not in given
    }
    for excluded, kept in dropped.items():
        if recipe.get(excluded) is not None:
            say(f"--set recipe.{kept} replaces recipe.{excluded}: {recipe[excluded]}", error=True)
    return {**data, "recipe": {k: v for k, v in recipe.items() if k not in dropped}}


def resolve(
    experiment: str | Path | Mapping[str, Any] | Experiment, changes: Mapping[str, Any]
) -> Experiment:
    """The experiment that Python names: file, preset, mapping or itself, with keys changed."""
    overrides = [override_of(key, value) for key, value in _flat(changes)]
    if isinstance(experiment, str | Path):
        return load_experiment(experiment, overrides)
    if isinstance(experiment, Experiment):
        experiment = experiment.model_dump(mode="json")
    return from_mapping(experiment, overrides)


def _flat(changes: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys; what is inside an axis of the matrix stays whole."""
    for key, value in changes.items():
        if isinstance(value, Mapping) and value and prefix != "matrix.":
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def to_yaml(experiment: Experiment) -> str:
    """The resolved experiment as a file that loads to an equal one."""
    return format_yaml(experiment.model_dump(mode="json"))


def preset_names() -> tuple[str, ...]:
    names = (entry.name for entry in PRESETS.iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def preset_text(name: str) -> str:
    """The file of a preset, comments included."""
    return PRESETS.joinpath(f"{name}.yaml").read_text(encoding="utf-8")


def presets() -> dict[str, str]:
    """Name of each experiment in the package -> the first sentence of its comment."""
    comments = {name: preset_text(name).removeprefix("# ") for name in preset_names()}
    return {
        name: re.split(r"\.\s", comment)[0].replace("\n# ", " ")
        for name, comment in comments.items()
    }


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
        raise InputError(source, "larger than 256 KiB", "allowed is an experiment in YAML")
    try:
        return source, content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(source, "not UTF-8 text", "allowed is an experiment in YAML") from None


def _missing(source: str) -> InputError:
    names = preset_names()
    near = nearest(Path(source).stem, names, count=3)
    allowed = f"allowed is a file or one of the presets {', '.join(names)}{near}"
    return InputError(source, "no such file, and no such preset", allowed)
