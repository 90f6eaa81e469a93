"""Loading of an experiment from a file or a preset, with `--set` overrides, and writing one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shardmark.base.errors import InputError
from shardmark.base.files.strict_yaml import format_yaml, parse_yaml
from shardmark.base.recipe import EXCLUSIVE
from shardmark.base.text import say
from shardmark.experiment.axes import MATRIX_ONLY_AXES, VARIANT, assigned, full_key, named, variants
from shardmark.experiment.experiment import Experiment
from shardmark.experiment.messages import Location, dotted, nearest, show
from shardmark.experiment.problems import explain
from shardmark.ranks.workloads.language.options import HUGGING_FACE
from shardmark.ranks.workloads.models import is_user_function

PRESETS = files("shardmark.experiment").joinpath("presets")
MAX_BYTES = 2**18
"""Maximum size of an experiment file."""
ALLOWED = "allowed is a mapping with name, workload, recipe and matrix"
USER_CODE = ("task", "model", "path")
"""Keys, and last parts of axes, whose value can name a class or function of the user."""
COMMANDS = ("command", "arguments")
"""Keys whose value can begin with a script's file."""
FILES = ("model", "tokenizer", "weights")
"""Keys, and last parts of axes, whose value can name a file, in addition to `data_dir`."""
REPLACED = {
    **{
        ("recipe", key): ("recipe", excluded)
        for pair in EXCLUSIVE
        for key, excluded in (pair, pair[::-1])
    },
    ("measure", "seeds"): ("measure", "repeats"),
}
"""Path of an override -> path of the key that it removes, if no override sets that."""


@dataclass(frozen=True, slots=True)
class Override:
    """A changed key: an option `--set`, or a keyword argument of `shardmark.run`."""

    path: tuple[str, ...]
    """Keys from the outermost to the innermost; a dotted axis is one key."""
    value: Any

    @property
    def option(self) -> str:
        return f"--set {dotted(self.path)}"


def load_experiment(source: str | Path, overrides: Sequence[str | Override] = ()) -> Experiment:
    """Load the experiment of a file or preset, changed by `key=value` overrides.

    Raises `InputError`, which lists all independent mistakes.
    """
    place, text = _read(str(source))
    data = parse_yaml(text, place)
    if data is None:
        raise InputError(place, "it is empty", ALLOWED)
    return from_mapping(data, overrides, place=place, folder=Path(place).expanduser().parent)


def _with_paths(data: Any, folder: Path, key: str = "") -> Any:
    """Replace names of modules and files in the folder by their paths.

    A module in the folder takes precedence over one in the current folder; for other files it is
    the reverse.
    """
    if isinstance(data, Mapping):
        return {
            name: value
            if str(name).endswith("options")
            else _with_paths(value, folder, str(name).rpartition(".")[2])
            for name, value in data.items()
        }
    if isinstance(data, list):
        return [_with_paths(value, folder, key) for value in data]
    if not isinstance(data, str):
        return data
    if key in USER_CODE and is_user_function(data):
        module, _, name = data.rpartition(":")
        file = folder / f"{module.removesuffix('.py')}.py"
        return f"{file}:{name}" if file.is_file() else data
    if key in COMMANDS:
        script, space, arguments = data.partition(" ")
        beside = script.endswith(".py") and not _exists(Path(script)) and _exists(folder / script)
        return f"{shlex.quote(str(folder / script))}{space}{arguments}" if beside else data
    prefix = "hf:" if data.startswith("hf:") and data not in HUGGING_FACE else ""
    path = Path(data.removeprefix(prefix)).expanduser()
    named = key == "data_dir" or (key in FILES and (prefix or path.suffix))
    in_folder = named and not _exists(path) and _exists(folder / path)
    return f"{prefix}{folder / path}" if in_folder else data


def _exists(path: Path) -> bool:
    with suppress(OSError, ValueError):  # the text is not a valid path
        return path.exists()
    return False


def from_mapping(
    data: object,
    overrides: Sequence[str | Override] = (),
    *,
    place: str = "experiment",
    folder: Path | None = None,
) -> Experiment:
    """Validate the experiment in a mapping; messages name it by `place`.

    Relative paths are also searched for in the folder.
    """
    if not isinstance(data, Mapping):
        raise InputError(place, f"found {show(data)}", ALLOWED)
    parsed = [
        override if isinstance(override, Override) else parse_override(override)
        for override in overrides
    ]
    changed = _overridden(_plain(data, place), parsed)
    if folder is not None and folder.resolve() != Path.cwd():
        changed = _with_paths(changed, folder.resolve())
    if changed.keys().isdisjoint(("workload", "recipe", "matrix")):
        raise InputError(place, "it is no experiment: no workload, recipe or matrix", ALLOWED)

    def place_of(location: Location) -> str:
        """Return the file and dotted key, the option, or the axis that set the value."""
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
        return f"{place}: {dotted(location)}" if location else place

    try:
        return Experiment.model_validate(_completed(changed))
    except ValidationError as error:
        raise explain(error, place_of) from None


def _axes(data: Mapping[str, Any]) -> Mapping[str, Any]:
    matrix = data.get("matrix")
    return matrix if isinstance(matrix, Mapping) else {}


