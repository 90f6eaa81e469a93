"""Environment variables for the length of an export."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def variables(wanted: Mapping[str, str]) -> Iterator[None]:
    """Set those that the user has not set; afterwards everything is as it was.

    Trackers' libraries read their settings here, and set some variables of their own.
    """
    before = dict(os.environ)
    os.environ.update({name: value for name, value in wanted.items() if name not in before})
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
