"""Result rows put aside on disk, table by table, until all of them are there."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import IO

from schemas import codec
from schemas.errors import KvcensusError
from schemas.records import DuplicateWindow, RankWindow, Recompute, SharedPrefix

Row = RankWindow | Recompute | DuplicateWindow | SharedPrefix

TABLES: dict[str, type[Row]] = {
    "rank_windows": RankWindow,
    "recomputes": Recompute,
    "duplicate_windows": DuplicateWindow,
    "shared_prefixes": SharedPrefix,
}
"""Result tables and the records that are their rows, in the order in which they are written."""

_NAMES = {kind: name for name, kind in TABLES.items()}


class RowSpool:
    """Temporary files that nobody else sees and that go with the process. A context manager; :class:`KvcensusError` if the disk is full."""

    def __init__(self) -> None:
        self._files: dict[str, IO[bytes]] = {name: tempfile.TemporaryFile() for name in TABLES}  # noqa: SIM115
        self.rows = dict.fromkeys(TABLES, 0)

    def __enter__(self) -> RowSpool:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def add(self, row: Row) -> None:
        """Put one row aside."""
        name = _NAMES[type(row)]
        data = codec.encode(row)
        try:
            self._files[name].write(len(data).to_bytes(4, "big") + data)
        except OSError as error:
            raise KvcensusError(f"{tempfile.gettempdir()}: {error.strerror or error} (TMPDIR names another place)") from error
        self.rows[name] += 1

    def read(self, table: str) -> Iterator[Row]:
        """The rows of one table, in the order in which they were put aside."""
        file, kind = self._files[table], TABLES[table]
        file.seek(0)
        while head := file.read(4):
            yield codec.decode(file.read(int.from_bytes(head, "big")), kind)