def _plain(data: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the file's data with full axis keys and without the user's keys (`x-...`)."""
    plain = {key: value for key, value in data.items() if not str(key).startswith("x-")}
    if isinstance(plain.get("engine"), str):
        plain["engine"] = named(plain["engine"])
    axes: dict[str, Any] = {}
    for key, values in _axes(plain).items():
        full = "strategy" if key == VARIANT else full_key(str(key))
        if full in axes:
            raise InputError(f"{place}: matrix.{key}", f"the same axis as {full}", "give it once")
        entries = variants(values) if key == VARIANT else values
        axes[full] = list(entries) if isinstance(entries, tuple) else entries
    return {**plain, "matrix": axes} if axes else plain


def _completed(data: dict[str, Any]) -> dict[str, Any]:
    """Insert the first value of every axis that the base sections, which are validated, lack.

    A script needs no recipe.
    """
    if _at(data, ("workload", "name")) == "script":
        data = {"recipe": {}, **data}
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
    """Return the value at a path of nested mappings, or None if there is none."""
    for part in path:
        data = data.get(part) if isinstance(data, Mapping) else None
    return data


def _is_given(data: Mapping[str, Any], path: Sequence[str | int]) -> bool:
    """Return whether the nested mappings have a value, which can be null, at the path."""
    holder = _at(data, path[:-1])
    return isinstance(holder, Mapping) and path[-1] in holder


def parse_override(text: str) -> Override:
    """Parse an override such as `recipe.steps=10` or `steps=10`; the value is YAML."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise InputError(f"--set {text}", "not key=value", "allowed is e.g. recipe.steps=10")
    return override_of(key, parse_yaml(value, f"--set {key}"))


def override_of(key: str, value: Any) -> Override:
    """Return the override of a full or unambiguous short key, or of an axis of the matrix."""
    section, _, rest = key.partition(".")
    if key in MATRIX_ONLY_AXES:
        return Override(("matrix", key), value if isinstance(value, list | tuple) else [value])
    if VARIANT in (key, rest):
        return Override(("matrix", "strategy"), variants(value))
    if section == "matrix" and rest:
        return Override(("matrix", full_key(rest)), value)
    path = key if key in Experiment.model_fields else full_key(key)
    return Override(tuple(path.split(".")), value)


def _overridden(data: dict[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """Return a copy with the overrides applied in order.

    An override removes a key that excludes it: `recipe.steps=10` removes `epochs`, and
    `measure.seeds=4` removes `repeats`.  The name of another engine removes the options of the
    file's engine.
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
                problem = f"{axis} is an axis of the matrix, which would hide this"
                raise InputError(override.option, problem, f"set matrix.{axis} to a list instead")
    values = {override.path: override.value for override in overrides}
    for path, excluded in REPLACED.items():
        section = data.get(path[0])
        without_effect = values.get(path) is None or (path[1] == "seeds" and values[path] == 1)
        if without_effect or excluded in values or path[:1] in values:
            continue
        if isinstance(section, Mapping) and excluded[1] in section:
            data = {**data, path[0]: {k: v for k, v in section.items() if k != excluded[1]}}
            value = section[excluded[1]]
            if value is not None and not isinstance(value, Mapping):  # the default of repeats is
                text = f"--set {dotted(path)} replaces {dotted(excluded)}: {show(value)}"
                say(text, error=True)
    return data


def resolve(
    experiment: str | Path | Mapping[str, Any] | Experiment, changes: Mapping[str, Any]
) -> Experiment:
    """Return the experiment of a file, preset, mapping or object, with changed keys."""
    overrides = [override_of(key, value) for key, value in _flat(changes)]
    if isinstance(experiment, str | Path):
        return load_experiment(experiment, overrides)
    if isinstance(experiment, Experiment):
        experiment = experiment.model_dump(mode="json")
    return from_mapping(experiment, overrides)


def _flat(changes: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys with their values; the value of an axis is not flattened."""
    for key, value in changes.items():
        if isinstance(value, Mapping) and value and prefix != "matrix.":
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def to_yaml(experiment: Experiment) -> str:
    """Format the experiment as YAML that loads to an equal experiment."""
    return format_yaml(experiment.model_dump(mode="json"))


def preset_names() -> tuple[str, ...]:
    names = (entry.name for entry in PRESETS.iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def preset_text(name: str) -> str:
    """Return the text of a preset's file, including its comments."""
    return PRESETS.joinpath(f"{name}.yaml").read_text(encoding="utf-8")


def presets() -> dict[str, str]:
    """Return the first sentence of the comment of every preset, by the preset's name."""
    comments = {name: preset_text(name).removeprefix("# ") for name in preset_names()}
    return {
        name: re.split(r"\.\s", comment)[0].replace("\n# ", " ")
        for name, comment in comments.items()
    }


def _read(source: str) -> tuple[str, str]:
    """Return the name of an experiment in messages, and its text."""
    try:
        path = Path(source).expanduser()
        if source in preset_names() and not path.is_file():
            return f"preset {source}", preset_text(source)
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        names = preset_names()
        near = nearest(Path(source).stem, names, count=3)
        allowed = f"allowed is a file or one of the presets {', '.join(names)}{near}"
        raise InputError(source, "no such file, and no such preset", allowed) from None
    except IsADirectoryError:
        inside = path / "experiment.yaml"
        allowed = f"its experiment is {inside}" if inside.is_file() else "allowed is a YAML file"
        raise InputError(source, "it is a folder", allowed) from None
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(source, f"cannot be read: {reason}", "allowed is a YAML file") from None
    if len(content) > MAX_BYTES:
        raise InputError(source, "larger than 256 KiB", "allowed is an experiment in YAML")
    try:
        return source, content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(source, "not UTF-8 text", "allowed is an experiment in YAML") from None
