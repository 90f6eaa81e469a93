"""A bench of network namespaces, by root, from the repository's root.

    python -m benchmarks.cluster run --nodes 2 --speed 1gbit -- COMMAND...
    python -m benchmarks.cluster experiment FILE --nodes 2 --speed 1gbit --speed 200mbit --out DIR
    python -m benchmarks.cluster collectives --nodes 2 --speed 200mbit --megabytes 20
    python -m benchmarks.cluster links-table DIR

`run` starts the command on every node at once and ends with the first code that is not zero.  In
its words, {node} is the node's number, {nodes} how many there are, {host} and {address} its own
name and address, {master} the address of node 0; so do BENCH_NODE, BENCH_NODES and BENCH_MASTER.
`experiment` runs one with the engine `torchrun`, at each speed into a folder of that name; its
`placement.nodes` is set to --nodes unless its matrix varies that, and --set changes other keys.
`collectives` measures bytes and time of single collectives.  `links-table` makes one table of the
runs that `experiment` wrote to DIR, and lists the pairs of strategies whose order changes.  All
namespaces are removed at the end, also after a failure.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cluster.bench import UNLIMITED, Node, bench, bits_per_second
from benchmarks.harness import RESULTS

from shardmark.base.errors import InputError, ShardmarkError
from shardmark.experiment.load import load_experiment
from shardmark.experiment.matrix import expand

BAD_INPUT = 2
INTERRUPTED = 130
TERMINATED = 143
OUT_OF_TIME = 124
TRIALS_FAILED = 1
PORT = 29400


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    options = _options(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(TERMINATED))
    try:
        code = _answer(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader is gone; Python would fail to flush once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _answer(options: argparse.Namespace) -> int:
    try:
        verbs = {
            "run": _run,
            "experiment": _experiment,
            "collectives": _collectives,
            "links-table": _links_table,
        }
        return verbs[str(options.what)](options)
    except ShardmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(options: argparse.Namespace) -> int:
    words = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not words:
        raise InputError("command", "none is given", "write it after --")
    return _everywhere(words, options, options.speed)


def _experiment(options: argparse.Namespace) -> int:
    speeds = options.speed or [UNLIMITED]
    for speed in speeds:
        bits_per_second(speed)  # fails before the first run takes an hour
    changes = _changes(options)
    codes = []
    for speed in speeds:
        print(f"links: {speed}", flush=True)
        words = [
            *(sys.executable, "-m", "shardmark", "run", options.experiment),
            *("--out", str(options.out / speed.replace("/", "-"))),
            *(word for change in changes for word in ("--set", change)),
        ]
        codes.append(_everywhere(words, options, speed))
        if codes[-1] not in (0, TRIALS_FAILED):
            return codes[-1]
    return max(codes)


def _changes(options: argparse.Namespace) -> list[str]:
    """Changes to the experiment; raises `InputError` if it takes more nodes than there are."""
    engine = ["engine.name=torchrun", f"engine.rendezvous={{master}}:{PORT}"]
    given = options.set or []
    experiment = load_experiment(options.experiment, [engine[0], *given])
    if "placement.nodes" not in experiment.matrix:
        return [*engine, f"placement.nodes={options.nodes}", *given]
    most = max(trial.nodes for trial in expand(experiment).trials)
    if most > options.nodes:
        raise InputError("--nodes", f"{options.nodes}, and trials take up to {most}", "as many")
    return [*engine, *given]


def _everywhere(words: Sequence[str], options: argparse.Namespace, speed: str) -> int:
    """Run the command on every node at that speed; return the first exit code that is not 0."""
    with bench(nodes=options.nodes, bits_per_second=bits_per_second(speed)) as built:
        first = built.nodes[0]

        def words_of(node: Node) -> list[str]:
            return [filled(word, node, first, options.nodes) for word in words]

        codes = built.run_everywhere(words_of, seconds=options.seconds)
    if None in codes:
        print(f"out of time after {options.seconds:g} s", file=sys.stderr)
        return OUT_OF_TIME
    return next((abs(code) for code in codes if code), 0)


def filled(word: str, node: Node, first: Node, nodes: int) -> str:
    """Replace the known names in braces; leave other braces as they are."""
    values = {
        "node": str(node.number),
        "nodes": str(nodes),
        "host": node.host,
        "address": node.address,
        "master": first.address,
    }
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def _collectives(options: argparse.Namespace) -> int:
    from benchmarks.cluster.collectives import MB, measure

    table = measure(
        nodes=options.nodes,
        payload_bytes=int(options.megabytes * MB),
        bits_per_second=bits_per_second(options.speed),
    )
    print(
        f"{options.nodes} nodes with one rank each, {options.speed} links, "
        f"payload {options.megabytes:g} MB; one call, mean over ranks\n"
    )
    print(table.markdown())
    return 0


def _links_table(options: argparse.Namespace) -> int:
    from benchmarks.cluster.link_speeds import markdown, read_speeds, reversals_of, write_table

    speeds = read_speeds(options.runs)
    runs = options.runs.resolve().name if options.runs.is_absolute() else options.runs
    stored = write_table(speeds, options.out, f"python -m benchmarks.cluster links-table {runs}")
    print(markdown(speeds, reversals_of(speeds)))
    print("\n".join(f"stored: {path}" for path in stored))
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="what", required=True)
    run = verbs.add_parser("run", help="a command on every node")
    collectives = verbs.add_parser("collectives", help="bytes and seconds of single collectives")
    experiment = verbs.add_parser("experiment", help="an experiment across the nodes")
    for verb in (run, experiment, collectives):
        verb.add_argument("--nodes", type=int, default=2)
    for verb in (run, collectives):
        verb.add_argument("--speed", default=UNLIMITED, help="of each link, such as 200mbit")
    for verb in (run, experiment):
        verb.add_argument("--seconds", type=float, default=86400.0, help="time limit")
    run.add_argument("command", nargs=argparse.REMAINDER)
    experiment.add_argument("experiment", help="file or preset")
    experiment.add_argument("--speed", action="append", help="one run for each that is given")
    experiment.add_argument("--out", type=Path, required=True, help="folder for the runs")
    experiment.add_argument("--set", action="append", metavar="KEY=VALUE")
    collectives.add_argument("--megabytes", type=float, default=4.0, help="payload of a call")
    table_of = verbs.add_parser("links-table", help="table of the runs in a folder")
    table_of.add_argument("runs", type=Path, metavar="DIR", help="what `experiment --out` wrote")
    table_of.add_argument("--out", type=Path, default=RESULTS, help="folder for the files")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
