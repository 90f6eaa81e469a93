"""What `fuzz.py` attacks, and with what: mutated files and messages through their real readers.

An input either does its work or is refused by an error of Shardmark's.  Whatever else comes out of
it is a find: another exception, an output that steers a terminal, 5 s, 500 MB.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import resource
import shutil
import signal
import socket
import tempfile
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from shardmark.cli import main
from shardmark.config.load import load_experiment, preset_names, preset_text, to_yaml
from shardmark.core.errors import InputError, ShardmarkError
from shardmark.core.strict_yaml import format_yaml, parse_yaml
from shardmark.launch.nodes.protocol import Channel, ChannelEndedError, own_versions
from shardmark.launch.nodes.registry import NodeRegistry
from shardmark.launch.trial_artifacts import merge_samples, merge_steps, rank_records
from shardmark.trials.matrix import expand

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden" / "v1"
MOST_SECONDS = 5.0
"""Of the processor: others may use the machine."""
MOST_WAITING_SECONDS = 120.0
MOST_BYTES = 500 * 10**6
MOST_PLACES = 20_000
MOST_MORE_BYTES = 2**31
"""Of address space, so that a find does not take the machine along."""
STEERS = "=1+2\x1b[2J\x1b]0;t\x07\x9b31m\u202e\u2028\x85\r\n| forged | \\| row <script>x</script>"

# Documents

LEAVES: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, False, 0, 1, -1, 2, 0.5, 10**18, 10**19, -(10**400), 10**400, 1e308, -1e308,
     5e-324, float("nan"), float("inf"), "", "0", "single", "ddp", "fsdp", STEERS,
     "x" * 20_000, "a\0b", "\udcff", "../../x", "/dev/zero", [], {}, [None], [[]], {"": {}}]
)  # fmt: skip
DEEP = st.integers(1, 3000).map(lambda depth: ("deep", depth))
REPLACEMENTS = st.recursive(
    LEAVES | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)
OPERATIONS = ("replace", "replace", "replace", "delete", "copy", "wrap", "rename", "add", "repeat")
Mutation = tuple[int, str, int, Any]
MUTATIONS = st.lists(
    st.tuples(st.integers(0, 9999), st.sampled_from(OPERATIONS), st.integers(0, 9999),
              REPLACEMENTS),
    min_size=1, max_size=5,
)  # fmt: skip


def mutated(document: Any, mutations: list[Mutation]) -> Any:
    """The document with a value, a key or a list of its own changed for each mutation."""
    for place, operation, other, replacement in mutations:
        places, value = list(_places(document)), deepcopy(replacement)
        if not places:
            return value
        if len(places) > MOST_PLACES:
            break
        holder, key = places[place % len(places)]
        if operation == "replace":
            holder[key] = value
        elif operation == "delete":
            del holder[key]
        elif operation == "copy":
            source, name = places[other % len(places)]
            holder[key] = json.loads(json.dumps(source[name]))
        elif operation == "wrap":
            holder[key] = [holder[key]]
        elif operation == "repeat":
            holder[key] = [holder[key]] * (other % 100)
        elif isinstance(holder, dict):
            name = value if isinstance(value, str) else str(key)[: other % 9]
            holder[name] = holder.pop(key) if operation == "rename" else value
        else:
            holder.insert(other % (len(holder) + 1), value)
    return document


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    if not isinstance(document, dict | list):
        return
    for key, value in document.items() if isinstance(document, dict) else enumerate(document):
        yield document, key
        yield from _places(value)


# Texts

TOKENS = (
    *("\t", "\n", "\0", "\x1b[2J", "\ufeff", "\x85", "\u2028", "\xff", '"', "'", "#", ": ", "- "),
    *("? ", "| ", "> ", "&a ", "*a ", "<<: *a\n", "!!python/object:os.system x", "!!binary x"),
    *("!!set {a}", "---\n", "...\n", "%YAML 9.9\n", "[", "]", "{", "}", ",", "[" * 3000),
    *("{a: " * 900, "- " * 2000, "1e999", "-.inf", ".nan", "0x" + "f" * 9000, "1" * 5000),
    *("1:2:3", "0o7", "~",
      "null", "a" * 30_000, "a: &a [x, x]\nb: &b [*a, *a]\n", "\u202e", "\U0001f600", "\\", "1_0"),
)  # fmt: skip
EDITS = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.sampled_from(("insert", "cut", "repeat", "end")),
        st.sampled_from(TOKENS),
        st.integers(1, 40),
    ),
    min_size=1,
    max_size=4,
)


def edited(text: str, edits: list[tuple[float, str, str, int]]) -> str:
    for share, operation, token, count in edits:
        at = int(share * len(text))
        if operation == "insert":
            text = text[:at] + token + text[at:]
        elif operation == "cut":
            text = text[:at] + text[at + count :]
        elif operation == "repeat":
            text = text[:at] + text[at : at + 60] * count + text[at:]
        else:
            text = text[:at]
    return text[: 2**18]


def nested(depth: int, form: str = "list") -> str:
    return "[" * depth + "]" * depth if form == "list" else '{"a":' * depth + "1" + "}" * depth


# Targets


@dataclass(frozen=True, kw_only=True)
class Target:
    """Something that reads what others have written."""

    name: str
    inputs: st.SearchStrategy[Any]
    act: Callable[[Any, Path], None]
    """Raises for a find; the folder is a new one of each portion."""
    prepare: Callable[[Path], None] = lambda _: None
    has_torch: bool = False
    """Memory is counted on top of what the process has before its first input."""


class FindError(AssertionError):
    """What an input did that none may do."""


def told(*arguments: str) -> str:
    """What a command prints, which is text whatever it read."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    if code not in (0, 1, 2):
        raise FindError(f"exit code {code}")
    text = out.getvalue() + err.getvalue()
    steering = {sign for sign in text if unicodedata.category(sign)[0] == "C"} - {"\n"}
    if steering or "\n| forged" in text:
        raise FindError(f"the output holds {steering or 'a forged row'}")
    return out.getvalue()


