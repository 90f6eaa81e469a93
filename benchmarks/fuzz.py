"""Attacks whatever reads what others have written, with inputs that nobody would write.

    python benchmarks/fuzz.py [--inputs 10000] [--seed 0] [--state runs/fuzz.jsonl] [--only results]

Experiment files, run folders, messages of nodes and of parameter servers, and the files that nodes
send: mutated ones, through the real readers and commands.  Works in portions, each in a process of
its own; started again with the same state, it goes on.  One core is enough.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

from fuzz_inputs import MOST_BYTES, MOST_SECONDS, attacked, limit_memory
from recording import Table, options_of, store, surroundings

NAME = "fuzz"
PORTION = 250
SHARES = {
    "experiments": 0.30,
    "results": 0.22,
    "reports": 0.01,
    "messages": 0.20,
    "parameter_server": 0.12,
    "left_files": 0.15,
}
BAR = "Bar: no traceback, no input over 5 s, memory under 500 MB beside torch"


def portion(target: str, seed: int, inputs: int) -> dict[str, Any]:
    """The portion in a process of its own, whose end by a signal is a find, too."""
    words = [sys.executable, __file__, "--portion", target, str(seed), str(inputs)]
    done = subprocess.run(words, check=False, capture_output=True, text=True, errors="replace")
    try:
        made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        end = f"ended with {done.returncode}: {done.stderr[-2000:]}"
        made = {"target": target, "seed": seed, "inputs": 0, "finds": [end]}
        made |= {"slowest_seconds": 0.0, "peak_bytes": 0}
    return made


def all_portions(
    inputs: int, seed: int, state: Path, targets: Sequence[str]
) -> list[dict[str, Any]]:
    """Those that the state has, and the rest until every target has had its share."""
    state.parent.mkdir(parents=True, exist_ok=True)
    lines = state.read_text().splitlines() if state.exists() else []
    done = [json.loads(line) for line in lines]
    for target in targets:
        own = [each for each in done if each["target"] == target]
        for number in count(seed + len(own)):
            left = round(SHARES[target] * inputs) - sum(each["inputs"] for each in own)
            if left <= 0 or (own and own[-1]["inputs"] == 0):
                break
            own.append(portion(target, number, min(PORTION, left)))
            with state.open("a") as file:
                file.write(f"{json.dumps(own[-1])}\n")
            done.append(own[-1])
            print(f"{target} {number}: {own[-1]['inputs']} inputs", *own[-1]["finds"], flush=True)
    return done


def main() -> None:
    parser = options_of(NAME, __doc__)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, default=Path("runs") / "fuzz.jsonl")
    parser.add_argument("--only", nargs="+", choices=SHARES, default=[*SHARES])
    parser.add_argument("--portion", nargs=3, metavar=("TARGET", "SEED", "INPUTS"))
    options = parser.parse_args()
    if options.portion is not None:
        target, seed, inputs = options.portion
        if target == "parameter_server":  # limited is what comes on top of torch
            import_module("torch")
        if target != "reports":  # what draws figures reserves more than there is
            limit_memory()
        print(f"\n{json.dumps(asdict(attacked(target, int(seed), int(inputs))))}")
        return
    around = surroundings()
    inputs = 200 if options.small else options.inputs
    done = all_portions(inputs, options.seed, options.state, options.only)
    rows = []
    for target in options.only:
        own = [each for each in done if each["target"] == target]
        rows.append(
            (
                target.replace("_", " "),
                f"{sum(each['inputs'] for each in own):,}",
                str(sum(len(each["finds"]) for each in own)),
                f"{max(each['slowest_seconds'] for each in own):.2f}",
                f"{max(each['peak_bytes'] for each in own) / 1e6:.0f}",
            )
        )
    finds = [find for each in done for find in each["finds"]]
    holds = (
        not finds
        and max(each["slowest_seconds"] for each in done) <= MOST_SECONDS
        and max(each["peak_bytes"] for each in done) <= MOST_BYTES
    )
    store(
        NAME,
        options=options,
        around=around,
        bar=BAR,
        holds=holds,
        table=Table(
            columns=("read", "inputs", "finds", "slowest in s", "peak memory in MB"),
            rows=tuple(rows),
        ),
        numbers={"portions": done},
    )


if __name__ == "__main__":
    main()
