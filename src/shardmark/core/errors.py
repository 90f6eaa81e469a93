"""Errors that a user can cause or fix: what was found, where, what is allowed, what to do."""

from __future__ import annotations

import errno
import os
import re
from typing import Literal

from shardmark.core.text import one_line


class ShardmarkError(Exception):
    """Base of every error that a user can cause or fix; it is told on one line."""

    def __str__(self) -> str:
        return one_line(super().__str__())


class InputError(ShardmarkError):
    """The experiment, a run folder or an argument is wrong: exit code 2.

    `where` is a file and key or an option, `found` the value met, `allowed` what would be accepted.
    Each of `more` mistakes, or lines of a traceback, has a line of its own.
    """

    def __init__(self, where: str, found: str, allowed: str, *more: ShardmarkError) -> None:
        super().__init__(where, found, allowed, *more)  # all positional, so that it can be pickled

    def __str__(self) -> str:
        where, found, allowed, *more = self.args
        return "\n".join([one_line(f"{where}: {found}; {allowed}"), *map(str, more)])


FULL = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room on that disk"),
    **dict.fromkeys((errno.EIO, errno.EROFS, errno.ESTALE, errno.ENODEV), "see to that disk"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)"),
}
"""What is wrong with a disk or the machine, and what to do."""
STORAGE_EXIT = os.EX_IOERR
"""Exit code of a process that a disk stopped, and kept from leaving a word of it."""


class StorageError(InputError):
    """A disk is full, broken or read-only, or there is no right to write: as an `InputError`."""


class DataError(ShardmarkError):
    """A data set is missing, empty or broken."""

    def __init__(self, where: str, found: str, remedy: str) -> None:
        super().__init__(where, found, remedy)

    def __str__(self) -> str:
        return one_line("{}: {}; {}".format(*self.args))


class StrategyUnavailable(ShardmarkError):  # noqa: N818  (an outcome, not a failure)
    """The strategy cannot run on this machine, with this many ranks or with these options."""

    def __init__(self, strategy: str, reason: str, remedy: str) -> None:
        super().__init__(strategy, reason, remedy)

    @property
    def reason(self) -> str:
        return str(self.args[1])

    @property
    def remedy(self) -> str:
        return str(self.args[2])

    def __str__(self) -> str:
        return one_line("cannot run {!r} here: {}; {}".format(*self.args))


MEMORY_MESSAGE = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|CUDA( driver)?( error:)? out of memory"
    r"|Cuda failure.* '?out of memory|Failed to CUDA \w*alloc"  # NCCL
    r"|\bCU[A-Z]+_\w*ALLOC\w*_FAILED"  # cuBLAS, cuDNN and the others
    r"|Cannot allocate memory"
)


ErrorKind = Literal["out_of_memory", "unavailable", "data", "storage", "input", "exception"]
KINDS: dict[type[BaseException], ErrorKind] = {
    MemoryError: "out_of_memory",
    StrategyUnavailable: "unavailable",
    DataError: "data",
    StorageError: "storage",  # before what it is a case of
    InputError: "input",
}


def error_kind(error: BaseException) -> ErrorKind:
    """What kind of end an exception is; torch's classes are known by name, without torch."""
    memory = (
        type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and MEMORY_MESSAGE.search(str(error)))
    )
    if memory:
        return "out_of_memory"
    if isinstance(error, OSError) and error.errno in FULL:
        return "storage"  # no strategy is to blame
    return next((kind for known, kind in KINDS.items() if isinstance(error, known)), "exception")
