"""Options of one command that runs trials, beside the experiment.  Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of one `run`, from the command line or from Python."""

    retry: bool = False
    """Also repeat failed, timed-out and disturbed trials."""
    remeasure: bool = False
    """Measure everything anew; the stored results move to `set-aside` in the run's folder."""
    budget_seconds: float | None = None
    """Start no trial that is not expected to end within this time."""
    quiet: bool = False
    """Print failures and the final table alone."""
