"""The secret that all nodes of a run share: who does not know it is no node.  Imports no torch."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from shardmark.core.environment_variables import SECRET_VARIABLE
from shardmark.core.errors import InputError
from shardmark.results.files import open_regular

LEAST_CHARACTERS = 16


def given_secret() -> str | None:
    """From the environment.  Raises `InputError` for one that can be guessed."""
    secret = os.environ.get(SECRET_VARIABLE)
    if secret is not None and len(secret) < LEAST_CHARACTERS:
        raise InputError(
            SECRET_VARIABLE,
            f"found {len(secret)} characters, which can be guessed",
            f"at least {LEAST_CHARACTERS}, the same on every node, such as `openssl rand -hex 32`",
        )
    return secret


def fresh_secret() -> str:
    """For nodes that are started by this process, which tells them."""
    return given_secret() or secrets.token_hex(32)


def shared_secret() -> str:
    """For the same command on every node: what each finds in its environment, else in its file.

    The file is made where there is none.  Raises `InputError` where others can read it.
    """
    return given_secret() or _read(secret_file())


def secret_file() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "shardmark" / "secret"


def _read(path: Path) -> str:
    remedy = f"have the same file on every node, of mode 0600, or set {SECRET_VARIABLE}"
    try:
        _make(path)
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid():
                raise InputError(str(path), "is no file of this user", remedy)
            if status.st_mode & 0o077:
                mode = f"has mode {stat.S_IMODE(status.st_mode):04o}, so that others can read it"
                raise InputError(str(path), mode, remedy)
            secret = file.readline().decode(errors="replace").strip()
    except OSError as error:
        raise InputError(str(path), f"cannot be used: {error.strerror or error}", remedy) from None
    if len(secret) < LEAST_CHARACTERS:
        raise InputError(str(path), f"has fewer than {LEAST_CHARACTERS} characters", remedy)
    return secret


def _make(path: Path) -> None:
    """Write a new secret unless there is one; the first of several nodes at once wins."""
    if path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{secrets.token_hex(32)}\n")
        path.hardlink_to(part)  # whole, or not there
    except FileExistsError:
        pass
    finally:
        part.unlink()
