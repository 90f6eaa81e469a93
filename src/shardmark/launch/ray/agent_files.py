"""Files that an actor's rank leaves for the node beside its record.  Imports no torch."""

from __future__ import annotations

AGENT_LOG = "agent.log"
"""Of all guardians of a node together."""

OUTPUT = "logs/ray/attempt_0/{}"
"""Where a local rank's output goes: the launcher's layout, which the log is put together from."""


def death_file(local_rank: int) -> str:
    """How the rank ended, if badly."""
    return f"agent.{local_rank}.json"
