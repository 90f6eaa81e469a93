"""`shardmark schema`."""

from __future__ import annotations

import json

import typer


def schema() -> None:
    """Print the JSON schema of the experiment file, for editors."""
    from shardmark.config.experiment import experiment_schema

    typer.echo(json.dumps(experiment_schema(), indent=2))
