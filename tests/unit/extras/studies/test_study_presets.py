"""The presets that repeat the studies: nothing stated is another value, and every variant runs."""

from __future__ import annotations

import shlex
from collections import Counter

import pytest

from shardmark.bench.launch.engines import submission
from shardmark.experiment.load import load_experiment, preset_text
from shardmark.experiment.matrix import expand
from shardmark.extras.studies.study import load_study, study_names


def variants(preset: str = "lamsal-2025") -> list[list[str]]:
    """The `--set` lines in the comments of the preset."""
    lines = preset_text(preset).splitlines()
    lines = [line.lstrip("# ") for line in lines if line.lstrip("# ").startswith("--set")]
    return [[word for word in shlex.split(line) if word != "--set"] for line in lines]


def test_the_posters_preset_is_its_recipe() -> None:
    experiment = load_experiment("fsdp-vs-deepspeed-poster")
    study = load_study("fsdp-vs-deepspeed-poster")
    assert {key: tuple(experiment.matrix[key]) for key in study.varied} == study.varied
    plan = expand(experiment, "cuda")
    assert len(plan.trials) == (6 + 5) * 3 * 2 * 2
    sizes = Counter((trial.nodes, trial.world_size) for trial in plan.trials)
    assert sizes == {(1, 4): 5 * 3 * 2 * 2, (2, 8): 6 * 3 * 2 * 2}
    (left_out,) = map(str, plan.left_out)
    assert left_out.startswith("fsdp-hybrid (shard_group=4) on 4 ranks")
    (told,) = submission(experiment, plan, ["shardmark"])
    assert "unavailable" in told


@pytest.mark.parametrize("name", study_names())
def test_the_preset_is_the_studys_experiment(name: str) -> None:
    """Nothing that the study states is another value in the preset that repeats it."""
    study = load_study(name)
    assert study.preset is not None
    trials = expand(load_experiment(study.preset), "cuda").trials
    for trial in trials:
        data = trial.model_dump(mode="json")
        for key, value in study.conditions.items():
            told = data
            for part in key.split("."):
                told = told[part]
            assert told == value, key
    cells = {(trial.strategy.name, trial.world_size) for trial in trials}
    assert {(e.strategy, e.world_size) for e in study.figures if e.strategy} <= cells


LEFT_OUT: dict[str, set[str]] = {
    "lamsal-2025": set(),
    "fsdp-vs-deepspeed-poster": {"fsdp-hybrid"},
    "ovi-2025": {"single"},
}
"""Requirements that some variants of a preset cannot fulfil."""


@pytest.mark.parametrize(
    ("preset", "overrides"), [(name, each) for name in LEFT_OUT for each in variants(name)]
)
def test_every_variant_expands(preset: str, overrides: list[str]) -> None:
    plan = expand(load_experiment(preset, overrides), "cuda")
    assert plan.trials
    assert {cell.strategy.name for cell in plan.left_out if cell.strategy} <= LEFT_OUT[preset]
