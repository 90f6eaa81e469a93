"""Imports all frameworks once where all scripts of the zoo are audited."""

from __future__ import annotations

import os

import pytest  # noqa: TC002 - pytest resolves the annotation of a hook

from tests.zoo.forked import FRAMEWORKS_VARIABLE


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("markexpr") == "zoo":
        os.environ[FRAMEWORKS_VARIABLE] = "transformers.trainer accelerate lightning deepspeed"
