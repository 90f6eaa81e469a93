"""What all nodes of a run must have in common, and how to say that they have not."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from shardmark.config.axes import canonical

EXPERIMENT = "experiment"


def sections(experiment: Mapping[str, Any]) -> str:
    """Each section of the experiment with a hash of it: `name:1f..,recipe:a0..`."""
    return ",".join(f"{name}:{_hash(content)}" for name, content in sorted(experiment.items()))


def difference(theirs: Mapping[str, Any], ours: Mapping[str, str]) -> str | None:
    """Why a node with that key belongs to another run; None if it belongs to ours."""
    for name, value in ours.items():
        found = theirs.get(name)
        if found == value:
            continue
        there, here = _by_section(found), _by_section(value)
        if name == EXPERIMENT and there and here:
            names = [one for one in here | there if there.get(one) != here.get(one)]
            return f"its experiment is another one, with a different {', '.join(names)}"
        return f"its {name} is {found}, here it is {value}"
    return None


def _hash(content: Any) -> str:
    return hashlib.sha256(canonical(content).encode()).hexdigest()[:16]


def _by_section(text: object) -> dict[str, str]:
    parts = [part.partition(":") for part in str(text).split(",")]
    return {name: value for name, colon, value in parts if colon}
