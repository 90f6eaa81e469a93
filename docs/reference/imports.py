"""Writes the import closures into `docs/architecture.md`: `python docs/reference/imports.py`.

Module-level imports count; imports for type checking do not.  Files that are imported inside a
function on the way of `ddp` are entries.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "shardmark"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- imports: generated -->\n", "<!-- imports: end -->"
ENTRIES: Mapping[str, tuple[str, ...]] = {
    "rank": (
        *("ranks/train/rank.py", "ranks/strategies/ddp.py", "ranks/strategies/step.py"),
        *("ranks/workloads/vision/task.py", "ranks/workloads/datasets/digits.py"),
    ),
    "command": (
        *("cli/run.py", "experiment/load.py", "experiment/matrix.py", "bench/launch/session.py"),
        *(
            "bench/launch/local/engine.py",
            "bench/launch/local/agent.py",
            "bench/progress/display.py",
        ),
        *(
            "bench/analysis/compare/comparison.py",
            "cli/compare.py",
            "bench/report/answers/overview.py",
        ),
    ),
}
"""Files from which the closures begin."""


def closure(entries: tuple[str, ...]) -> list[str]:
    """Return the files that the entries import, directly or indirectly, and the entries."""
    pending, seen = [SOURCE / entry for entry in entries], set[Path]()
    while pending:
        path = pending.pop()
        if path not in seen:
            seen.add(path)
            pending += imported_files(path)
    return sorted(str(path.relative_to(SOURCE)) for path in seen)


def imported_files(path: Path) -> Iterator[Path]:
    """Yield the files of this package that a file imports, without type-only imports."""
    for node in runtime_nodes(ast.parse(path.read_text())):
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                modules = [module, *(f"{module}.{alias.name}" for alias in names)]
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case _:
                continue
        for name in modules:
            if name.startswith("shardmark."):
                place = SOURCE.joinpath(*name.split(".")[1:])
                candidates = (place.with_suffix(".py"), place / "__init__.py")
                yield from (file for file in candidates if file.is_file())


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes except those in functions and in `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        type_only = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if type_only or isinstance(child, ast.FunctionDef):
            continue
        yield child
        yield from runtime_nodes(child)


def section() -> str:
    """Return the generated part of the page."""
    paragraphs = []
    for name, entries in ENTRIES.items():
        files = closure(entries)
        lines = sum(len((SOURCE / file).read_text().splitlines()) for file in files)
        starts = ", ".join(f"`{entry}`" for entry in entries)
        rooms = [
            f"`{room}/`: {', '.join(file.partition('/')[2] for file in members)}"
            for room, members in groupby(files, key=lambda file: file.rpartition("/")[0])
        ]
        # Rounded, so that the page changes only with the files.
        paragraphs.append(
            f"The closure of the {name} ({starts}): {len(files)} files, about"
            f" {round(lines, -3):,} lines.\n\n" + "\n".join(f"- {room}" for room in rooms)
        )
    return "\n\n".join(paragraphs) + "\n"


def with_section(page: str) -> str:
    """Return the page with the generated part replaced."""
    pattern = re.escape(BEGIN) + ".*?" + re.escape(END)
    return re.sub(pattern, lambda _: f"{BEGIN}\n{section()}\n{END}", page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(with_section(PAGE.read_text()))
