"""What every way to ClickHouse has in common: the interface, results and errors."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clickhouse_connect import common
from clickhouse_connect.driver.exceptions import OperationalError

from schemas.errors import KvcensusError

if TYPE_CHECKING:
    import pyarrow as pa

common.set_setting("dict_parameter_format", "map")  # a map as JSON, which is the default, is read for no Map(...)

DATABASE = "kvcensus"
"""The database of all tables, unless the URL names another."""

UNKNOWN_TABLE, UNKNOWN_DATABASE = 60, 81
"""ClickHouse's error codes for a schema that has not been created."""


class StoreError(KvcensusError):
    """The database refused or failed.

    ``code`` is ClickHouse's own number where it gave one; ``detail`` what it said, without where and when.
    """

    def __init__(self, message: str, code: int | None = None, detail: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.detail = detail or message

    @property
    def schema_missing(self) -> bool:
        """Whether the cause is a table or database that does not exist (yet)."""
        return self.code in (UNKNOWN_TABLE, UNKNOWN_DATABASE)


class StoreUnavailable(StoreError):
    """The database did not answer: the same call may succeed later."""


@dataclass(frozen=True)
class QueryResult:
    """Rows of a query, in order. ``column_types`` are ClickHouse type names. Times are aware datetimes, ids are bytes."""

    column_names: tuple[str, ...]
    column_types: tuple[str, ...]
    rows: list[tuple[Any, ...]]


class Database(ABC):
    """One store. Safe to use from several threads. All methods raise :class:`StoreError`."""

    kind: str
    """``server``, ``embedded`` (opened by this process) or ``owner`` (embedded, through the process that owns it)."""

    place: str
    """Where the data is, for messages; never with a password."""

    name: str = DATABASE
    """Name of the database that holds the tables."""

    can_write: bool = True

    @abstractmethod
    def query(self, sql: str, parameters: Mapping[str, Any] | None = None, *, final: bool = False) -> QueryResult:
        """Rows of one reading statement. Parameters are bound by the server: ``{name:Type}`` in the SQL.

        ``final`` reads every replacing table as if the query said FINAL.
        """

    @abstractmethod
    def query_arrow(self, sql: str, parameters: Mapping[str, Any] | None = None, *, final: bool = False) -> pa.Table:
        """The same as an Arrow table, without a Python object per value."""

    @abstractmethod
    def insert(self, table: str, column_names: Sequence[str], columns: Sequence[Sequence[Any]]) -> int:
        """Insert columns of equal length; times as integers in the column's own unit. Returns the number of rows."""

    @abstractmethod
    def command(self, sql: str) -> None:
        """Run one statement that changes something."""

    @abstractmethod
    def create_database(self) -> None:
        """Create the database itself if it is missing."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the connection, and of the folder. Twice is once."""

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_CODE = re.compile(r"\bCode:\s*(\d+)")
_NOISE = re.compile(
    r"Code:\s*\d+\.\s*|DB::Exception:\s*|\s*\(version [^()]*(?:\([^()]*\))?\)|\s*\(for url [^)]*\)"
    r"|^HTTP driver [^,]*,?\s*(?:server response:)?\s*|Received ClickHouse exception, code: \d+, server response:\s*"
)
_UNREACHED = re.compile(
    r"Max retries exceeded.*?\b(?:Failed to [^:]*: |Read timed out|NameResolutionError\([^:]*: )?([^:()\"']+)[\"']?\)\)"
)
_LONGEST = 600


def store_error(error: Exception, doing: str, place: str) -> StoreError:
    """``error`` of the driver as one readable line that says what was tried and where."""
    code = getattr(error, "code", None)
    text = str(error)
    if code is None and (found := _CODE.search(text)):
        code = int(found.group(1))
    if code is None and _is_transport(error):
        cause = _UNREACHED.search(text)
        text = "no answer: " + (cause.group(1) if cause else text)
        kind: type[StoreError] = StoreUnavailable
    else:
        kind = StoreError
    text = " ".join(_NOISE.sub("", text).split()) or type(error).__name__
    if len(text) > _LONGEST:
        text = text[: _LONGEST - 3] + "..."
    hint = (
        " Create the schema with `kvcensus migrate`." if code == UNKNOWN_DATABASE or (code == UNKNOWN_TABLE and _OURS.search(text)) else ""
    )
    return kind(f"{doing} ({place}): {text}{hint}", code, text)


_OURS = re.compile(
    r"\b(?:rank_(?:windows|window_groups|events|messages|rollups|health\w*)|life_(?:groups|primary_groups)|recomputes|recomputed_blocks\w*"
    r"|repeat_compute\w*|gpu_time\w*|duplicate_(?:windows|rollups|footprint\w*)|shared_prefixes|top_shared_prefixes|workload_pairs\w*"
    r"|return_times\w*|coverage_\w+|interruptions|metric_breaches|known_ranks|dead_letters|deploys|deploys_declared|deploy_(?:windows|effect\w*)"
    r"|rollup_\w+|fleet_clock|block_events|batches|lifecycle|engine_metrics|schema_migrations)\b"
)


def _is_transport(error: Exception) -> bool:
    return isinstance(error, OperationalError | OSError)


def bound_parameters(parameters: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Parameters as the driver takes them; ``None`` instead of an empty mapping, which would start its ``%`` formatting."""
    return dict(parameters) if parameters else None
