"""A stored run whose every text is a stranger's: each string that a file may hold is replaced."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from shardmark.base.files.run_files import RESULT_FILE
from shardmark.base.results.network import NETWORK_FILE, NetworkRecord
from shardmark.base.results.schema import TrialResult
from shardmark.base.results.store import ENVIRONMENT_FILE, EXPERIMENT_FILE
from shardmark.base.results.verification import VERIFICATION_FILE, Verification

GOLDEN = Path(__file__).parent / "v1"
MODELS: dict[str, type[BaseModel]] = {
    RESULT_FILE: TrialResult,
    NETWORK_FILE: NetworkRecord,
    VERIFICATION_FILE: Verification,
}
MAPPINGS = ("varied", "strategy_options", "settings", "missing", "reasons", "packages", "variables")
"""Their keys are texts, too."""


def hostile_copy(folder: Path, text: str) -> int:
    """Store the golden run there with the text for every string that is free; return how many."""
    shutil.copytree(GOLDEN, folder)
    replaced = 0
    for place in sorted((folder / "trials").iterdir()):
        name = f"{place.name} {text}".replace("/", " ").replace("\0", " ")
        hostile = place.rename(place.with_name(name))
        (hostile / "log.txt").write_text(text)
        replaced += _replace(hostile / RESULT_FILE, text, {"id": name, "files": {}})
    for name in (NETWORK_FILE, VERIFICATION_FILE):
        replaced += _replace(folder / name, text, {})
    environment = json.loads((folder / ENVIRONMENT_FILE).read_text())
    more = {"host": text, "packages": {text: text}, "os": text, "cpu": {"model": text}, text: text}
    more["load"] = {"average": [1.0], "busy_processes": [{"name": text, "cpu_percent": 90.0}]}
    (folder / ENVIRONMENT_FILE).write_text(json.dumps(environment | more))
    with (folder / EXPERIMENT_FILE).open("a") as file:
        file.write(f"x-more: {json.dumps(text)}\n")
    return replaced


def _replace(file: Path, text: str, more: dict[str, Any]) -> int:
    """Every string and every free key, wherever the model takes it."""
    document = json.loads(file.read_text()) | more
    model = MODELS[file.name]
    replaced = 0
    for holder, key in list(_strings(document)):
        if holder is document and key in more:
            continue
        before, holder[key] = holder[key], text
        try:
            model.model_validate_json(json.dumps(document))
            replaced += 1
        except ValidationError:
            holder[key] = before
    for mapping in list(_mappings(document)):
        mapping[text] = text
        replaced += 1
    file.write_text(model.model_validate_json(json.dumps(document)).model_dump_json())
    return replaced


def _strings(document: Any) -> Iterator[tuple[Any, Any]]:
    """Each with what holds it, and its key there."""
    pairs = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in pairs:
        if isinstance(value, str):
            yield document, key
        elif isinstance(value, dict | list):
            yield from _strings(value)


def _mappings(document: Any) -> Iterator[dict[str, Any]]:
    pairs = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in pairs:
        if key in MAPPINGS and isinstance(value, dict):
            yield value
        elif isinstance(value, dict | list):
            yield from _mappings(value)
