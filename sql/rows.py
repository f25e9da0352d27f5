"""Records of the topics as columns for ClickHouse. Pure.

One :class:`ColumnBatch` per table holds a list per column.
:class:`TableRows` takes any record and knows its tables.

    rows = TableRows()
    rows.add(record)
    for batch in rows.batches():
        database.insert(batch.table, batch.column_names, batch.columns)
    rows.clear()
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from schemas.records import (
    Declaration,
    Declared,
    DuplicateWindow,
    EngineMetrics,
    GroupCounters,
    Lifecycle,
    RankMessage,
    RankWindow,
    Recompute,
)
from sql.block_rows import BlockEventColumns
from sql.columns import ColumnBatch

GROUP_FIELDS: tuple[str, ...] = GroupCounters.__struct_fields__[:27]
"""Fields of a cache group, each a column ``groups.<field>`` of ``rank_windows``."""

GROUP_COUNTERS: tuple[str, ...] = GROUP_FIELDS[3:]
"""Those of them that count; the last two are states, not sums."""


class RankWindowColumns(ColumnBatch):
    """``rank_windows``: one row per record, its groups as arrays."""

    table = "rank_windows"
    column_names = (
        "instance_id",
        "dp_rank",
        "life_id",
        "window_start",
        "window_us",
        "semantics_version",
        "version",
        "is_final",
        "workload",
        "model",
        "reuse_reporting",
        "removals",
        "kv_connector",
        "key_epoch",
        "canary",
        "observed_us",
        "first_batch",
        "last_batch",
        "batches",
        "duplicate_batches",
        "lost_batches",
        "refused_batches",
        "unknown_events",
        "unresolved_blocks",
        "warmup",
        "reasons",
        *(f"groups.{field}" for field in GROUP_FIELDS),
    )

    def add(self, record: RankWindow) -> None:
        """One row."""
        groups = record.groups
        values = (
            record.instance_id,
            record.dp_rank,
            record.life_id,
            record.window_start_us,
            record.window_us,
            record.semantics_version,
            record.version,
            record.final,
            record.workload,
            record.model,
            record.reuse_reporting,
            record.removals,
            record.kv_connector,
            record.key_epoch,
            record.canary,
            record.observed_us,
            record.first_batch_us or None,
            record.last_batch_us or None,
            record.batches,
            record.duplicate_batches,
            record.lost_batches,
            record.refused_batches,
            record.unknown_events,
            record.unresolved_blocks,
            record.warmup,
            record.reasons,
            *([getattr(group, field) for group in groups] for field in GROUP_FIELDS),
        )
        for column, value in zip(self.columns, values, strict=True):
            column.append(value)


class RecomputeColumns(ColumnBatch):
    """``recomputes``: one row per record."""

    table = "recomputes"
    column_names = (
        "instance_id",
        "dp_rank",
        "group_idx",
        "life_id",
        "seq",
        "block_index",
        "semantics_version",
        "version",
        "cause",
        "block_id",
        "content_id",
        "tokens",
        "stored_at",
        "lost_at",
        "back_at",
        "elapsed_us",
    )

    def add(self, record: Recompute) -> None:
        """One row."""
        values = (
            record.instance_id,
            record.dp_rank,
            record.group_idx,
            record.life_id,
            record.seq,
            record.index,
            record.semantics_version,
            record.version,
            record.cause,
            record.block_id,
            record.content_id,
            record.tokens,
            record.stored_at_us,
            record.lost_at_us,
            record.back_at_us,
            record.elapsed_us,
        )
        for column, value in zip(self.columns, values, strict=True):
            column.append(value)


class DuplicateWindowColumns(ColumnBatch):
    """``duplicate_windows``: one row per record; the columns are the record's fields, times without their unit."""

    table = "duplicate_windows"
    _FIELDS: ClassVar[tuple[str, ...]] = DuplicateWindow.__struct_fields__[:27]
    column_names = tuple(
        {"window_start_us": "window_start", "as_of_us": "as_of", "final": "is_final"}.get(field, field)
        for field in DuplicateWindow.__struct_fields__[:27]
    )

    def add(self, record: DuplicateWindow) -> None:
        """One row."""
        for column, field in zip(self.columns, self._FIELDS, strict=True):
            column.append(getattr(record, field))


_TIMES = {"at_ms": "at", "at_us": "at", "last_message_at_ms": "last_message_at", "process_started_us": "process_started"}
"""Columns whose name differs from the field's: times carry no unit in SQL."""

_DECLARED_FIELDS = Declared.__struct_fields__


class LifecycleColumns(ColumnBatch):
    """``lifecycle``: one row per record; the columns are the record's fields, what it declares as arrays."""

    table = "lifecycle"
    _FIELDS: ClassVar[tuple[str, ...]] = tuple(field for field in Lifecycle.__struct_fields__ if field != "declared")
    column_names = (
        *(_TIMES.get(field, field) for field in Lifecycle.__struct_fields__ if field != "declared"),
        *(f"declared.{_TIMES.get(field, field)}" for field in _DECLARED_FIELDS),
    )

    def add(self, record: Lifecycle) -> None:
        """One row."""
        values = (
            *(getattr(record, field) for field in self._FIELDS),
            *([getattr(each, field) for each in record.declared] for field in _DECLARED_FIELDS),
        )
        for column, value in zip(self.columns, values, strict=True):
            column.append(value)


