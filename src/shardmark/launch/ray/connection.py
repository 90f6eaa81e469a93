"""Ray itself: imported when it is asked for, connected to without a word on the terminal."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shardmark.core.errors import InputError

if TYPE_CHECKING:
    from shardmark.config.engines import RayOptions

REACH_SECONDS = 5.0
REMEDY = "start one by `ray start --head`, or set engine.address to HOST:PORT of its head"
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # as it is by now; older versions warn of that
}


def ray_module() -> Any:
    """`InputError` with the remedy where it is not installed."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise InputError(
            "engine", f"ray cannot be imported: {error}", "pip install 'shardmark[ray]'"
        ) from None


def connected(ray: Any, options: RayOptions) -> None:
    """Connect as a driver.  `InputError` where no cluster answers, or another version does."""
    address = options.address if options.address != "auto" else os.environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        raise InputError(
            "RAY_ADDRESS", f"found {address}, Ray Client", "give engine.address as HOST:PORT"
        )
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        _reach(host.strip("[]"), int(port))
    try:
        with _variables(), _own_signals():
            ray.init(
                address=options.address,
                namespace=options.namespace,
                runtime_env=options.runtime_env or None,
                log_to_driver=False,
                logging_level=logging.CRITICAL,
            )
        _print_messages(ray, wanted=False)
    except ConnectionError as error:
        raise InputError(
            "engine.address", f"no Ray cluster: {_first_line(error)}", REMEDY
        ) from None
    except (RuntimeError, ValueError, TypeError, ray.exceptions.RayError) as error:
        remedy = "the same versions of Ray and Python on all machines; see the guide"
        raise InputError("engine", f"Ray refuses: {_first_line(error)}", remedy) from None


def disconnected(ray: Any) -> None:
    """Leave the cluster; what it does not know of any more it ends."""
    ray.shutdown()
    _print_messages(ray, wanted=True)


def _print_messages(ray: Any, *, wanted: bool) -> None:
    """Whether Ray prints the cluster's errors, from a thread of its own and whatever it logs.

    What they are about is told in our own way.  Ray has no public switch for them; its debugger
    uses this one.
    """
    worker: Any = getattr(getattr(ray, "_private", None), "worker", None)
    if hasattr(worker, "_worker_logs_enabled"):
        worker._worker_logs_enabled = wanted


def reason_of(error: Exception) -> str:
    """What went wrong in an actor, or with it, in one line."""
    cause = getattr(error, "cause", None) or error
    return _first_line(cause)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:1]) or type(error).__name__


def _reach(host: str, port: int) -> None:
    """Ray itself would try for a minute, and say so in its own way."""
    try:
        socket.create_connection((host, port), timeout=REACH_SECONDS).close()
    except OSError as error:
        raise InputError(
            "engine.address",
            f"nobody answers at {host}:{port}: {error.strerror or error}",
            REMEDY,
        ) from None


@contextmanager
def _variables() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in VARIABLES}
    os.environ.update(VARIABLES)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray exits at SIGTERM, where the command line stores the trial under way first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
