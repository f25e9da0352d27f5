"""Rolls up a filled store, and says what that cost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.queries_fill import MARKER, SETTINGS
from benchmarks.queries_rows import Fleet
from sql import rollups
from sql.database import Database

_TABLES = {
    "rank_rollups": ("window_start", "first_window", "last_window", "expected_until", "first_batch", "last_batch"),
    "duplicate_rollups": ("window_start", "as_of"),
}
"""Tables of rollups, and their columns that are times."""


@dataclass
class Rolled:
    """What rolling up took: seconds, for so many rows of windows. ``copied_days`` were not rolled up but copied."""

    seconds: float
    windows: int
    copied_days: int

    def document(self) -> dict[str, object]:
        """As JSON."""
        return asdict(self) | {"seconds_per_million_windows": round(self.seconds / self.windows * 1e6, 2) if self.windows else None}

    def sentence(self) -> str:
        """As text."""
        each = f", {self.seconds / self.windows * 1e6:.2f} s a million" if self.windows else ""
        copied = f"; the rollups of {self.copied_days} other days are copies of those" if self.copied_days else ""
        return f"rolled up {self.windows:,} windows in {self.seconds:,.0f} s{each}{copied}"


def roll_up(database: Database, fleet: Fleet, folder: Path, say: Callable[[str], None], *, every_day: bool) -> Rolled:
    """Roll up what was filled, unless the marker in ``folder`` says that it was. Raises :class:`sql.database.StoreError`.

    Of several days only the last is rolled up, unless ``every_day``; the days before get copies of its rollups. A worker has two weeks to
    roll up two weeks, a benchmark has not.
    """
    marker = json.loads((folder / MARKER).read_text())
    if "rolled" in marker:
        return Rolled(**marker["rolled"])
    last_s = fleet.day_s(0 if every_day else fleet.days - 1)
    # Whatever a run that was cut short, or somebody else, left there: copies beside it would have every row twice.
    for table in (*_TABLES, "rollup_touched"):
        database.command(f"TRUNCATE TABLE {table}")
    rollups.touch(database, last_s * 1_000_000, fleet.end_s * 1_000_000)
    windows = sum(
        database.query(f"SELECT count() FROM {table} WHERE window_start >= toDateTime({last_s}, 'UTC')").rows[0][0]
        for table in ("rank_windows", "duplicate_windows")
    )

    def progress(done: int, total: int) -> None:
        say(f"rolled up: {done} of {total} steps")

    started = time.perf_counter()
    rollups.run(database, progress)
    seconds = time.perf_counter() - started
    database.command("TRUNCATE TABLE rollup_touched")  # nothing more comes: no second look at what came last
    copied = 0 if every_day else fleet.days - 1
    for days in range(1, copied + 1):
        for table, times in _TABLES.items():
            database.command(f"{_copy(database, table, times, days, last_s)} {SETTINGS}")
        say(f"copied to day {fleet.days - days}")
    rolled = Rolled(seconds, windows, copied)
    (folder / MARKER).write_text(json.dumps(marker | {"rolled": asdict(rolled)}, indent=1))
    return rolled


def _copy(database: Database, table: str, times: tuple[str, ...], days: int, last_s: int) -> str:
    """Fill a day of ``table`` with what stands in the last one."""
    found = database.query(
        "SELECT name FROM system.columns WHERE database = currentDatabase() AND table = {table:String} AND default_kind = ''",
        {"table": table},
    ).rows
    columns = [str(row[0]) for row in found]
    values = [f"s.`{name}` - toIntervalDay({days})" if name in times else f"s.`{name}`" for name in columns]
    return (
        f"INSERT INTO {table} ({', '.join(f'`{name}`' for name in columns)}) SELECT {', '.join(values)} "
        f"FROM (SELECT * FROM {table} FINAL WHERE window_start >= toDateTime({last_s}, 'UTC')) AS s"
    )
