"""What every benchmark shares: its options, and its numbers stored with date, machine, versions."""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmark.measure.system.environment import environment

BENCHMARKS = Path(__file__).resolve().parent
ROOT = BENCHMARKS.parent
RESULTS = BENCHMARKS / "results"
VERSIONS = ("torch", "torchvision", "deepspeed", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of short texts below a heading."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join([text, *self.notes])

    def plain(self) -> str:
        cells = (self.columns, *self.rows)
        widths = [max(len(line[i]) for line in cells) for i in range(len(self.columns))]
        lines = ["  ".join(t.ljust(w) for t, w in zip(c, widths, strict=True)) for c in cells]
        return "\n".join([*(line.rstrip() for line in lines), *self.notes])


def options_of(name: str, description: str | None) -> argparse.ArgumentParser:
    """The options that each benchmark has; it adds its own."""
    parser = argparse.ArgumentParser(
        prog=f"benchmarks/{name}.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--small", action="store_true", help="a quick look: proves that it runs, no bar is meant"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for JSON and markdown")
    return parser


def surroundings() -> dict[str, Any]:
    """Date, machine and versions of here and now, and what may disturb."""
    found = environment(ROOT)
    # Folders are this machine's own.
    variables = {n: value for n, value in found["variables"].items() if not value.startswith("/")}
    return around(found) | {"variables": variables, "load_before": found["load"]}


def around(found: Mapping[str, Any]) -> dict[str, Any]:
    """Date, machine and versions of an environment, without the machine's name."""
    return {
        "date": found["date"],
        "machine": {
            "cpu": found["cpu"]["model"],
            "cores": found["cpu"]["usable_cores"],
            "memory_bytes": found["memory"]["total_bytes"],
            "os": found["os"],
            "cuda_devices": [
                device["name"] for device in (found.get("cuda") or {}).get("devices", ())
            ],
        },
        "versions": {
            "python": found["python"],
            "shardmark": found["shardmark"],
            **{name: found["packages"][name] for name in VERSIONS},
        },
        "git": found.get("git"),
    }


def place(found: Mapping[str, Any]) -> str:
    """Where and with what it was measured, on one line."""
    machine, versions, git = found["machine"], found["versions"], found["git"]
    commit = "no commit" if git is None else git["commit"][:10] + ("+" if git["dirty"] else "")
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items())
    devices = "".join(f", {name}" for name in machine["cuda_devices"])
    return (
        f"{found['date'][:10]}; {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB{devices}; {libraries}; commit {commit}"
    )


def store(
    name: str,
    *,
    options: argparse.Namespace,
    around: Mapping[str, Any],
    bar: str,
    holds: bool,
    table: Table,
    numbers: Mapping[str, Any],
    variant: str = "",
) -> None:
    """Print the table, leave `DATE-NAME.json` and `.md`; `around` was taken before measuring.

    `variant` follows the name, where other options measure something else.
    """
    verdict = "holds" if holds else "DOES NOT HOLD"
    # Where something was kept on this machine is nobody else's concern.
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    command = shlex.join(["python", f"benchmarks/{name}.py", *words])
    print(f"\n{table.plain()}\n{bar}: {verdict}.\n{place(around)}")
    kinds = [name.replace("_", "-"), *filter(None, [variant]), *["small"][: options.small]]
    stem = "-".join([around["date"][:10], *kinds])
    options.out.mkdir(parents=True, exist_ok=True)
    content = {
        "benchmark": name,
        **around,
        "command": command,
        "bar": bar,
        "holds": holds,
        "numbers": numbers,
    }
    (options.out / f"{stem}.json").write_text(json.dumps(content, indent=1) + "\n")
    (options.out / f"{stem}.md").write_text(
        f"# {name}\n\n{table.markdown()}\n\n**{bar}: {verdict}.**\n\n"
        f"{place(around)}\n\n`{command}`\n"
    )
    print(f"stored as {options.out / stem}.json and .md")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, extremes and interquartile range."""
    if len(values) > 1:
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    else:
        low = high = values[0]
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "interquartile_range": high - low,
    }
