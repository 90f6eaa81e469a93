"""The output of `--format json` has the documented fields; other tests check costly verbs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardmark.cli import main
from tests import GOLDEN
from tests.docs.pages import program
from tests.json_fields import PAGE, problems_of

COMMANDS = {
    "compare {golden}": "Comparison",
    "compare {golden} --view scaling --view epochs --view network --columns predicted": (
        "Comparison"
    ),
    "compare {golden} --view time-to:train_loss --view study:lamsal-2025": "Comparison",
    "run quickstart --dry-run --set matrix.world_size=[1,2]": "Planned trials",
    "plan language-quickstart --on h100x8 --price-per-hour 2 --search": "Plan",
    "plan resnet18 --on 4xa10g": "Plan",
    "plan hf:{model} --on 1xa10g --batch 256": "Plan",
    "doctor": "Machine",
    "list": "List",
    "list strategies": "List",
}


@pytest.mark.parametrize(("command", "document"), COMMANDS.items())
def test_output_has_the_documented_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, document: str
) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps({"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2}))
    words = command.format(golden=GOLDEN, model=model).split()
    assert main([*words, "--format", "json"]) in (0, 1)
    output = json.loads(capsys.readouterr().out)
    assert problems_of(document, output) == []


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        ({"kind": "models"}, "the document has no entries"),
        ({"kind": 3, "entries": []}, "kind is 3, documented as text"),
        ({"kind": "x", "entries": [{"name": "a"}]}, "entries.[] has no description"),
        ({"kind": "x", "entries": [], "more": 1}, "the document.more: no such field"),
        ({"kind": "x", "entries": {"a": 1}}, "entries.a: no such field"),
        ({"kind": "x", "entries": "a"}, "entries is 'a', documented as a mapping or list"),
    ],
)
def test_other_output_is_a_problem(output: Any, problem: str) -> None:
    assert problem in problems_of("List", output)


def test_every_verb_is_in_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [verb for verb in program().commands if f"`{verb}" not in page] == []
    for name, verb in program().commands.items():
        has_format = any(parameter.name == "form" for parameter in verb.params)
        assert has_format != (name in ("report", "export", "init", "schema")), name
