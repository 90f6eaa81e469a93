"""Every metric of the catalogue is defined, in base units."""

from __future__ import annotations

import re

from shardmark.base.metrics import METRICS

UNITS = {"seconds": "seconds", "bytes": "bytes", "watts": "watts", "joules": "joules"}


def test_every_metric_is_defined() -> None:
    for name, metric in METRICS.items():
        assert metric.name == name
        assert metric.source
        assert metric.unit, name
        assert re.fullmatch(r"[0-9A-Za-z].*[.]", metric.definition)
        for suffix, unit in UNITS.items():
            if metric.name.endswith(f"_{suffix}"):
                assert metric.unit.split("/")[0] == unit
