"""What `time --improve` gains on scripts, by its own race and by a stopwatch outside of it.

Run:  python benchmarks/improve.py [--only NAME,...] [--budget 3m]

The stopwatch reads the lines that a script prints every 100 steps, as it is and with the patch
applied by `patch`, three times each in turn.  Nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "zoo" / "slow"
RANKS, RUNS = 2, 3
SECONDS = 10.0
"""Time of the stopwatch from the first line on."""
STEPS_A_LINE = 100
LINE = re.compile(r"step \d+ loss|'loss':")
SCRIPTS = {
    "DDP": "loop.py",
    "FSDP2": "loop.py --strategy fsdp",
    "slow decoding": "loop.py --fault slow_input --way item --amount-ms 1",
    "decoding in two workers": "loop.py --workers 2 --fault slow_input --way item --amount-ms 4",
    ".item()": "loop.py --fault host_bound --way item",
    "images": "images.py",
    "accumulation": "loop.py --batch 2 --accumulate 4 --sync all",
    "Accelerate": "accelerated.py",
    "Trainer": "trainer.py",
    "Lightning": "lightning_loop.py",
    "DeepSpeed": "deepspeed_loop.py",
}


def launched(command: str) -> list[str]:
    return ["torchrun", "--nproc-per-node", str(RANKS), *command.split()]


def step_seconds(command: str, folder: Path) -> float:
    """Mean seconds of a step by the times at which the script's lines arrive."""
    words = ["stdbuf", "-oL", *launched(command)]
    settings = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        words, cwd=folder, env=settings, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    arrived: list[float] = []
    for line in process.stdout:
        if LINE.search(line):
            arrived.append(time.monotonic())
            if arrived[-1] - arrived[0] >= SECONDS:
                break
    os.killpg(process.pid, signal.SIGTERM)
    process.wait()
    process.stdout.close()
    return (arrived[-1] - arrived[0]) / (len(arrived) - 1) / STEPS_A_LINE


def improved(command: str, folder: Path, budget: str) -> dict[str, Any]:
    words = ["time", "--improve", "--budget", budget, "--format", "json", "--ranks", str(RANKS)]
    words = [sys.executable, "-m", "shardmark", *words, command]
    ended = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    if not ended.stdout.startswith("{"):
        raise SystemExit(f"{command}\n{ended.stdout}{ended.stderr}")
    document: dict[str, Any] = json.loads(ended.stdout)
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="names, with commas between them")
    parser.add_argument("--budget", default="3m", help="of each race")
    options = parser.parse_args()
    chosen = set(options.only.split(",")) - {""} or SCRIPTS.keys()
    print("| script | kept | gain (interval) | by stopwatch | patch | refused | not decided |")
    print("| --- | --- | ---: | ---: | --- | --- | --- |", flush=True)
    for name, command in SCRIPTS.items():
        if name not in chosen:
            continue
        with tempfile.TemporaryDirectory() as place:
            before, after = Path(place, "before"), Path(place, "after")
            for folder in (before, after):
                shutil.copytree(FOLDER, folder)
            document = improved(command, before, options.budget)
            if document["patch"]:
                subprocess.run(
                    ["patch", "-p1"], cwd=after, input=document["patch"], text=True, check=True,
                    capture_output=True,
                )  # fmt: skip
            ratios = [
                step_seconds(command, before) / step_seconds(command, after) for _ in range(RUNS)
            ]
        kept = next((one for one in document["tried"] if one["decision"] == "keep"), None)
        gain = "none" if kept is None else "{ratio:.2f} ({low:.2f} to {high:.2f})".format(**kept)
        refused = [one["variant"] for one in document["tried"] if one["same_training"] is False]
        undecided = [
            "{variant} {ratio:.2f} ({low:.2f} to {high:.2f}, {pairs} pairs)".format(**one)
            for one in document["tried"]
            if one["decision"] == "not decided" and one["low"] is not None
        ]
        print(
            f"| {name} | {', '.join(document['kept'])} | {gain} | {statistics.median(ratios):.2f} "
            f"| {'applies' if document['patch'] else 'none'} | {', '.join(refused)} "
            f"| {', '.join(undecided)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
