"""ClickHouse inside this process (chDB), on a folder that only one process can have open."""

from __future__ import annotations

import fcntl
import importlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import clickhouse_connect
import pyarrow as pa
from clickhouse_connect.driver.client import Client
from clickhouse_connect.driver.exceptions import ClickHouseError

from sql.database import Database, QueryResult, StoreError, bound_parameters, store_error
from sql.statements import first_word, require_read_only

T = TypeVar("T")

READ_SETTINGS = {
    "final": "1",
    "max_execution_time": "120",
    "max_result_bytes": str(256 * 1024 * 1024),
    "max_result_rows": "5000000",
    "optimize_move_to_prewhere_if_final": "1",  # only conditions on the key are moved; the other columns are read where they hold
}
"""Of every handle that reads: rows as if replaced already, and no query without an end.

A result is in memory whole, several times over, in the process that may be the worker: hence the limits. The engine counts
a constant column once, whatever its rows, so that bytes alone would not bound it.
"""

_open_here: Counter[str] = Counter()
_open_guard = threading.Lock()


class FolderLocked(StoreError):
    """Another process has the folder open."""


def holder_of(folder: Path) -> int | None:
    """The process id that has the embedded store in ``folder`` open, 0 if it cannot be told, ``None`` if nobody else has."""
    with _open_guard:
        if _open_here[os.path.realpath(folder)]:
            return None
    status = folder / "status"  # the engine holds a lock on this file as long as it runs
    try:
        with status.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                first = file.readline().decode(errors="replace")
                number = first.removeprefix("PID:").strip()
                return int(number) if number.isdigit() else 0
            fcntl.flock(file, fcntl.LOCK_UN)
    except OSError:
        return None
    return None


def _refuse_if_held(folder: Path) -> None:
    holder = holder_of(folder)
    if holder is not None:
        who = f"process {holder}" if holder else "another process"
        raise FolderLocked(
            f"the embedded store at {folder} is open in {who}, which answers no queries for others: stop it, or use --clickhouse-url"
        )


class _Handle:
    """One client of the engine, used by one thread at a time, opened anew after every failed call.

    The engine keeps what a failed query had already produced and puts it before the result of the next query on the
    same handle (seen in chDB 4.4.0), so a handle that failed once is not used again.
    """

    def __init__(self, folder: Path, database: str, settings: Mapping[str, str]) -> None:
        self._folder = folder
        self._database = database
        self._settings = settings
        self._lock = threading.Lock()
        self._client: Client | None = self._open()

    def _open(self) -> Client:
        client = clickhouse_connect.get_client(interface="chdb", path=str(self._folder), tz_mode="aware")
        client.command(f"CREATE DATABASE IF NOT EXISTS `{self._database}`", use_database=False)
        client.database = self._database
        for name, value in self._settings.items():
            client.command(f"SET {name} = {value}")
        return client

    def run(self, call: Callable[[Client], T], doing: str) -> T:
        """``call`` with the client; a failure becomes a :class:`StoreError`."""
        with self._lock:
            if self._client is None:
                raise StoreError(f"{doing}: the store at {self._folder} has been closed")
            try:
                return call(self._client)
            except Exception as error:
                failed, self._client = self._client, self._open()
                failed.close()
                if isinstance(error, ClickHouseError | OSError):
                    raise store_error(error, doing, str(self._folder)) from error
                raise

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
            if client is not None:
                client.close()


READERS = 3
"""Queries of others that run at the same time: a long one does not hold up the rest."""

READER_PATIENCE_S = 30.0
"""How long a query waits for its turn."""

CLOSE_PATIENCE_S = 5.0


