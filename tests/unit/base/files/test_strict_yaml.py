from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmark.base.errors import InputError
from shardmark.base.files import strict_yaml
from shardmark.base.files.strict_yaml import format_yaml, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5e-4", 5e-4),
        ("1E3", 1000.0),
        ("-.5e+1", -5.0),
        ("3.e2", 300.0),
        ("5.0e-4", 5e-4),
        ("0.1", 0.1),
        ("7", 7),
        ("'5e-4'", "5e-4"),
        ("e5", "e5"),
        ("2024-01-31", "2024-01-31"),
        ("2:00:00", "2:00:00"),
        ("1:30.5", "1:30.5"),
        ("0x10", 16),
        ("[a, 1, true, null]", ["a", 1, True, None]),
        ("", None),
    ],
)
def test_scalars_have_the_expected_types(text: str, value: object) -> None:
    found = parse_yaml(text, "FILE")
    assert found == value
    assert type(found) is type(value)


def test_whole_numbers_are_keys() -> None:
    """The keys are numbers of ranks; they are read as text, like every key."""
    assert parse_yaml("slow_ranks: {1: 2.0, '0': 3}", "FILE") == {"slow_ranks": {"1": 2.0, "0": 3}}


def test_anchors_and_merges_are_read() -> None:
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}"
    assert parse_yaml(text, "FILE") == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2", "FILE, line 4: the key 'c' is given twice, first on line 3"),
        ("a: 1\n2.5: 1", "FILE, line 2: the key '2.5' is not text; put it in quotes"),
        ("on: 1", "FILE, line 1: the key 'on' is not text"),
        ("? [a]\n: 1", "FILE, line 1: the key 'a list or mapping' is not text"),
        ("a:\n\t- b", "FILE, line 2: while scanning for the next token found character '\\t'"),
        ("a:\n\t- b", "indent with spaces, not tabs"),
        ("a: b: c", "put text with a colon in quotes"),
        ("{a: [b}", "close every bracket"),
        ("a: *b", "put text that begins with * or & in quotes"),
        ("a: [1", "FILE, line 1: while parsing a flow sequence expected ',' or ']'"),
        ("a: b: c", "FILE, line 1: mapping values are not allowed here"),
        ("a: 1\n---\nb: 2", "but found another document"),
        ("a: &a [*a]", "recursive"),
        ("a: !!python/object:os.system x", "could not determine a constructor"),
        ("a: !!timestamp x", "could not determine a constructor"),
        ("a: !!int x", "FILE: not YAML: invalid literal"),
        ("a: !!bool x", "FILE: not YAML"),
        ("a\0b", "FILE: not YAML: unacceptable character #x0000"),
        ("[" * 200, "FILE, line 1: nested too deeply"),
        ("- " * 200, "FILE, line 1: nested too deeply; at most 50 levels"),
        ("a: " + "{a: " * 200, "FILE, line 1: nested too deeply"),
    ],
)
def test_error_names_the_line(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_yaml(text, "FILE")
    assert message in str(caught.value)


_TEXT = st.text(
    st.characters(exclude_characters="\0", codec="utf-8"), max_size=8
) | st.sampled_from(["5e-4", "on", "null", "1:30", "2024-01-01", "<<", "=", "a\x85b"])
_DATA = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.floats(allow_nan=False) | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=8,
)


def test_surrogate_pairs_of_json_are_read() -> None:
    assert parse_yaml(json.dumps({"\U0001f600": "\U0001f680"}), "FILE") == {
        "\U0001f600": "\U0001f680"
    }


@given(_DATA)
def test_written_yaml_is_read_back(data: Any) -> None:
    assert parse_yaml(format_yaml(data), "FILE") == data


def _bomb(levels: int, line: str) -> str:
    """Aliases of aliases, each level twice the one before."""
    return "\n".join(["a0: &a0 [1, 2]", *(line.format(n - 1, n) for n in range(1, levels))])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_bomb(40, "a{1}: &a{1} [*a{0}, *a{0}]"), "FILE, line 15: more than 50,000 values"),
        (_bomb(40, "a{1}: &a{1} {{x: *a{0}, y: *a{0}}}"), "more than 50,000 values"),
        ("#" * (2**20 + 1), "FILE: larger than 1 MiB"),
        ("a: 1\nb: 1" + "0" * 400, "FILE, line 2: too large a whole number; at most 10^18"),
        ('a: "x\\0y"', "FILE, line 1: a NUL character"),
        ('{"\\ud83d": 1}', "FILE, line 1: half of a character"),
    ],
    ids=["lists", "mappings", "large", "integer", "NUL", "surrogate"],
)
def test_small_texts_that_expand_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_yaml(text, "FILE")
    assert message in str(caught.value)


def test_a_long_text_is_refused_before_all_of_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_yaml, "MAX_VALUES", 1000)
    with pytest.raises(InputError, match="FILE, line 1: more than 1,000 values"):
        parse_yaml("a: [" + "1, " * 1200 + "not closed", "FILE")
