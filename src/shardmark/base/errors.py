"""Errors that a user can cause or fix.  Each names the place, the problem and a remedy."""

from __future__ import annotations

import errno
import os
import re
from typing import Literal

from shardmark.base.text import one_line


class ShardmarkError(Exception):
    """Base of every error that a user can cause or fix.  Its text is one line."""

    def __str__(self) -> str:
        return one_line(super().__str__())


class InputError(ShardmarkError):
    """The experiment, a run folder or an argument is invalid; the exit code is 2.

    `place` is a file and key, or an option; `problem` describes the invalid value; `allowed`
    describes valid values or a remedy.  Every further mistake is formatted on a line of its own.
    """

    def __init__(self, place: str, problem: str, allowed: str, *more: ShardmarkError) -> None:
        super().__init__(place, problem, allowed, *more)  # positional, so that it can be pickled

    def __str__(self) -> str:
        place, problem, allowed, *more = self.args
        return "\n".join([one_line(f"{place}: {problem}; {allowed}"), *map(str, more)])


FULL = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room on that disk"),
    **dict.fromkeys((errno.EIO, errno.EROFS, errno.ESTALE, errno.ENODEV), "see to that disk"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)"),
}
"""Remedies by error number, for errors that come from a disk or the machine."""
STORAGE_EXIT = os.EX_IOERR
"""Exit code of a process that failed because it could not write, its error message included."""


class StorageError(InputError):
    """A disk is full, broken or read-only, or the user has no permission to write."""


class DataError(ShardmarkError):
    """A data set is missing, empty or broken."""

    def __init__(self, place: str, problem: str, remedy: str) -> None:
        super().__init__(place, problem, remedy)

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
    StorageError: "storage",  # before its base class
    InputError: "input",
}


def error_kind(error: BaseException) -> ErrorKind:
    """Classify an exception.  Classes of torch are recognised by name, without importing torch."""
    memory = (
        type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and MEMORY_MESSAGE.search(str(error)))
    )
    if memory:
        return "out_of_memory"
    if isinstance(error, OSError) and error.errno in FULL:
        return "storage"
    return next((kind for type_, kind in KINDS.items() if isinstance(error, type_)), "exception")
