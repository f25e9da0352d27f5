"""The schema, as numbered files in ``sql/migrations``, each applied once and recorded.

A file's statements are all of the kind that may run twice (IF NOT EXISTS, OR REPLACE), because ClickHouse has no
transaction over several statements: a run that was cut short, or two started at once, only repeat what was done.
A file is recorded after its last statement. A recorded file whose text has changed since is an error.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files

from schemas.errors import KvcensusError
from sql.database import Database, StoreError
from sql.statements import split

_NAME = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")

# Plain MergeTree: two runs at once may record a file twice, which reads as once; two differing checksums must both stay visible.
_HISTORY = """
CREATE TABLE IF NOT EXISTS schema_migrations
(
    `number` UInt32,
    `name` String,
    `checksum` String COMMENT 'SHA-256 of the file',
    `applied_at` DateTime64(3, 'UTC') DEFAULT now64(3)
)
ENGINE = MergeTree
ORDER BY (number, checksum)
COMMENT 'Which files of sql/migrations were applied, and when.'
"""


@dataclass(frozen=True)
class Migration:
    """One numbered file. ``checksum`` is of its text with ``\\n`` line ends, so that a checkout's line ends do not matter."""

    number: int
    name: str
    text: str

    @property
    def checksum(self) -> str:
        """SHA-256, hex."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def statements(self) -> list[str]:
        """Its statements, in order."""
        return split(self.text)


@dataclass(frozen=True)
class Applied:
    """A recorded migration."""

    number: int
    name: str
    checksum: str
    applied_at: datetime


@dataclass(frozen=True)
class Status:
    """One line of the state of the schema: ``state`` is ``applied``, ``pending``, ``changed`` or ``unknown`` (of a newer version)."""

    number: int
    name: str
    state: str
    applied_at: datetime | None


def shipped() -> list[Migration]:
    """The migrations of this version, by number. Raises :class:`KvcensusError` if the files are misnamed or numbered twice."""
    found: dict[int, Migration] = {}
    for entry in (files("sql") / "migrations").iterdir():
        if not entry.name.endswith(".sql"):
            continue
        match = _NAME.fullmatch(entry.name)
        if match is None:
            raise KvcensusError(f"sql/migrations/{entry.name}: expected NNNN_name.sql")
        number = int(match.group(1))
        if number in found:
            raise KvcensusError(f"sql/migrations/{entry.name}: number {number} is taken by {found[number].name}")
        found[number] = Migration(number, match.group(2), entry.read_text(encoding="utf-8").replace("\r\n", "\n"))
    return [found[number] for number in sorted(found)]


def applied(database: Database) -> list[Applied]:
    """What is recorded, by number; nothing where the schema has not been created."""
    try:
        rows = database.query(
            "SELECT number, name, checksum, min(applied_at) FROM schema_migrations "
            "GROUP BY number, name, checksum ORDER BY number, checksum"
        ).rows
    except StoreError as error:
        if error.schema_missing:
            return []
        raise
    return [Applied(*row) for row in rows]


def status(database: Database, migrations: Sequence[Migration] | None = None) -> list[Status]:
    """The state of every file of this version and of everything recorded, by number."""
    known = {migration.number: migration for migration in (shipped() if migrations is None else migrations)}
    lines: list[Status] = []
    seen: set[int] = set()
    for record in applied(database):
        migration = known.get(record.number)
        state = "unknown" if migration is None else "applied" if migration.checksum == record.checksum else "changed"
        seen.add(record.number)
        lines.append(Status(record.number, record.name, state, record.applied_at))
    lines += [Status(m.number, m.name, "pending", None) for m in known.values() if m.number not in seen]
    return sorted(lines, key=lambda line: (line.number, line.state))


def pending(database: Database, migrations: Sequence[Migration] | None = None) -> list[Migration]:
    """The files still to be applied, in order.

    Raises :class:`KvcensusError` if a file was changed after it had been applied. What a newer version recorded is
    left alone: an older version can read on beside it, and write to tables whose columns still have the names it knows.
    """
    ours = list(shipped() if migrations is None else migrations)
    lines = status(database, ours)
    changed = [line for line in lines if line.state == "changed"]
    if changed:
        names = ", ".join(f"{line.number:04d}_{line.name} (applied {line.applied_at:%Y-%m-%d %H:%M:%S} UTC)" for line in changed)
        raise KvcensusError(
            f"changed after it was applied: {names}. "
            "A migration is never edited: restore the file and add a new one, or use another database"
        )
    done = {line.number for line in lines if line.state == "applied"}
    return [migration for migration in ours if migration.number not in done]


def apply(database: Database, migrations: Sequence[Migration] | None = None) -> list[Migration]:
    """Bring the schema up to date; returns what was applied now. May run twice, and beside another run of the same.

    Raises :class:`KvcensusError` as :func:`pending` does, and naming the statement that failed.
    """
    if database.can_write:
        database.create_database()
        database.command(_HISTORY)
    todo = pending(database, migrations)
    if todo and not database.can_write:
        raise KvcensusError(
            f"{len(todo)} migrations are pending, but {database.place} can only be asked: its owner applies them when it starts"
        )
    for migration in todo:
        for position, statement in enumerate(migration.statements, 1):
            try:
                database.command(statement)
            except StoreError as error:
                raise StoreError(f"migration {migration.number:04d}_{migration.name}, statement {position}: {error}", error.code) from error
        database.insert("schema_migrations", ("number", "name", "checksum"), ([migration.number], [migration.name], [migration.checksum]))
    return todo
