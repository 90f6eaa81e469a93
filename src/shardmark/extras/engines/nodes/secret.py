"""The secret by which the nodes of a run authenticate each other.  Imports no torch."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from shardmark.base.errors import InputError
from shardmark.base.results.files import open_regular
from shardmark.base.system.environment_variables import SECRET_VARIABLE

MIN_CHARACTERS = 16


def secret_from_environment() -> str | None:
    """Return the secret in the environment.  Raises `InputError` for one that can be guessed."""
    secret = os.environ.get(SECRET_VARIABLE)
    if secret is not None and len(secret) < MIN_CHARACTERS:
        raise InputError(
            SECRET_VARIABLE,
            f"found {len(secret)} characters, which can be guessed",
            f"at least {MIN_CHARACTERS}, the same on every node, such as `openssl rand -hex 32`",
        )
    return secret


def new_secret() -> str:
    """Return a secret for nodes that this process starts."""
    return secret_from_environment() or secrets.token_hex(32)


def shared_secret() -> str:
    """Return the secret for the same command on every node: from the environment or the file.

    A missing file is created.  Raises `InputError` for a file that other users can read.
    """
    return secret_from_environment() or _read(secret_file())


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
                raise InputError(str(path), "belongs to another user", remedy)
            if status.st_mode & 0o077:
                mode = f"has mode {stat.S_IMODE(status.st_mode):04o}, so that others can read it"
                raise InputError(str(path), mode, remedy)
            secret = file.readline().decode(errors="replace").strip()
    except OSError as error:
        raise InputError(str(path), f"cannot be used: {error.strerror or error}", remedy) from None
    if len(secret) < MIN_CHARACTERS:
        raise InputError(str(path), f"has fewer than {MIN_CHARACTERS} characters", remedy)
    return secret


def _make(path: Path) -> None:
    """Write a new secret unless there is one; of several nodes, the first one wins."""
    if path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{secrets.token_hex(32)}\n")
        path.hardlink_to(temporary)  # atomic
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