EXPERIMENTS = (
    *map(preset_text, preset_names()),
    *(path.read_text() for path in sorted((ROOT / "experiments").glob("*.yaml"))),
    (GOLDEN / "experiment.yaml").read_text(),
)
SETTINGS = st.tuples(
    st.sampled_from(
        ("recipe.steps", "matrix.strategy", "matrix.world_size", "seed", "engine", "recipe", "name",
         "workload.model", "matrix", "placement.nodes", "measure.repeats", "x", "recipe..a", "")
    ),
    st.sampled_from(TOKENS) | st.text(max_size=10) | LEAVES.map(repr),
)  # fmt: skip


def experiment_text(given: tuple[int, Any, Any, bool]) -> str:
    number, mutations, edits, as_json = given
    text = EXPERIMENTS[number]
    if mutations is not None:
        document = mutated(parse_yaml(text, "base"), mutations)
        as_yaml = json.dumps(document)
        if not as_json:
            with suppress(Exception):  # what YAML has no form for
                as_yaml = format_yaml(document)
        text = as_yaml
    return text if edits is None else edited(text, edits)


def untrained(*_: object) -> None:
    raise InputError("workload.tokenizer", "training one is work, not reading", "take another")


@patch("shardmark.workloads.language.tokenizers._trained", untrained)
def read_experiment(given: tuple[Any, list[tuple[str, str]], bool], folder: Path) -> None:
    """Read, resolve, write, read again, expand; by the command where the last says so."""
    text, overrides, whole = experiment_text(given[0]), given[1], given[2]
    file = folder / "experiment.yaml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    changes = [f"{key}={value}" for key, value in overrides]
    if whole:
        told("run", str(file), "--dry-run", *(word for each in changes for word in ("--set", each)))
        return
    with suppress(ShardmarkError):
        experiment = load_experiment(str(file), changes)
        file.write_text(to_yaml(experiment))
        if load_experiment(str(file)) != experiment:
            raise FindError("it is another one when it is read back")
        expand(experiment)


