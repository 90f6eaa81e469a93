"""Changes single operators and numbers of the source: the unit tests notice.

    python benchmarks/mutants.py [--seed 20261128] [--only NUMBER ...]

Needs cosmic-ray, which finds the mutants.  Lines are drawn first, so that a line with many mutants
is not drawn more often.  A mutant that the tests of its room leave alive meets all unit tests.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.machinery
import io
import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from cosmic_ray.ast import get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[1]
SRC, UNIT = ROOT / "src" / "shardmark", "tests/unit/"
COMPARED = ["base/statistics/**/*.py", "bench/analysis/compare/**/*.py"]
ROOMS: dict[str, tuple[int, list[str], list[str]]] = {
    "audit": (14, ["audit/**/*.py"], ["audit", "scripts"]),
    "costs": (8, ["**/costs/**/*.py"], ["ranks/costs", "predict"]),
    "predict": (14, ["predict/**/*.py"], ["predict"]),
    "analysis": (12, COMPARED, ["bench/analysis", "base/statistics", "bench/report"]),
    "reference": (6, ["bench/reference/**/*.py"], ["bench/reference"]),
    "ranks": (6, ["ranks/train/**/*.py", "ranks/strategies/**/step.py"], ["ranks"]),
}
"""The number of mutants, the files of the source and the folders of the tests."""
UNWANTED = ("RemoveDecorator", "VariableInserter", "VariableReplacer")
TEXTS = (ast.JoinedStr, ast.Raise, ast.Assert)
OPTIONS = ["-xq", "-pno:cacheprovider", "-pno:xdist", "-m", "not canary and not zoo"]
OPTIONS += ["-Wignore::pytest.PytestAssertRewriteWarning", "-oaddopts=--import-mode=importlib"]
PRELOADED = ("torch.distributed.tensor", "torchvision", "scipy.stats", "transformers", "yaml")
"""Modules that are imported once, before the processes of all mutants are forked."""


def skipped(source: str) -> Iterator[tuple[int, int, int, int]]:
    """Yields the positions of annotations, texts and errors."""
    for node in ast.walk(ast.parse(source)):
        parts = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        for part in (*parts, node if isinstance(node, TEXTS) else None):
            if isinstance(part, ast.AST):
                yield part.lineno, part.col_offset, part.end_lineno, part.end_col_offset  # type: ignore[attr-defined]


def mutants(files: list[Path]) -> dict[tuple[Path, int], list[tuple[str, int]]]:
    """Returns operators with their occurrence, by file and line."""
    found: dict[tuple[Path, int], list[tuple[str, int]]] = {}
    names = [n for n in sorted(operator_names()) if not n.split("/")[1].startswith(UNWANTED)]
    for path in files:
        source = path.read_text()
        spans, tree = list(skipped(source)), get_ast(source)
        nodes, pending = [], [tree]
        while pending:
            node = pending.pop()
            nodes.append(node)
            pending += reversed(getattr(node, "children", []))
        for name in names:
            operator, occurrence = get_operator(name)(), -1
            for node in nodes:
                for start, end in operator.mutation_positions(node):
                    occurrence += 1
                    inside = any(s[:2] <= start and end <= s[2:] for s in spans)
                    if start[0] == end[0] and not inside:
                        found.setdefault((path, start[0]), []).append((name, occurrence))
    return found


def drawn(seed: int) -> Iterator[dict[str, Any]]:
    """Yields the mutants of all rooms in their order."""
    for room, (count, folders, tests) in ROOMS.items():
        files = sorted({f for folder in folders for f in SRC.glob(folder)})
        files = [f for f in files if room != "predict" or "costs" not in f.parts]
        found, draw = mutants(files), random.Random(f"{seed} {room}")
        places = draw.sample(sorted(found), min(len(found), 3 * count))
        taken = 0
        for path, line in places:
            operator, occurrence = draw.choice(found[path, line])
            source = path.read_text()
            after = mutate_code(source, get_operator(operator)(), occurrence)
            pairs = zip(source.splitlines(), str(after).splitlines(), strict=False)
            lines = [(a.strip(), b.strip()) for a, b in pairs if a != b]
            if taken < count and after is not None and len(lines) == 1:
                taken += 1
                facts = {"room": room, "tests": tests, "line": line, "source": after}
                file = str(path.relative_to(ROOT))
                yield facts | {"file": file, "before": lines[0][0], "after": lines[0][1]}


def passes(mutant: dict[str, Any] | None, tests: list[str]) -> bool:
    """Imports the mutant in a child process and runs tests there; no file is changed."""
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code not in {0, 1, 2, 4}:  # 1: a test failed, others: the mutant cannot be imported
            raise RuntimeError(f"pytest ended with {code} for {mutant}")
        return code == 0
    read = importlib.machinery.SourceFileLoader.get_code
    changed = "" if mutant is None else str(ROOT / mutant["file"])

    def get_code(self: Any, fullname: str) -> Any:
        if mutant is None or self.path != changed:
            return read(self, fullname)
        return compile(mutant["source"], changed, "exec", dont_inherit=True)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    code = 70
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        try:
            code = int(pytest.main([*OPTIONS, *(UNIT + test for test in tests)]))
        finally:
            os._exit(code)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=20261128)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of mutants, from 0")
    options = parser.parse_args()
    os.chdir(ROOT)
    for name in PRELOADED:
        importlib.import_module(name)
    counts: Counter[tuple[str, str]] = Counter()
    for number, mutant in enumerate(drawn(options.seed)):
        room, tests = mutant["room"], mutant["tests"]
        if options.only and number not in options.only:
            continue
        if (room not in {known for known, _ in counts}) and not passes(None, tests):
            raise SystemExit(f"the tests of {room} fail without a mutant")
        result = "survives" if passes(mutant, tests) and passes(mutant, [""]) else "killed"
        counts[room, result] += 1
        change = f"{mutant['before']} -> {mutant['after']}: {result}"
        print(f"{number} {mutant['file']}:{mutant['line']} {change}", flush=True)
    print(*sorted(counts.items()), sep="\n")


if __name__ == "__main__":
    main()
