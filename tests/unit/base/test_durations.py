from __future__ import annotations

import pytest

from shardmark.base.durations import duration, parse_seconds
from shardmark.base.errors import InputError


def test_durations_are_parsed() -> None:
    read = [parse_seconds(text, "--budget") for text in ("90s", "30m", "1h30m", "0.5h")]
    assert read == [90.0, 1800.0, 5400.0, 1800.0]
    for text in ("30", "m", "", "30 minutes", "-3m", "0s", "3m!"):
        with pytest.raises(InputError, match="30m"):
            parse_seconds(text, "--budget")


def test_durations_are_formatted() -> None:
    seconds = (0.4, 99.4, 100, 5940, 12000)
    assert [*map(duration, seconds)] == ["0.4 s", "99 s", "2 min", "99 min", "3 h 20 min"]