VIEWS: tuple[tuple[str, ...], ...] = (
    (), ("--wide",), ("--scaling",), ("--pareto",), ("--network",), ("--nodes",), ("--epochs",),
    ("--time-to", "accuracy_top1"), ("--against", "lamsal-2025"),
)  # fmt: skip
COMMANDS = st.one_of(
    st.tuples(
        st.just("compare"),
        st.sampled_from(VIEWS),
        st.sampled_from(("text", "text", "markdown", "latex", "csv", "json")),
    ),
    st.tuples(st.just("compare"), st.just(("--regression",)), st.sampled_from(("text", "json"))),
    st.tuples(st.just("export"), st.just(()), st.sampled_from(("csv", "torchrun", "accelerate"))),
)
FILES = (
    *("trials/ddp-2-0/result.json",) * 6,
    *("trials/single-1-0/result.json",) * 3,
    *("trials/fsdp-2-0/result.json",) * 2,
    *("environment.json", "network.json", "verification.json", "experiment.yaml"),
    *("trials/ddp-2-0/steps.jsonl", "trials/ddp-2-0/samples.jsonl", "trials/ddp-2-0/log.txt"),
)
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(FILES),
        st.one_of(MUTATIONS, MUTATIONS, MUTATIONS, EDITS.map(lambda edits: ("edits", edits)), DEEP),
    ),
    min_size=1,
    max_size=3,
)


def prepare_run(folder: Path) -> None:
    """The golden run with some steps and samples; its results vouch for no file beside them."""
    shutil.copytree(GOLDEN, folder / "base")
    began = 1_767_225_600.0
    for result in folder.glob("base/trials/*/result.json"):
        document = json.loads(result.read_text()) | {"files": {}}
        result.write_text(json.dumps(document))
        steps = [
            {"rank": rank, "step": step, "epoch": 0, "measured": step > 1, "samples": 32,
             "loss": 2.0, "learning_rate": 0.1, "started_at_seconds": began + step,
             "step_seconds": 1.0, "data_seconds": 0.1, "forward_seconds": 0.3,
             "backward_seconds": 0.4, "optimizer_seconds": 0.1}
            for rank in (0, 1) for step in range(6)
        ]  # fmt: skip
        sent = {"lo": {"bytes_sent": 10**6, "bytes_received": 10**6}}
        used = {"pid": 4000, "cpu_seconds": 1.0, "rss_bytes": 10**8, "threads": 4, "network": sent}
        gpu = {"uuid": "GPU-0", "utilization_percent": 50.0, "power_watts": 200.0}
        samples = [
            {"at_seconds": began + at, "ranks": [{"rank": rank, **used} for rank in (0, 1)],
             "network": sent, "gpus": [gpu], "machine": {"cores": 2, "cpu_seconds": 1.0 * at}}
            for at in range(8)
        ]  # fmt: skip
        for name, lines in (("steps.jsonl", steps), ("samples.jsonl", samples)):
            text = "".join(f"{json.dumps(line)}\n" for line in lines)
            result.with_name(name).write_text(text)
    shutil.copytree(folder / "base", folder / "run")


def prepare_report(folder: Path) -> None:
    """What draws has been loaded; that takes its time, whatever is drawn."""
    prepare_run(folder)
    told("report", str(folder / "base"), "--no-images")
    (folder / "base" / "report.html").unlink()


def changed_file(content: str, name: str, change: Any) -> bytes:
    if isinstance(change, tuple) and change[0] == "deep":
        return nested(change[1] * 40, "list" if change[1] % 2 else "dict").encode()
    if isinstance(change, tuple):
        return edited(content, change[1]).encode(errors="surrogateescape")
    if name.endswith(".jsonl"):
        lines = mutated([json.loads(line) for line in content.splitlines()], change)
        lines = lines if isinstance(lines, list) else [lines]
        return "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    if name.endswith(".json"):
        return json.dumps(mutated(json.loads(content), change)).encode()
    return edited(content, [(0.5, "insert", STEERS, 1)]).encode()


def read_run(given: tuple[list[tuple[str, Any]], tuple[str, Any, str]], folder: Path) -> None:
    """A run with some of its files changed, through a command that reads it."""
    changes, (verb, options, form) = given
    run = folder / "run"
    try:
        for name, change in changes:
            (run / name).write_bytes(
                changed_file((folder / "base" / name).read_text(), name, change)
            )
        if verb == "compare":
            runs = [str(folder / "base")] * (options == ("--regression",))
            text = told("compare", str(run), *runs, *options, "--format", form)
            if form == "json" and text:
                json.loads(text)
        elif verb == "export":
            trial = () if form == "csv" else ("--trial", "ddp-2-0")
            told("export", str(run), "--to", form, "--out", str(folder / "exported"), *trial)
        else:
            told("report", str(run), "--no-images")
    finally:
        for name, _ in changes:
            shutil.copyfile(folder / "base" / name, run / name)


