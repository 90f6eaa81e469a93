"""Removes a bench as soon as whoever built it lets go of it, or is gone.

Started before the bench is built.  It ends by its standard input alone, so that Ctrl-C in the
terminal, a signal to the builder, even SIGKILL, leave nothing behind.
"""

from __future__ import annotations

import signal
import sys

from benchmarks.cluster.namespaces import remove


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()  # until the builder closes it, or ends
    remove(sys.argv[1])


if __name__ == "__main__":
    main()
