"""A change that makes a script faster and lets it train something else is found by the referee."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmark.bench.analysis.compare.comparison import compare
from tests import ROOT
from tests.distributed.experiments import experiment
from tests.distributed.test_script import WARMUP_STEPS, timed, value
from tests.kept_engine import KeptEngine

SCRIPT = ROOT / "tests" / "zoo" / "slow" / "traps.py"
TRAPS = {
    "fused": "", "channels_last": "", "no_sync": "=2", "set_to_none": "", "workers": "=2",
    "bucket_view": "",
}  # fmt: skip
"""Interventions with their values."""


@pytest.mark.slow
@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_is_refused(kept_engine: KeptEngine, trap: str, tmp_path: Path) -> None:
    run = timed(
        kept_engine, tmp_path / "run", {"unchanged": "", trap: f"%{trap}{TRAPS[trap]}"},
        workload={"command": f"{SCRIPT} --trap {trap}"},
        measure=experiment()["measure"] | {"warmup_steps": WARMUP_STEPS, "verify": True},
    )  # fmt: skip
    rates = {trial.strategy: value(trial, "samples_per_second") for trial in run.trials}
    assert rates[trap] > 1.2 * rates["unchanged"]
    equivalent = {row.strategy: row.equivalent for row in compare([run]).rows}
    assert equivalent == {"unchanged": True, trap: False}