# Messages


KEY = {"recipe": "r", **own_versions()}
SECRET = "known to the nodes alone"
HELLO = {"number": 1, "host": "h", "address": "127.0.0.1", "with_files": False, "key": KEY}
SENT = {"file": "rank-1.json", "first": True, "last": True}
SAID = st.one_of(
    st.tuples(st.just(HELLO), MUTATIONS),
    st.tuples(st.just(SENT), MUTATIONS),
    st.tuples(st.just({"beat": 1.0}), MUTATIONS),
    st.tuples(st.just({}), MUTATIONS),
)
RAW = st.binary(max_size=300) | st.integers(1, 5000).map(lambda depth: nested(depth * 12).encode())


@contextmanager
def listening(folder: Path) -> Iterator[NodeRegistry]:
    registry = NodeRegistry(
        ("127.0.0.1", 0), wanted=2, secret=SECRET, key=KEY, patience_seconds=MOST_SECONDS
    )
    (folder / "trial").mkdir(exist_ok=True)
    registry.keep_files_in(folder / "trial", ((0,), (1,)))
    with contextlib.closing(registry):
        yield registry


@contextmanager
def failures_of_threads() -> Iterator[None]:
    """A thread that ends with an exception is a find."""
    failed: list[BaseException | None] = []
    threading.excepthook = lambda failure: failed.append(failure.exc_value)
    try:
        yield
    finally:
        threading.excepthook = threading.__excepthook__
    if failed:
        raise FindError("a thread failed") from failed[0]


def greet(
    given: tuple[bytes, bool, bool, list[tuple[dict[str, Any], Any]], bytes, bool], folder: Path
) -> None:
    """A connection that says something; the next one, an honest node's, is welcome all the same."""
    raw, proves, joins, said, piece, sealed = given
    with failures_of_threads(), listening(folder) as registry:
        channel = Channel(socket.create_connection(("127.0.0.1", registry.port)))
        with suppress(ChannelEndedError, OSError):
            if proves:
                channel.prove(SECRET, controls=False)
                if joins:
                    channel.send(HELLO)
                    channel.receive()
                for base, mutations in said:
                    message = mutated(json.loads(json.dumps(base)), mutations)
                    channel.send(message, piece)
                if sealed:  # what is no message, from one that knows how to seal it
                    size = len(raw).to_bytes(4) + bytes(4)
                    seal = channel._own_seals.next(size + raw)
                    channel._connection.sendall(size + raw + seal)
            else:
                channel._connection.sendall(raw)
        channel.close()
        honest = Channel(socket.create_connection(("127.0.0.1", registry.port)))
        with contextlib.closing(honest):
            honest.prove(SECRET, controls=False)
            honest.send({**HELLO, "number": 0})
            if honest.receive()[0].get("welcome") != 0:
                raise FindError("an honest node is not welcome")
    left = {path.name for path in (folder / "trial").rglob("*") if path.is_file()}
    if left - {"rank-1.json", "rank-1.json.incoming"}:
        raise FindError(f"it left {left}")


# Messages of parameter servers


@dataclass(kw_only=True)
class SpokenGroup:
    """In place of `torch.distributed`: ranks say what there is, and then their connections end."""

    headers: dict[int, list[Any]]
    contents: list[Any]
    """None: just what is expected, full of ones."""
    silent: threading.Event = field(default_factory=threading.Event)

    def recv(self, tensor: Any, source: int, tag: int) -> None:
        import torch

        from shardmark.strategies.parameter_server.messages import CONTENT, HEADER, LIFE

        if tag == LIFE:
            self.silent.wait()
        said = {HEADER: self.headers.get(source), CONTENT: self.contents}.get(tag)
        content = said.pop(0) if said else b""
        if content is None and tensor.nbytes < 2**20:
            tensor.fill_(1)
        elif isinstance(content, tuple):
            tensor.copy_(torch.tensor(content, dtype=tensor.dtype))
        elif content is not None and len(content) == tensor.nbytes:
            tensor.view(torch.uint8).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        else:  # as gloo does where it gets another size, or the other side has gone
            self.silent.set()
            raise RuntimeError("Connection closed by peer")

    def send(self, tensor: Any, to: int, tag: int) -> None:
        """Nobody listens."""


