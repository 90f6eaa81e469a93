"""Brings what the ranks testified to the node that judges it: no file system is shared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from shardmark.launch.nodes.channel import files_below, keep_piece

CELLS_FILE = "cells.json"
PIECE_BYTES = 16 * 2**20


def send_testimony(folder: Path, keep: Callable[[dict[str, object], bytes], None]) -> None:
    """Have `keep` hold all files of the cells that the folder lists, below the cells' numbers."""
    for number, directory in enumerate(json.loads((folder / CELLS_FILE).read_text())):
        for path, name in files_below(Path(directory)):
            with path.open("rb") as file:
                piece = file.read(PIECE_BYTES)
                while True:
                    following = file.read(PIECE_BYTES)
                    keep({"file": f"{number}/{name}", "last": not following}, piece)
                    if not following:
                        break
                    piece = following


class Testimony:
    """The node's side."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def keep(self, message: dict[str, object], piece: bytes) -> None:
        keep_piece(self._directory, message, piece)

    def list_in(self, folder: Path) -> None:
        """Write the list of cells that the judge reads, with the folders as they are here."""
        cells = sorted(self._directory.iterdir(), key=lambda path: int(path.name))
        (folder / CELLS_FILE).write_text(json.dumps([str(path) for path in cells]))
