"""Changes that make a script faster, and the lines of it that they concern."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmark.bench.analysis.compare.race import Race

FIRST, TOGETHER = "as it is", "together"
SNIPPETS = {
    "no_sync": "wrap all micro-batches but the last of each step in `with model.no_sync():`",
    "channels_last": "model = model.to(memory_format=torch.channels_last)",
    "tf32": "torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True",
    "cudnn_benchmark": "torch.backends.cudnn.benchmark = True",
    "malloc": "start it with MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=1073741824",
    "set_to_none": "leave set_to_none=False of zero_grad() out",
}
"""Changes to make by hand, of interventions that add no argument to a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """The race of changes of a script, and the fastest ones that train the same."""

    race: Race
    interventions: tuple[str, ...]
    """Interventions of the fastest set that trains the same; empty if none is faster."""
    best: str
    """The variant of the race that has them; empty without one."""
    patch: str
    """Changes of the script's lines, as a unified diff."""
    snippets: tuple[str, ...]
    """Changes that no single line shows."""


def patch_of(places: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a unified diff that adds arguments to calls.

    `places` has `FILE:LINE` with the arguments by the name of the class or function.
    """
    by_file: dict[str, dict[int, Mapping[str, Any]]] = {}
    for place, calls in places.items():
        file, _, line = place.rpartition(":")
        by_file.setdefault(file, {})[int(line)] = calls
    patches: list[str] = []
    for file, lines in by_file.items():
        before = Path(file).read_text().splitlines(keepends=True)
        after = [line.encode() for line in before]
        tree = ast.parse("".join(before))
        for call, added in sorted(_calls(tree, lines), key=lambda pair: -pair[0].lineno):
            assert call.end_lineno is not None, "it is parsed from text"
            assert call.end_col_offset is not None, "it is parsed from text"
            row, column = call.end_lineno - 1, call.end_col_offset - 1
            head, tail = after[row][:column], after[row][column:]
            text = ", ".join(f"{name}={value!r}" for name, value in added.items())
            values = [*call.args, *(keyword.value for keyword in call.keywords)]
            last = max(
                values, key=lambda value: (value.end_lineno, value.end_col_offset), default=None
            )
            comma = "" if last is None or _has_comma_after(after, last, row, column) else ", "
            after[row] = head + f"{comma}{text}".encode() + tail
        patches += difflib.unified_diff(
            before, [line.decode() for line in after], f"a/{file}", f"b/{file}"
        )
    return "".join(patches)


def _has_comma_after(lines: list[bytes], last: ast.expr, row: int, column: int) -> bool:
    """True if a comma follows the last argument of a call, before its bracket."""
    assert last.end_lineno is not None, "it is parsed from text"
    between = b"".join([*lines[last.end_lineno - 1 : row], lines[row][:column]])
    return b"," in between[last.end_col_offset or 0 :].partition(b"#")[0]


def _calls(
    tree: ast.AST, lines: Mapping[int, Mapping[str, Any]]
) -> Iterator[tuple[ast.Call, Mapping[str, Any]]]:
    """Yield the calls of these lines that have one of the names, also as imported."""
    nodes = [*ast.walk(tree)]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    aliases = {a.asname: a.name for node in imports for a in node.names if a.asname}
    for node in nodes:
        if isinstance(node, ast.Call) and node.lineno in lines:
            name = ast.unparse(node.func).rpartition(".")[2]
            added = lines[node.lineno].get(aliases.get(name, name))
            if added:
                yield node, added