NUMBER = st.sampled_from(
    [0.0, 1.0, 5.0, 6.0, 58.0, 0.5, -1.0, 2.0**20, 2.0**31, 2.0**53, 2.0**63, 1e308, -1e308,
     float("nan"), float("inf"), -float("inf")]
) | st.floats()  # fmt: skip
HEADERS = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 9).map(float), st.just(0.0), st.just(0.1)),
        st.tuples(st.integers(1, 9).map(float), NUMBER, NUMBER),
        st.tuples(NUMBER, NUMBER, NUMBER),
    ),
    max_size=6,
)
CONTENTS = st.lists(
    st.none()
    | st.binary(max_size=60)
    | st.integers(-3, 99).map(lambda size: size.to_bytes(8, "little", signed=True)),
    max_size=8,
)


def load_torch(_: Path) -> None:
    for name in ("server", "worker"):
        importlib.import_module(f"shardmark.strategies.parameter_server.{name}")


def speak(given: tuple[Any, Any, int, int | None, bool], folder: Path) -> None:  # noqa: ARG001
    """Rank 0 says it to a server, which rank 1 leaves; then a server says it to a worker."""
    import torch

    from shardmark.core.recipe import Recipe
    from shardmark.strategies.parameter_server import messages
    from shardmark.strategies.parameter_server.buckets import partition_parameters
    from shardmark.strategies.parameter_server.server import GradientServer
    from shardmark.strategies.parameter_server.worker import WorkerGroup, talking_to_servers

    headers, contents, workers, bound, checkpoints = given
    close = (float(messages.Kind.CLOSE), 0.0, 0.0)
    model = torch.nn.Linear(5, 3)
    (buckets,) = partition_parameters(model, servers=1, bucket_bytes=30, wire="fp32")
    server = GradientServer(
        model,
        buckets,
        recipe=Recipe(global_batch=4, steps=2),
        workers=workers,
        bound=bound,
        norm_group=None,
    )
    threads = set(threading.enumerate())
    group = SpokenGroup(headers={0: [*headers], 1: [close]}, contents=[*contents])
    with patch.object(messages, "dist", group), failures_of_threads():
        with suppress(ShardmarkError):
            server.serve((lambda _: None) if checkpoints else None)
        group.silent.set()
        for thread in set(threading.enumerate()) - threads:
            thread.join(MOST_SECONDS)  # one that waits ends with the server's process
    group = SpokenGroup(headers={}, contents=[*contents], silent=group.silent)
    with patch.object(messages, "dist", group):
        with suppress(ShardmarkError):
            WorkerGroup([1]).gather("mine")
        with suppress(ShardmarkError), talking_to_servers():
            messages.receive_step_shard(1, end_step=2, workers=workers)


# Files of nodes and ranks


LEFT = ("rank-1.json", "samples.node-1.jsonl", "rank-1.steps.jsonl", "lost-1.txt")


def prepare_left(folder: Path) -> None:
    """What two ranks leave for the controller."""
    rank = json.loads((GOLDEN / "trials/ddp-2-0/result.json").read_text())["ranks"][1]
    line = {"rank": 1, "step": 0, "measured": True, "loss": 2.0, "step_seconds": 1.0}
    contents = {
        "rank-1.json": rank,
        "samples.node-1.jsonl": {"at_seconds": 1.0, "ranks": [], "network": {}, "gpus": []},
        "rank-1.steps.jsonl": line,
        "lost-1.txt": "killed by signal 9",
    }
    (folder / "left").mkdir()
    for name, content in contents.items():
        (folder / "left" / name).write_text(f"{json.dumps(content)}\n")


def collect(given: list[tuple[str, Any]], folder: Path) -> None:
    """What a node or a dying rank left, as the controller gathers it."""
    trial = folder / "gathered"
    shutil.rmtree(trial, ignore_errors=True)
    shutil.copytree(folder / "left", trial)
    for name, change in given:
        content = (folder / "left" / name).read_text()
        (trial / name).write_bytes(changed_file(content, name, change))
    with suppress(ShardmarkError):
        rank_records(trial, range(2))
        merge_steps(trial, 2)
        merge_samples(trial)


