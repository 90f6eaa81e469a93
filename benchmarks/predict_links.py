"""Predicted against measured step times over links of several speeds.

    python benchmarks/predict_links.py FOLDER

FOLDER holds a run for each link speed, as `python -m benchmarks.cluster experiment` leaves them.
Every strategy is predicted from the trial of `single` in the same run and from what that run
measured of its links and cores.  The order counts where the measured difference of two strategies
is shown, corrected for all pairs at that speed.  Measures nothing.
"""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `benchmarks.cluster`

from benchmarks.cluster.link_speeds import Speed, batch_of, labels_of, read_speeds
from benchmarks.cluster.link_speeds_runs import environments
from benchmarks.recording import Table, around, options_of, store

from shardmark.analysis.compare.predicted import Predictions
from shardmark.core.errors import ShardmarkError
from shardmark.predict.models import Models

NAME = "predict_links"
MEDIAN = 0.10
BAR = f"Bar: median error at most {MEDIAN:.0%}, and the order right wherever a difference is shown"


def predicted(speed: Speed, models: Models) -> tuple[dict[str, float], dict[str, str]]:
    """Step seconds by name, and why others have none."""
    predictions = Predictions([cell.row for cell in speed.cells.values()], models)
    found, reasons = {}, {}
    for name, cell in speed.cells.items():
        samples = batch_of(cell.row)
        try:
            found[name] = samples / predictions.samples_per_second(cell.row)
        except ShardmarkError as error:
            reasons[name] = str(error)
    return found, reasons


def ordered(speed: Speed, found: dict[str, float]) -> tuple[int, list[tuple[str, str]]]:
    """Pairs whose measured difference is shown, and those of them predicted the other way."""
    shown, wrong = 0, []
    for one, other in combinations(found, 2):
        faster = speed.faster(one, other)
        if faster is None:
            continue
        shown += 1
        slower = other if faster == one else one
        if found[faster] >= found[slower]:
            wrong.append((faster, slower))
    return shown, wrong


def main() -> None:
    parser = options_of(NAME, __doc__)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    speeds, models = read_speeds(options.folder), Models()
    found: dict[str, dict[str, Any]] = {}
    shown = 0
    wrong: dict[str, list[tuple[str, str]]] = {}
    reasons: dict[str, str] = {}
    for speed in speeds:
        seconds, untold = predicted(speed, models)
        reasons |= untold
        found[speed.name] = {
            name: {
                "predicted_seconds": value,
                "measured_seconds": speed.cells[name].step.value,
                "error": value / speed.cells[name].step.value - 1,
            }
            for name, value in seconds.items()
        }
        count, wrong[speed.name] = ordered(speed, seconds)
        shown += count
    errors = {
        speed: [abs(each["error"]) for each in cells.values()] for speed, cells in found.items()
    }
    overall = median(error for each in errors.values() for error in each)
    wrong_count = sum(map(len, wrong.values()))

    def cell(speed: str, name: str) -> str:
        if name not in found[speed]:
            return "-"
        of = found[speed][name]
        return f"{1e3 * of['measured_seconds']:.0f} {of['error']:+.0%}"

    labels = [label for label in labels_of(speeds) if any(label in each for each in found.values())]
    store(
        NAME,
        options=options,
        around=around(environments(speeds)[0]),
        bar=BAR,
        holds=overall <= MEDIAN and not wrong_count,
        table=Table(
            columns=("strategy", *(f"{speed}, ms" for speed in found)),
            rows=(
                *((label, *(cell(speed, label) for speed in found)) for label in labels),
                ("median error", *(f"{median(each):.0%}" for each in errors.values())),
                (
                    "pairs in the wrong order",
                    *(str(len(pairs)) for pairs in wrong.values()),
                ),
            ),
            notes=(
                "Measured step time, and the prediction's error. Median of all:"
                f" {overall:.1%}. Of {shown} pairs whose difference is shown, {wrong_count} are"
                " predicted in the wrong order.",
                *(f"Not predicted: {name}: {why}" for name, why in reasons.items()),
            ),
        ),
        numbers={"speeds": found, "wrong_order": wrong, "shown_pairs": shown, "median": overall},
    )


if __name__ == "__main__":
    main()
