"""The bench of network namespaces: built, used, and gone in whatever way it ends.  Root only."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.cluster import namespaces
from benchmarks.cluster.__main__ import filled, main
from benchmarks.cluster.bench import ROOT, Node, bench
from benchmarks.cluster.speed import bits_per_second

from shardmark.core.errors import InputError, ShardmarkError

LACKING = [tool for tool in ("ip", "tc", "unshare", "setpriv") if shutil.which(tool) is None]


def why_not() -> str | None:
    """Why no bench can be built here."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if LACKING:
        return f"no {', '.join(LACKING)}: apt-get install iproute2"
    name = f"smkprobe{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
    if done.returncode:
        return f"no namespace can be made: {done.stderr.strip()}"
    try:
        device = ("dev", "lo", "root", "tbf", "rate", "1mbit", "burst", "10kb", "latency", "9ms")
        limited = subprocess.run(
            ["tc", "-n", name, "qdisc", "add", *device], check=False, capture_output=True, text=True
        )
        return f"no tbf in the kernel: {limited.stderr.strip()}" if limited.returncode else None
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


REASON = why_not()
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=str(REASON))
SEND = """
import socket, sys, time
if sys.argv[1] == "0":
    with socket.create_server(("0.0.0.0", 5000)) as server:
        peer, _ = server.accept()
        count, started = 0, time.monotonic()
        while chunk := peer.recv(1 << 20):
            count += len(chunk)
        print(count, time.monotonic() - started)
else:
    while True:
        try:
            peer = socket.create_connection(("node0", 5000))
            break
        except OSError:
            time.sleep(0.05)
    peer.sendall(b"x" * int(sys.argv[2]))
    peer.close()
"""


def present(prefix: str = "smk") -> set[str]:
    """Namespaces of this process's benches."""
    found = namespaces.NAMESPACES.glob(f"{prefix}{os.getpid():x}x*")
    return {path.name for path in found}


