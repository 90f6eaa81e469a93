"""Starts a node process on each of a list of hosts, by ssh or whatever leads there."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from shardmark.core.errors import InputError, ShardmarkError
from shardmark.launch.nodes.roster import Roster

if TYPE_CHECKING:
    from shardmark.config.engines import TorchrunOptions

LOOPBACK = "127.0.0.1"
END_SECONDS = 10.0
"""For node processes to end, once they have been told to."""


class Commands:
    """Starts node 0's process here, and the others over the hosts, if there are any."""

    def __init__(self, options: TorchrunOptions, nodes: int, key: Mapping[str, str]) -> None:
        self._options = options
        self._nodes = nodes
        self._key = key
        self._started: dict[int, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}
        self._roster: Roster | None = None

    def start(self, roster: Roster) -> None:
        self._roster = roster
        host = resolved(self._options.address[0])
        local = self._node(sys.executable, 0, listening_address(host) or LOOPBACK, roster.port)
        self._popen(0, [*local, "--here"])
        if self._options.hosts:
            for number in range(1, self._nodes):
                command = self.remote(number, self._options.address[0], roster.port)
                self._popen(number, command)

    def remote(self, number: int, host: str, port: int | str) -> list[str]:
        """The command that starts a node process on another host."""
        python = self._options.python or sys.executable
        node = shlex.join(self._node(python, number, host, port))
        path = os.environ.get("PYTHONPATH")
        variables = f"PYTHONPATH={shlex.quote(path)} " if path else ""
        command = ["sh", "-c", f"cd {shlex.quote(str(Path.cwd()))} && {variables}exec {node}"]
        words: list[str] = []
        for word in shlex.split(self._options.remote):
            if word == "{command}":
                words += command
            else:
                known = {"host": self._options.hosts[number], "quoted": shlex.join(command)}
                for name, value in known.items():
                    word = word.replace(f"{{{name}}}", value)  # noqa: PLW2901
                words.append(word)
        return words

    def check(self) -> None:
        for number, (process, log) in self._started.items():
            if process.poll() is not None:
                log.seek(0)
                lines = log.read().decode(errors="replace").strip().splitlines()[-3:]
                where = f" ({self._options.hosts[number]})" if self._options.hosts else ""
                raise ShardmarkError(
                    f"the command that starts node {number}{where} ended with code "
                    f"{process.returncode}: {' | '.join(lines) or 'no output'}"
                )

    def close(self) -> None:
        came = {member.number for member in self._roster.members()} if self._roster else set()
        deadline = time.monotonic() + END_SECONDS
        for number, (process, log) in self._started.items():
            if number not in came:
                process.kill()  # it has not been told: it would go on trying to come
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            log.close()
        self._started.clear()

    def _node(self, python: str, number: int, host: str, port: int | str) -> list[str]:
        words = [
            python,
            "-m",
            "shardmark.launch.nodes.joining",
            "--host",
            host,
            "--port",
            str(port),
        ]
        words += ["--number", str(number), "--join-seconds", f"{self._options.join_seconds:g}"]
        for name, value in self._key.items():
            words += ["--key", f"{name}={value}"]
        if self._options.interface is not None:
            words += ["--interface", self._options.interface]
        return words

    def _popen(self, number: int, command: Sequence[str]) -> None:
        log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process)
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # the terminal's Ctrl-C reaches the controller alone
            )
        except OSError as error:
            log.close()
            raise InputError(
                "engine.remote", f"{command[0]} cannot be run: {error.strerror}", "see the guide"
            ) from None
        self._started[number] = (process, log)


def resolved(host: str) -> str:
    """The host's address."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise InputError(
            "engine.rendezvous",
            f"{host} has no address: {error.strerror or error}",
            "a name or an address of node 0 that every node knows",
        ) from None


def listening_address(address: str) -> str:
    """Where to listen: there, or everywhere if a name leads to this machine's loopback alone."""
    return "" if address.startswith("127.") and address != LOOPBACK else address
