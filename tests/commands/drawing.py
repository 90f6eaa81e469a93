"""A run without a run: tells the listener what a controller would, under a clock of its own.

Started by the tests in front of a terminal; `ctrl-c` as its argument interrupts it.
"""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from types import SimpleNamespace

from shardmark.base.results.schema import Failure, Outcome
from shardmark.bench.launch.listener import TrialProgress
from shardmark.bench.progress import display, lines, pace
from shardmark.cli.run import _interrupted_by_sigterm
from shardmark.experiment.matrix import expand
from tests.golden.invented import invented_trial
from tests.unit.bench.launch.fakes import experiment

NOW = [100.0]


def main(arguments: list[str]) -> None:
    for module in (pace, lines, display):
        module.time = SimpleNamespace(monotonic=lambda: NOW[0])  # type: ignore[attr-defined]
    plan = expand(experiment("matrix.strategy=[ddp]", "measure.repeats=2"), "cpu")
    with suppress(KeyboardInterrupt), _interrupted_by_sigterm(), display.listener() as told:
        told.planned(2, 0, ())
        told.doing("verifying [1/1] ddp")
        told.trial_started(1, 2, plan.trials[0])
        for step in range(1, 41):
            NOW[0] += 1.0
            told.trial_stepped(
                TrialProgress(
                    steps=10 * step,
                    total_steps=400,
                    loss=2.0 - step / 100,
                    loss_steps=10 * step,
                )
            )
            if step == 30 and "ctrl-c" in arguments:
                signal.raise_signal(signal.SIGTERM)
        told.trial_ended(1, 2, invented_trial(metrics={"samples_per_second": 80.0}))
        told.trial_started(2, 2, plan.trials[1])
        failure = Failure(reason="rank 1:\n\x1b[31mbroken\x1b[0m\x07", remedy="mend it")
        told.trial_ended(2, 2, invented_trial(outcome=Outcome.FAILED, failure=failure))
    print("the table")


if __name__ == "__main__":
    main(sys.argv[1:])
