"""TCP sockets of this network namespace with their byte counters, from the kernel.  Linux only.

Source: sock_diag(7), and `struct inet_diag_msg` and `struct tcp_info` of linux/inet_diag.h and
linux/tcp.h.  No privilege is needed.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
NLMSG_ERROR, NLMSG_DONE = 2, 3
NLM_F_REQUEST, NLM_F_DUMP = 0x1, 0x300
INET_DIAG_INFO = 2
CONNECTED = sum(1 << state for state in (1, 4, 5, 8, 9, 11))
"""Established, or half closed: the table of listening sockets need not be walked."""

_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI48x")
_ATTRIBUTE = struct.Struct("=HH")
_INODE_AT, _MESSAGE_BYTES = 68, 72
_ACKED_AT, _RECEIVED_AT, _SENT_AT = 120, 128, 200
_RECEIVE_BYTES = 256 * 1024
_MAPPED = bytes(10) + b"\xff\xff"


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpSocket:
    """One end of a connection."""

    inode: int
    """As in the links of /proc/PID/fd; never 0."""
    local: str
    remote: str
    sent_bytes: int
    """Payload, what was sent again included; what was acknowledged where the kernel is too old."""
    received_bytes: int


def tcp_sockets() -> list[TcpSocket]:
    """All connections that some process holds.  `OSError` where the kernel does not tell."""
    return [tcp for family in (socket.AF_INET, socket.AF_INET6) for tcp in _dumped(family)]


def _dumped(family: int) -> Iterator[TcpSocket]:
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (INET_DIAG_INFO - 1), CONNECTED)
    header = _HEADER.pack(
        _HEADER.size + len(request), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP, 1, 0
    )
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
    with socket.socket(socket.AF_NETLINK, kind, NETLINK_SOCK_DIAG) as link:
        link.settimeout(1.0)
        link.send(header + request)
        while True:
            for what, body in _messages(link.recv(_RECEIVE_BYTES)):
                if what == NLMSG_DONE:
                    return
                if what == NLMSG_ERROR:
                    number = -struct.unpack_from("=i", body)[0]
                    raise OSError(number, os.strerror(number))
                tcp = parse_socket(body)
                if tcp is not None:
                    yield tcp


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _HEADER.size <= len(data):
        length, what, *_ = _HEADER.unpack_from(data, at)
        yield what, data[at + _HEADER.size : at + length]
        at += (length + 3) & ~3


def parse_socket(body: bytes) -> TcpSocket | None:
    """One `inet_diag_msg` with its attributes; None for one without counters, or without owner."""
    if len(body) < _MESSAGE_BYTES:
        return None
    (inode,) = struct.unpack_from("=I", body, _INODE_AT)
    info = _attribute(body, INET_DIAG_INFO)
    if not inode or len(info) < _RECEIVED_AT + 8:
        return None
    sent_at = _SENT_AT if len(info) >= _SENT_AT + 8 else _ACKED_AT
    size = 4 if body[0] == socket.AF_INET else 16
    return TcpSocket(
        inode=inode,
        local=_address(body[8 : 8 + size]),
        remote=_address(body[24 : 24 + size]),
        sent_bytes=struct.unpack_from("=Q", info, sent_at)[0],
        received_bytes=struct.unpack_from("=Q", info, _RECEIVED_AT)[0],
    )


def _attribute(body: bytes, wanted: int) -> bytes:
    at = _MESSAGE_BYTES
    while at + _ATTRIBUTE.size <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, at)
        if kind == wanted:
            return body[at + _ATTRIBUTE.size : at + length]
        at += max((length + 3) & ~3, _ATTRIBUTE.size)
    return b""


def _address(packed: bytes) -> str:
    """As text; an IPv4 address in an IPv6 socket as the former."""
    if packed.startswith(_MAPPED):
        packed = packed[len(_MAPPED) :]
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
