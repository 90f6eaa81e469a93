"""The map of `docs/architecture.md` agrees with the code."""

from __future__ import annotations

import re
import runpy
from typing import Any

import pytest

from tests import ROOT

PAGE = ROOT / "docs" / "architecture.md"


@pytest.fixture(scope="module")
def imports() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "reference" / "imports.py"))


def test_the_page_lists_the_imported_files(imports: dict[str, Any]) -> None:
    page = PAGE.read_text()
    assert imports["BEGIN"] in page
    assert imports["END"] in page
    assert imports["with_section"](page) == page, "run python docs/reference/imports.py"


def test_the_steps_name_files_that_are_imported(imports: dict[str, Any]) -> None:
    _, _, steps = PAGE.read_text().partition("| step | file |")
    table = steps.partition("\n\n")[0]
    imported = {
        file for entries in imports["ENTRIES"].values() for file in imports["closure"](entries)
    }
    named = set(re.findall(r"`([\w/]+\.py)`", table))
    assert len(named) > 10
    assert named <= imported
