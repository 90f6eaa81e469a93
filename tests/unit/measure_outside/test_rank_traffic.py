"""Bytes of each rank's connections: read from the kernel, and counted on when connections end."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardmark.measure.network.rank_traffic import RankTraffic
from shardmark.measure.network.tcp_sockets import TcpSocket, parse_socket, tcp_sockets

ADDRESSES = {"127.0.0.1": "lo", "10.0.0.1": "eth0"}
FAR, OWN = "10.0.0.2", "10.0.0.1"


def tcp(inode: int, sent: int, received: int, remote: str = FAR) -> TcpSocket:
    return TcpSocket(
        inode=inode, local=OWN, remote=remote, sent_bytes=sent, received_bytes=received
    )


def holding(proc: Path, pid: int, *inodes: int) -> None:
    folder = proc / str(pid) / "fd"
    folder.mkdir(parents=True, exist_ok=True)
    for inode in inodes:
        (folder / str(inode)).symlink_to(f"socket:[{inode}]")
    if not (folder / "0").is_symlink():
        (folder / "0").symlink_to("/dev/null")


def traffic(proc: Path, *readings: list[TcpSocket]) -> RankTraffic:
    found: Iterator[list[TcpSocket]] = iter(readings)
    return RankTraffic(proc, sockets=lambda: next(found), addresses=lambda: ADDRESSES)


def counters(sent: int, received: int) -> dict[str, int]:
    return {"bytes_sent": sent, "bytes_received": received}


def test_connections_are_told_apart_by_rank_and_interface(tmp_path: Path) -> None:
    """What goes to an address of the machine itself takes the loopback."""
    holding(tmp_path, 10, 1, 2)
    holding(tmp_path, 11, 3)
    sockets = [
        tcp(1, 100, 10),
        tcp(2, 200, 20, OWN),
        tcp(3, 300, 30),
        tcp(9, 7, 7),
    ]
    found = traffic(tmp_path, sockets).read({0: [10], 1: [11], 2: [12]})
    assert found == {
        0: {"eth0": counters(100, 10), "lo": counters(200, 20)},
        1: {"eth0": counters(300, 30)},
        2: {},
    }


def test_what_an_ended_connection_sent_stays_counted(tmp_path: Path) -> None:
    holding(tmp_path, 10, 1)
    reads = traffic(tmp_path, [tcp(1, 100, 0)], [], [tcp(1, 5, 5)], [tcp(1, 3, 9)])
    sums = [reads.read({0: [10]})[0]["eth0"] for _ in range(3)]
    assert sums == [counters(100, 0), counters(100, 0), counters(105, 5)]
    assert reads.read({0: [10]})[0]["eth0"] == counters(108, 14), "the number was used again"


def test_connections_and_ranks_that_come_later_are_found(tmp_path: Path) -> None:
    """The second rank had its connection before anybody asked: it was nobody's then."""
    holding(tmp_path, 10)
    holding(tmp_path, 11, 2)
    known, later = [tcp(5, 1, 1), tcp(2, 20, 20)], tcp(6, 40, 4)
    reads = traffic(tmp_path, known, [*known, later], [*known, later])
    assert reads.read({0: [10]}) == {0: {}}
    holding(tmp_path, 10, 6)
    assert reads.read({0: [10]}) == {0: {"eth0": counters(40, 4)}}
    assert reads.read({0: [10], 1: [11]})[1] == {"eth0": counters(20, 20)}


def test_a_kernel_that_does_not_tell_is_asked_once(tmp_path: Path) -> None:
    def refused() -> list[TcpSocket]:
        raise OSError(2, "No such file or directory")

    reads = RankTraffic(tmp_path, sockets=refused)
    assert reads.read({0: [10]}) == {}
    assert "No such file" in (reads.reason or "")


@pytest.mark.parametrize(
    ("family", "address", "shown"),
    [
        (socket.AF_INET, bytes([10, 0, 0, 1]) + bytes(12), "10.0.0.1"),
        (socket.AF_INET6, bytes(15) + b"\x01", "::1"),
        (socket.AF_INET6, bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 1]), "10.0.0.1"),
    ],
)
def test_a_message_of_the_kernel(family: int, address: bytes, shown: str) -> None:
    head = bytes([family, 1, 0, 0]) + bytes(4) + address + address + bytes(28)
    info = bytes(120) + struct.pack("=QQ", 11, 22)
    old = head + struct.pack("=I", 77) + struct.pack("=HH", 4 + len(info), 2) + info
    found = parse_socket(old)
    assert found is not None
    assert (found.inode, found.local, found.remote) == (77, shown, shown)
    assert (found.sent_bytes, found.received_bytes) == (11, 22), "an old kernel: acknowledged"
    info += bytes(64) + struct.pack("=Q", 33)
    new = head + struct.pack("=I", 77) + struct.pack("=HHI", 8, 8, 0)
    found = parse_socket(new + struct.pack("=HH", 4 + len(info), 2) + info)
    assert found is not None
    assert found.sent_bytes == 33
    assert parse_socket(head + struct.pack("=I", 0)) is None
    assert parse_socket(head + struct.pack("=I", 77)) is None


def test_the_kernel_s_own_counters() -> None:
    try:
        tcp_sockets()
    except OSError as error:
        pytest.skip(f"no sock_diag: {error}")
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as near, server.accept()[0] as far:
            reads = RankTraffic()
            before = reads.read({0: [os.getpid()]})[0]["lo"]
            near.sendall(b"x" * 5000)
            assert len(far.recv(5000, socket.MSG_WAITALL)) == 5000
            after = reads.read({0: [os.getpid()]})[0]["lo"]
        assert after["bytes_received"] - before["bytes_received"] == 5000
        assert after["bytes_sent"] - before["bytes_sent"] >= 5000
        assert reads.read({0: [os.getpid()]})[0]["lo"] == after
