"""Seeds as repeats: which seed each trial has, and which runs may be continued."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardmark.base.cells import cell_id
from shardmark.base.errors import InputError
from shardmark.base.recipe import Measure
from shardmark.base.results.fingerprint import Fingerprint
from shardmark.base.results.store import EXPERIMENT_FILE
from shardmark.bench.launch.fingerprint import check_same_run
from shardmark.experiment.experiment import Experiment
from shardmark.experiment.load import load_experiment, resolve
from shardmark.experiment.matrix import expand

Make = Callable[..., Experiment]
TWO = "matrix.strategy=[single, ddp]"


def test_a_repeat_takes_the_next_seed_and_pairs_share_it(make: Make) -> None:
    plan = expand(make(TWO, "recipe.seed=7", "measure.seeds=3"))
    seeds = {(t.strategy.name, t.repeat): t.recipe.seed for t in plan.trials}
    assert seeds == {(s, r): 7 + r for s in ("single", "ddp") for r in range(3)}
    cells = {(t.strategy.name, cell_id(t.model_dump(mode="json"))) for t in plan.trials}
    assert len(cells) == 2, "all seeds of a strategy are one cell"
    assert plan.twin is not None
    assert plan.twin.recipe.seed == 7
    assert cell_id(plan.twin.model_dump(mode="json")) in {cell for _, cell in cells}
    assert plan.trials[-1].repeat_title == "repeat 3 of 3, seed 9"


def test_ids_stay_when_seeds_are_added(make: Make) -> None:
    one, four, eight = (
        {t.id for t in expand(make(TWO, f"measure.seeds={count}", "measure.repeats=1")).trials}
        for count in (1, 4, 8)
    )
    assert one < four < eight
    assert (len(one), len(four), len(eight)) == (2, 8, 16)


@pytest.mark.parametrize(
    ("given", "repeats"),
    [({}, 4), ({"repeats": 1}, 4), ({"repeats": 4}, 4), ({"repeats": {"at_most": 9}}, 4)],
)
def test_repeats_become_the_number_of_seeds(given: dict[str, Any], repeats: int) -> None:
    measure = Measure.model_validate({"seeds": 4, **given})
    assert measure.repeats.at_least == measure.repeats.at_most == repeats
    assert Measure.model_validate(measure.model_dump(mode="json")) == measure


@pytest.mark.parametrize("preset", ["lamsal-2025", "asu-fsdp-2024", "ovi-2025", "quickstart"])
@pytest.mark.parametrize("seeds", [2, 5])
def test_seeds_alone_replace_the_repeats_of_a_preset(preset: str, seeds: int) -> None:
    for experiment in (
        load_experiment(preset, [f"measure.seeds={seeds}"]),
        resolve(preset, {"measure": {"seeds": seeds}}),
    ):
        repeats = [(trial.repeat, trial.recipe.seed) for trial in expand(experiment).trials]
        assert set(repeats) == {(number, number) for number in range(seeds)}


def test_replaced_repeats_are_named_and_two_stated_numbers_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    load_experiment("lamsal-2025", ["measure.seeds=2"])
    assert capsys.readouterr().err == "--set measure.seeds replaces measure.repeats: 3\n"
    repeats = load_experiment("lamsal-2025", ["measure.seeds=1"]).measure.repeats
    assert repeats.at_most == 3, "one seed says nothing about the repeats"
    with pytest.raises(InputError, match=r"found seeds 2 and repeats 3"):
        load_experiment("lamsal-2025", ["measure.seeds=2", "measure.repeats=3"])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (("measure={seeds: 4, repeats: 5}",), "found seeds 4 and repeats 5"),
        (("measure.seeds=0",), "greater than or equal to 1|at least 1"),
        (("measure.seeds=2", "matrix.recipe.seed=[0, 1]"), "recipe.seed is an axis"),
        (("measure.seeds=2", "recipe.seed=4294967295"), "last seed would be 4294967296"),
        (("matrix.measure.seeds=[1, 2]",), "measure.seeds"),
    ],
)
def test_contradictory_seeds_are_refused(
    make: Make, changes: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(InputError) as refused:
        expand(make(*changes))
    assert re.search(problem, str(refused.value))


@pytest.mark.parametrize(
    ("before", "now", "continues"),
    [
        ("{seeds: 4}", "{seeds: 8}", True),
        ("{repeats: 1}", "{seeds: 4}", True),
        ("{repeats: 3}", "{seeds: 4}", False),
        ("{seeds: 4}", "{repeats: 4}", False),
        ("{repeats: 3}", "{repeats: 5}", True),
    ],
)
def test_a_run_goes_on_unless_a_repeat_would_change_its_seed(
    make: Make, tmp_path: Path, before: str, now: str, continues: bool
) -> None:
    """Runs of earlier versions have no key `seeds`."""
    stored = make(f"measure={before}").model_dump(mode="json")
    if stored["measure"]["seeds"] == 1:
        del stored["measure"]["seeds"]
    (tmp_path / EXPERIMENT_FILE).write_text(yaml.dump(stored))
    if continues:
        check_same_run(tmp_path, make(f"measure={now}"), Fingerprint())
    else:
        with pytest.raises(InputError, match=r"a run with measure\.seeds = "):
            check_same_run(tmp_path, make(f"measure={now}"), Fingerprint())
