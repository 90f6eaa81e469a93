"""YAML without its surprises: `5e-4` is a number, `2:00:00` and dates are text, keys are unique."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml

from shardmark.base.errors import InputError

_EXPONENT = re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)[eE][-+]?[0-9]+$")
"""Numbers such as `5e-4`, in which YAML 1.1 requires a point and a sign."""
_SURROGATE = re.compile("[\ud800-\udfff]")
MAX_CHARACTERS = 2**20
MAX_VALUES = 50_000
"""Maximum number of values in a document; the values behind an alias count each time."""
MAX_LEVELS = 50
"""Maximum depth of nesting: PyYAML's time grows with its square."""
MAX_INTEGER = 10**18
"""Larger integers would overflow in the code that uses them."""
_FLOAT_TAG = "tag:yaml.org,2002:float"
_PLAIN_TAGS = ("null", "bool", "int", "float", "str", "seq", "map")


class _Loader(yaml.SafeLoader):
    """Loads plain values; a value that contains itself is an error."""

    _composed = 0
    yaml_constructors: ClassVar = {
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in _PLAIN_TAGS
    }

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node and count it, so that a large document is rejected early."""
        node = super().compose_node(parent, index)
        self._composed += 1
        if node is not None:
            _check_count(node, self._composed)
            if isinstance(node, yaml.ScalarNode):
                self._check_characters(node)
        return node

    def _check_characters(self, node: yaml.ScalarNode) -> None:
        line = node.start_mark.line + 1
        if "\0" in node.value:
            raise _Mistake(line, "a NUL character", "leave it out")
        if _SURROGATE.search(node.value):
            # JSON writes some characters as surrogate pairs, which PyYAML does not join.
            try:
                node.value = node.value.encode("utf-16", "surrogatepass").decode("utf-16")
            except UnicodeDecodeError:
                raise _Mistake(line, "half of a character", "write the whole one") from None

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        self._check_level(self.flow_level)
        super().fetch_flow_collection_start(token)

    def add_indent(self, column: int) -> bool:
        self._check_level(len(self.indents))
        return super().add_indent(column)

    def _check_level(self, level: int) -> None:
        if level >= MAX_LEVELS:
            raise _Mistake(self.line + 1, "nested too deeply", f"at most {MAX_LEVELS} levels")

    def mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        self._check_keys(node)
        return {str(key): value for key, value in self.construct_mapping(node, deep=True).items()}

    def sequence(self, node: yaml.SequenceNode) -> list[Any]:
        return list(self.construct_sequence(node, deep=True))

    def number(self, node: yaml.ScalarNode) -> Any:
        """Construct a number; `2:00:00`, which YAML 1.1 reads as 7200, stays text."""
        if ":" in node.value:
            return node.value
        is_integer = node.tag.endswith(":int")
        number = self.construct_yaml_int(node) if is_integer else self.construct_yaml_float(node)
        if is_integer and abs(number) > MAX_INTEGER:
            raise _Mistake(node.start_mark.line + 1, "too large a whole number", "at most 10^18")
        return number

    def _check_keys(self, node: yaml.MappingNode) -> None:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.tag not in _KEY_TAGS:
                text = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                raise _Mistake(line, f"the key {text!r} is not text", "put it in quotes")
            if key.value in lines:
                problem = f"the key {key.value!r} is given twice, first on line {lines[key.value]}"
                raise _Mistake(line, problem, "give it once")
            lines[key.value] = line


_REMEDIES = {
    "\\t": "indent with spaces, not tabs",
    "mapping values": "put text with a colon in quotes, and indent the keys of a mapping alike",
    "expected ',' or": "close every bracket, and put text with : , [ ] { } in quotes",
    "expected <block end>": "indent the keys of a mapping alike",
    "alias": "put text that begins with * or & in quotes",
    "cannot start any token": "put it in quotes",
}
"""Remedies by a part of PyYAML's message."""
_KEY_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:int")
"""Tags of valid keys: text, and numbers of ranks.  `on` and `1.5` would not be read as text."""


class _Dumper(yaml.SafeDumper):
    """Quotes text that the loader would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True

    def text(self, data: str) -> yaml.ScalarNode:
        # PyYAML writes these characters unescaped, and reads them as line breaks.
        style = '"' if any(character in data for character in "\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


class _Mistake(Exception):  # noqa: N818
    """A mistake in the document: line, problem, and what is allowed."""


_Loader.yaml_implicit_resolvers = {  # dates are text
    first: [pair for pair in pairs if not pair[0].endswith(":timestamp")]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.mapping)
_Loader.add_constructor("tag:yaml.org,2002:seq", _Loader.sequence)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.number)
_Loader.add_constructor(_FLOAT_TAG, _Loader.number)
_Dumper.add_representer(str, _Dumper.text)
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(_FLOAT_TAG, _EXPONENT, list("-+.0123456789"))


def _count_values(node: yaml.Node, counts: dict[yaml.Node, int]) -> int:
    """Count the values in a node with every alias expanded.  Raises `_Mistake` for too many.

    A file of 600 bytes can hold nested aliases that expand to more than the memory can hold.
    """
    if node not in counts:
        counts[node] = 1  # a node that contains itself is rejected when it is constructed
        children = node.value if isinstance(node, yaml.CollectionNode) else ()
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in children for child in pair]
        counts[node] += sum(_count_values(child, counts) for child in children)
    _check_count(node, counts[node])
    return counts[node]


def _check_count(node: yaml.Node, count: int) -> None:
    if count > MAX_VALUES:
        problem = f"more than {MAX_VALUES:,} values, aliases written out"
        raise _Mistake(node.start_mark.line + 1, problem, "use fewer")


def parse_yaml(text: str, place: str) -> Any:
    """Parse one document.  Raises `InputError` with the place and the line of the mistake."""
    if len(text) > MAX_CHARACTERS:
        raise InputError(place, "larger than 1 MiB", "allowed is an experiment in YAML")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _count_values(node, {})
        return loader.construct_document(node)
    except _Mistake as error:
        line, problem, allowed = error.args
        raise InputError(f"{place}, line {line}", problem, allowed) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line_place = f"{place}, line {mark.line + 1}" if mark else place
        problem = " ".join(filter(None, (error.context, error.problem)))
        remedy = next((r for text, r in _REMEDIES.items() if text in problem), "see that line")
        raise InputError(line_place, problem, remedy) from None
    except (yaml.YAMLError, ValueError, LookupError) as error:
        problem = " ".join(str(error).split())
        raise InputError(place, f"not YAML: {problem}", "allowed is plain YAML text") from None
    except RecursionError:
        raise InputError(place, "nested too deeply", "allowed is plain YAML") from None


def format_yaml(data: Any, *, one_line: bool = False) -> str:
    """Format data as YAML that `parse_yaml` reads back unchanged, with the keys in order."""
    text: str = yaml.dump(
        data,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=float("inf") if one_line else 100,
        default_flow_style=one_line,
    )
    return text.rstrip("\n") if one_line else text
