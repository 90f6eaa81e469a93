"""YAML as people write it: `5e-4` is a number, `2:00:00` and dates are text, keys come once."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml

from shardmark.core.errors import InputError

_EXPONENT = re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)[eE][-+]?[0-9]+$")
"""YAML 1.1 wants a point and a sign in `5e-4`."""
_SURROGATE = re.compile("[\ud800-\udfff]")
MOST_CHARACTERS = 2**20
MOST_VALUES = 50_000
"""Values in one document, each alias counted as what it stands for."""
MOST_LEVELS = 50
"""Of nesting: PyYAML's time grows with their square."""
LARGEST_INTEGER = 10**18
"""More is no count of anything, and overflows what reads it."""
_FLOAT_TAG = "tag:yaml.org,2002:float"
_PLAIN_TAGS = ("null", "bool", "int", "float", "str", "seq", "map")


class _Loader(yaml.SafeLoader):
    """Plain values only; nothing may contain itself."""

    _composed = 0
    yaml_constructors: ClassVar = {
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in _PLAIN_TAGS
    }

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Counted, so that a large text is refused before all of it is read."""
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
            # JSON writes some characters as two halves, which PyYAML leaves apart.
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
        if level >= MOST_LEVELS:
            raise _Mistake(self.line + 1, "nested too deeply", f"at most {MOST_LEVELS} levels")

    def mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        self._check_keys(node)
        return {str(key): value for key, value in self.construct_mapping(node, deep=True).items()}

    def sequence(self, node: yaml.SequenceNode) -> list[Any]:
        return list(self.construct_sequence(node, deep=True))

    def number(self, node: yaml.ScalarNode) -> Any:
        """YAML 1.1 reads 2:00:00 as 7200, and nobody means that."""
        if ":" in node.value:
            return node.value
        whole = node.tag.endswith(":int")
        number = self.construct_yaml_int(node) if whole else self.construct_yaml_float(node)
        if whole and abs(number) > LARGEST_INTEGER:
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
                found = f"the key {key.value!r} is given twice, first on line {lines[key.value]}"
                raise _Mistake(line, found, "give it once")
            lines[key.value] = line


_REMEDIES = {
    "\\t": "indent with spaces, not tabs",
    "mapping values": "put text with a colon in quotes, and indent the keys of a mapping alike",
    "expected ',' or": "close every bracket, and put text with : , [ ] { } in quotes",
    "expected <block end>": "indent the keys of a mapping alike",
    "alias": "put text that begins with * or & in quotes",
    "cannot start any token": "put it in quotes",
}
"""Parts of PyYAML's messages -> remedies."""
_KEY_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:int")
"""Text, and the numbers of ranks; `on` and `1.5` were meant as something else."""


class _Dumper(yaml.SafeDumper):
    """Quotes text that the loader would take for something else."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True

    def text(self, data: str) -> yaml.ScalarNode:
        # PyYAML writes these as they are, and reads them back as ends of lines.
        style = '"' if any(character in data for character in "\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


class _Mistake(Exception):  # noqa: N818
    """Line, found, allowed."""


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


def _weigh(node: yaml.Node, weights: dict[yaml.Node, int]) -> int:
    """Values in the node with every alias written out.  Raises `_Mistake` for too many.

    A file of 600 bytes can hold aliases of aliases that stand for more than memory has.
    """
    if node not in weights:
        weights[node] = 1  # a node that contains itself is refused when it is constructed
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in parts for part in pair]
        weights[node] += sum(_weigh(part, weights) for part in parts)
    _check_count(node, weights[node])
    return weights[node]


def _check_count(node: yaml.Node, count: int) -> None:
    if count > MOST_VALUES:
        found = f"more than {MOST_VALUES:,} values, aliases written out"
        raise _Mistake(node.start_mark.line + 1, found, "use fewer")


def parse_yaml(text: str, where: str) -> Any:
    """The one document in the text; raises `InputError` with the line of whatever is wrong."""
    if len(text) > MOST_CHARACTERS:
        raise InputError(where, "larger than 1 MiB", "allowed is an experiment in YAML")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _weigh(node, {})
        return loader.construct_document(node)
    except _Mistake as error:
        line, found, allowed = error.args
        raise InputError(f"{where}, line {line}", found, allowed) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where}, line {mark.line + 1}" if mark else where
        problem = " ".join(filter(None, (error.context, error.problem)))
        remedy = next((r for text, r in _REMEDIES.items() if text in problem), "see that line")
        raise InputError(place, problem, remedy) from None
    except (yaml.YAMLError, ValueError, LookupError) as error:
        problem = " ".join(str(error).split())
        raise InputError(where, f"not YAML: {problem}", "allowed is plain YAML text") from None
    except RecursionError:
        raise InputError(where, "nested too deeply", "allowed is plain YAML") from None


def format_yaml(data: Any, *, one_line: bool = False) -> str:
    """Text that `parse_yaml` reads back as the same data; keys keep their order."""
    text: str = yaml.dump(
        data,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=float("inf") if one_line else 100,
        default_flow_style=one_line,
    )
    return text.rstrip("\n") if one_line else text
