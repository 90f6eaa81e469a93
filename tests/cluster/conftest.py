"""What the tests of all engines share."""

from __future__ import annotations

from tests.cluster.one_machine import one  # noqa: F401  (a fixture)
