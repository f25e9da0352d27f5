"""Runs queries the way others get them answered, and says how long each took and how much of the store it read."""

from __future__ import annotations

import importlib
import os
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from sql.database import Database, QueryResult
from sql.embedded import READ_SETTINGS

RUNS = 7
"""Counted runs of each query, after one that is not."""

_LONG_MS, _FEWEST = 10_000.0, 3
"""What has taken so long is not run again, but for the fewest runs of which a median says anything."""


@dataclass(frozen=True)
class Query:
    """One query with its bound parameters, and the median it has to stay below (``None``: told for information)."""

    name: str
    grain: str
    span: str
    sql: str
    parameters: Mapping[str, Any]
    target_ms: float | None = None


@dataclass(frozen=True)
class Measured:
    """What one query took: milliseconds of ``runs`` runs, and what the engine read for it. ``error`` instead, where it failed.

    ``cpu_ms``: of this process, per run; where others use the machine it says more than the clock.
    """

    name: str
    grain: str
    span: str
    median_ms: float = 0.0
    worst_ms: float = 0.0
    cpu_ms: float = 0.0
    rows_read: int = 0
    bytes_read: int = 0
    rows_out: int = 0
    target_ms: float | None = None
    error: str | None = None
    runs: int = 0

    @property
    def verdict(self) -> str:
        """``ok``, ``over``, ``failed``, or nothing where there is no target."""
        if self.error is not None:
            return "failed"
        if self.target_ms is None:
            return ""
        return "ok" if self.median_ms <= self.target_ms else "over"

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {"verdict": self.verdict}


class Asker:
    """A reading connection of its own to the store in this process, with the settings that every reader of it has."""

    def __init__(self, folder: Path, database: str, settings: Mapping[str, str] | None = None) -> None:
        chdb: Any = importlib.import_module("chdb")
        self._connection = chdb.connect(os.path.realpath(folder))
        self._connection.query(f"USE `{database}`", "TabSeparated")
        for name, value in (READ_SETTINGS | dict(settings or {}) | {"readonly": "1"}).items():
            self._connection.query(f"SET {name} = {value}", "TabSeparated")

    def ask(self, sql: str, parameters: Mapping[str, Any]) -> tuple[float, Any]:
        """Milliseconds until the whole answer was there, and the answer, which knows what was read for it."""
        bound = {name: _text(value) for name, value in parameters.items()}
        started = time.perf_counter()
        answer = self._connection.query(sql, "Native", params=bound)
        return (time.perf_counter() - started) * 1e3, answer

    def close(self) -> None:
        """Let go of the store."""
        self._connection.close()


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _text(value: Any) -> str:
    """A parameter as the engine's own interface takes it."""
    if isinstance(value, list | tuple):
        return "[" + ",".join(repr(each) if isinstance(each, str) else _text(each) for each in value) + "]"
    return str(value)


def measure(asker: Asker, query: Query, runs: int = RUNS) -> Measured:
    """Median and worst of ``runs`` runs of ``query``, after one to warm up; of that one, if ``runs`` is 0. A query that fails says why.

    Fewer runs of one that takes long (:data:`_LONG_MS`).
    """
    took: list[float] = []
    try:
        before = _cpu_s()
        milliseconds, answer = asker.ask(query.sql, query.parameters)
        if runs:
            before = _cpu_s()
        else:
            took.append(milliseconds)
        for _ in range(runs):
            milliseconds, answer = asker.ask(query.sql, query.parameters)
            took.append(milliseconds)
            if len(took) >= _FEWEST and sum(took) > _LONG_MS:
                break
        cpu_ms = (_cpu_s() - before) / len(took) * 1e3
    except Exception as error:
        return Measured(query.name, query.grain, query.span, target_ms=query.target_ms, error=_line(error))
    return Measured(
        query.name,
        query.grain,
        query.span,
        statistics.median(took),
        max(took),
        cpu_ms,
        answer.storage_rows_read(),
        answer.storage_bytes_read(),
        answer.rows_read(),
        query.target_ms,
        runs=len(took),
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


class _Recording(Database):
    """Passes queries on, and keeps them."""

    def __init__(self, inner: Database) -> None:
        self.kind, self.place, self.name = inner.kind, inner.place, inner.name
        self.can_write = False
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self._inner = inner

    def query(self, sql: str, parameters: Mapping[str, Any] | None = None, *, final: bool = False) -> QueryResult:
        self.asked.append((sql, dict(parameters or {})))
        return self._inner.query(sql, parameters, final=final)

    def query_arrow(self, sql: str, parameters: Mapping[str, Any] | None = None, *, final: bool = False) -> pa.Table:
        self.asked.append((sql, dict(parameters or {})))
        return self._inner.query_arrow(sql, parameters, final=final)

    def insert(self, table: str, column_names: Sequence[str], columns: Sequence[Sequence[Any]]) -> int:
        return self._inner.insert(table, column_names, columns)

    def command(self, sql: str) -> None:
        self._inner.command(sql)

    def create_database(self) -> None:
        self._inner.create_database()

    def close(self) -> None:
        self._inner.close()


def measure_call(
    asker: Asker,
    database: Database,
    name: str,
    span: str,
    call: Callable[[Database], object],
    runs: int = RUNS,
    target_ms: float | None = None,
) -> Measured:
    """The same of a call that asks ``database`` several times: the time is that of the whole call, Python and all."""
    recording = _Recording(database)
    took: list[float] = []
    try:
        before = _cpu_s()
        started = time.perf_counter()
        call(recording)
        if runs:
            before = _cpu_s()
        else:
            took.append((time.perf_counter() - started) * 1e3)
        for _ in range(runs):
            started = time.perf_counter()
            call(database)
            took.append((time.perf_counter() - started) * 1e3)
        cpu_ms = (_cpu_s() - before) / len(took) * 1e3
        answers = [asker.ask(sql, parameters)[1] for sql, parameters in recording.asked]
    except Exception as error:
        return Measured(name, "10 s", span, target_ms=target_ms, error=_line(error))
    return Measured(
        name,
        "10 s",
        span,
        statistics.median(took),
        max(took),
        cpu_ms,
        sum(cast("int", answer.storage_rows_read()) for answer in answers),
        sum(cast("int", answer.storage_bytes_read()) for answer in answers),
        sum(cast("int", answer.rows_read()) for answer in answers),
        target_ms,
        runs=len(took),
    )