class ReadHandle:
    """Raw access for the loopback server: one read-only statement in, bytes of its FORMAT out. Up to :data:`READERS` at a time."""

    def __init__(self, folder: Path, database: str) -> None:
        self._path = os.path.realpath(folder)
        self._database = database
        self._turns = threading.BoundedSemaphore(READERS)
        self._lock = threading.Lock()
        self._idle: list[Any] = [self._open()]
        self._closed = False

    def _open(self) -> Any:
        chdb: Any = importlib.import_module("chdb")  # the engine itself, half a gigabyte: not for those who only ask an owner
        connection = chdb.connect(self._path)
        connection.query(f"USE `{self._database}`", "TabSeparated")
        for name, value in (READ_SETTINGS | {"readonly": "1"}).items():
            connection.query(f"SET {name} = {value}", "TabSeparated")
        return connection

    def run(self, sql: str, parameters: Mapping[str, str]) -> bytes:
        """Result of ``sql``, which must be one read-only statement; parameters as ClickHouse's HTTP interface takes them."""
        require_read_only(sql)
        if not self._turns.acquire(timeout=READER_PATIENCE_S):
            raise StoreError(f"{READERS} long queries are running already: try again later")
        try:
            with self._lock:
                if self._closed:
                    raise StoreError("the store has been closed")
                connection = self._idle.pop() if self._idle else self._open()
            try:
                result = connection.query(sql, "TabSeparated", params=dict(parameters)).bytes() or b""
            except Exception as error:
                with suppress(Exception):  # what failed once is not used again: see _Handle
                    connection.close()
                raise store_error(error, "query", self._path) from error
            self._idle.append(connection)
            return bytes(result)
        finally:
            self._turns.release()

    def close(self) -> None:
        """Let go of the engine; what still runs after :data:`CLOSE_PATIENCE_S` is left to the end of the process. Twice is once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        deadline = time.monotonic() + CLOSE_PATIENCE_S
        for _ in range(READERS):
            self._turns.acquire(timeout=max(0.0, deadline - time.monotonic()))
        for connection in self._idle:
            connection.close()


class EmbeddedDatabase(Database):
    """The embedded store in ``folder``, opened by this process. Reads do not wait for inserts: each has its own handle."""

    kind = "embedded"

    def __init__(self, folder: Path, database: str) -> None:
        self.place = str(folder)
        self.name = database
        self._real = os.path.realpath(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise StoreError(f"cannot make the folder {folder}: {error.strerror}; name another with --data-dir") from error
        _refuse_if_held(folder)
        try:
            self._writer = _Handle(folder, database, {"throw_on_max_partitions_per_insert_block": "0"})
        except Exception as error:
            _refuse_if_held(folder)  # another process was quicker between the look and the opening
            raise store_error(error, "opening the embedded store", self.place) from error
        try:
            self._reader = _Handle(folder, database, READ_SETTINGS | {"readonly": "1"})
        except BaseException:
            self._writer.close()
            raise
        self._types: dict[tuple[str, ...], Sequence[Any]] = {}
        self._closed = False
        with _open_guard:
            _open_here[self._real] += 1

    def query(self, sql: str, parameters: Mapping[str, Any] | None = None, *, final: bool = False) -> QueryResult:
        """See :class:`Database`."""
        text = require_read_only(sql)
        return self._reader.run(lambda client: read(client, text, parameters), "query")

    def query_arrow(self, sql: str, parameters: Mapping[str, Any] | None = None, *, final: bool = False) -> pa.Table:
        """See :class:`Database`."""
        text = require_read_only(sql)
        return self._reader.run(lambda client: read_arrow(client, text, parameters), "query")

    def insert(self, table: str, column_names: Sequence[str], columns: Sequence[Sequence[Any]]) -> int:
        """See :class:`Database`."""
        return self._writer.run(lambda client: insert(client, self._types, table, column_names, columns), f"insert into {table}")

    def command(self, sql: str) -> None:
        """See :class:`Database`."""
        self._writer.run(lambda client: client.command(sql), "statement")

    def create_database(self) -> None:
        """See :class:`Database`. Done when the folder was opened."""

    def close(self) -> None:
        """See :class:`Database`."""
        if self._closed:
            return
        self._closed = True
        self._reader.close()
        self._writer.close()
        with _open_guard:
            _open_here[self._real] -= 1


def read(client: Client, sql: str, parameters: Mapping[str, Any] | None, settings: dict[str, Any] | None = None) -> QueryResult:
    """One query on ``client``, with the columns' names and types also where there are no rows."""
    bound = bound_parameters(parameters)
    result = client.query(sql, parameters=bound, settings=settings)
    names = tuple(result.column_names)
    types = tuple(kind.name for kind in result.column_types)
    if not names and first_word(sql) in ("SELECT", "WITH"):
        # The embedded engine sends nothing at all for an empty result.
        described = client.query(f"DESCRIBE TABLE (\n{sql}\n)", parameters=bound, settings=settings).result_rows
        names, types = tuple(row[0] for row in described), tuple(row[1] for row in described)
    return QueryResult(names, types, [tuple(row) for row in result.result_rows])


def read_arrow(client: Client, sql: str, parameters: Mapping[str, Any] | None, settings: dict[str, Any] | None = None) -> pa.Table:
    """One query on ``client`` as an Arrow table."""
    raw = client.raw_query(sql, parameters=bound_parameters(parameters), settings=settings, fmt="Arrow")
    with pa.ipc.open_file(pa.BufferReader(raw)) as reader:
        return reader.read_all()


def insert(
    client: Client,
    types: dict[tuple[str, ...], Sequence[Any]],
    table: str,
    column_names: Sequence[str],
    columns: Sequence[Sequence[Any]],
    settings: dict[str, Any] | None = None,
) -> int:
    """Insert columns through ``client``; ``types`` remembers the column types of each table, which need not be asked twice."""
    lengths = {len(column) for column in columns}
    if len(lengths) != 1 or len(columns) != len(column_names):
        raise StoreError(f"insert into {table}: {len(column_names)} names, {len(columns)} columns of lengths {sorted(lengths)}")
    rows = lengths.pop()
    if not rows:
        return 0
    key = (table, *column_names)
    if key not in types:
        types[key] = client.create_insert_context(table, list(column_names), column_oriented=True).column_types
    client.insert(table, columns, column_names=list(column_names), column_types=types[key], column_oriented=True, settings=settings)
    return rows