def alive(pid: int) -> bool:
    """Not ended; one that nobody has collected yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def host_links() -> str:
    return subprocess.run(["ip", "-o", "link"], check=True, capture_output=True, text=True).stdout


@needs_namespaces
def test_bytes_go_over_the_limited_link_and_are_counted(tmp_path: Path) -> None:
    before = {line.split(":")[1] for line in host_links().splitlines()}
    payload, speed = 2_000_000, 2e7
    with bench(nodes=2, bits_per_second=speed) as built:
        assert {line.split(":")[1] for line in host_links().splitlines()} == before
        codes = built.run_everywhere(
            lambda node: [sys.executable, "-c", SEND, str(node.number), str(payload)],
            seconds=60,
            logs=tmp_path,
        )
        sent = built.counters(1)[namespaces.INTERFACE]["sent_bytes"]
        received = built.counters(0)[namespaces.INTERFACE]["received_bytes"]
    assert codes == [0, 0]
    count, seconds = (tmp_path / "node0.log").read_text().split()
    assert int(count) == payload
    least_seconds = (payload - 4 * namespaces.LEAST_BURST_BYTES) * 8 / speed
    assert float(seconds) > least_seconds, "the link is slower than its limit"
    assert payload < sent < 1.1 * payload
    assert payload < received < 1.1 * payload
    assert not present()


@needs_namespaces
def test_nodes_have_names_and_places_of_their_own(tmp_path: Path) -> None:
    words = ["sh", "-c", "hostname; echo $BENCH_NODE of $BENCH_NODES at $BENCH_MASTER"]
    with bench(nodes=3) as built:
        assert built.run_everywhere(lambda _: words, seconds=20, logs=tmp_path) == [0, 0, 0]
        assert [node.host for node in built.nodes] == ["node0", "node1", "node2"]
    for number in range(3):
        told = (tmp_path / f"node{number}.log").read_text().splitlines()
        assert told == [f"node{number}", f"{number} of 3 at 10.99.0.1"]


@needs_namespaces
def test_a_cut_link_is_silent_and_can_be_mended(tmp_path: Path) -> None:
    connect = "import socket; socket.create_connection(('node0', 6000), timeout=1).close()"
    listen = "import socket, time; s = socket.create_server(('0.0.0.0', 6000)); time.sleep(60)"
    with bench(nodes=2) as built:
        built.start(0, [sys.executable, "-c", listen], log=tmp_path / "listener.log")

        def connects() -> bool:
            found = built.start(1, [sys.executable, "-c", connect], log=tmp_path / "connect.log")
            return found.wait(timeout=30) == 0

        def connects_soon() -> bool:
            deadline = time.monotonic() + 20
            while not (found := connects()) and time.monotonic() < deadline:
                time.sleep(0.1)
            return found

        assert connects_soon()
        built.cut(1)
        assert not connects()
        built.mend(1)
        assert connects_soon()
        built.kill(0)
        assert not connects()
    assert not present()


@needs_namespaces
def test_two_benches_at_once() -> None:
    with bench(nodes=1) as one, bench(nodes=1) as other:
        assert one.nodes[0].namespace != other.nodes[0].namespace
        assert {one.nodes[0].namespace, other.nodes[0].namespace} <= present()
    assert not present()


@needs_namespaces
def test_an_error_takes_everything_down() -> None:
    def use() -> None:
        with bench(nodes=2) as built:
            built.start(0, ["sleep", "600"])
            raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        use()
    assert not present()


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_takes_everything_down(number: signal.Signals, tmp_path: Path) -> None:
    """Even the one that nobody can catch: the guard is another process."""
    words = ["sh", "-c", f": > {tmp_path}/{{node}}; exec sleep 600"]
    builder = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.cluster", "run", "--nodes", "2", "--", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
    )
    prefix = f"smk{builder.pid:x}x0"

    def left() -> list[str]:
        return [path.name for path in namespaces.NAMESPACES.glob(f"{prefix}*")]

    deadline = time.monotonic() + 30
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    names = left()
    asleep = [pid for name in names for pid in namespaces.processes(name)]
    builder.send_signal(number)
    builder.wait(timeout=30)
    assert len(names) == 3
    assert len(asleep) == 2
    deadline = time.monotonic() + 30
    while left() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left()
    assert not [pid for pid in asleep if alive(pid)]


@needs_namespaces
def test_the_command_gives_the_first_bad_code(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--nodes", "2", "--", "sh", "-c", "exit {node}"]) == 1
    assert main(["run", "--nodes", "1", "--seconds", "0.3", "--", "sleep", "60"]) == 124
    assert "out of time" in capfd.readouterr().err


def test_only_root_can(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["run", "--", "true"]) == 2
    assert "can be built by root only" in capsys.readouterr().err


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ShardmarkError, match="no ip: install iproute2"):
        namespaces.check_root()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("unlimited", None), ("10gbit", 1e10), ("200mbit/s", 2e8), ("1.5 Gbit", 1.5e9)],
)
def test_speeds(text: str, expected: float | None) -> None:
    assert bits_per_second(text) == expected


@pytest.mark.parametrize("text", ["fast", "10", "-1mbit", "1bit", "200mb"])
def test_wrong_speeds(text: str) -> None:
    with pytest.raises(InputError, match="allowed: unlimited, or such as 10gbit"):
        bits_per_second(text)


def test_words_in_braces() -> None:
    first = Node(number=0, namespace="n0", host="node0", address="10.99.0.1")
    second = Node(number=1, namespace="n1", host="node1", address="10.99.0.2")
    word = "{node}/{nodes} {host} {address} {master} {other}"
    assert filled(word, second, first, 2) == "1/2 node1 10.99.0.2 10.99.0.1 {other}"


def test_an_experiment_runs_once_for_each_speed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Trials that failed do not keep the next speed from being tried; bad input does."""
    ran: list[tuple[list[str], str]] = []
    codes = iter([1, 0, 2])

    def everywhere(words: list[str], _: object, speed: str) -> int:
        ran.append((words, speed))
        return next(codes)

    monkeypatch.setattr("benchmarks.cluster.__main__._everywhere", everywhere)
    given = ["experiment", "quickstart", "--out", str(tmp_path), "--set", "recipe.steps=3"]
    speeds = ["--speed", "unlimited", "--speed", "200mbit/s"]
    assert main([*given, *speeds]) == 1
    assert [speed for _, speed in ran] == ["unlimited", "200mbit/s"]
    words = ran[1][0]
    assert words[words.index("--out") + 1] == str(tmp_path / "200mbit-s")
    changes = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
    assert changes == [
        *("engine.name=torchrun", "engine.rendezvous={master}:29400"),
        *("placement.nodes=2", "recipe.steps=3"),
    ]
    assert main([*given, *speeds]) == 2
    assert len(ran) == 3


def test_an_experiment_may_vary_the_nodes_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the poster's does; it is then not told how many, and must find as many as it takes."""
    ran: list[list[str]] = []

    def everywhere(words: list[str], *_: object) -> int:
        ran.append(words)
        return 0

    monkeypatch.setattr("benchmarks.cluster.__main__._everywhere", everywhere)
    given = ["experiment", "fsdp-vs-deepspeed-poster", "--out", str(tmp_path)]
    assert main(given) == 0
    assert not any("placement.nodes" in word for word in ran[0])
    assert main([*given, "--set", "matrix.nodes=[1, 4]"]) == 2
    assert "--nodes: 2, and trials take up to 4" in capsys.readouterr().err
    assert len(ran) == 1


def test_a_wrong_speed_is_found_before_the_first_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.cluster.__main__._everywhere", lambda *_: pytest.fail("ran"))
    wrong = ["experiment", "quickstart", "--out", str(tmp_path), "--speed", "1gbit"]
    assert main([*wrong, "--speed", "fast"]) == 2
    assert "found 'fast'" in capsys.readouterr().err