NUMBERS = st.integers(0, len(EXPERIMENTS) - 1)
TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target(
            name="experiments",
            inputs=st.tuples(
                st.one_of(
                    st.tuples(NUMBERS, MUTATIONS, st.none(), st.booleans()),
                    st.tuples(NUMBERS, MUTATIONS, EDITS, st.booleans()),
                    st.tuples(NUMBERS, st.none(), EDITS, st.just(value=False)),
                ),
                st.just([]) | st.lists(SETTINGS, max_size=2),
                st.integers(0, 19).map(lambda number: number == 7),
            ),
            act=read_experiment,
        ),
        Target(
            name="results",
            inputs=st.tuples(CHANGES, COMMANDS),
            act=read_run,
            prepare=prepare_run,
        ),
        Target(
            name="reports",
            inputs=st.tuples(CHANGES, st.just(("report", (), ""))),
            act=read_run,
            prepare=prepare_report,
        ),
        Target(
            name="messages",
            inputs=st.tuples(RAW, st.booleans(), st.booleans(), st.lists(SAID, max_size=3),
                             st.binary(max_size=99), st.booleans()),
            act=greet,
        ),
        Target(
            name="parameter_server",
            inputs=st.tuples(HEADERS, CONTENTS, st.integers(1, 2), st.sampled_from([0, 1, None]),
                             st.booleans()),
            act=speak,
            prepare=load_torch,
            has_torch=True,
        ),
        Target(
            name="left_files",
            inputs=st.lists(
                st.tuples(
                    st.sampled_from(LEFT),
                    st.one_of(MUTATIONS, EDITS.map(lambda edits: ("edits", edits)), DEEP),
                ),
                min_size=1,
                max_size=3,
            ),
            act=collect,
            prepare=prepare_left,
        ),
    )
}  # fmt: skip


# One portion of inputs


@dataclass(kw_only=True)
class Measured:
    """What a portion found."""

    target: str
    seed: int
    inputs: int = 0
    slowest_seconds: float = 0.0
    peak_bytes: int = 0
    finds: list[str] = field(default_factory=list)


class HangError(BaseException):
    """Not an `Exception`, so that nothing takes it for an error of the input's."""


def attacked(name: str, number: int, count: int) -> Measured:
    """Up to so many inputs of a target; a find is shrunk, and ends the portion."""
    target = TARGETS[name]
    measured = Measured(target=name, seed=number)
    last: Any = None

    with tempfile.TemporaryDirectory(prefix="shardmark-fuzz-") as made, in_folder(Path(made)):
        folder = Path(made)
        target.prepare(folder)

        @seed(number)
        @settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(target.inputs)
        def attack(made_up: Any) -> None:
            measured.inputs += 1
            nonlocal last
            last = made_up
            began = time.process_time()
            with at_most_seconds():
                target.act(made_up, folder)
            measured.slowest_seconds = max(measured.slowest_seconds, time.process_time() - began)
            used_bytes = peak_bytes() - loaded_bytes
            measured.peak_bytes = max(measured.peak_bytes, used_bytes)
            if used_bytes > MOST_BYTES:
                reset_peak()
                raise FindError("it took more than 500 MB")

        reset_peak()
        loaded_bytes = peak_bytes() if target.has_torch else 0
        try:
            attack()
        except (Exception, HangError) as error:
            notes = "\n".join(getattr(error, "__notes__", ())) or repr(last)
            measured.finds.append(f"{_traced(error)}\n{notes[:3000]}")
    return measured


def _traced(error: BaseException) -> str:
    import traceback

    return "".join(traceback.format_exception(error)[-8:])[-3000:]


@contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    with contextlib.chdir(folder):
        yield


@contextmanager
def at_most_seconds() -> Iterator[None]:
    def hang(number: int, _: object) -> None:
        waited = number == signal.SIGALRM
        seconds = MOST_WAITING_SECONDS if waited else MOST_SECONDS
        raise HangError(f"it {'waited' if waited else 'worked'} for more than {seconds:g} s")

    timers = {
        signal.SIGPROF: (signal.ITIMER_PROF, MOST_SECONDS),
        signal.SIGALRM: (signal.ITIMER_REAL, MOST_WAITING_SECONDS),
    }
    before = {number: signal.signal(number, hang) for number in timers}
    for timer, seconds in timers.values():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for number, (timer, _) in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


def limit_memory() -> None:
    """Of this process from now on: a find is an error, and not the end of the machine."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_MORE_BYTES, resource.RLIM_INFINITY))


def reset_peak() -> None:
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The most of memory that this process has had since the last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
