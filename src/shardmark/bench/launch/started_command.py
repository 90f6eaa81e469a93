"""A command that runs in the background.  Imports no torch."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress

from shardmark.base.errors import InputError
from shardmark.base.files.storage import temporary_folder

LAST_BYTES = 2**16
"""Length of the output's end in which the last lines are searched."""


class StartedCommand:
    """A command in a separate session, so that the terminal's Ctrl-C does not reach it."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        option: str,
        environment: Mapping[str, str] | None = None,
        first_line: str | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Start the command; an `InputError` about `option` says that it cannot be run.

        `first_line` is the only line of its standard input, which closes with this process or with
        `close`.  The command inherits the `descriptors`.
        """
        self._log = tempfile.TemporaryFile(  # noqa: SIM115  (lives as long as the process)
            dir=temporary_folder()
        )
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL if first_line is None else subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                env=environment,
                pass_fds=descriptors,
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            problem = f"{words[0]} cannot be run: {error.strerror or error}"
            raise InputError(option, problem, "see docs/guides/several-machines.md") from None
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # the command may have ended
                self._process.stdin.write(f"{first_line}\n".encode())
                self._process.stdin.flush()

    def failure(self) -> str | None:
        """Return the exit code and last lines after the end of the command; None before it."""
        if self._process.poll() is None:
            return None
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - LAST_BYTES))
        lines = self._log.read().decode(errors="replace").strip().splitlines()[-3:]
        output = " | ".join(lines) or "no output"
        return f"ended with code {self._process.returncode}: {output}"

    def close(self, seconds: float) -> str | None:
        """Wait so long for the command's end, then terminate and kill it; return its `failure`."""
        for end in (self._process.terminate, self._process.kill):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=seconds)
                break
            end()
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        failure = self.failure()
        self._log.close()
        return failure
