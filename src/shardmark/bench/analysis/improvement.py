"""Changes that make a script faster, and the lines of it that they concern."""

from __future__ import annotations

import ast
import difflib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import StringIO
from itertools import accumulate
from pathlib import Path
from typing import Any

from shardmark.bench.analysis.compare.race import Race

FIRST = "unchanged"
SNIPPETS = {
    "no_sync": "wrap all micro-batches but the last of each step in `with model.no_sync():`",
    "compile": "model.compile()",
    "channels_last": "model = model.to(memory_format=torch.channels_last)",
    "tf32": "torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True",
    "cudnn_benchmark": "torch.backends.cudnn.benchmark = True",
    "threads": "torch.set_num_threads({})",
    "malloc": "start it with MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=1073741824 "
    "MALLOC_TOP_PAD_=67108864",
}
"""Changes to make by hand, with the value, of interventions that add no argument to a call."""
_OF_LOADER = ("num_workers", "persistent_workers", "prefetch_factor", "pin_memory")
_OF_DDP = {name: name for name in ("bucket_cap_mb", "gradient_as_bucket_view")}
LIBRARIES = {
    "transformers": (
        "TrainingArguments",
        {name: f"dataloader_{name}" for name in _OF_LOADER}
        | {"bucket_cap_mb": "ddp_bucket_cap_mb"},
    ),
    "accelerate": ("DistributedDataParallelKwargs among the kwargs_handlers", _OF_DDP),
    "lightning": ("DDPStrategy", _OF_DDP),
    "pytorch_lightning": ("DDPStrategy", _OF_DDP),
}
"""Classes to which users of a library give arguments of torch's, with the names of these there."""
NO_NEWLINE = "\n\\ No newline at end of file\n"


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
    unfit: tuple[str, ...]
    """Interventions that were asked for, and that the script has no place or no use for."""


def patch_of(places: Mapping[str, Mapping[str, Any]]) -> tuple[str, tuple[str, ...]]:
    """Return a unified diff that adds arguments to calls, and sentences on calls that it lacks.

    `places` has `FILE:LINE<LIBRARY`, both of which may be empty, with the arguments by the name of
    the class or function.
    """
    by_file: dict[str, dict[int, Mapping[str, Any]]] = {}
    patches: list[str] = []
    missing: list[str] = []
    for place, calls in places.items():
        line_of_user, _, library = place.partition("<")
        file, _, line = line_of_user.rpartition(":")
        if library or not file:
            by = f"by {library or 'a library'}" + (f" at {line_of_user}" if file else "")
            missing += [
                f"{name} is called {by}: {_remedy_of(library, calls[name])}" for name in calls
            ]
        else:
            by_file.setdefault(file, {})[int(line)] = calls
    for file, lines in by_file.items():
        before: list[str] = []
        with suppress(OSError, UnicodeError), Path(file).open(encoding="utf-8", newline="") as code:
            before = [*code]
        after, patched = _edited(before, lines)
        diff = difflib.unified_diff(before, after, f"a/{file}", f"b/{file}")
        patches += (line if line.endswith("\n") else line + NO_NEWLINE for line in diff)
        missing += [
            f"{name} is called at {file}:{line}: {_remedy_of('', added)}"
            for line, calls in lines.items()
            for name, added in calls.items()
            if line not in patched
        ]
    return "".join(patches), tuple(missing)


def _remedy_of(library: str, added: Mapping[str, Any]) -> str:
    """Say where the arguments belong."""
    owner, names = LIBRARIES.get(library, ("", {}))
    if added.keys() <= names.keys():
        return f"give {owner} " + _text_of({names[name]: value for name, value in added.items()})
    return f"let it get {_text_of(added)}"


def _text_of(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _edited(
    before: Sequence[str], lines: Mapping[int, Mapping[str, Any]]
) -> tuple[list[str], set[int]]:
    """Return a file's lines with arguments added, and the numbers of the calls that have them."""
    code = "".join(before).encode()
    starts = [0, *accumulate(len(line.encode()) for line in before)]
    edits: list[tuple[int, int, str]] = []
    patched, calls = set[int](), list[tuple[ast.Call, Mapping[str, Any]]]()
    with suppress(SyntaxError, ValueError):  # other code may be named after the file
        calls = [*_calls(ast.parse(code), lines)]
    counts = Counter(call.lineno for call, _ in calls)
    for call, added in calls:
        if counts[call.lineno] > 1:
            continue  # one of them was seen
        patched.add(call.lineno)
        changed = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg in added}
        for name, value in changed.items():
            edits.append((*_ends(value, starts), repr(added[str(name)])))
        if text := _text_of({name: value for name, value in added.items() if name not in changed}):
            bracket = _ends(call, starts)[1] - 1
            values = [*call.args, *(keyword.value for keyword in call.keywords)]
            last = min(bracket, max((_ends(one, starts)[1] for one in values), default=bracket))
            while closed := re.match(rb"\s*\)", code[last:bracket]):
                last += closed.end()
            edits.append((last, last, f", {text}" if values else text))
    after = code
    for start, end, text in sorted(edits, reverse=True):
        after = after[:start] + text.encode() + after[end:]
    with suppress(SyntaxError):
        ast.parse(after)
        return [*StringIO(after.decode(), newline="")], patched
    return [*before], set()


def _ends(node: ast.expr, starts: Sequence[int]) -> tuple[int, int]:
    """Return where a part of the code begins and ends, in bytes."""
    start, end = starts[node.lineno - 1], starts[(node.end_lineno or 1) - 1]
    return start + node.col_offset, end + (node.end_col_offset or 0)


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
            if added and all(keyword.arg for keyword in node.keywords):  # none of **arguments
                yield node, added
