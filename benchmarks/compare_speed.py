"""How long `shardmark compare` takes for 200 stored trials of four ranks, the whole process.

    python benchmarks/compare_speed.py [--trials 200] [--rounds 5]

Prints one JSON object; the trials are copies of the stored run of the tests, in a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from shardmark.results.schema import TrialResult
from shardmark.results.store import RECORDED_FILES, RunFolder

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "tests" / "golden" / "v1" / "trials" / "ddp-2-0"
STRATEGIES = ("single", "ddp", "fsdp", "fsdp-grad-op", "zero-0", "zero-1", "zero-2", "zero-3")
REPEATS = 5
RANKS = 4


def write_trials(path: Path, count: int) -> int:
    """Fill a run with varied cells of five repeats; return the mean size of a result in bytes."""
    folder = RunFolder.create(path)
    folder.write_experiment({"name": "compare-speed"})
    template = RunFolder(TEMPLATE.parent.parent).read_result(TEMPLATE.name)
    assert isinstance(template, TrialResult)
    rank = template.ranks[0]
    ranks = tuple(rank.model_copy(update={"rank": index}) for index in range(RANKS))
    size_bytes = 0
    for order in range(count):
        cell, repeat = divmod(order, REPEATS)
        batch, strategy = divmod(cell, len(STRATEGIES))
        result = template.model_copy(
            update={
                "id": f"trial-{order:04}",
                "strategy": STRATEGIES[strategy],
                "world_size": RANKS if strategy else 1,
                "varied": {"recipe.global_batch": 64 * (batch + 1)},
                "repeat": repeat,
                "order": order,
                "ranks": ranks,
            }
        )
        trial = folder.create_trial(result.id)
        for name in RECORDED_FILES:
            (trial / name).write_bytes(b"x" * 200_000)
        folder.write_result(result)
        size_bytes += (trial / "result.json").stat().st_size
    return size_bytes // count


def seconds_of_compare(path: Path) -> float:
    """Wall time of one whole process, its start included."""
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths}
    command = [sys.executable, "-m", "shardmark", "compare", str(path)]
    started = time.perf_counter()
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result_bytes = write_trials(Path(folder), options.trials)
        rounds = [seconds_of_compare(Path(folder)) for _ in range(options.rounds)]
    report = {
        "trials": options.trials,
        "mean_result_bytes": result_bytes,
        "compare_seconds_median": round(median(rounds), 3),
        "compare_seconds": [round(seconds, 3) for seconds in rounds],
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
