"""A number that no run measures makes its trial damaged, and never crashes what reads it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from shardmark.base.results.store import load_run
from tests.golden.invented import invented_trial, write_run


def put(document: Any, place: str, value: object) -> None:
    *parents, last = place.split(".")
    for key in parents:
        document = document[int(key) if isinstance(document, list) else key]
    document[last] = value


def reasons(folder: Path, place: str, value: object) -> list[str]:
    """Change the number at a place; list why its trial counts as damaged, if it does."""
    run = write_run(folder / "run", [invented_trial("single", 1)])
    (file,) = run.glob("trials/*/result.json")
    document = json.loads(file.read_text())
    put(document, place, value)
    file.write_text(json.dumps(document))
    stored = load_run(run)
    assert len(stored.trials) + len(stored.damaged) == 1
    return [one.reason for one in stored.damaged]


ABSURD: list[tuple[str, object, str]] = [
    ("metrics.samples_per_second.value", 1e308, "1e-15 to 1e+18"),
    ("metrics.samples_per_second.value", 0.0, "1e-15 to 1e+18"),
    ("metrics.step_seconds.maximum", math.inf, "0 to 1e+18"),
    ("metrics.step_seconds.imbalance", math.nan, "-1e+18 to 1e+18"),
    ("metrics.data_seconds.value", -1e-9, "0 to 1e+18"),
    ("metrics.accuracy_top1.value", 1.01, "0 to 1"),
    ("ranks.0.epochs.0.quality.accuracy_top1", 95.0, "0 to 1"),
    ("ranks.0.epochs.0.train_loss", 1e200, "-1e+100 to 1e+100"),
    ("ranks.0.windows.0.window_seconds", 0.0, "1e-15 to 1e+18"),
    ("ranks.0.probe.parameter_bytes", -4, "0 to 1e+18"),
    ("ranks.0.samples", 10**400, "0 to 1e+18"),
    ("world_size", 0, "1 to 1e+09"),
    ("trial.recipe.epochs", 10**400, "-1e+300 to 1e+300"),
    ("ranks.0.settings.momentum", -(10**400), "-1e+300 to 1e+300"),
    ("order", 10**400, "-1e+300 to 1e+300"),
    ("total_seconds", math.inf, "0 to 1e+18"),
]
RARE: list[tuple[str, object, None]] = [
    ("metrics.data_seconds.value", 0.0, None),
    ("metrics.startup_seconds.value", -0.5, None),
    ("metrics.validation_loss.value", 1e30, None),
    ("metrics.accuracy_top1.value", 0.0, None),
    ("metrics.accuracy_top1.value", 1, None),
    ("metrics.model_flops_per_second.value", 5e19, None),
    ("ranks.0.epochs.0.quality.perplexity", 1e47, None),
    ("ranks.0.epochs.0.quality.accuracy_top1", None, None),
]


@pytest.mark.parametrize(("place", "value", "possible"), [*ABSURD, *RARE])
def test_absurd_numbers_are_damage_and_rare_ones_are_believed(
    tmp_path: Path, place: str, value: object, possible: str | None
) -> None:
    told = [] if possible is None else [f"; possible is {possible}"]
    found = reasons(tmp_path, place, value)
    assert [reason.startswith(f"{place} is ") for reason in found] == [True] * len(told)
    assert [reason[reason.rindex(";") :] for reason in found] == told


def test_a_layout_without_ranks_is_damage(tmp_path: Path) -> None:
    (reason,) = reasons(tmp_path, "layout.ranks", [])
    assert "no rank that trains" in reason
