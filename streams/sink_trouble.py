"""What a store says when it takes no rows: whether the rows are at fault, whether it may pass, and what a person can do. Pure."""

from __future__ import annotations

from clickhouse_connect.driver.exceptions import DataError

from sql.database import StoreError, StoreUnavailable

_OF_VALUES = frozenset({6, 27, 33, 38, 41, 43, 53, 69, 70, 72, 131, 321, 349, 469})
"""ClickHouse's numbers for a value that does not fit its column."""

_FULL = "free disk space where ClickHouse keeps its data"
_BUSY = "nothing to do if it passes; else give ClickHouse more of what it lacks"
_MISSING = "the schema is gone: drop what is left of its database and run `kvcensus migrate`"
_GRANTS = "let the user of --clickhouse-url INSERT and SELECT there, and CREATE and ALTER for migrations"

_ADVICE = {
    16: "the schema is not of this version: run `kvcensus migrate`",
    47: "the schema is not of this version: run `kvcensus migrate`",
    60: _MISSING,
    81: _MISSING,
    159: _BUSY,
    164: "the user of --clickhouse-url may only read: name one that may write",
    192: "see user and password in --clickhouse-url",
    193: "see user and password in --clickhouse-url",
    194: "see user and password in --clickhouse-url",
    201: "the user's quota is used up: it goes on with the next interval, or raise it",
    202: _BUSY,
    209: _BUSY,
    225: "the table is replicated: see to its keeper",
    236: _BUSY,
    241: _BUSY,
    242: "the table is read-only: a replicated one has lost its keeper, or the disk is",
    243: _FULL,
    252: "merges are behind: nothing to do if it passes; else give ClickHouse faster disks or more memory",
    285: "too few replicas are up",
    286: "too few replicas are up",
    319: "nothing to do: the rows are inserted again, which replaces them with themselves",
    439: _BUSY,
    497: _GRANTS,
    516: "see user and password in --clickhouse-url",
    999: "the table is replicated: see to its keeper",
}
"""By ClickHouse's number of the error. What is not here is waited for all the same."""

_MAY_PASS = frozenset({159, 201, 202, 209, 225, 236, 241, 242, 243, 252, 285, 286, 319, 439, 999})


def of_values(error: StoreError) -> bool:
    """Whether the rows of this insert are at fault, not the store: their values, or their size for what is between us and the store."""
    if error.code is not None:
        return error.code in _OF_VALUES
    return isinstance(error.__cause__, DataError) or "HTTP status 413" in str(error.__cause__)


def may_pass(error: StoreError) -> bool:
    """Whether a start should wait for it. While it runs the sink waits for everything: whatever it is, somebody may put it right."""
    return isinstance(error, StoreUnavailable) or error.code in _MAY_PASS


def advice(error: StoreError) -> str:
    """What a person can do about it."""
    if isinstance(error, SchemaChanged):
        return "restore the schema, or start the worker again"
    if isinstance(error, StoreUnavailable):
        return "see whether ClickHouse runs and can be reached from here"
    return _ADVICE.get(error.code or 0, "see the log of ClickHouse")


class SchemaChanged(StoreError):
    """No row is taken any more, and the columns are not those that the sink began with."""


class Waiting:
    """Whether something is waited for, since when, and what is worth a line in the log: its beginning, another cause, its end."""

    def __init__(self) -> None:
        self.since: float | None = None
        self.cause = ""
        self._kind: object = None

    def begin(self, error: StoreError | str, now: float) -> bool:
        """Note that ``error`` is waited for; whether that is news. ``now`` is of any clock, in seconds."""
        kind = error if isinstance(error, str) else (type(error), error.code)
        news = self.since is None or kind != self._kind
        self.since = now if self.since is None else self.since
        self.cause, self._kind = str(error), kind
        return news

    def end(self, now: float) -> float | None:
        """It is over; the seconds that it took, ``None`` if nothing was waited for."""
        since, self.since = self.since, None
        return None if since is None else now - since
