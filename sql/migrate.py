"""The schema, as numbered files in ``sql/migrations``, each applied once and recorded.

A file's statements are all of the kind that may run twice (IF NOT EXISTS, OR REPLACE), because ClickHouse has no
transaction over several statements: a run that was cut short, or two started at once, only repeat what was done.
A file is recorded after its last statement. A recorded file whose text has changed since is an error.

A database is set up for one server or for a cluster (:mod:`sql.cluster`), by its first migration, and says so itself ever after.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files

from schemas.errors import KvcensusError
from sql import cluster as clusters
from sql import retention
from sql.cluster import Cluster
from sql.database import Database, StoreError
from sql.retention import Wanted
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

_RETENTION = 10
"""The file that sets how long rows are kept, where nobody said so before."""


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


@dataclass(frozen=True)
class SetUp:
    """What a database was set up for: one server, or the cluster of that name (``None``: the first migration was cut short before that)."""

    clustered: bool
    cluster: str | None = None

    @property
    def mode(self) -> str:
        """``single`` or ``cluster``."""
        return "cluster" if self.clustered else "single"


def set_up(database: Database) -> SetUp | None:
    """What ``database`` itself says it was set up for; ``None`` where the schema has not been created."""
    try:
        rows = database.query(
            "SELECT name, engine_full FROM system.tables WHERE database = currentDatabase() AND (name = {history:String} "
            "OR engine = 'Distributed') ORDER BY name",
            {"history": clusters.HISTORY},
        ).rows
    except StoreError as error:
        if error.schema_missing:
            return None
        raise
    engines: dict[str, str] = dict(rows)
    if clusters.HISTORY not in engines:
        return None
    names = [name for engine in engines.values() if (name := clusters.cluster_of(engine)) is not None]
    # Its path tells ours from one that a server of its own accord replicates, where nothing is to be done for that.
    begun = clusters.history_path(database.name) in engines[clusters.HISTORY]
    return SetUp(bool(names) or begun, names[0] if names else None)


def cluster_for(database: Database, asked: str | None) -> Cluster | None:
    """The cluster to go on with; ``None``: one server. ``asked`` is what the user named, if anything.

    Raises :class:`KvcensusError` if that is not what the database was set up for, or if nobody says which cluster it is.
    """
    return _cluster(database, set_up(database), asked)


def _cluster(database: Database, found: SetUp | None, asked: str | None) -> Cluster | None:
    if asked is not None and database.kind != "server":
        raise KvcensusError("a cluster is of ClickHouse servers: name one of them with --clickhouse-url; the embedded store is one process")
    if found is None:
        return None if asked is None else Cluster(asked, database.name)
    if not found.clustered:
        if asked is not None:
            raise KvcensusError(
                f"the database {database.name} was set up for one server, not for the cluster {asked}: its tables cannot become those of "
                "a cluster; name another database, or leave the cluster out"
            )
        return None
    name = found.cluster or asked
    if name is None:
        raise KvcensusError(
            f"the database {database.name} was begun for a cluster and the first migration was cut short: "
            "run `kvcensus migrate --cluster NAME` again"
        )
    if asked not in (None, name):
        raise KvcensusError(f"the database {database.name} was set up for the cluster {name}, not for {asked}")
    return Cluster(name, database.name)


def apply(
    database: Database,
    migrations: Sequence[Migration] | None = None,
    *,
    cluster: str | None = None,
    keep: Wanted | None = None,
) -> list[Migration]:
    """Bring the schema up to date; returns what was applied now. May run twice, and beside another run of the same.

    ``cluster`` is for the first time: from then on the database itself says what it was set up for. ``keep`` is what
    :func:`retention.apply` is going to be told next, so that nothing goes by the defaults before that.

    Raises :class:`KvcensusError` as :func:`pending` and :func:`cluster_for` do, and naming the statement that failed.
    """
    found = set_up(database)
    on = _cluster(database, found, cluster)
    # Once set up, a start needs no right to create anything, and no answer from every node.
    if database.can_write and (found is None or (found.clustered and found.cluster is None)):
        database.create_database()
        if on is not None:
            database.command(clusters.create_database(on))
        database.command(_HISTORY if on is None else clusters.history(_HISTORY, on))
    todo = pending(database, migrations)
    if todo and not database.can_write:
        raise KvcensusError(
            f"{len(todo)} migrations are pending, but {database.place} can only be asked: its owner applies them when it starts"
        )
    for migration in todo:
        statements = migration.statements
        if migration.number == _RETENTION:
            statements = retention.defaults(statements, retention.in_force(database), keep or {})
        for position, statement in enumerate(statements, 1):
            try:
                for each in [statement] if on is None else clusters.rewrite([statement], on):
                    database.command(each)
            except StoreError as error:
                where = f"migration {migration.number:04d}_{migration.name}, statement {position}"
                raise type(error)(f"{where}: {error}", error.code, error.detail) from error
        database.insert("schema_migrations", ("number", "name", "checksum"), ([migration.number], [migration.name], [migration.checksum]))
    return todo
