"""What forwarders and engines say of themselves, as columns for ClickHouse: life signs, metrics, and what interrupts a stream. Pure."""

from __future__ import annotations

from typing import ClassVar

from schemas.records import Declaration, Declared, EngineMetrics, Lifecycle, RankMessage
from sql.columns import ColumnBatch

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
        self.append(values)


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
        self.append(values)


class RankEventColumns(ColumnBatch):
    """``rank_events``: one row per holder reset, loss, refusal, declaration, refused identity or departure.

    A declaration's fields are columns. Batches have a table of their own; scrapes are in ``engine_metrics`` in full.
    """

    table = "rank_events"
    _DECLARATION: ClassVar[tuple[str, ...]] = Declaration.__struct_fields__
    _MAPS: ClassVar[frozenset[str]] = frozenset({"labels", "kv_bytes_by_group"})
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
        *Declaration.__struct_fields__,
    )

    def add(self, record: RankMessage) -> None:
        """The row of a message that is neither a batch nor a scrape; none if it is."""
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
        elif record.departure is not None:
            kind, reason = "departure", record.departure.reason
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
            *(({} if field in self._MAPS else None) if declared is None else getattr(declared, field) for field in self._DECLARATION),
        )
        self.append(values)
