"""Stores a run's comparison and verdicts, and puts its table into the README.

    python benchmarks/results_table.py RUN NAME [--readme]

Leaves `DATE-NAME.md`, `.json` (every metric of every row) and `-verification.json` in
benchmarks/results/; `--readme` replaces the README's block between its results-table marks.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from recording import RESULTS, ROOT, VERSIONS
from shardmark.analysis.compare.comparison import compare
from shardmark.report.table.comparison import comparison_json, comparison_table
from shardmark.report.table.formats import Format, render_tables
from shardmark.results.store import RunFolder, load_run

BLOCK = re.compile(r"(<!-- results-table -->\n).*?(\n<!-- /results-table -->)", re.DOTALL)


def measured_on(environment: dict[str, Any]) -> str:
    """Date, machine and versions in one sentence, without the machine's name."""
    cpu, packages = environment["cpu"], environment["packages"]
    versions = ", ".join(f"{name} {packages[name]}" for name in VERSIONS)
    devices = ", ".join(device["name"] for device in environment["cuda"]["devices"]) or "no GPU"
    memory = environment["memory"]["total_bytes"] / 2**30
    return (
        f"Measured on {environment['date'][:10]}: {cpu['model']}, {cpu['usable_cores']} cores, "
        f"{memory:.0f} GiB, {devices}; Python {environment['python']}, {versions}, "
        f"Shardmark {environment['shardmark']} at {environment['git']['commit'][:10]}."
    )


def verdict_lines(path: Path) -> list[str]:
    """The largest deviation of each verdict, in units of its tolerance."""
    stored = load_run(path).verification
    if stored is None:
        return []
    lines = [
        "| model | strategy | ranks | equivalent | largest deviation / tolerance |",
        "|---" * 5 + "|",
    ]
    for verdict in sorted(stored.verdicts, key=lambda v: (str(v.varied), v.strategy)):
        model = verdict.varied.get("workload.model", "")
        word = {True: "yes", False: "no", None: "not tried"}[verdict.equivalent]
        worst = "" if verdict.worst is None else f"{verdict.worst:.2g}"
        cells = (str(model), verdict.strategy, str(verdict.world_size), word, worst)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    parser.add_argument("--readme", action="store_true")
    options = parser.parse_args()
    environment = RunFolder(options.run).read_environment()
    comparison = compare([load_run(options.run)], None)
    table = render_tables([comparison_table(comparison)], Format.MARKDOWN, headings=False).strip()
    place = measured_on(environment)
    stem = f"{environment['date'][:10]}-{options.name}"
    command = shlex.join(["python", "benchmarks/results_table.py", *sys.argv[1:]])
    verdicts = "\n".join(verdict_lines(options.run))
    (RESULTS / f"{stem}.md").write_text(
        f"# {options.name}\n\n{place}\n\n{table}\n\n## Verification\n\n{verdicts}\n"
    )
    content = {"place": place, "command": command, **comparison_json(comparison)}
    (RESULTS / f"{stem}.json").write_text(json.dumps(content, indent=1, default=str) + "\n")
    stored = load_run(options.run).verification
    if stored is not None:
        text = stored.model_dump_json(indent=1)
        (RESULTS / f"{stem}-verification.json").write_text(text + "\n")
    if options.readme:
        readme = ROOT / "README.md"
        block = f"{place}\n\n{table}"
        text = readme.read_text()
        readme.write_text(BLOCK.sub(lambda m: m[1] + block + m[2], text))


if __name__ == "__main__":
    main()
