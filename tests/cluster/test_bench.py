"""The bench of network namespaces: built, used, and gone in whatever way it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from benchmarks.cluster import namespaces
from benchmarks.cluster.__main__ import main
from benchmarks.cluster.bench import ROOT, bench

from tests.cluster.needs import needs_bench
from tests.waiting import wait_for

pytestmark = needs_bench

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


def present(pid: int | None = None) -> set[str]:
    """Namespaces of that process's benches, by default of this one's."""
    found = namespaces.NAMESPACES.glob(f"smk{pid or os.getpid():x}x*")
    return {path.name for path in found}


def alive(process: psutil.Process) -> bool:
    """Not ended; one that nobody has collected yet has."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def host_links() -> set[str]:
    lines = subprocess.run(["ip", "-o", "link"], check=True, capture_output=True, text=True).stdout
    return {line.split(":")[1] for line in lines.splitlines()}


def test_bytes_go_over_the_limited_link_and_are_counted(tmp_path: Path) -> None:
    before = host_links()
    payload, speed = 2_000_000, 2e7
    with bench(nodes=2, bits_per_second=speed) as built:
        assert host_links() == before
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signal_removes_namespaces_and_processes(number: signal.Signals, tmp_path: Path) -> None:
    """Even the one that nobody can catch: the guard is another process."""
    words = ["sh", "-c", f": > {tmp_path}/{{node}}; exec sleep 600"]
    builder = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.cluster", "run", "--nodes", "2", "--", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
    )
    wait_for(lambda: len([*tmp_path.iterdir()]) == 2)
    names = present(builder.pid)
    asleep = [psutil.Process(pid) for name in names for pid in namespaces.processes(name)]
    builder.send_signal(number)
    builder.wait(timeout=30)
    assert len(names) == 3
    assert len(asleep) == 2
    wait_for(lambda: not present(builder.pid))
    wait_for(lambda: not any(map(alive, asleep)))


def test_the_command_gives_the_first_bad_code(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--nodes", "2", "--", "sh", "-c", "exit {node}"]) == 1
    assert main(["run", "--nodes", "1", "--seconds", "0.3", "--", "sleep", "60"]) == 124
    assert "out of time" in capfd.readouterr().err
