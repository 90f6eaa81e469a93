"""Commands that start node processes elsewhere, and what becomes of them."""

from __future__ import annotations

import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress

from shardmark.config.engines import LOOPBACK
from shardmark.core.errors import InputError


class StartedCommand:
    """A command under way in a session of its own: the terminal's Ctrl-C is the controller's."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        option: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`option` is the one to mend where it cannot be run, which is an `InputError`."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process)
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            why = f"{words[0]} cannot be run: {error.strerror or error}"
            raise InputError(option, why, "see docs/guides/several-machines.md") from None

    def failure(self) -> str | None:
        """Its exit code and last words, once it has ended."""
        if self._process.poll() is None:
            return None
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()[-3:]
        said = " | ".join(lines) or "no output"
        return f"ended with code {self._process.returncode}: {said}"

    def close(self, seconds: float) -> None:
        """Wait so long for its end, then terminate it, then kill it."""
        for end in (self._process.terminate, self._process.kill):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=seconds)
                break
            end()
        self._process.wait()
        self._log.close()


def resolved(host: str, option: str) -> str:
    """The host's address; `InputError` about the option if it has none."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise InputError(
            option,
            f"{host} has no address: {error.strerror or error}",
            "a name or an address of node 0 that every node knows",
        ) from None


def listening_address(address: str) -> str:
    """Where to listen: there, or everywhere if a name leads to this machine's loopback alone."""
    return "" if address.startswith("127.") and address != LOOPBACK else address
