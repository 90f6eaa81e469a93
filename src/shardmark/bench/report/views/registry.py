"""The views of `shardmark compare --view NAME[:VALUE]`: each makes tables of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from shardmark.base.errors import InputError
from shardmark.base.system.plugins import by_name
from shardmark.base.table.formats import records
from shardmark.base.table.table import Table
from shardmark.bench.analysis.compare.comparison import Comparison
from shardmark.bench.report.views.epochs import epochs_tables, time_to_tables
from shardmark.bench.report.views.metrics import metrics_tables
from shardmark.bench.report.views.network import network_json, network_tables
from shardmark.bench.report.views.scaling import scaling_tables


class View(NamedTuple):
    """A view: its tables, and its form in JSON."""

    key: str
    """The view's key in JSON."""
    tables: Callable[[Comparison, str], Sequence[Table]]
    """Makes the tables from the comparison and VALUE, which is empty if the view takes none."""
    value: str = ""
    """VALUE as the usage message shows it; empty for a view that takes no value."""
    with_comparison: bool = False
    """If True, the usual comparison is printed above the tables."""
    document: Callable[[Sequence[Table]], Any] = lambda tables: [*chain(*map(records, tables))]
    """Turns the tables into what JSON holds under `key`."""


VIEWS = {
    "scaling": View("scaling", lambda comparison, _: scaling_tables(comparison)),
    "epochs": View("epochs", lambda comparison, _: epochs_tables(comparison)),
    "network": View(
        "network", lambda comparison, _: network_tables(comparison), document=network_json
    ),
    "time-to": View("time_to", time_to_tables, value="METRIC[=VALUE]"),
    "metrics": View("all_metrics", lambda comparison, _: metrics_tables(comparison)),
    "effort": View("effort", by_name("shardmark.bench.report.views.effort:effort_tables")),
    "when": View("when", by_name("shardmark.predict.when.view:when_tables")),
    "study": View(
        "against",
        by_name("shardmark.extras.studies.against_view:study_tables"),
        value="NAME",
        with_comparison=True,
    ),
}
"""The views by their names on the command line."""


def find_view(text: str) -> tuple[View, str]:
    """Return the view that `NAME` or `NAME:VALUE` asks for, and its value.

    Raises `InputError` for another name, and for a value that is missing or not expected.
    """
    name, _, value = (part.strip() for part in text.partition(":"))
    if name not in VIEWS:
        usage = [f"{name}:{view.value}" if view.value else name for name, view in VIEWS.items()]
        raise InputError("--view", f"there is no view {name!r}", f"allowed are {', '.join(usage)}")
    view = VIEWS[name]
    if view.value and not value:
        raise InputError(f"--view {name}", "it has no value", f"write {name}:{view.value}")
    if value and not view.value:
        raise InputError(f"--view {text}", "this view has no value", f"write {name}")
    return view, value
