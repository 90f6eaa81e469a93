"""`shardmark schema`: prints the JSON schema of the experiment file."""

from __future__ import annotations

import json

from shardmark.base.text import say


def schema() -> None:
    """Print the JSON schema of the experiment file, for editors."""
    from shardmark.experiment.experiment import experiment_schema

    say(*json.dumps(experiment_schema(), indent=2).split("\n"))