class EngineMetricsColumns(ColumnBatch):
    """``engine_metrics``: one row per record; the columns are the record's fields, its histograms as arrays by their name."""

    table = "engine_metrics"
    _FIELDS: ClassVar[tuple[str, ...]] = tuple(field for field in EngineMetrics.__struct_fields__ if field != "histograms")
    column_names = (
        *(_TIMES.get(field, field) for field in EngineMetrics.__struct_fields__ if field != "histograms"),
        "histograms.name",
        "histograms.bounds",
        "histograms.counts",
        "histograms.sum",
    )

    def add(self, record: EngineMetrics) -> None:
        """One row."""
        names = sorted(record.histograms)
        histograms = [record.histograms[name] for name in names]
        values = (
            *(getattr(record, field) for field in self._FIELDS),
            names,
            [each.bounds for each in histograms],
            [each.counts for each in histograms],
            [each.sum for each in histograms],
        )
        for column, value in zip(self.columns, values, strict=True):
            column.append(value)


class RankEventColumns(ColumnBatch):
    """``rank_events``: one row per holder reset, loss, refusal, declaration or refused identity; a declaration's fields are columns."""

    table = "rank_events"
    _DECLARATION: ClassVar[tuple[str, ...]] = Declaration.__struct_fields__[:-1]
    column_names = (
        "instance_id",
        "dp_rank",
        "life_id",
        "seq",
        "kind",
        "at",
        "observed_at",
        "incarnation",
        "reason",
        "boundary",
        "cause",
        "first_seq",
        "last_seq",
        "payload_bytes",
        "group_idx",
        "refused",
        "window_start",
        "window_end",
        *Declaration.__struct_fields__[:-1],
    )

    def add(self, record: RankMessage) -> None:
        """The row of a message that is not a batch; none if it is."""
        kind: str
        reason: str | None = None
        cause: str | None = None
        boundary = first_seq = last_seq = payload_bytes = refused = window_start = window_end = None
        group_idx = 0
        if record.holder_reset is not None:
            kind, reason = "holder_reset", record.holder_reset.reason
            boundary, cause = record.holder_reset.boundary_us, record.holder_reset.cause
        elif record.loss is not None:
            kind, reason = "loss", record.loss.reason
            first_seq, last_seq = record.loss.first_seq, record.loss.last_seq
        elif record.refusal is not None:
            kind, reason, payload_bytes = "refusal", record.refusal.reason, record.refusal.payload_bytes
        elif record.identity_refused is not None:
            said = record.identity_refused
            kind, group_idx, refused, window_start, window_end = (
                "identity_refused",
                said.group_idx,
                said.refused,
                said.window_start_us,
                said.window_end_us,
            )
        elif record.declaration is not None:
            kind = "declaration"
        else:
            return
        declared = record.declaration
        values = (
            record.instance_id,
            record.dp_rank,
            record.life_id,
            record.seq,
            kind,
            record.at_us,
            record.observed_at_ms,
            record.incarnation,
            reason,
            boundary,
            cause,
            first_seq,
            last_seq,
            payload_bytes,
            group_idx,
            refused,
            window_start,
            window_end,
            *(({} if field == "labels" else None) if declared is None else getattr(declared, field) for field in self._DECLARATION),
        )
        for column, value in zip(self.columns, values, strict=True):
            column.append(value)


class TableRows:
    """Rows of all tables: give it records, take the batches."""

    def __init__(self) -> None:
        self.rank_windows = RankWindowColumns()
        self.recomputes = RecomputeColumns()
        self.duplicate_windows = DuplicateWindowColumns()
        self.lifecycle = LifecycleColumns()
        self.engine_metrics = EngineMetricsColumns()
        self.block_events = BlockEventColumns()
        self.rank_events = RankEventColumns()

    def add(self, record: RankWindow | Recompute | DuplicateWindow | Lifecycle | EngineMetrics | RankMessage) -> None:
        """The rows of one record, in its table or tables."""
        if isinstance(record, RankMessage):
            if record.batch is not None:
                self.block_events.add(record)
            else:
                self.rank_events.add(record)
        elif isinstance(record, RankWindow):
            self.rank_windows.add(record)
        elif isinstance(record, Recompute):
            self.recomputes.add(record)
        elif isinstance(record, DuplicateWindow):
            self.duplicate_windows.add(record)
        elif isinstance(record, EngineMetrics):
            self.engine_metrics.add(record)
        else:
            self.lifecycle.add(record)

    def __len__(self) -> int:
        return sum(len(batch) for batch in self.tables)

    def batches(self) -> Iterator[ColumnBatch]:
        """Those that hold rows."""
        return (batch for batch in self.tables if len(batch))

    def clear(self) -> None:
        """Forget all rows."""
        for batch in self.tables:
            batch.clear()

    @property
    def tables(self) -> tuple[ColumnBatch, ...]:
        """The batches of all tables, rows or not."""
        return (
            self.rank_windows,
            self.recomputes,
            self.duplicate_windows,
            self.lifecycle,
            self.engine_metrics,
            self.block_events,
            self.rank_events,
        )
