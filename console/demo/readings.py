"""What the demo reads: the figures from ClickHouse through the process that owns it, as any other command would."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sql.database import Database, StoreError
from sql.figures import assemble, load
from sql.store import connect
from sql.totals import Totals

_CLOSED = """
    SELECT toUnixTimestamp64Micro(max(window_end)), count()
    FROM duplicate_windows FINAL
    WHERE scope = 'fleet' AND tier = 'GPU' AND is_final
"""
_RECOMPUTES = "SELECT count() FROM recomputes FINAL"


@dataclass(frozen=True)
class Reading:
    """The figures at one moment. ``settled`` is the document up to ``settled_us``, the end of the last closed window, if one has closed."""

    totals: Totals
    document: dict[str, Any]
    settled: dict[str, Any] | None = None
    settled_us: int | None = None

    @property
    def counted(self) -> int:
        """Batches in the rank windows."""
        return sum(life.batches + life.duplicate_batches + life.refused for life in self.totals.lives)

    @property
    def lost(self) -> int:
        """Batches declared lost."""
        return sum(life.lost for life in self.totals.lives)


class Figures:
    """A connection to the demo's store."""

    def __init__(self, folder: Path) -> None:
        self._database: Database = connect(None, folder)
        self._settled: tuple[int, dict[str, Any]] | None = None

    def close(self) -> None:
        """Let go of the connection."""
        self._database.close()

    def version(self) -> str:
        """Version of ClickHouse."""
        return str(self._database.query("SELECT version()").rows[0][0])

    def read(self, *, settled: bool = False) -> Reading | None:
        """The figures of everything counted so far; None while the schema is being made. With ``settled``, also those of closed windows."""
        try:
            totals = load(self._database)
            document = assemble(totals)
            if not settled:
                return Reading(totals, document)
            ((closed_us, windows),) = self._database.query(_CLOSED).rows
        except StoreError as error:
            if error.schema_missing:
                return None
            raise
        if not windows:
            return Reading(totals, document)
        if self._settled is None or self._settled[0] != closed_us:
            self._settled = (closed_us, assemble(load(self._database, until_us=closed_us)))
        return Reading(totals, document, self._settled[1], closed_us)

    def recomputes(self) -> int:
        """Recomputed blocks that have a row of their own."""
        return int(self._database.query(_RECOMPUTES).rows[0][0])
