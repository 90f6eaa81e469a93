"""Where data that Shardmark has made or read once are kept.  Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$SHARDMARK_CACHE, else $XDG_CACHE_HOME/shardmark, else ~/.cache/shardmark.  May not exist.

    Whatever lies there can be deleted at any time: it is made again.
    """
    own = os.environ.get("SHARDMARK_CACHE")
    if own:
        return Path(own).expanduser()
    users = os.environ.get("XDG_CACHE_HOME")
    return (Path(users) if users else Path("~/.cache")).expanduser() / "shardmark"
