"""Every row node by node: the numbers of its own ranks and devices alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.compare.rows import Row, main_rate
from shardmark.analysis.statistics.intervals import Estimate, estimate_mean
from shardmark.analysis.trial.raw_files import Line, number, raw_lines, samples_by_node
from shardmark.analysis.trial.summarise import summarise
from shardmark.core.metrics import METRICS, TRIAL_METRICS
from shardmark.core.run_files import STEPS_FILE
from shardmark.report.table.notes import by_reason, left_out
from shardmark.report.table.table import Column, Table, for_programs, metric, table_by_row
from shardmark.results.schema import RankRecord, Summary, TrialResult
from shardmark.results.store import RunFolder

GROUPS = ("time", "rate", "memory", "network", "processes", "device")
OF_NO_NODE = ("epoch_seconds", "total_seconds", "model_flops_per_second", "mfu", "hfu")
NODE_METRICS = (
    *(n for n in TRIAL_METRICS if METRICS[n].group in GROUPS and n not in OF_NO_NODE),
    *("nonfinite_steps", "skipped_steps", "data_errors"),
)
"""Of the catalogue: what differs from node to node."""
SHOWN = ("step_seconds", "exposed_communication_seconds", "peak_memory_bytes", "peak_rss_bytes",
         "device_used_bytes", "cpu_percent", "gpu_utilization", "power_watts", "processes",
         "threads")  # fmt: skip
"""For people, beside the rate; CSV and JSON hold every metric."""
EXPLANATION = (
    "A node's numbers are those of its own ranks: rates and processes together, CPU and GPU %"
    " the mean, the rest of the fullest or slowest rank. CPU: 100 is one core kept busy. Bytes by"
    " node and interface: --network."
)


class NodeOfRow(NamedTuple):
    """One node of one row, over the trials that ended ok."""

    node: int
    records: Sequence[RankRecord]
    """Its ranks in every repeat, servers included."""
    metrics: Mapping[str, Estimate | None]
    """`NODE_METRICS`; each comes from the ranks as the catalogue says."""
    missing: Mapping[str, str]

    @property
    def hosts(self) -> str:
        return ", ".join(dict.fromkeys(rank.host for rank in self.records))

    @property
    def ranks(self) -> list[int]:
        return sorted({rank.rank for rank in self.records})

    @property
    def servers(self) -> int:
        return len({rank.rank for rank in self.records if rank.role == "server"})


def nodes_tables(comparison: Comparison) -> list[Table]:
    """One line for each node of each row."""
    nodes = [(row, node) for row in comparison.rows for node in _nodes_of(row)]
    shown = (main_rate(comparison.rows), *SHOWN)
    table = table_by_row(
        "Node by node",
        nodes,
        [
            (Column("node", "node", names_row=True), lambda node: node.node),
            (Column("hosts", "host", numeric=False), lambda node: node.hosts),
            (Column("its", "its", unit="ranks", shown_to="people"), _ranks),
            (for_programs("ranks"), lambda node: node.ranks),
            (for_programs("servers"), lambda node: node.servers),
            *(metric(name) for name in shown),
            *(metric(n, shown_to="programs") for n in NODE_METRICS if n not in shown),
        ],
        [*_notes(nodes, shown), *left_out(comparison.rows)],
    )
    return [table]


def _ranks(node: NodeOfRow) -> str:
    """Workers, and servers beside them: `2+1`."""
    workers = len(node.ranks) - node.servers
    return f"{workers}+{node.servers}" if node.servers else str(workers)


def _notes(nodes: Sequence[tuple[Row, NodeOfRow]], shown: Sequence[str]) -> list[str]:
    if not nodes:
        return ["No trial ended ok."]
    notes = [EXPLANATION]
    if any(node.servers for _, node in nodes):
        notes.append("Parameter servers stand behind the +.")
    if max(len(row.ok_trials) for row, _ in nodes) > 1:
        notes.append("Means over the repeats, ± 95 % interval of the mean (Student's t).")
    # What no line has, as a CPU's device metrics, has no column either and needs no reason.
    unknown = [
        (f"Not known: {name}: {node.missing[name]}", f"node {node.node} of {row.place}")
        for name in shown
        if any(name not in node.missing for _, node in nodes)
        for row, node in nodes
        if name in node.missing
    ]
    return [*notes, *by_reason(unknown, len(nodes))]


def _nodes_of(row: Row) -> list[NodeOfRow]:
    """Every node of the trials that ended ok; reads their raw files."""
    raw = [(trial, *_raw(row, trial)) for trial in row.ok_trials]
    nodes = []
    for place in sorted({rank.node for trial, *_ in raw for rank in trial.ranks}):
        ranks = [[r for r in trial.ranks if r.node == place] for trial, *_ in raw]
        summaries = [
            _summary(place, own, *files) for own, files in zip(ranks, raw, strict=True) if own
        ]
        values = {
            name: [value.value for known, _ in summaries if (value := known[name]) is not None]
            for name in NODE_METRICS
        }
        nodes.append(
            NodeOfRow(
                node=place,
                records=[rank for own in ranks for rank in own],
                metrics={n: estimate_mean(known) if known else None for n, known in values.items()},
                missing={n: summaries[0][1][n] for n, known in values.items() if not known},
            )
        )
    return nodes


def _raw(row: Row, trial: TrialResult) -> tuple[list[Line], Mapping[int, list[Line]]]:
    """Steps, and samples by node; lines that are none are left out."""
    if row.folder is None:
        return [], {}
    folder = RunFolder(row.folder).trial_folder(trial.id)
    steps = [
        line
        for line in raw_lines(folder / STEPS_FILE)
        if "measured" in line and None not in (number(line.get("step")), number(line.get("rank")))
    ]
    return steps, samples_by_node(folder)


def _summary(
    node: int,
    ranks: Sequence[RankRecord],
    trial: TrialResult,
    steps: Sequence[Line],
    samples: Mapping[int, Sequence[Line]],
) -> tuple[Mapping[str, Summary | None], Mapping[str, str]]:
    """The catalogue's own computations, given one node's ranks and samples.

    What was sampled is cut to the windows of the node's slowest rank, so that one clock timed both;
    on a node that only holds parameters, to those of the trial's slowest.
    """
    return summarise(
        ranks,
        steps,
        samples.get(node, ()),
        launched_at_seconds=trial.started_at_seconds,
        total_seconds=trial.total_seconds,
        device_type=str(trial.trial.get("device_type", "cpu")),
        precision=trial.precision,
        tf32=False,
        layout=trial.layout,
        steps_per_epoch=None,
        timed_by=[rank for rank in trial.ranks if rank.role == "worker" and rank.lost is None],
    )
