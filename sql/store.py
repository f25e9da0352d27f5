"""The way to ClickHouse: a server, the embedded store in the data folder, or the process that owns that store."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import clickhouse_connect
import pyarrow as pa
import urllib3
from clickhouse_connect.driver.client import Client
from clickhouse_connect.driver.exceptions import ClickHouseError
from clickhouse_connect.driver.httpclient import HttpClient

from schemas.errors import KvcensusError
from sql.database import DATABASE, Database, QueryResult, StoreError, StoreUnavailable, store_error
from sql.embedded import EmbeddedDatabase, FolderLocked, ReadHandle, insert, read, read_arrow
from sql.loopback import Owner, StoreServer, live_owner
from sql.statements import quoted, require_read_only

__all__ = ["Database", "QueryResult", "StoreError", "StoreUnavailable", "connect", "exists", "store_folder"]

# The driver warns of every refused connection; here that is an exception with a message of its own.
logging.getLogger("clickhouse_connect").addHandler(logging.NullHandler())

LOCK_PATIENCE_S = 10.0
"""How long to wait for a folder that another process has open: it may be about to answer, or to close."""

OWNER_PATIENCE_S = 30.0
"""The same for a process that is to own the folder: readers that came before it hold it for as long as they read."""

_LOCK_POLL_S = 0.1

_READS: Mapping[str, Any] = {"distributed_product_mode": "global"}
"""On a cluster a table that a query looks up is read over all shards, once, and not on each of them alone."""

_WRITES: Mapping[str, Any] = {
    **_READS,
    # A batch of played-back data may span years; the server's limit is there for tables partitioned by mistake.
    "throw_on_max_partitions_per_insert_block": 0,
    # On a cluster an insert has ended when the rows are on their shards, not when the node that was asked has noted to send them.
    "insert_distributed_sync": 1,
    "parallel_distributed_insert_select": 0,
    # A batch that comes again after a crash must run through the materialized views again; its rows replace themselves.
    "insert_deduplicate": 0,
}
"""Of every insert and statement that changes something. A server takes what it knows and lets the user set."""

HANDSHAKE_S, QUERY_S = 15, 300
"""How long a ClickHouse server may be silent: at the first question, and later."""


def store_folder(data_dir: Path) -> Path:
    """The folder of the embedded store."""
    return data_dir / "clickhouse"


def exists(clickhouse_url: str | None, data_dir: Path) -> bool:
    """Whether there is a store to read: a server is named, the embedded store has been made, or a process answers for one (a demo's)."""
    return bool(clickhouse_url) or (store_folder(data_dir) / "metadata").is_dir() or live_owner(data_dir) is not None


def connect(clickhouse_url: str | None, data_dir: Path, own: bool = False, prepare: Callable[[Database], object] | None = None) -> Database:
    """Open the store.

    With a URL: that server. Without: the embedded store in ``data_dir``, through its owner where ``store.json`` names a live
    one (reading only), else by this process. With ``own`` this process becomes the owner and answers for the others until
    the database is closed. ``prepare`` is done to the store before anything else, by an owner before it answers anybody, so that nobody
    sees a schema that is being brought up to date; not where only an owner can be asked.

    Raises :class:`StoreError`, also if ``own`` is asked and there is an owner already.
    """
    if clickhouse_url:
        return _prepared(_server(clickhouse_url), prepare)
    folder = store_folder(data_dir)
    deadline = time.monotonic() + (OWNER_PATIENCE_S if own else LOCK_PATIENCE_S)
    while True:
        owner = live_owner(data_dir)
        if owner is not None:
            if own:
                raise StoreError(f"the embedded store at {folder} has an owner already: process {owner.pid}")
            return _through(owner, folder)
        try:
            database = EmbeddedDatabase(folder, DATABASE)
        except FolderLocked:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOCK_POLL_S)
            continue
        _prepared(database, prepare)
        if not own:
            return database
        try:
            return OwnedDatabase(database, data_dir)
        except BaseException:
            database.close()
            raise


def _prepared(database: Database, prepare: Callable[[Database], object] | None) -> Database:
    try:
        if prepare is not None:
            prepare(database)
    except BaseException:
        database.close()
        raise
    return database


