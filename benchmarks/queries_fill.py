"""Fills an embedded store with the made-up fleet, day by day as it would have come, and says what that cost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.queries_duplicates import duplicate_windows, shared_prefixes
from benchmarks.queries_facts import deploys, engine_metrics, facts, lifecycle, rank_events
from benchmarks.queries_rows import Fleet, Insert, rank_windows
from sql.database import Database

MARKER = "benchmark-fill.json"
"""In the data folder of a filled store: what it was filled with, and what that cost."""

MEMORY_BYTES = 8_000_000_000
SETTINGS = (
    "SETTINGS max_insert_threads = 2, max_block_size = 16384, optimize_on_insert = 0, parallel_view_processing = 1, "
    f"max_memory_usage = {MEMORY_BYTES}"
)
"""Of every statement that fills: both cores, and a bound on memory."""

_HEAVY = ("rank_windows", "duplicate_windows", "lifecycle", "block_events", "recomputes")
"""Tables whose merged parts would otherwise stay on disk twice, for eight minutes each time."""


@dataclass
class Filled:
    """What one table took: rows written, seconds, and what lies on disk when merges have come to rest."""

    table: str
    rows: int = 0
    seconds: float = 0.0
    stored: int = 0
    bytes: int = 0
    parts: int = 0

    def document(self) -> dict[str, object]:
        """As JSON."""
        return asdict(self) | {
            "rows_per_second": round(self.rows / self.seconds) if self.seconds else None,
            "bytes_per_row": round(self.bytes / self.stored, 1) if self.stored else None,
        }


def inserts(fleet: Fleet) -> Iterator[Insert]:
    """Everything, day by day; facts with the last one."""
    yield from deploys(fleet)
    for day in range(fleet.days):
        yield from rank_windows(fleet, day)
        yield from duplicate_windows(fleet, day)
        yield from shared_prefixes(fleet, day)
        yield from lifecycle(fleet, day)
        yield from engine_metrics(fleet, day)
    yield from rank_events(fleet)
    yield from facts(fleet)


def filled_with(folder: Path) -> tuple[Fleet, list[Filled]] | None:
    """What the store in ``folder`` was filled with, if it was filled to the end."""
    try:
        told = json.loads((folder / MARKER).read_text())
    except FileNotFoundError:
        return None
    return Fleet(**told["fleet"]), [Filled(**each) for each in told["tables"]]


def fill(database: Database, fleet: Fleet, folder: Path, say: Callable[[str], None]) -> list[Filled]:
    """Write all rows, wait until merges have come to rest, leave the marker. Raises :class:`sql.database.StoreError`."""
    tables: dict[str, Filled] = {}
    for table in _HEAVY:
        database.command(f"ALTER TABLE {table} MODIFY SETTING old_parts_lifetime = 20")
    began = time.perf_counter()
    total = 0
    for insert in inserts(fleet):
        started = time.perf_counter()
        database.command(f"{insert.sql} {SETTINGS}")
        row = tables.setdefault(insert.table, Filled(insert.table))
        row.rows += insert.rows
        row.seconds += time.perf_counter() - started
        total += insert.rows
        if insert.rows > 1_000_000:
            say(f"{time.perf_counter() - began:6.0f} s  {total:13,} rows, now {insert.table}")
    rest(database, say, 3.0 if fleet.windows > 1_000_000 else 0.0)
    for table in _HEAVY:
        database.command(f"ALTER TABLE {table} RESET SETTING old_parts_lifetime")
    measured(database, tables)
    marker = {"fleet": asdict(fleet), "tables": [asdict(row) for row in tables.values()]}
    (folder / MARKER).write_text(json.dumps(marker, indent=1))
    return list(tables.values())


def measured(database: Database, tables: dict[str, Filled]) -> None:
    """Put what lies on disk into ``tables``; rows that came without a statement of their own count as well."""
    sizes = database.query(
        "SELECT table, sum(rows), sum(bytes_on_disk), count() FROM system.parts "
        "WHERE active AND database = currentDatabase() GROUP BY table"
    ).rows
    for table, stored, size, parts in sizes:
        row = tables.setdefault(table, Filled(table))
        row.stored, row.bytes, row.parts = stored, size, parts


def rest(database: Database, say: Callable[[str], None], quiet_s: float = 3.0, patience_s: float = 900.0) -> None:
    """Wait until no merge has run for ``quiet_s``, as in a store that was left alone for a while; nothing is forced."""
    deadline = time.monotonic() + patience_s
    since = time.monotonic()
    while time.monotonic() - since < quiet_s:
        if time.monotonic() > deadline:
            say("merges are still running")
            return
        if database.query("SELECT count() FROM system.merges").rows[0][0]:
            since = time.monotonic()
        time.sleep(0.2)