class HttpDatabase(Database):
    """A ClickHouse server, or the owner of an embedded store, over HTTP."""

    def __init__(self, client: Client, kind: str, place: str, database: str) -> None:
        self.kind = kind
        self.place = place
        self.name = database
        self.can_write = kind == "server"
        self._client = client
        self._types: dict[tuple[str, ...], Sequence[Any]] = {}

    def _reading(self, final: bool) -> dict[str, Any] | None:
        if not self.can_write:
            return None  # an owner reads as if final anyway, and lets nobody set anything
        return self._taken(_READS) | ({"final": 1} if final else {})

    def _taken(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        known = self._client.server_settings
        return {name: value for name, value in settings.items() if name in known and not known[name].readonly}

    def query(self, sql: str, parameters: Mapping[str, Any] | None = None, *, final: bool = False) -> QueryResult:
        """See :class:`Database`."""
        text = require_read_only(sql)
        try:
            return read(self._client, text, parameters, self._reading(final))
        except (ClickHouseError, OSError) as error:
            raise store_error(error, "query", self.place) from error

    def query_arrow(self, sql: str, parameters: Mapping[str, Any] | None = None, *, final: bool = False) -> pa.Table:
        """See :class:`Database`."""
        text = require_read_only(sql)
        try:
            return read_arrow(self._client, text, parameters, self._reading(final))
        except (ClickHouseError, OSError) as error:
            raise store_error(error, "query", self.place) from error

    def insert(self, table: str, column_names: Sequence[str], columns: Sequence[Sequence[Any]]) -> int:
        """See :class:`Database`."""
        self._require_writable()
        try:
            return insert(self._client, self._types, table, column_names, columns, self._taken(_WRITES))
        except (ClickHouseError, OSError) as error:
            raise store_error(error, f"insert into {table}", self.place) from error

    def command(self, sql: str) -> None:
        """See :class:`Database`."""
        self._require_writable()
        try:
            self._client.command(sql, settings=self._taken(_WRITES))
        except (ClickHouseError, OSError) as error:
            raise store_error(error, "statement", self.place) from error

    def create_database(self) -> None:
        """See :class:`Database`. Asks first, so that a user who may not create one can use one that is there."""
        self._require_writable()
        try:
            found = self._client.command(
                "SELECT count() FROM system.databases WHERE name = {name:String}", parameters={"name": self.name}, use_database=False
            )
            if found != 1:
                self._client.command(f"CREATE DATABASE IF NOT EXISTS {quoted(self.name)}", use_database=False)
        except (ClickHouseError, OSError) as error:
            raise store_error(error, f"creating the database {self.name}", self.place) from error

    def close(self) -> None:
        """See :class:`Database`."""
        self._client.close()

    def _require_writable(self) -> None:
        if not self.can_write:
            raise StoreError(f"{self.place} answers queries only: changes are made by the process that owns the store")


class OwnedDatabase(Database):
    """The embedded store, opened here, with the server that answers for the others."""

    kind = "embedded"

    def __init__(self, inner: EmbeddedDatabase, data_dir: Path) -> None:
        self.place = inner.place
        self.name = inner.name
        self._inner = inner
        self._handle = ReadHandle(Path(inner.place), inner.name)
        self._server: StoreServer | None = StoreServer(self._handle, inner.name)
        self.url = self._server.url
        try:
            self._server.announce(data_dir)
        except BaseException:
            self._stop_answering()
            raise

    def query(self, sql: str, parameters: Mapping[str, Any] | None = None, *, final: bool = False) -> QueryResult:
        """See :class:`Database`."""
        return self._inner.query(sql, parameters, final=final)

    def query_arrow(self, sql: str, parameters: Mapping[str, Any] | None = None, *, final: bool = False) -> pa.Table:
        """See :class:`Database`."""
        return self._inner.query_arrow(sql, parameters, final=final)

    def insert(self, table: str, column_names: Sequence[str], columns: Sequence[Sequence[Any]]) -> int:
        """See :class:`Database`."""
        return self._inner.insert(table, column_names, columns)

    def command(self, sql: str) -> None:
        """See :class:`Database`."""
        self._inner.command(sql)

    def create_database(self) -> None:
        """See :class:`Database`."""
        self._inner.create_database()

    def close(self) -> None:
        """See :class:`Database`. Stops answering first."""
        self._stop_answering()
        self._inner.close()

    def _stop_answering(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
            self._handle.close()


def _through(owner: Owner, folder: Path) -> Database:
    port = urlsplit(owner.url).port
    place = f"{folder}, through process {owner.pid}"
    try:
        client = clickhouse_connect.get_client(
            interface="http",
            host="127.0.0.1",
            port=port or 0,
            access_token=owner.token,
            pool_mgr=urllib3.PoolManager(),  # its own: the default one would go through a proxy named in the environment
            compress=False,
            autogenerate_session_id=False,
            tz_mode="aware",
        )
    except (ClickHouseError, OSError) as error:
        raise store_error(error, "connecting", place) from error
    client.database = DATABASE
    return HttpDatabase(client, "owner", place, DATABASE)


def _server(url: str) -> Database:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise KvcensusError(f"--clickhouse-url: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise KvcensusError("--clickhouse-url: expected http://USER:PASSWORD@HOST:8123/DATABASE or https://...:8443/...")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    place = urlunsplit((parts.scheme, f"{host}:{port}" if port else host, "", "", ""))
    database = unquote(parts.path.strip("/")) or DATABASE
    try:
        client = clickhouse_connect.get_client(
            dsn=urlunsplit((parts.scheme, parts.netloc, "", parts.query, "")),
            interface=parts.scheme,
            autogenerate_session_id=False,
            send_receive_timeout=HANDSHAKE_S,
            tz_mode="aware",
        )
        if isinstance(client, HttpClient):
            client.timeout = urllib3.Timeout(connect=HANDSHAKE_S, read=QUERY_S)
    except (ClickHouseError, OSError, ValueError, TypeError) as error:
        raise store_error(error, "connecting to ClickHouse", place) from error
    client.database = database  # only now: the handshake must work before the database exists
    return HttpDatabase(client, "server", place, database)
